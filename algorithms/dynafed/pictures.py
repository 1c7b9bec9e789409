"""Synthetic images as pictures for a report."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# A picture shows at most so many images.
_MOST_SHOWN = 100


def picture_name(iteration: int) -> str:
    """Of the set after so many iterations."""
    return f"synthetic_{iteration:06d}"


def picture_grid(images: Tensor) -> Tensor:
    """The first images side by side, three standard deviations of the initial noise from black to white.

    Args:
        images: [S, channels, height, width].

    Returns:
        uint8, [rows, columns] for other than three channels (their mean), else [rows, columns, 3].
    """
    shown = (0.5 + images.detach()[:_MOST_SHOWN].cpu().double() / 6).clamp(0, 1)
    if shown.shape[1] != 3:
        shown = shown.mean(dim=1, keepdim=True)
    count, channels, height, width = shown.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = torch.ones(channels, rows * (height + 1) + 1, columns * (width + 1) + 1, dtype=torch.float64)
    for place, image in enumerate(shown):
        top, left = place // columns * (height + 1) + 1, place % columns * (width + 1) + 1
        grid[:, top : top + height, left : left + width] = image
    pixels = (grid * 255).round().to(torch.uint8).movedim(0, 2)
    return (pixels[:, :, 0] if channels == 1 else pixels).contiguous()


def as_picture(grid: Tensor) -> np.ndarray:
    """A kept grid as a report has it: 0..1."""
    return grid.numpy().astype(np.float32) / 255
