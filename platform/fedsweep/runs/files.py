"""Files that survive a kill at any byte, and reading files that others may have prepared."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import stat
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsweep.bounded import MOST_TEXT_BYTES, open_regular, parse_json, read_regular
from fedsweep.errors import DataError, OutputError

TEMPORARY = ".tmp"
# The file of a run's folder that says where MLflow has the run.
TRACKING = "mlflow.json"
# And which shorter configurations a run had before it was given more rounds.
EARLIER = "earlier.json"
# Which sources played its rounds.
SOURCES = "sources.json"
# And, of a finished run that was copied from another folder, from where.
TAKEN_OVER = "taken-over.json"
# A disk brings several files to safety at once in hardly more time than one.
_WRITERS = 8
_OF_PROCESS = re.compile(rf"\..+\.(\d+){re.escape(TEMPORARY)}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, once :func:`sync_folder` was called on its folder.

    Args:
        path: Where; what is there is replaced.
        data: Its bytes.

    Raises:
        OSError: The disk is full, say; nothing is left behind, and an older file stays.
    """
    # A thread that an interrupt lost sight of may still write what is written again by now: to a file of its own.
    thread = threading.current_thread()
    own = "" if thread is threading.main_thread() else f".{thread.ident}"
    _write(path, data, path.with_name(f".{path.name}{own}{TEMPORARY}"))


def _write(path: Path, data: bytes, temporary: Path) -> None:
    try:
        # Never through something that is there already: a link could lead anywhere.
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    # Renaming writes the folder, not the file: without this a power cut may bring back the old name.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep_temporaries(folder: Path) -> None:
    """Delete what a killed :func:`write_durably` left in a folder."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink(missing_ok=True)


def sweep_dead_temporaries(folder: Path) -> None:
    """Delete what killed processes left of :func:`atomic_write`, in a folder that nobody else writes now."""
    for path in folder.glob(f".*{TEMPORARY}"):
        named = _OF_PROCESS.fullmatch(path.name)
        if named and int(named[1]) != os.getpid():
            with contextlib.suppress(OSError):
                path.unlink()


def remove_files(folder: Path, pattern: str) -> None:
    """Delete the files of a pattern in a folder, and the folder where nothing is left; not through a link."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.glob(pattern):
            path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def write_file(path: Path, data: bytes) -> None:
    """Write a file as :func:`atomic_write` does.

    Raises:
        OutputError: It can't be written.
    """
    try:
        atomic_write(path, data)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_json(path: Path, *, max_bytes: int = MOST_TEXT_BYTES) -> Any:
    """Read a JSON document of a folder that somebody else may have prepared.

    Raises:
        OutputError: It is missing, can't be read, is too large or no JSON.
    """
    try:
        return parse_json(read_regular(path, max_bytes=max_bytes))
    except OSError as error:
        raise OutputError(f"{path}: not readable: {error.strerror or error}") from error
    except ValueError as error:
        raise OutputError(f"{path}: not readable as JSON: {error}") from error


def read_note(path: Path) -> dict[str, Any]:
    """Read a small JSON object that is of use where it is there and sound; empty where it is not."""
    try:
        note = read_json(path)
    except OutputError:
        return {}
    return note if isinstance(note, dict) else {}


