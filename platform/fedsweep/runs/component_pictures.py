"""Pictures that a method's components report, as PNG files in the run folder's ``pictures``."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedsweep.errors import InvariantError, RunError
from fedsweep.runs.files import atomic_write
from fedsweep.runs.run_folder import PICTURES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")


def png_bytes(picture: np.ndarray) -> bytes:
    """A picture as a PNG file of 8 bits per channel.

    Args:
        picture: [H, W] (grey) or [H, W, 3] (red, green, blue), 0..1; what lies outside is cut off, NaN is black.

    Raises:
        InvariantError: It has another shape, or no pixels.
    """
    is_grey = picture.ndim == 2
    if not picture.size or not (is_grey or (picture.ndim == 3 and picture.shape[2] == 3)):
        raise InvariantError(f"a picture has the shape [H, W] or [H, W, 3], but got {list(picture.shape)}")
    height, width = picture.shape[:2]
    pixels = (np.nan_to_num(picture, nan=0.0).clip(0, 1) * 255).round().astype(np.uint8).reshape(height, -1)
    rows = np.pad(pixels, ((0, 0), (1, 0)))  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if is_grey else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write_pictures(folder: Path, pictures: Mapping[str, np.ndarray]) -> list[Path]:
    """Write the pictures that are not there yet; a name stands for one picture for ever.

    Args:
        folder: The run folder.
        pictures: By name, without an ending.

    Returns:
        The files that were written.

    Raises:
        InvariantError: A name is no plain file name, or a picture has a wrong shape.
        RunError: A file can't be written.
    """
    written = []
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
        written.append(path)
    return written
