"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, in torchvision's folder layout.

Folders, file names, addresses and checksums are torchvision's, and so is the downloader. The files are parsed here,
from the very bytes whose checksum was verified: torchvision itself would unpack archives into the data folder, take
unpacked IDX files and metadata unseen, and refuse a read-only folder that holds only the ``.gz`` files.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError
from fedsweep.world.data.files import OfficialFile, check_md5, fetch_missing, read_checked
from fedsweep.world.data.record import Dataset
from fedsweep.world.data.torchvision_compat import import_torchvision

# torchvision publishes the checksums of the .gz files alone; these are the md5 of the same files unpacked.
_UNPACKED_MD5 = {
    "MNIST": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}


@dataclass(frozen=True, kw_only=True)
class PixelConstants:
    """Per-channel mean and standard deviation of the training pixels, scaled to 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class IdxFiles:
    """One of the MNIST family: four gzip'd IDX files, each of which may lie there unpacked instead.

    Attributes:
        name: The data set's name.
        folder: Below the data folder.
        archives: The official files, whose names end in ``.gz``.
        unpacked_md5: Checksum of each file after unpacking, by its name without ``.gz``.
        class_names: In the order of the labels.
        pixels: Mean and standard deviation.
    """

    name: str
    folder: str
    archives: tuple[OfficialFile, ...]
    unpacked_md5: dict[str, str]
    class_names: tuple[str, ...]
    pixels: PixelConstants


def load_mnist(root: Path, *, download: bool) -> Dataset:
    """MNIST, 28 x 28 grey, 10 digits. Raises DataError as :func:`load_idx` does."""
    return load_idx(
        _idx_files("MNIST", "mnist", PixelConstants(mean=(0.1307,), std=(0.3081,))), root, download=download
    )


def load_fashion_mnist(root: Path, *, download: bool) -> Dataset:
    """Fashion-MNIST, 28 x 28 grey, 10 garments. Raises DataError as :func:`load_idx` does."""
    pixels = PixelConstants(mean=(0.2860,), std=(0.3530,))
    return load_idx(_idx_files("FashionMNIST", "fashion_mnist", pixels), root, download=download)


def _idx_files(torchvision_name: str, name: str, pixels: PixelConstants) -> IdxFiles:
    source = getattr(import_torchvision().datasets, torchvision_name)
    folder = f"{torchvision_name}/raw"
    archives = tuple(
        OfficialFile(path=f"{folder}/{file}", md5=md5, urls=tuple(mirror + file for mirror in source.mirrors))
        for file, md5 in source.resources
    )
    return IdxFiles(
        name=name,
        folder=folder,
        archives=archives,
        unpacked_md5=_UNPACKED_MD5[torchvision_name],
        class_names=tuple(source.classes),
        pixels=pixels,
    )


def load_idx(files: IdxFiles, root: Path, *, download: bool) -> Dataset:
    """A data set of the MNIST family.

    Args:
        files: Which files to read.
        root: The data folder.
        download: Whether missing files may be fetched.

    Raises:
        DataError: a file is missing, damaged, or not in the IDX format.
    """
    missing = [
        file
        for file in files.archives
        if not (root / file.path).exists() and not (root / file.path.removesuffix(".gz")).exists()
    ]
    fetch_missing(files.name, missing, root=root, download=download)
    arrays = {Path(file.path).name: _read_idx(root, file, files.unpacked_md5) for file in files.archives}
    return Dataset(
        name=files.name,
        train_images=arrays["train-images-idx3-ubyte.gz"][:, None],
        train_labels=arrays["train-labels-idx1-ubyte.gz"].astype(np.int64),
        test_images=arrays["t10k-images-idx3-ubyte.gz"][:, None],
        test_labels=arrays["t10k-labels-idx1-ubyte.gz"].astype(np.int64),
        num_classes=len(files.class_names),
        scale=255.0,
        mean=files.pixels.mean,
        std=files.pixels.std,
        class_names=files.class_names,
    )


def _read_idx(root: Path, archive: OfficialFile, unpacked_md5: dict[str, str]) -> NDArray[np.uint8]:
    """One file's array, from the archive where it is there, else from the unpacked file."""
    path = root / archive.path
    if path.exists():
        content = read_checked(path, archive.md5)
        try:
            return _parse_idx(gzip.decompress(content), path)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked: {error}") from error
    plain = path.with_suffix("")
    return _parse_idx(read_checked(plain, unpacked_md5[plain.name]), plain)


