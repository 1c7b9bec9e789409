"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, in torchvision's folder layout.

Folders, file names, addresses and checksums are torchvision's, and so is the downloader. The files are parsed here,
from the very bytes whose checksum was verified: torchvision opens a file again once it has compared its checksum, and
unpickles what lies there by then. It would also unpack archives into the data folder, take unpacked IDX files unseen,
refuse a read-only folder that holds archives alone, and not say which file is damaged.
"""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError
from fedsweep.world.data.cache import Arrays
from fedsweep.world.data.files import OfficialFile, check_md5, fetch_missing, read_checked
from fedsweep.world.data.record import Dataset, of_bytes
from fedsweep.world.data.torchvision_compat import import_torchvision

_CLASSES = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
# Per-channel mean and standard deviation of the training pixels, scaled to 0..1.
_PIXELS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
# torchvision publishes the checksums of the .gz files alone; these are the md5 of the same files unpacked.
_UNPACKED_MD5 = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}


def official_files(name: str) -> list[OfficialFile]:
    """Return the files of a data set that torchvision lists: four ``.gz``, CIFAR's archive, SVHN's two ``.mat``."""
    source = _source(name)
    if name == "svhn":
        entries = [source.split_list[part] for part in ("train", "test")]
        return [OfficialFile(path=path, md5=md5, urls=(url,)) for url, path, md5 in entries]
    if name.startswith("cifar"):
        return [OfficialFile(path=source.filename, md5=source.tgz_md5, urls=(source.url,))]
    return [
        OfficialFile(
            path=f"{_CLASSES[name]}/raw/{file}", md5=md5, urls=tuple(mirror + file for mirror in source.mirrors)
        )
        for file, md5 in source.resources
    ]


def _source(name: str) -> Any:
    """Return torchvision's class of a data set: where its files are, and their checksums."""
    return getattr(import_torchvision().datasets, _CLASSES[name])


def load_idx(name: str, root: Path, *, download: bool) -> Dataset:
    """Load MNIST or Fashion-MNIST, 28 x 28 grey, 10 classes: four gzip'd IDX files, each possibly unpacked.

    Args:
        name: ``mnist`` or ``fashion_mnist``.
        root: The data folder.
        download: Whether missing files may be fetched.

    Raises:
        DataError: a file is missing, damaged, or not in the IDX format.
    """
    files = official_files(name)
    missing = [
        file for file in files if not any((root / path).exists() for path in (file.path, file.path.removesuffix(".gz")))
    ]
    fetch_missing(name, missing, root=root, download=download)
    content = {Path(file.path).stem: _read_idx(root, file, _UNPACKED_MD5[name]) for file in files}
    arrays: Arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_images"] = content[f"{prefix}-images-idx3-ubyte"][:, None]
        arrays[f"{part}_labels"] = content[f"{prefix}-labels-idx1-ubyte"]
    return of_bytes(name, arrays, pixels=_PIXELS[name], classes=_source(name).classes)


def _read_idx(root: Path, archive: OfficialFile, unpacked_md5: dict[str, str]) -> NDArray[np.uint8]:
    """Return one file's array, from the archive where it is there, else from the unpacked file."""
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
    """Parse IDX: two zero bytes, type 8 (uint8), number of axes, a big-endian 32-bit length per axis, the values."""
    num_axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * num_axes
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    shape = tuple(int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(num_axes))
    if len(content) - start != int(np.prod(shape)):
        raise DataError(f"{path} should hold {shape} values after its header, but holds {len(content) - start}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def load_cifar(name: str, root: Path, *, download: bool) -> Dataset:
    """Load CIFAR-10 or CIFAR-100 (its fine classes), 32 x 32 colour.

    The Python batches are read from the unpacked folder where it is complete, else from the archive.

    Args:
        name: ``cifar10`` or ``cifar100``.
        root: The data folder.
        download: Whether a missing archive may be fetched.

    Raises:
        DataError: the files are missing or damaged. Nothing is unpickled before its checksum was verified.
    """
    source = _source(name)
    meta = source.meta
    expected = dict([*source.train_list, *source.test_list, (meta["filename"], meta["md5"])])
    folder = root / source.base_folder
    if all((folder / file).exists() for file in expected):
        contents = {file: read_checked(folder / file, md5) for file, md5 in expected.items()}
    else:
        (archive,) = official_files(name)
        path = root / archive.path
        fetch_missing(name, [] if path.exists() else [archive], root=root, download=download)
        contents = _read_members(path, archive.md5, folder=source.base_folder, expected=expected)
    arrays: Arrays = {}
    for part, batches in (("train", source.train_list), ("test", source.test_list)):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = _join_batches([contents[file] for file, _ in batches])
    class_names = _unpickle_verified(contents[meta["filename"]])[meta["key"]]
    return of_bytes(name, arrays, pixels=_PIXELS[name], classes=class_names)


def _read_members(archive: Path, archive_md5: str, *, folder: str, expected: dict[str, str]) -> dict[str, bytes]:
    """Return the expected members of a tar archive, each with its own checksum verified; read in memory."""
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


def _join_batches(batches: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    entries = [_unpickle_verified(batch) for batch in batches]
    images = np.concatenate([entry["data"] for entry in entries]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([entry["labels" if "labels" in entry else "fine_labels"] for entry in entries])


def _unpickle_verified(content: bytes) -> Any:
    """Unpickle an official CIFAR batch; the caller has compared its checksum."""
    with warnings.catch_warnings():
        # The batches were pickled by Python 2 and describe their type in a way that newer numpy deprecates.
        warnings.simplefilter("ignore")
        return pickle.loads(content, encoding="latin1")


def load_svhn(root: Path, *, download: bool) -> Dataset:
    """Load SVHN (cropped), 32 x 32 colour, 10 digits, 73,257 training and 26,032 test images.

    Raises:
        DataError: a file is missing or damaged.
    """
    files = official_files("svhn")
    missing = [file for file in files if not (root / file.path).exists()]
    fetch_missing("svhn", missing, root=root, download=download)
    arrays: Arrays = {}
    for part, file in zip(("train", "test"), files, strict=True):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = _read_house_numbers(root / file.path, file.md5)
    return of_bytes("svhn", arrays, pixels=_PIXELS["svhn"], classes=list(map(str, range(10))))


def _read_house_numbers(path: Path, md5: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from scipy.io import loadmat

    content = loadmat(io.BytesIO(read_checked(path, md5)))
    images = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
    labels = content["y"].astype(np.int64).reshape(-1)
    return images, np.where(labels == 10, 0, labels)  # the files call the digit 0 "10"
