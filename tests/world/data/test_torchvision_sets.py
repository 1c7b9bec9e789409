import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.errors import DataError
from fedsweep.world.data.files import OfficialFile
from fedsweep.world.data.torchvision_sets import (
    CifarFiles,
    IdxFiles,
    PixelConstants,
    load_cifar,
    load_house_numbers,
    load_idx,
)

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def official(path: str, content: bytes) -> OfficialFile:
    return OfficialFile(path=path, md5=md5(content), urls=(f"http://host.invalid/{path}",))


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (6, 3, 3)), np.arange(6) % 2, rng.integers(0, 256, (4, 3, 3)), np.arange(4) % 2]


@pytest.fixture
def idx_files(tmp_path: Path, idx_arrays: list[np.ndarray]) -> IdxFiles:
    """The four files, gzip'd, on disk under ``tmp_path``."""
    plain = {name: idx_bytes(array) for name, array in zip(IDX_NAMES, idx_arrays, strict=True)}
    archives = {name: gzip.compress(content, mtime=0) for name, content in plain.items()}
    (tmp_path / "Own/raw").mkdir(parents=True)
    for name, content in archives.items():
        (tmp_path / "Own/raw" / f"{name}.gz").write_bytes(content)
    return IdxFiles(
        name="own",
        folder="Own/raw",
        archives=tuple(official(f"Own/raw/{name}.gz", content) for name, content in archives.items()),
        unpacked_md5={name: md5(content) for name, content in plain.items()},
        class_names=("even", "odd"),
        pixels=PixelConstants(mean=(0.5,), std=(0.3,)),
    )