def _parse_idx(content: bytes, path: Path) -> NDArray[np.uint8]:
    """IDX: two zero bytes, type 8 (uint8), number of axes, a big-endian 32-bit length per axis, the values."""
    num_axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * num_axes
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(num_axes))
    if len(content) - start != int(np.prod(shape)):
        raise DataError(f"{path} should hold {shape} values after its header, but holds {len(content) - start}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


@dataclass(frozen=True, kw_only=True)
class CifarFiles:
    """CIFAR's Python batches: in a folder, or in the archive that holds this folder.

    Attributes:
        name: The data set's name.
        folder: The folder of batches, below the data folder and inside the archive.
        archive: The official archive.
        train: Name and md5 of each training batch, in order.
        test: Name and md5 of each test batch.
        meta: Name and md5 of the file with the class names, and the key that they have in it.
        label_key: The labels' key in a batch.
        pixels: Mean and standard deviation.
    """

    name: str
    folder: str
    archive: OfficialFile
    train: tuple[tuple[str, str], ...]
    test: tuple[tuple[str, str], ...]
    meta: tuple[str, str, str]
    label_key: str
    pixels: PixelConstants


def load_cifar10(root: Path, *, download: bool) -> Dataset:
    """CIFAR-10, 32 x 32 colour, 10 classes. Raises DataError as :func:`load_cifar` does."""
    pixels = PixelConstants(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    return load_cifar(_cifar_files("CIFAR10", "cifar10", "labels", pixels), root, download=download)


def load_cifar100(root: Path, *, download: bool) -> Dataset:
    """CIFAR-100, 32 x 32 colour, 100 fine classes. Raises DataError as :func:`load_cifar` does."""
    pixels = PixelConstants(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
    return load_cifar(_cifar_files("CIFAR100", "cifar100", "fine_labels", pixels), root, download=download)


def _cifar_files(torchvision_name: str, name: str, label_key: str, pixels: PixelConstants) -> CifarFiles:
    source = getattr(import_torchvision().datasets, torchvision_name)
    return CifarFiles(
        name=name,
        folder=source.base_folder,
        archive=OfficialFile(path=source.filename, md5=source.tgz_md5, urls=(source.url,)),
        train=tuple((file, md5) for file, md5 in source.train_list),
        test=tuple((file, md5) for file, md5 in source.test_list),
        meta=(source.meta["filename"], source.meta["md5"], source.meta["key"]),
        label_key=label_key,
        pixels=pixels,
    )


def load_cifar(files: CifarFiles, root: Path, *, download: bool) -> Dataset:
    """A CIFAR data set, from the unpacked folder where it is complete, else from the archive.

    Args:
        files: Which files to read.
        root: The data folder.
        download: Whether a missing archive may be fetched.

    Raises:
        DataError: the files are missing or damaged. Nothing is unpickled before its checksum was verified.
    """
    meta_file, meta_md5, meta_key = files.meta
    expected = dict((*files.train, *files.test, (meta_file, meta_md5)))
    folder = root / files.folder
    if all((folder / name).exists() for name in expected):
        contents = {name: read_checked(folder / name, md5) for name, md5 in expected.items()}
    else:
        archive = root / files.archive.path
        fetch_missing(files.name, [] if archive.exists() else [files.archive], root=root, download=download)
        contents = _read_members(archive, files.archive.md5, folder=files.folder, expected=expected)
    train_images, train_labels = _join_batches([contents[name] for name, _ in files.train], files.label_key)
    test_images, test_labels = _join_batches([contents[name] for name, _ in files.test], files.label_key)
    class_names = tuple(_unpickle_verified(contents[meta_file])[meta_key])
    return Dataset(
        name=files.name,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        num_classes=len(class_names),
        scale=255.0,
        mean=files.pixels.mean,
        std=files.pixels.std,
        class_names=class_names,
    )


def _read_members(archive: Path, archive_md5: str, *, folder: str, expected: dict[str, str]) -> dict[str, bytes]:
    """The expected members of a tar archive, each with its own checksum verified; read in memory."""
    content = read_checked(archive, archive_md5)
    members = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            for name, md5 in expected.items():
                member = tar.extractfile(f"{folder}/{name}")
                if member is None:
                    raise DataError(f"{archive}: {folder}/{name} is not a file")
                members[name] = member.read()
                check_md5(members[name], md5, name=f"{folder}/{name} in {archive}")
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}") from error
    return members


def _join_batches(batches: list[bytes], label_key: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    entries = [_unpickle_verified(batch) for batch in batches]
    images = np.concatenate([entry["data"] for entry in entries]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([np.asarray(entry[label_key], dtype=np.int64) for entry in entries])
    return images, labels


def _unpickle_verified(content: bytes) -> Any:
    """Unpickle an official CIFAR batch; the caller has compared its checksum."""
    with warnings.catch_warnings():
        # The batches were pickled by Python 2 and describe their type in a way that newer numpy deprecates.
        warnings.simplefilter("ignore")
        return pickle.loads(content, encoding="latin1")


def load_svhn(root: Path, *, download: bool) -> Dataset:
    """SVHN (cropped), 32 x 32 colour, 10 digits, 73,257 training and 26,032 test images.

    Raises:
        DataError: a file is missing or damaged.
    """
    splits = import_torchvision().datasets.SVHN.split_list
    files = {
        part: OfficialFile(path=splits[part][1], md5=splits[part][2], urls=(splits[part][0],))
        for part in ("train", "test")
    }
    return load_house_numbers(files, root, download=download)


def load_house_numbers(files: dict[str, OfficialFile], root: Path, *, download: bool) -> Dataset:
    """SVHN from the given ``.mat`` files.

    Args:
        files: The files ``"train"`` and ``"test"``.
        root: The data folder.
        download: Whether missing files may be fetched.

    Raises:
        DataError: a file is missing or damaged.
    """
    missing = [file for file in files.values() if not (root / file.path).exists()]
    fetch_missing("svhn", missing, root=root, download=download)
    train_images, train_labels = _read_house_numbers(root / files["train"].path, files["train"].md5)
    test_images, test_labels = _read_house_numbers(root / files["test"].path, files["test"].md5)
    return Dataset(
        name="svhn",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        num_classes=10,
        scale=255.0,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        class_names=tuple(str(digit) for digit in range(10)),
    )


def _read_house_numbers(path: Path, md5: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from scipy.io import loadmat

    content = loadmat(io.BytesIO(read_checked(path, md5)))
    images = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
    labels = content["y"].astype(np.int64).reshape(-1)
    return images, np.where(labels == 10, 0, labels)  # the files call the digit 0 "10"
