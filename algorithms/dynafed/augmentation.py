"""Random changes of images through which gradients flow, for learning synthetic images.

One family of changes is drawn per call, its parameters per image. All draws are made on the CPU from the stream that
is given, so a call with the same stream makes the same changes again. Legend: B batch, C channels, H height, W width.

Source: Zhao and Bilen (2021), Dataset condensation with differentiable siamese augmentation; the strengths are those
of DynaFed's authors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedsweep import Stream


def augment(images: Tensor, stream: Stream) -> Tensor:
    """Change images [B, C, H, W] by one family of changes, each of the six equally likely.

    Args:
        images: In any floating type, on any device.
        stream: Determines the family and every image's parameters.

    Returns:
        A tensor of the same shape, differentiable with respect to ``images``.
    """
    generator = stream.torch()
    family = FAMILIES[int(torch.randint(len(FAMILIES), (), generator=generator))]
    return family(images, generator)


def colour(
    images: Tensor, generator: Generator, *, brightness: float = 0.5, saturation: float = 1.0, contrast: float = 0.5
) -> Tensor:
    """Change brightness, then saturation, then contrast.

    Args:
        images: [B, C, H, W].
        generator: Of the draws.
        brightness: Largest summand, at least 0.
        saturation: Largest change of the factor 1 on the deviation from each pixel's mean over the channels.
        contrast: The same for the deviation from each image's mean.
    """
    brighter = images + brightness * _symmetric(images, generator)
    grey = brighter.mean(dim=1, keepdim=True)
    saturated = grey + (brighter - grey) * (1 + saturation * _symmetric(images, generator))
    level = saturated.mean(dim=(1, 2, 3), keepdim=True)
    return level + (saturated - level) * (1 + contrast * _symmetric(images, generator))


def crop(images: Tensor, generator: Generator, *, ratio: float = 0.125) -> Tensor:
    """Shift by whole pixels along both axes, with zeros where nothing was.

    Args:
        images: [B, C, H, W].
        generator: Of the draws.
        ratio: Largest shift as a share of the side, 0..1; rounded to whole pixels.
    """
    for axis in (2, 3):
        size = images.shape[axis]
        reach = int(size * ratio + 0.5)
        shifts = torch.randint(-reach, reach + 1, (images.shape[0], 1), generator=generator)
        places = torch.arange(size)[None, :] + shifts
        inside = (places >= 0) & (places < size)
        shape = [images.shape[0], 1, 1, 1]
        shape[axis] = size
        index = places.clamp(0, size - 1).view(shape).expand(images.shape).to(images.device)
        images = images.gather(axis, index) * inside.view(shape).to(images.device, images.dtype)
    return images


def cutout(images: Tensor, generator: Generator, *, ratio: float = 0.5) -> Tensor:
    """Set a square around a random centre to zero, cut off at the borders.

    Args:
        images: [B, C, H, W].
        generator: Of the draws.
        ratio: The square's side as a share of the image's, 0..1; rounded to whole pixels.
    """
    hidden = torch.ones(images.shape[0], 1, 1, 1, dtype=torch.bool)
    for axis in (2, 3):
        size = images.shape[axis]
        side = int(size * ratio + 0.5)
        # The centre of a square of even side lies between two pixels, for which there is one place more.
        centres = torch.randint(0, size + 1 - side % 2, (images.shape[0], 1), generator=generator)
        places = torch.arange(size)[None, :] - (centres - side // 2)
        shape = [images.shape[0], 1, 1, 1]
        shape[axis] = size
        hidden = hidden & ((places >= 0) & (places < side)).view(shape)
    return images * (~hidden).to(images.device, images.dtype)


def flip(images: Tensor, generator: Generator, *, probability: float = 0.5) -> Tensor:
    """Exchange left and right, in each image with the given probability."""
    coins = torch.rand(images.shape[0], 1, 1, 1, generator=generator) < probability
    return torch.where(coins.to(images.device), images.flip(3), images)


def scale(images: Tensor, generator: Generator, *, ratio: float = 1.2) -> Tensor:
    """Stretch width and height independently.

    Args:
        images: [B, C, H, W].
        generator: Of the draws.
        ratio: Factors are uniform in ``[1 / ratio, ratio]``; at least 1.
    """
    draws_B2 = torch.rand(images.shape[0], 2, generator=generator, dtype=torch.float64)
    factors_B2 = 1 / ratio + draws_B2 * (ratio - 1 / ratio)
    return _resample(images, torch.diag_embed(factors_B2))


def rotate(images: Tensor, generator: Generator, *, degrees: float = 15.0) -> Tensor:
    """Turn around the centre by an angle that is uniform in ``[-degrees, degrees]``."""
    draws_B = torch.rand(images.shape[0], generator=generator, dtype=torch.float64)
    angles_B = (2 * draws_B - 1) * math.radians(degrees)
    cos_B, sin_B = angles_B.cos(), angles_B.sin()
    height, width = (max(1, size - 1) for size in images.shape[2:])  # places go from -1 to 1 along both
    rows = (
        torch.stack((cos_B, -sin_B * (height / width)), dim=1),
        torch.stack((sin_B * (width / height), cos_B), dim=1),
    )
    return _resample(images, torch.stack(rows, dim=1))


FAMILIES: tuple[Callable[[Tensor, Generator], Tensor], ...] = (colour, crop, cutout, flip, scale, rotate)


def _symmetric(images: Tensor, generator: Generator) -> Tensor:
    """Draw numbers uniformly from [-1, 1), one per image: [B, 1, 1, 1]."""
    draws = torch.rand(images.shape[0], 1, 1, 1, generator=generator)
    return (2 * draws - 1).to(images.device, images.dtype)


def _resample(images: Tensor, maps_B22: Tensor) -> Tensor:
    """Return bilinear values at linearly mapped places, corners aligned, zero outside.

    On the CPU wherever the images lie: on a GPU the gradients of this are summed in no fixed order.
    """
    pixels = images.cpu()
    y, x = torch.meshgrid(_places(pixels.shape[2]), _places(pixels.shape[3]), indexing="ij")
    grid_BHW2 = torch.einsum("bij,hwj->bhwi", maps_B22, torch.stack((x, y), dim=2)).to(pixels.dtype)
    moved = F.grid_sample(pixels, grid_BHW2, mode="bilinear", padding_mode="zeros", align_corners=True)
    return moved.to(images.device)


def _places(size: int) -> Tensor:
    """Return the pixels' places along an axis, from -1 to 1."""
    return torch.linspace(-1, 1, size, dtype=torch.float64) if size > 1 else torch.zeros(1, dtype=torch.float64)
