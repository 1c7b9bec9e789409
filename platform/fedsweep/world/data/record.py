"""The record of a data set in memory, and the checks that any data set must pass, a user's own included.

Shape letters: S samples, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError

Array = NDArray[Any]
# What inputs and targets may be: bool, integers, floats of up to 64 bits.
_KINDS = "buif"
_LARGEST = float(np.finfo(np.float32).max)
_MOST = np.iinfo(np.int64).max
# Of each array a digest takes so many bytes at most, some 35 ms of a slow core.
_DIGESTED_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The constants by which a data set's pictures are normalised.

    Attributes:
        scale: The pixel value that maps to 1.0, > 0.
        mean: Per channel, of the pixels divided by ``scale``.
        std: Per channel, likewise, > 0.
    """

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def check(self, where: str, *, num_channels: int) -> None:
        """Refuse constants that can't be.

        Raises:
            DataError: The message says ``where``.
        """
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise DataError(f"{where}scale > 0 must hold, but is {self.scale}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != num_channels or not all(math.isfinite(value) for value in values):
                raise DataError(
                    f"{where}{name} must hold one finite number per channel ({num_channels}), but is {values}"
                )
        if min(self.std) <= 0:
            raise DataError(f"{where}std > 0 must hold, but is {self.std}")


class Pictures(TypedDict):
    """The parameters of :meth:`Dataset.images`; S training samples, C channels, H x W pixels.

    Labels and writers may be given as any integers, arrays in any memory order.

    Attributes:
        name: What it is called in tables.
        train_images: ``[S, C, H, W]``, uint8, or float32 for a user's own.
        train_labels: ``[S]``, each in ``0 .. num_classes - 1``.
        test_images: ``[S_test, C, H, W]``, of the same type and image shape.
        test_labels: ``[S_test]``.
        num_classes: How many classes there are, at least 1; a class without samples is allowed.
        scale: The pixel value that maps to 1.0, > 0.
        mean: Per channel, of the pixels divided by ``scale``.
        std: Per channel, likewise, > 0.
        writers: ``[S]``, >= 0: each training sample's natural client; None where there is none.
        test_writers: ``[S_test]``, likewise, numbered as ``writers`` are; so a client has test samples of its own.
        class_names: One per class, or empty.
    """

    name: str
    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array
    num_classes: int
    scale: float
    mean: Sequence[float]
    std: Sequence[float]
    writers: NotRequired[Array | None]
    test_writers: NotRequired[Array | None]
    class_names: NotRequired[Sequence[str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Inputs with targets, of any shape and type.

    Attributes:
        inputs: ``[S, ...]`` of integers, floats or bool; or several such arrays by name, which the model gets by
            keyword (they become one structured array). Text of several lengths is padded, with a mask beside it.
        targets: ``[S, ...]``, integers or floats: what the task makes of them, it checks. Left out or None: there are
            none, and they become ``[S, 0]``.
        groups: ``[S]``, each sample's natural client (writer, speaker, hospital), >= 0; None where there is none. Where
            the test samples say it, too, a client of whole groups has test samples of its own.
        strata: ``[S]``, >= 0: what partitions by class go by; None: what the task makes of the targets.

    Raises:
        DataError: An array is empty, of another type or length, or not finite.
    """

    inputs: Array
    targets: Array = None  # type: ignore[assignment]  # an array as soon as the samples are made
    groups: NDArray[np.int64] | None = None
    strata: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check everything, and bring the arrays to their types."""
        inputs: Any = self.inputs
        packed = _packed(inputs) if isinstance(inputs, Mapping) else _array(inputs, "inputs")
        object.__setattr__(self, "inputs", packed)
        targets: Any = self.targets
        if targets is None:
            targets = np.empty((len(packed), 0), np.float32)
        is_none = isinstance(targets, np.ndarray) and targets.shape[1:] == (0,)
        object.__setattr__(self, "targets", targets if is_none else _array(targets, "targets"))
        if len(self.targets) != len(packed):
            raise DataError(f"targets must be one per sample ({len(packed)}), but are {len(self.targets)}")
        for name in ("groups", "strata"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integers(getattr(self, name), name, length=len(packed)))

    def __len__(self) -> int:
        return len(self.inputs)

    def taken(self, index: NDArray[np.int64]) -> Samples:
        """Return some of the samples."""
        more = {name: None if (v := getattr(self, name)) is None else v[index] for name in ("groups", "strata")}
        return Samples(inputs=self.inputs[index], targets=self.targets[index], **more)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Samples for training and for testing. Of labelled pictures :meth:`images` makes one.

    Attributes:
        name: What it is called in tables.
        train: For training.
        test: For testing, with inputs and targets of the same shapes and types.
        num_classes: Classes, labels or words; 0 where targets are no such thing. A class without samples is allowed.
        class_names: One per class, or empty.
        pixels: How pictures ``[S, C, H, W]`` are normalised; None: inputs are no pictures.

    Raises:
        DataError: Shapes, types or ranges are wrong.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    pixels: Pixels | None = None

    def __post_init__(self) -> None:
        """Check that training and test fit."""
        for part in ("inputs", "targets"):
            train, test = getattr(self.train, part), getattr(self.test, part)
            if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
                raise DataError(
                    f"data set {self.name!r}: training and test {part} must have one shape and type, but are "
                    f"{train.shape[1:]} {train.dtype} and {test.shape[1:]} {test.dtype}"
                )
        if self.num_classes < 0:
            raise DataError(f"data set {self.name!r}: num_classes >= 0 must hold, but is {self.num_classes}")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise DataError(
                f"data set {self.name!r}: class_names must hold num_classes={self.num_classes} names or none, but "
                f"holds {len(self.class_names)}"
            )

    @classmethod
    def images(cls, **pictures: Unpack[Pictures]) -> Dataset:
        """Make a data set of labelled pictures; its parameters are those of :class:`Pictures`.

        Raises:
            DataError: Shapes, types or ranges are wrong, or a value is not finite.
        """
        name, num_classes = pictures["name"], pictures["num_classes"]
        if num_classes < 1:
            raise DataError(f"data set {name!r}: num_classes >= 1 must hold, but is {num_classes}")
        where = f"data set {name!r}: "
        train = _pictures(pictures["train_images"], f"{where}train_images")
        test = _pictures(pictures["test_images"], f"{where}test_images")
        parts = (("train", pictures["train_labels"], train), ("test", pictures["test_labels"], test))
        labels = {
            part: _labels(values, f"{where}{part}_labels", length=len(images), num_classes=num_classes)
            for part, values, images in parts
        }
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"{where}training and test images must have one shape and type, but are "
                f"{train.shape[1:]} {train.dtype} and {test.shape[1:]} {test.dtype}"
            )
        named = (("writers", pictures.get("writers"), train), ("test_writers", pictures.get("test_writers"), test))
        groups = {
            key: None if values is None else integers(values, f"{where}{key}", length=len(images), each="image")
            for key, values, images in named
        }
        constants = Pixels(
            scale=pictures["scale"],
            mean=tuple(map(float, pictures["mean"])),
            std=tuple(map(float, pictures["std"])),
        )
        constants.check(where, num_channels=train.shape[1])
        return cls(
            name=name,
            train=Samples(inputs=train, targets=labels["train"], groups=groups["writers"]),
            test=Samples(inputs=test, targets=labels["test"], groups=groups["test_writers"]),
            num_classes=num_classes,
            class_names=tuple(pictures.get("class_names", ())),
            pixels=constants,
        )

    @cached_property
    def digest(self) -> str:
        """A hash of samples, classes and constants, 16 hexadecimal digits.

        Of an array over 16 MB evenly spaced rows count: of many pictures a change of a few may go unseen.
        """
        pixels = self.pixels and [float(v) for v in (self.pixels.scale, *self.pixels.mean, *self.pixels.std)]
        classes = [int(self.num_classes), *map(str, self.class_names)]
        whole = blake2b(repr((classes, pixels)).encode(), digest_size=8)
        for part in (self.train, self.test):
            for name in ("inputs", "targets", "groups", "strata"):
                if (values := getattr(part, name)) is not None:
                    whole.update(f"{name} {values.dtype} {values.shape}".encode())
                    whole.update(values[:: max(1, math.ceil(values.nbytes / _DIGESTED_BYTES))].tobytes())
        return whole.hexdigest()

    # What pictures have always been called by.

    @property
    def train_images(self) -> Array:
        """The training inputs ``[S, ...]``."""
        return self.train.inputs

    @property
    def train_labels(self) -> Array:
        """The training targets ``[S, ...]``."""
        return self.train.targets

    @property
    def test_images(self) -> Array:
        """The test inputs."""
        return self.test.inputs

    @property
    def test_labels(self) -> Array:
        """The test targets."""
        return self.test.targets

    @property
    def writers(self) -> NDArray[np.int64] | None:
        """The training samples' groups."""
        return self.train.groups

    @property
    def scale(self) -> float:
        """The pixel value that maps to 1.0; 1 where there are no pixels."""
        return 1.0 if self.pixels is None else self.pixels.scale

    @property
    def mean(self) -> tuple[float, ...]:
        """The pixels' mean by channel."""
        return () if self.pixels is None else self.pixels.mean

    @property
    def std(self) -> tuple[float, ...]:
        """The pixels' standard deviation by channel."""
        return () if self.pixels is None else self.pixels.std

    @property
    def num_channels(self) -> int:
        """C, the number of colour channels."""
        return int(self.train.inputs.shape[1])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        channels, height, width = self.train.inputs.shape[1:]
        return int(channels), int(height), int(width)


def integers(values: Any, what: str, *, length: int, each: str = "sample") -> NDArray[np.int64]:
    """Return integers >= 0, one for each sample, as int64 [S].

    Raises:
        DataError: They are something else; the message says ``what``.
    """
    if not (isinstance(values, np.ndarray) and np.issubdtype(values.dtype, np.integer) and values.shape == (length,)):
        kind = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise DataError(f"{what} must be integers, one per {each}, of shape ({length},), but is {kind}")
    _refuse_masked(values, what)
    if values.min() < 0:
        raise DataError(f"{what} must not be negative, but one is {values.min()}")
    if values.max() > _MOST:
        raise DataError(f"{what} must be less than 2^63, but one is {values.max()}; number them from 0")
    return np.ascontiguousarray(values, dtype=np.int64)


def _array(values: Any, what: str) -> Array:
    """Return an array in one piece of memory, or a structured one as it is."""
    if not isinstance(values, np.ndarray) or values.ndim < 1 or 0 in values.shape:
        shape = values.shape if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
        raise DataError(f"{what} must be a non-empty numpy array [samples, ...], but is {shape}")
    _check_values(values, what)
    # Of files of other machines: torch takes the byte order of this one alone.
    return _contiguous(values.astype(values.dtype.newbyteorder("="), copy=False))


def _check_values(values: Array, what: str) -> None:
    for name in values.dtype.names or ():
        _check_values(values[name], f"{what}[{name!r}]")
    if values.dtype.names:
        return
    if values.dtype.kind not in _KINDS or values.dtype.itemsize > 8:
        raise DataError(f"{what} must be bool, integers or floats of at most 64 bits, but is {values.dtype}")
    _refuse_masked(values, what)
    if values.dtype.kind == "u" and values.max() > _MOST:
        raise DataError(f"{what} must be less than 2^63, but one is {values.max()}")
    # By the two ends, which a NaN makes NaN: no copy of all. In float32, which networks get, larger ones are infinite.
    if values.dtype.kind == "f" and not -_LARGEST <= float(values.min()) <= float(values.max()) <= _LARGEST:
        raise DataError(f"{what} must be finite in float32, but holds NaN, infinite values or some over {_LARGEST:.2g}")


def _refuse_masked(values: Array, what: str) -> None:
    if np.ma.is_masked(values):
        raise DataError(f"{what} must have no masked values; fill them, or leave out the samples that have some")


def _contiguous(values: Array) -> Array:
    # By way of one dimension: an axis of length 1 may have any step and be contiguous. Torch's convolutions go by
    # the steps, and pickling mends them, so that a run on actors would round otherwise than one in this process.
    return np.ascontiguousarray(values).reshape(-1).reshape(values.shape)


def _packed(inputs: Mapping[str, Array]) -> Array:
    """Return several arrays as one structured array [S] with a field for each: it is indexed and sent as any other."""
    arrays = {name: _array(values, f"inputs[{name!r}]") for name, values in inputs.items()}
    if not arrays or not all(name.isidentifier() for name in arrays):
        raise DataError(f"inputs by name need names that a function's parameters can have, but got {[*arrays]}")
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"inputs by name must be equally many, but are {lengths}")
    packed = np.empty(next(iter(lengths.values())), [(name, v.dtype, v.shape[1:]) for name, v in arrays.items()])
    for name, values in arrays.items():
        packed[name] = values
    return packed


def _labels(values: Any, what: str, *, length: int, num_classes: int) -> NDArray[np.int64]:
    labels = integers(values, what, length=length, each="image")
    if labels.max() >= num_classes:
        raise DataError(
            f"{what} must lie in 0..{num_classes - 1}, but one is {labels.max()}; correct the labels or "
            f"num_classes={num_classes}"
        )
    return labels


def _pictures(images: Any, what: str) -> Array:
    if not isinstance(images, np.ndarray) or images.ndim != 4 or 0 in images.shape:
        shape = images.shape if isinstance(images, np.ndarray) else f"a {type(images).__name__}"
        raise DataError(f"{what} must be a non-empty numpy array [S, C, H, W], but is {shape}")
    if images.dtype not in (np.uint8, np.float32):
        raise DataError(f"{what} must be uint8 or float32, but is {images.dtype}")
    return _array(images, what)


def of_bytes(
    name: str,
    arrays: Mapping[str, Array],
    *,
    pixels: tuple[tuple[float, ...], tuple[float, ...]],
    classes: Sequence[str] | int,
) -> Dataset:
    """Return a data set of pixels 0..255.

    Args:
        name: What it is called in tables.
        arrays: The images and labels, perhaps their writers, by their names in :meth:`Dataset.images`.
        pixels: Mean and standard deviation per channel, of the pixels divided by 255.
        classes: Their names, or how many there are.
    """
    mean, std = pixels
    names, number = ((), classes) if isinstance(classes, int) else (tuple(classes), len(classes))
    return Dataset.images(name=name, **arrays, num_classes=number, scale=255.0, mean=mean, std=std, class_names=names)
