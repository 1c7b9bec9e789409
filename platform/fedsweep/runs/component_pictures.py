"""Pictures that a method's components report, as PNG files in the run folder's ``pictures``."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedsweep.errors import InvariantError, RunError
from fedsweep.runs.files import atomic_write
from fedsweep.runs.run_folder import PICTURES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")


def png_bytes(picture: np.ndarray) -> bytes:
    """Return a picture as a PNG file of 8 bits per channel.

    Args:
        picture: [H, W] (grey) or [H, W, 3] (red, green, blue), 0..1; what lies outside is cut off, NaN is black.

    Raises:
        InvariantError: It has another shape, or no pixels.
    """
    if not picture.size or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3)):
        raise InvariantError(f"a picture has the shape [H, W] or [H, W, 3], but got {list(picture.shape)}")
    from PIL import Image

    pixels = (np.nan_to_num(picture, nan=0.0).clip(0, 1) * 255).round().astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write_pictures(folder: Path, pictures: Mapping[str, np.ndarray]) -> None:
    """Write the pictures that are not there yet; a name stands for one picture for ever.

    Args:
        folder: The run folder.
        pictures: By name, without an ending.

    Raises:
        InvariantError: A name is no plain file name, or a picture has a wrong shape.
        RunError: A file can't be written.
    """
    for name, picture in pictures.items():
        if not _NAME.fullmatch(name):
            raise InvariantError(f"a picture's name has letters, digits, '_', '-' and '.' alone, but got {name!r}")
        path = folder / PICTURES / f"{name}.png"
        if path.is_file():
            continue
        data = png_bytes(picture)
        try:
            path.parent.mkdir(exist_ok=True)
            atomic_write(path, data)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
