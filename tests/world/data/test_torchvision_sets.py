import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsweep.errors import DataError
from fedsweep.world.data import torchvision_sets
from fedsweep.world.data.datasets import load_dataset
from fedsweep.world.data.record import Dataset
from fedsweep.world.data.torchvision_compat import import_torchvision

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def load(name: str, root: Path, *, download: bool = False) -> Dataset:
    return load_dataset(name, root=str(root), download=download)


def publish(monkeypatch: pytest.MonkeyPatch, name: str, **facts: Any) -> None:
    """What torchvision's class says of its files, for files of this test."""
    monkeypatch.setattr(import_torchvision().datasets, name, SimpleNamespace(**facts))


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (6, 3, 3)), np.arange(6) % 2, rng.integers(0, 256, (4, 3, 3)), np.arange(4) % 2]


@pytest.fixture
def idx_files(tmp_path: Path, idx_arrays: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The four files, gzip'd, on disk under ``tmp_path``, as MNIST's."""
    plain = {name: idx_bytes(array) for name, array in zip(IDX_NAMES, idx_arrays, strict=True)}
    archives = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in plain.items()}
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    for name, content in archives.items():
        (tmp_path / "MNIST/raw" / name).write_bytes(content)
    publish_idx(monkeypatch, archives)
    sums = {name: md5(content) for name, content in plain.items()}
    monkeypatch.setitem(torchvision_sets._UNPACKED_MD5, "mnist", sums)
    return [tmp_path / "MNIST/raw" / name for name in archives]


def publish_idx(monkeypatch: pytest.MonkeyPatch, archives: dict[str, bytes]) -> None:
    resources = [(name, md5(content)) for name, content in archives.items()]
    publish(monkeypatch, "MNIST", mirrors=["http://host.invalid/"], resources=resources, classes=["even", "odd"])


def test_idx_archives_are_read_without_unpacking_to_disk(
    tmp_path: Path, idx_files: list[Path], idx_arrays: list[np.ndarray]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    dataset = load("mnist", tmp_path)
    assert np.array_equal(dataset.train_images[:, 0], idx_arrays[0])
    assert np.array_equal(dataset.test_labels, idx_arrays[3])
    assert dataset.train_images.flags.writeable and dataset.class_names == ("even", "odd")
    assert sorted(tmp_path.rglob("*")) == before


def test_unpacked_idx_files_are_read_where_the_archive_is_absent(tmp_path: Path, idx_files: list[Path]) -> None:
    whole = load("mnist", tmp_path)
    for path in idx_files:
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(load("mnist", tmp_path).train_images, whole.train_images)


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_damaged_idx_file_is_named_with_both_checksums(tmp_path: Path, idx_files: list[Path], unpacked: bool) -> None:
    path, expected = idx_files[0], md5(idx_files[0].read_bytes())
    if unpacked:
        expected = md5(gzip.decompress(path.read_bytes()))
        path.unlink()
        path = path.with_suffix("")
    path.write_bytes(b"damaged")
    with pytest.raises(DataError) as raised:
        load("mnist", tmp_path, download=True)
    for part in (str(path), md5(b"damaged"), expected):
        assert part in str(raised.value)


@pytest.mark.parametrize("content", [b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\x01x", b"\0\0\x08\x01\0\0\0\x05x"])
def test_bytes_that_are_not_idx_are_refused(
    tmp_path: Path, idx_files: list[Path], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    idx_files[0].write_bytes(gzip.compress(content))
    publish_idx(monkeypatch, {path.name: path.read_bytes() for path in idx_files})
    with pytest.raises(DataError, match=r"IDX|values after its header"):
        load("mnist", tmp_path)


def test_a_missing_idx_file_is_listed_alone(tmp_path: Path, idx_files: list[Path]) -> None:
    idx_files[1].unlink()
    with pytest.raises(DataError) as raised:
        load("mnist", tmp_path)
    assert "train-labels" in str(raised.value) and "train-images" not in str(raised.value)


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.fixture
def cifar_contents() -> dict[str, bytes]:
    rng = np.random.default_rng(0)

    def batch(size: int) -> bytes:
        data = rng.integers(0, 256, (size, 3072), dtype=np.uint8)
        return pickle.dumps({"data": data, "fine_labels": [index % 3 for index in range(size)]}, protocol=2)

    return {"one": batch(4), "two": batch(5), "test": batch(3), "meta": pickle.dumps({"names": ["a", "b", "c"]})}


@pytest.fixture
def cifar_archive(cifar_contents: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in cifar_contents.items():
            member = tarfile.TarInfo(f"batches/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def cifar(cifar_contents: dict[str, bytes], cifar_archive: bytes, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is published of these batches, as CIFAR-100's."""
    sums = {name: md5(content) for name, content in cifar_contents.items()}
    facts: dict[str, Any] = {
        "base_folder": "batches",
        "filename": "own.tar.gz",
        "tgz_md5": md5(cifar_archive),
        "url": "http://host.invalid/own.tar.gz",
        "train_list": [["one", sums["one"]], ["two", sums["two"]]],
        "test_list": [["test", sums["test"]]],
        "meta": {"filename": "meta", "md5": sums["meta"], "key": "names"},
    }
    publish(monkeypatch, "CIFAR100", **facts)
    return facts


def write_batches(root: Path, contents: dict[str, bytes]) -> None:
    (root / "batches").mkdir()
    for name, content in contents.items():
        (root / "batches" / name).write_bytes(content)


@pytest.mark.usefixtures("cifar")
def test_cifar_folder_and_archive_give_the_same(
    tmp_path: Path, cifar_contents: dict[str, bytes], cifar_archive: bytes
) -> None:
    (tmp_path / "own.tar.gz").write_bytes(cifar_archive)
    from_archive = load("cifar100", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["own.tar.gz"]
    (tmp_path / "own.tar.gz").unlink()
    write_batches(tmp_path, cifar_contents)
    from_folder = load("cifar100", tmp_path)
    assert np.array_equal(from_archive.train_images, from_folder.train_images)
    assert from_folder.train_labels.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]
    expected = pickle.loads(cifar_contents["test"])["data"].reshape(3, 3, 32, 32)
    assert np.array_equal(from_folder.test_images, expected)
    assert from_folder.class_names == ("a", "b", "c")


@pytest.mark.usefixtures("cifar")
@pytest.mark.parametrize("name", ["one", "test", "meta"])
def test_a_changed_cifar_batch_is_never_unpickled(tmp_path: Path, cifar_contents: dict[str, bytes], name: str) -> None:
    write_batches(tmp_path, cifar_contents)
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    (tmp_path / "batches" / name).write_bytes(trap)
    with pytest.raises(DataError) as raised:
        load("cifar100", tmp_path, download=True)
    assert not (tmp_path / "sprung").exists()
    for part in (str(tmp_path / "batches" / name), md5(trap), md5(cifar_contents[name])):
        assert part in str(raised.value)


@pytest.mark.usefixtures("cifar")
def test_a_changed_cifar_archive_is_never_opened(
    tmp_path: Path, cifar_archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.tar.gz").write_bytes(cifar_archive[:-9])
    monkeypatch.setattr(tarfile, "open", lambda **more: pytest.fail("the archive was opened"))
    with pytest.raises(DataError, match=md5(cifar_archive[:-9])):
        load("cifar100", tmp_path, download=True)


def test_a_cifar_archive_without_a_batch_is_refused(
    tmp_path: Path, cifar: dict[str, Any], cifar_archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.tar.gz").write_bytes(cifar_archive)
    publish(monkeypatch, "CIFAR100", **{**cifar, "base_folder": "elsewhere"})
    with pytest.raises(DataError, match="elsewhere/one"):
        load("cifar100", tmp_path)


def test_house_numbers_call_digit_zero_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat  # type: ignore[import-untyped]

    files, images = {}, np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for part in ("train", "test"):
        stream = io.BytesIO()
        savemat(stream, {"X": images, "y": np.array([[10], [1], [9], [10]], np.uint8)})
        (tmp_path / f"{part}.mat").write_bytes(stream.getvalue())
        files[part] = (f"http://host.invalid/{part}.mat", f"{part}.mat", md5(stream.getvalue()))
    publish(monkeypatch, "SVHN", split_list=files)
    dataset = load("svhn", tmp_path)
    assert dataset.train_labels.tolist() == [0, 1, 9, 0]
    assert np.array_equal(dataset.test_images[2, 1], images[:, :, 1, 2])
    (tmp_path / "test.mat").write_bytes(b"damaged")
    with pytest.raises(DataError, match=md5(b"damaged")):
        load("svhn", tmp_path)
