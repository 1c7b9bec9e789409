"""The data sets that a configuration can name, and how one is loaded.

Each entry of :data:`DATASETS` has a one-line summary and its source. A name that is not listed is taken as
``package.module:callable``, called with ``root=`` and ``download=``, which returns a :class:`Dataset`; one that begins
with ``hf:`` is Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import ConfigError, DataError
from fedsweep.plugins import call_builder, find_plugin
from fedsweep.streams import Stream
from fedsweep.world.data import folder_sets, generated, huggingface, leaf, torchvision_sets
from fedsweep.world.data.files import default_root
from fedsweep.world.data.huggingface_source import PREFIX
from fedsweep.world.data.record import Dataset, of_bytes

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetEntry",
    "DatasetSizes",
    "default_root",
    "is_present",
    "load_dataset",
    "stand_in",
]

_NUM_DIGITS_TEST = 360


@dataclass(frozen=True, kw_only=True)
class DatasetSizes:
    """Sizes of a data set, as published.

    Attributes:
        train: Training samples.
        test: Test samples.
        image_shape: Channels, height and width; of other inputs, what they have.
        num_classes: How many classes there are.
    """

    train: int
    test: int
    image_shape: tuple[int, ...]
    num_classes: int = 10


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """A data set that is known by name.

    Attributes:
        summary: One line on its content.
        source: Who published it, and when.
        sizes: How large it is.
        load: Called with the data folder and ``download=``.
        is_present: Whether its files seem to lie under a data folder; nothing is read. By default they come along.
        task: What is learned of it, as ``scenario.task`` names it; None: its samples are classified.
    """

    summary: str
    source: str
    sizes: DatasetSizes
    load: Callable[..., Dataset]
    is_present: Callable[[Path], bool] = lambda root: True
    task: str | None = None


def is_present(name: str, *, root: str | None) -> bool:
    """Return whether a built-in data set's files seem to lie under the data folder; their content is not looked at.

    Args:
        name: One of :data:`DATASETS`.
        root: The data folder; None for the user's cache.
    """
    return DATASETS[name].is_present(_root_path(root))


def load_dataset(
    name: str, *, root: str | None, download: bool, image_size: int | None = None, for_test: bool = False
) -> Dataset:
    """Load a data set, by name.

    Args:
        name: One of :data:`DATASETS`, ``hf:NAME`` or ``hf:./FOLDER``, ``package.module:callable``, or an entry
            point of ``fedsweep.datasets``.
        root: The folder that holds the data, in torchvision's layout; None for the user's cache.
        download: Whether missing files may be fetched from the network.
        image_size: Resize all images to this height and width, in pixels; None leaves them.
        for_test: Whether the test samples alone are wanted; an ``hf:`` data set may then have no others.

    Raises:
        ConfigError: the name is unknown, or ``image_size`` is not positive.
        DataError: the data are missing, damaged, cannot be fetched, or break the rules of :class:`Dataset`.
    """
    if image_size is not None and image_size < 1:
        raise ConfigError(f"scenario.image_size must be at least 1 pixel or null, but is {image_size}")
    folder = _root_path(root)
    if name.startswith(PREFIX):
        return huggingface.load(name.removeprefix(PREFIX), download=download, image_size=image_size, for_test=for_test)
    if name in DATASETS:
        dataset = DATASETS[name].load(folder, download=download)
    else:
        builder = partial(find_plugin("dataset", name, DATASETS), root=str(folder), download=download)
        dataset = call_builder("data set", name, builder, gives=Dataset, error=DataError)
    return dataset if image_size is None else _resize(dataset, image_size)


def stand_in(name: str, *, image_size: int | None = None) -> Dataset:
    """Return black images with a built-in data set's sizes and equally frequent classes, for plans without its files.

    Args:
        name: One of :data:`DATASETS`.
        image_size: As of :func:`load_dataset`.
    """
    if DATASETS[name].task is not None:
        # In the package, but for texts, whose sizes their files alone tell.
        return load_dataset(name, root=None, download=False, image_size=image_size)
    sizes = DATASETS[name].sizes
    channels, height, width = sizes.image_shape
    shape = (channels, image_size or height, image_size or width)
    arrays: dict[str, NDArray[Any]] = {}
    for part, count in (("train", sizes.train), ("test", sizes.test)):
        # Memory that nobody reads is never there.
        arrays[f"{part}_images"] = np.zeros((count, *shape), np.uint8)
        arrays[f"{part}_labels"] = np.arange(count) % sizes.num_classes
    pixels = (0.5,) * channels, (0.25,) * channels
    return of_bytes(name, arrays, pixels=pixels, classes=sizes.num_classes)


def _root_path(root: str | None) -> Path:
    folder = default_root() if root is None else Path(root).expanduser()
    if folder.exists() and not folder.is_dir():
        raise DataError(f"scenario.root must be a folder, but {folder} is a file")
    return folder


def _resize(dataset: Dataset, size: int) -> Dataset:
    if dataset.pixels is None:
        raise ConfigError(
            f"scenario.image_size={size} resizes pictures, but data set {dataset.name!r} has none; leave it out"
        )
    if dataset.image_shape[1:] == (size, size):
        return dataset
    parts = {"train": dataset.train, "test": dataset.test}
    resized = {name: replace(part, inputs=_resize_images(part.inputs, size)) for name, part in parts.items()}
    return replace(dataset, train=resized["train"], test=resized["test"])


def _resize_images(images: NDArray[Any], size: int) -> NDArray[Any]:
    """Resize bilinearly, low-pass filtered when shrinking (as torchvision does), in pieces to bound the memory."""
    import torch

    resized = np.empty((*images.shape[:2], size, size), images.dtype)
    for start in range(0, len(images), 1000):
        piece = torch.from_numpy(images[start : start + 1000]).to(torch.float32)
        piece = torch.nn.functional.interpolate(piece, size=(size, size), mode="bilinear", antialias=True)
        if images.dtype == np.uint8:
            piece = piece.round().clamp(0, 255).to(torch.uint8)
        resized[start : start + 1000] = piece.numpy()
    return resized


def _load_digits(root: Path, *, download: bool) -> Dataset:
    """Load scikit-learn's digits, 8 x 8 grey, 10 classes: 1437 for training, 360 for testing.

    The split is stratified and always the same, whatever the run's seed. ``root`` and ``download`` change nothing: the
    data come with the package.
    """
    # [1797, 65]: 64 pixels and the label, in scikit-learn's order. Importing scikit-learn would take a second.
    table: NDArray[np.uint8] = np.load(Path(__file__).with_name("digits.npy"), allow_pickle=False)
    images = table[:, :-1].reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    test = _stratified(labels, num_chosen=_NUM_DIGITS_TEST, stream=Stream(("digits-split",)))
    train = np.setdiff1d(np.arange(len(labels)), test)
    pixels = images[train] / 16.0
    return Dataset.images(
        name="digits",
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        num_classes=10,
        scale=16.0,
        mean=(float(pixels.mean()),),
        std=(float(pixels.std()),),
        class_names=tuple(str(digit) for digit in range(10)),
    )


def _stratified(labels: NDArray[np.int64], *, num_chosen: int, stream: Stream) -> NDArray[np.int64]:
    """Return indices of a random subset, ascending, with each class's share kept to within one sample."""
    counts = np.bincount(labels)
    ideal = counts * num_chosen / len(labels)
    quota = np.floor(ideal).astype(np.int64)
    quota[np.argsort(quota - ideal, kind="stable")[: num_chosen - quota.sum()]] += 1
    keys = stream.numpy().random(len(labels))
    order = np.lexsort((keys, labels))
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(order[rank < quota[labels[order]]])