def test_idx_archives_are_read_without_unpacking_to_disk(
    tmp_path: Path, idx_files: IdxFiles, idx_arrays: list[np.ndarray]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    dataset = load_idx(idx_files, tmp_path, download=False)
    assert np.array_equal(dataset.train_images[:, 0], idx_arrays[0])
    assert np.array_equal(dataset.test_labels, idx_arrays[3])
    assert dataset.train_images.flags.writeable and dataset.class_names == ("even", "odd")
    assert sorted(tmp_path.rglob("*")) == before


def test_unpacked_idx_files_are_read_where_the_archive_is_absent(tmp_path: Path, idx_files: IdxFiles) -> None:
    whole = load_idx(idx_files, tmp_path, download=False)
    for archive in idx_files.archives:
        path = tmp_path / archive.path
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(load_idx(idx_files, tmp_path, download=False).train_images, whole.train_images)


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_damaged_idx_file_is_named_with_both_checksums(tmp_path: Path, idx_files: IdxFiles, unpacked: bool) -> None:
    archive = idx_files.archives[0]
    path, expected = tmp_path / archive.path, archive.md5
    if unpacked:
        path.unlink()
        path, expected = path.with_suffix(""), idx_files.unpacked_md5[path.stem]
    path.write_bytes(b"damaged")
    with pytest.raises(DataError) as raised:
        load_idx(idx_files, tmp_path, download=True)
    for part in (str(path), md5(b"damaged"), expected):
        assert part in str(raised.value)


@pytest.mark.parametrize("content", [b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\x01x", b"\0\0\x08\x01\0\0\0\x05x"])
def test_bytes_that_are_not_idx_are_refused(tmp_path: Path, idx_files: IdxFiles, content: bytes) -> None:
    packed = gzip.compress(content)
    (tmp_path / idx_files.archives[0].path).write_bytes(packed)
    archives = (official(idx_files.archives[0].path, packed), *idx_files.archives[1:])
    changed = IdxFiles(**{**vars(idx_files), "archives": archives})
    with pytest.raises(DataError, match=r"IDX|values after its header"):
        load_idx(changed, tmp_path, download=False)


def test_a_missing_idx_file_is_listed_alone(tmp_path: Path, idx_files: IdxFiles) -> None:
    (tmp_path / idx_files.archives[1].path).unlink()
    with pytest.raises(DataError) as raised:
        load_idx(idx_files, tmp_path, download=False)
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


def cifar_files(contents: dict[str, bytes], archive: bytes) -> CifarFiles:
    sums = {name: md5(content) for name, content in contents.items()}
    return CifarFiles(
        name="own",
        folder="batches",
        archive=official("own.tar.gz", archive),
        train=(("one", sums["one"]), ("two", sums["two"])),
        test=(("test", sums["test"]),),
        meta=("meta", sums["meta"], "names"),
        label_key="fine_labels",
        pixels=PixelConstants(mean=(0.5,) * 3, std=(0.3,) * 3),
    )


def write_batches(root: Path, contents: dict[str, bytes]) -> None:
    (root / "batches").mkdir()
    for name, content in contents.items():
        (root / "batches" / name).write_bytes(content)


def test_cifar_folder_and_archive_give_the_same(
    tmp_path: Path, cifar_contents: dict[str, bytes], cifar_archive: bytes
) -> None:
    files = cifar_files(cifar_contents, cifar_archive)
    (tmp_path / "own.tar.gz").write_bytes(cifar_archive)
    from_archive = load_cifar(files, tmp_path, download=False)
    assert [path.name for path in tmp_path.iterdir()] == ["own.tar.gz"]
    (tmp_path / "own.tar.gz").unlink()
    write_batches(tmp_path, cifar_contents)
    from_folder = load_cifar(files, tmp_path, download=False)
    assert np.array_equal(from_archive.train_images, from_folder.train_images)
    assert from_folder.train_labels.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]
    expected = pickle.loads(cifar_contents["test"])["data"].reshape(3, 3, 32, 32)
    assert np.array_equal(from_folder.test_images, expected)
    assert from_folder.class_names == ("a", "b", "c")


@pytest.mark.parametrize("name", ["one", "test", "meta"])
def test_a_changed_cifar_batch_is_never_unpickled(
    tmp_path: Path, cifar_contents: dict[str, bytes], cifar_archive: bytes, name: str
) -> None:
    write_batches(tmp_path, cifar_contents)
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    (tmp_path / "batches" / name).write_bytes(trap)
    with pytest.raises(DataError) as raised:
        load_cifar(cifar_files(cifar_contents, cifar_archive), tmp_path, download=True)
    assert not (tmp_path / "sprung").exists()
    for part in (str(tmp_path / "batches" / name), md5(trap), md5(cifar_contents[name])):
        assert part in str(raised.value)


def test_a_changed_cifar_archive_is_never_opened(
    tmp_path: Path, cifar_contents: dict[str, bytes], cifar_archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.tar.gz").write_bytes(cifar_archive[:-9])
    monkeypatch.setattr(tarfile, "open", lambda **more: pytest.fail("the archive was opened"))
    with pytest.raises(DataError, match=md5(cifar_archive[:-9])):
        load_cifar(cifar_files(cifar_contents, cifar_archive), tmp_path, download=True)


def test_a_cifar_archive_without_a_batch_is_refused(
    tmp_path: Path, cifar_contents: dict[str, bytes], cifar_archive: bytes
) -> None:
    (tmp_path / "own.tar.gz").write_bytes(cifar_archive)
    files = cifar_files(cifar_contents, cifar_archive)
    changed = CifarFiles(**{**vars(files), "folder": "elsewhere"})
    with pytest.raises(DataError, match="elsewhere/one"):
        load_cifar(changed, tmp_path, download=False)


def test_house_numbers_call_digit_zero_0(tmp_path: Path) -> None:
    from scipy.io import savemat  # type: ignore[import-untyped]

    files, images = {}, np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for part in ("train", "test"):
        stream = io.BytesIO()
        savemat(stream, {"X": images, "y": np.array([[10], [1], [9], [10]], np.uint8)})
        (tmp_path / f"{part}.mat").write_bytes(stream.getvalue())
        files[part] = official(f"{part}.mat", stream.getvalue())
    dataset = load_house_numbers(files, tmp_path, download=False)
    assert dataset.train_labels.tolist() == [0, 1, 9, 0]
    assert np.array_equal(dataset.test_images[2, 1], images[:, :, 1, 2])
    (tmp_path / "test.mat").write_bytes(b"damaged")
    with pytest.raises(DataError, match=md5(b"damaged")):
        load_house_numbers(files, tmp_path, download=False)
