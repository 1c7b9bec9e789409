"""The set-ups' data: the real data set where it is at hand, noise of its shape where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.bench.setup import Request
from fedsweep.streams import stream
from fedsweep.world.data.datasets import Dataset, is_present, load_dataset
from fedsweep.world.data.record import of_bytes

# Channels, height and width; training samples.
_SHAPES = {"cifar10": ((3, 32, 32), 50_000), "mnist": ((1, 28, 28), 60_000)}
_NUM_TEST = 1000


def data_for(name: str, request: Request) -> tuple[Dataset, str]:
    """Return the data set ``"cifar10"`` or ``"mnist"``, or noise of its shape where it is not there, and its name."""
    if is_present(name, root=request.root):
        return load_dataset(name, root=request.root, download=False), name
    return noise(name), f"noise shaped like {name}"


def noise(name: str, *, samples: int | None = None) -> Dataset:
    """Random bytes and labels of ten classes in a data set's shape, by default all its samples; the same each time."""
    shape, num_train = _SHAPES[name]
    generator = stream(0, "benchmark").numpy()
    sizes = {"train": samples or num_train, "test": _NUM_TEST}
    arrays: dict[str, NDArray[Any]] = {}
    for part, size in sizes.items():
        arrays[f"{part}_images"] = generator.integers(0, 256, size=(size, *shape), dtype=np.uint8)
    for part, size in sizes.items():
        arrays[f"{part}_labels"] = generator.integers(0, 10, size=size)
    return of_bytes(name, arrays, pixels=((0.5,) * shape[0], (0.25,) * shape[0]), classes=10)


def noise_like_mnist(*, root: str, download: bool) -> Dataset:
    """For ``scenario.dataset``, where MNIST is not at hand; nothing is read or fetched."""
    del root, download
    return noise("mnist")