def _files_present(*paths: str) -> Callable[[Path], bool]:
    """Return a check that at least one of some files or folders exists."""
    return lambda root: any((root / path).exists() for path in paths)


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(
        summary="8x8 grey digits, 10 classes, 1437 + 360; comes with the package",
        source="UCI optical recognition of handwritten digits, Alpaydin and Kaynak 1998",
        sizes=DatasetSizes(train=1_437, test=360, image_shape=(1, 8, 8)),
        load=_load_digits,
    ),
    "lines": DatasetEntry(
        summary="lines of a small grammar by 40 speakers, 29 letters, 1280 + 320; generated",
        source="this package",
        sizes=DatasetSizes(train=1_280, test=320, image_shape=(32,), num_classes=29),
        load=generated.load_lines,
        task="next_token",
    ),
    "diabetes": DatasetEntry(
        summary="ten measurements of 442 patients, a number to be told, 354 + 88; comes with the package",
        source="Efron, Hastie, Johnstone and Tibshirani 2004",
        sizes=DatasetSizes(train=354, test=88, image_shape=(10,), num_classes=0),
        load=generated.load_diabetes,
        task="regression",
    ),
    "shapes": DatasetEntry(
        summary="16x16 grey squares, discs and crosses, a class for each pixel, 800 + 200; generated",
        source="this package",
        sizes=DatasetSizes(train=800, test=200, image_shape=(1, 16, 16), num_classes=4),
        load=generated.load_shapes,
        task="segmentation",
    ),
    "multi_digits": DatasetEntry(
        summary="8x16 grey, two of the digits side by side, ten labels, 2000 + 500; comes with the package",
        source="UCI optical recognition of handwritten digits, Alpaydin and Kaynak 1998",
        sizes=DatasetSizes(train=2_000, test=500, image_shape=(1, 8, 16)),
        load=lambda root, *, download: generated.paired(_load_digits(root, download=download)),
        task="multi_label",
    ),
    "mnist": DatasetEntry(
        summary="28x28 grey digits, 10 classes, 60,000 + 10,000",
        source="LeCun et al. 1998",
        sizes=DatasetSizes(train=60_000, test=10_000, image_shape=(1, 28, 28)),
        load=partial(torchvision_sets.load_idx, "mnist"),
        is_present=_files_present("MNIST/raw/train-images-idx3-ubyte.gz", "MNIST/raw/train-images-idx3-ubyte"),
    ),
    "fashion_mnist": DatasetEntry(
        summary="28x28 grey garments, 10 classes, 60,000 + 10,000",
        source="Xiao, Rasul and Vollgraf 2017",
        sizes=DatasetSizes(train=60_000, test=10_000, image_shape=(1, 28, 28)),
        load=partial(torchvision_sets.load_idx, "fashion_mnist"),
        is_present=_files_present(
            "FashionMNIST/raw/train-images-idx3-ubyte.gz", "FashionMNIST/raw/train-images-idx3-ubyte"
        ),
    ),
    "cifar10": DatasetEntry(
        summary="32x32 colour photographs, 10 classes, 50,000 + 10,000",
        source="Krizhevsky 2009",
        sizes=DatasetSizes(train=50_000, test=10_000, image_shape=(3, 32, 32)),
        load=partial(torchvision_sets.load_cifar, "cifar10"),
        is_present=_files_present("cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"),
    ),
    "cifar100": DatasetEntry(
        summary="32x32 colour photographs, 100 classes, 50,000 + 10,000",
        source="Krizhevsky 2009",
        sizes=DatasetSizes(train=50_000, test=10_000, image_shape=(3, 32, 32), num_classes=100),
        load=partial(torchvision_sets.load_cifar, "cifar100"),
        is_present=_files_present("cifar-100-python/train", "cifar-100-python.tar.gz"),
    ),
    "svhn": DatasetEntry(
        summary="32x32 colour house numbers, 10 classes, 73,257 + 26,032",
        source="Netzer et al. 2011",
        sizes=DatasetSizes(train=73_257, test=26_032, image_shape=(3, 32, 32)),
        load=torchvision_sets.load_svhn,
        is_present=_files_present("train_32x32.mat"),
    ),
    "femnist": DatasetEntry(
        summary="28x28 grey letters and digits by 3,500 writers, 62 classes; LEAF's JSON files",
        source="Caldas et al. 2018 (LEAF), after Cohen et al. 2017",
        sizes=DatasetSizes(train=644_210, test=161_053, image_shape=(1, 28, 28), num_classes=62),
        load=leaf.load_femnist,
        is_present=lambda root: leaf.find("femnist", root) is not None,
    ),
    "shakespeare": DatasetEntry(
        summary="80 letters of a role, the next one asked for, 80 letters, 1,129 roles; LEAF's JSON files",
        source="Caldas et al. 2018 (LEAF), after McMahan et al. 2017",
        sizes=DatasetSizes(train=3_380_926, test=845_232, image_shape=(80,), num_classes=80),
        load=leaf.load_shakespeare,
        is_present=lambda root: leaf.find("shakespeare", root) is not None,
        task="next_token",
    ),
    "cinic10": DatasetEntry(
        summary="32x32 colour photographs, 10 classes, 90,000 + 90,000",
        source="Darlow et al. 2018",
        sizes=DatasetSizes(train=90_000, test=90_000, image_shape=(3, 32, 32)),
        load=folder_sets.load_cinic10,
        is_present=lambda root: folder_sets.find("cinic10", root) is not None,
    ),
    "tiny_imagenet": DatasetEntry(
        summary="64x64 colour photographs, 200 classes, 100,000 + 10,000",
        source="Stanford CS231n 2015, after Deng et al. 2009",
        sizes=DatasetSizes(train=100_000, test=10_000, image_shape=(3, 64, 64), num_classes=200),
        load=folder_sets.load_tiny_imagenet,
        is_present=lambda root: folder_sets.find("tiny_imagenet", root) is not None,
    ),
}