def jsonable(value: Any) -> Any:
    """Return a tree as JSON knows it: numpy's values as Python's, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def read_plain(path: Path, *, size: int | None = None, max_size: int | None = None) -> bytes:
    """Read a regular file; links, pipes and files of an unexpected size are refused before they are read.

    Args:
        path: The file.
        size: Bytes that it must have.
        max_size: Bytes that it may have.

    Raises:
        DataError: It is missing, can't be read, is no regular file, or has another size.
    """
    try:
        with open_regular(path) as handle:
            actual_size = os.fstat(handle).st_size
            if size is not None and actual_size != size:
                raise DataError(f"size differs ({path.name} has {actual_size} bytes instead of {size})")
            if max_size is not None and actual_size > max_size:
                raise DataError(f"{path.name} has {actual_size} bytes, more than {max_size}")
            with open(handle, "rb", closefd=False) as file:
                return file.read(actual_size)
    except OSError as error:
        raise DataError(f"can't read {path.name}: {error.strerror or error}") from error


@dataclass(frozen=True)
class ObjectRef:
    """The name of an object.

    Attributes:
        sha256: Of its bytes, 64 hexadecimal digits in lower case.
        size: Its bytes.
    """

    sha256: str
    size: int

    def __post_init__(self) -> None:
        """Check that this can be the name of a file in one folder, and nothing else."""
        if not isinstance(self.sha256, str) or not _DIGEST.fullmatch(self.sha256):
            raise DataError(f"an object is named by 64 hexadecimal digits, but got {str(self.sha256)[:80]!r}")
        if type(self.size) is not int or self.size < 0:
            raise DataError(f"the size of an object is a number of bytes, but got {str(self.size)[:80]!r}")


class ObjectStore:
    """Files named by their content: what did not change is not written again.

    Args:
        folder: Where they lie; made by the first :meth:`put`.
        suffix: Ending of the files' names.
    """

    def __init__(self, folder: Path, *, suffix: str) -> None:
        self._folder, self._suffix = folder, suffix
        self._intact: set[ObjectRef] = set()

    def path(self, ref: ObjectRef) -> Path:
        """Return the path of an object."""
        return self._folder / f"{ref.sha256}{self._suffix}"

    def put(self, data: bytes) -> ObjectRef:
        """Keep some bytes; they are safe once :meth:`sync` was called.

        Raises:
            OSError: The disk is full, say.
            OutputError: The folder is a link.
        """
        return self.put_all([data])[0]

    def put_all(self, contents: Sequence[bytes]) -> list[ObjectRef]:
        """Return the same for several, which takes less time than one by one."""
        refs = [ObjectRef(hashlib.sha256(data).hexdigest(), len(data)) for data in contents]
        missing = {ref: data for ref, data in zip(refs, contents, strict=True) if not self.holds(ref)}
        if missing:
            self._open_folder()
            with ThreadPoolExecutor(_WRITERS) as writers:
                for _ in writers.map(write_durably, map(self.path, missing), missing.values()):
                    pass
            self._intact.update(missing)
        return refs

    def holds(self, ref: ObjectRef) -> bool:
        """Check that the object is there with the right content; content is read once, afterwards only its size."""
        if ref not in self._intact:
            with contextlib.suppress(DataError):
                self.get(ref)
                return True
            return False
        with contextlib.suppress(OSError):
            status = os.lstat(self.path(ref))
            return stat.S_ISREG(status.st_mode) and status.st_size == ref.size
        return False

    def get(self, ref: ObjectRef) -> bytes:
        """Return the bytes of an object.

        Raises:
            DataError: It is missing or not what it was.
        """
        if self._folder.is_symlink():
            raise DataError(f"can't read {self._folder.name}: it is a link")
        data = read_plain(self.path(ref), size=ref.size)
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            self._intact.discard(ref)
            raise DataError(f"checksum differs ({self._folder.name}/{self.path(ref).name})")
        self._intact.add(ref)
        return data

    def sync(self) -> None:
        """Make everything that was put survive a power cut."""
        if self._folder.is_dir():
            sync_folder(self._folder)

    def sweep(self) -> None:
        """Delete what a killed :meth:`put` left."""
        if self._folder.is_dir():
            self._open_folder()
            sweep_temporaries(self._folder)

    def collect(self, keep: Collection[ObjectRef]) -> None:
        """Delete all objects but these; files with other names stay."""
        names = {self.path(ref).name for ref in keep}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            is_object = path.name.endswith(self._suffix) and _DIGEST.fullmatch(path.name.removesuffix(self._suffix))
            if is_object and path.name not in names:
                path.unlink()
        self._intact.intersection_update(keep)

    def _open_folder(self) -> None:
        if self._folder.is_symlink():
            raise OutputError(f"{self._folder} must be a folder, but is a link; move it away")
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True)
            sync_folder(self._folder.parent)


def file_above(path: Path) -> Path | None:
    """Return the file that stands where a folder above a path would be; None: there is none."""
    return next((place for place in path.absolute().parents if place.is_file()), None)


def atomic_write(path: Path, data: bytes) -> None:
    """Put a file in its place as a whole: after a kill or a power cut there is the old one or the new one.

    Args:
        path: The file.
        data: Its bytes.

    Raises:
        OSError: It cannot be written; the old file is untouched.
    """
    # By process: runs of one folder may write a common file, a sweep's summary say, at the same time.
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of a process with this number that was killed
    _write(path, data, temporary)
    sync_folder(path.parent)


def check_no_link(path: Path) -> None:
    """Refuse what would be written into where it is a link: whoever made it would have us write elsewhere.

    Raises:
        OutputError: It is; the line names it.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a link, and nothing is written through links; move it away")
