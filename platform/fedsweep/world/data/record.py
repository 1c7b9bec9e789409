"""The record of a data set in memory, and the checks that any data set must pass, a user's own included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Images with labels, for training and for testing; S training samples, C channels, H x W pixels.

    Labels and writers may be given as any integers, arrays in any memory order; they are brought to the types below.

    Attributes:
        name: What it is called in tables.
        train_images: ``[S, C, H, W]``, uint8, or float32 for a user's own; C-contiguous.
        train_labels: ``[S]`` int64, each in ``0 .. num_classes - 1``.
        test_images: ``[S_test, C, H, W]``, of the same type and image shape.
        test_labels: ``[S_test]`` int64.
        num_classes: How many classes there are, at least 1; a class without samples is allowed.
        scale: The pixel value that maps to 1.0, > 0.
        mean: Per channel, of the pixels divided by ``scale``.
        std: Per channel, likewise, > 0.
        writers: ``[S]`` int64, >= 0: each training sample's natural client; None where there is none.
        class_names: One per class, or empty.

    Raises:
        DataError: shapes, types or ranges are wrong, or a value is not finite.
    """

    name: str
    train_images: NDArray[np.uint8] | NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8] | NDArray[np.float32]
    test_labels: NDArray[np.int64]
    num_classes: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    writers: NDArray[np.int64] | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check everything, and bring the arrays to their types."""
        if self.num_classes < 1:
            raise DataError(f"data set {self.name!r}: num_classes >= 1 must hold, but is {self.num_classes}")
        for part in ("train", "test"):
            images = self._checked_images(f"{part}_images")
            labels = self._checked_integers(f"{part}_labels", length=len(images))
            if labels.max() >= self.num_classes:
                raise DataError(
                    f"data set {self.name!r}: {part}_labels must lie in 0..{self.num_classes - 1}, but one is "
                    f"{labels.max()}; correct the labels or num_classes={self.num_classes}"
                )
        train, test = self.train_images, self.test_images
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"data set {self.name!r}: training and test images must have one shape and type, but are "
                f"{train.shape[1:]} {train.dtype} and {test.shape[1:]} {test.dtype}"
            )
        if self.writers is not None:
            self._checked_integers("writers", length=len(train))
        self._check_constants()

    @property
    def num_channels(self) -> int:
        """C, the number of colour channels."""
        return int(self.train_images.shape[1])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        channels, height, width = self.train_images.shape[1:]
        return int(channels), int(height), int(width)

    def _checked_images(self, field: str) -> NDArray[np.uint8] | NDArray[np.float32]:
        images = getattr(self, field)
        if not isinstance(images, np.ndarray) or images.ndim != 4 or 0 in images.shape:
            shape = getattr(images, "shape", type(images).__name__)
            raise DataError(f"data set {self.name!r}: {field} must be a non-empty array [S, C, H, W], but is {shape}")
        if images.dtype not in (np.uint8, np.float32):
            raise DataError(f"data set {self.name!r}: {field} must be uint8 or float32, but is {images.dtype}")
        if images.dtype == np.float32 and not np.isfinite(images).all():
            raise DataError(f"data set {self.name!r}: {field} must be finite, but holds NaN or infinite values")
        # By way of one dimension: an axis of length 1 may have any step and be contiguous. Torch's convolutions go by
        # the steps, and pickling mends them, so that a run on actors would round otherwise than one in this process.
        images = np.ascontiguousarray(images).reshape(-1).reshape(images.shape)
        object.__setattr__(self, field, images)
        return images

    def _checked_integers(self, field: str, *, length: int) -> NDArray[np.int64]:
        values = getattr(self, field)
        is_integer = isinstance(values, np.ndarray) and np.issubdtype(values.dtype, np.integer)
        if not is_integer or values.shape != (length,):
            kind = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise DataError(
                f"data set {self.name!r}: {field} must be integers, one per image, of shape ({length},), but is {kind}"
            )
        if values.min() < 0:
            raise DataError(f"data set {self.name!r}: {field} must not be negative, but one is {values.min()}")
        values = np.ascontiguousarray(values, dtype=np.int64)
        object.__setattr__(self, field, values)
        return values

    def _check_constants(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise DataError(f"data set {self.name!r}: scale > 0 must hold, but is {self.scale}")
        for field in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, field))
            if len(values) != self.num_channels or not all(math.isfinite(value) for value in values):
                raise DataError(
                    f"data set {self.name!r}: {field} must hold one finite number per channel "
                    f"({self.num_channels}), but is {values}"
                )
            object.__setattr__(self, field, values)
        if min(self.std) <= 0:
            raise DataError(f"data set {self.name!r}: std > 0 must hold, but is {self.std}")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise DataError(
                f"data set {self.name!r}: class_names must hold num_classes={self.num_classes} names or none, but "
                f"holds {len(self.class_names)}"
            )


def of_bytes(
    name: str,
    arrays: Mapping[str, NDArray[Any]],
    *,
    pixels: tuple[tuple[float, ...], tuple[float, ...]],
    class_names: Sequence[str],
) -> Dataset:
    """Return a data set of pixels 0..255 whose classes are named.

    Args:
        name: What it is called in tables.
        arrays: The images and labels, perhaps the writers, by their names in :class:`Dataset`.
        pixels: Mean and standard deviation per channel, of the pixels divided by 255.
        class_names: One per class.
    """
    mean, std = pixels
    names = tuple(class_names)
    return Dataset(name=name, **arrays, num_classes=len(names), scale=255.0, mean=mean, std=std, class_names=names)
