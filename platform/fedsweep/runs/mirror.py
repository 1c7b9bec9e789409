"""A folder's copy on another file system, which follows the folder: what changed is sent, what is gone is removed.

Whenever a copy breaks off, the checkpoints that were there before are whole: the objects that a checkpoint names go
before it, and are removed after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fedsweep.bounded import MOST_TEXT_BYTES, parse_json, read_regular
from fedsweep.errors import DataError, OutputError
from fedsweep.runs.files import TEMPORARY, atomic_write
from fedsweep.runs.folder_lock import LOCK
from fedsweep.runs.run_folder import CONFIG, PLAN, RESULT

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

# In the folder: whose work it has; in its copy: who writes it. Each is written by itself.
MARK = ".copy.json"
# Ray Tune's own, which no other process reads back, too.
_NOT_COPIED = frozenset({LOCK, MARK, ".tune"})
# A file that is replaced while it is read is read once more; a run replaces none of them so often.
_ATTEMPTS = 5
_OBJECTS, _CHECKPOINTS = "objects", "checkpoints"
# Parts of checkpoints by their names: a user's own files may lie in a folder that is called so, too.
_PART = re.compile(rf"(?:.*/)?{_CHECKPOINTS}/(?:round-\d+\.json|{_OBJECTS}/[^/]+\.safetensors)")
# File systems on which a file that is being written can be seen half; elsewhere it is there when it is whole.
_SHOWS_HALF_FILES = ("local", "hdfs")


@dataclass(frozen=True)
class _Stamp:
    """The state of a file by which a change shows."""

    size: int
    mtime_ns: int
    inode: int


class Mirror:
    """Keeps a folder and its copy the same.

    Args:
        folder: The folder.
        files: The file system of the copy.
        base: The copy's path there, without a slash at its end.
    """

    def __init__(self, folder: Path, files: FileSystem, base: str) -> None:
        self._folder, self._files, self._base = folder, files, base
        self._copied: dict[str, _Stamp] = {}
        # Parts of checkpoints that the copy alone has: old where their run is the folder's, otherwise somebody else's.
        self._only_there: set[str] = set()

    def pull(self) -> None:
        """Make the folder what the copy is; objects of checkpoints that are there with their size stay.

        Raises:
            DataError: A name in the copy leads out of the folder.
            OSError: The copy cannot be read, or the folder not be written.
        """
        sizes = self.listing()
        for name in set(self._local()) - set(sizes):
            (self._folder / name).unlink(missing_ok=True)
        for name, size in sizes.items():
            path = self._folder / name
            if not (_is_object(name) and path.is_file() and path.stat().st_size == size):
                self._fetch(name)
            self._copied[name] = _stamp(path)

    def pull_file(self, name: str) -> None:
        """Bring one file of the copy into the folder, where it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fetch(name)
            self._copied[name] = _stamp(self._folder / name)

    def trust(self) -> None:
        """Take objects of checkpoints that the copy has with their size for copied, and the rest for old.

        What both have is removed from the copy, too, when it goes here; what the copy alone has is somebody else's, but
        for parts of checkpoints of runs that the folder has, or gets.
        """
        local = self._local()
        for name, size in self.listing().items():
            if name in local:
                is_same = _is_object(name) and local[name].size == size
                self._copied[name] = local[name] if is_same else _Stamp(-1, -1, -1)
            elif _is_of_checkpoint(name):
                self._only_there.add(name)

    def push(self) -> int:
        """Make the copy what the folder is; return how many files were sent.

        Raises:
            OSError: The copy cannot be written.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._push()
            except _Replaced:
                if attempt == _ATTEMPTS - 1:
                    raise
        return 0

    def bytes_left(self) -> int:
        """Return how many bytes a :meth:`push` would send now."""
        return sum(stamp.size for name, stamp in self._local().items() if self._copied.get(name) != stamp)

    def listing(self) -> dict[str, int]:
        """Return the sizes of the copy's files by their names, relative with slashes.

        Raises:
            DataError: A name leads out of the folder.
            OSError: The copy cannot be read.
        """
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self._base, recursive=True, allow_not_found=True)
        sizes = {}
        for info in self._files.get_file_info(selector):
            name = info.path.removeprefix(self._base).lstrip("/")
            if info.type != FileType.File or _is_left_out(name):
                continue
            if ".." in PurePosixPath(name).parts or "\0" in name:
                raise DataError(f"{info.path}: its name leads out of the folder that it is in")
            sizes[name] = int(info.size)
        return sizes

    def send(self, name: str, data: bytes) -> None:
        """Put a file into the copy; there it is whole or not at all."""
        path = PurePosixPath(self._base, name)
        if self._files.type_name not in _SHOWS_HALF_FILES:
            with self._files.open_output_stream(str(path)) as stream:
                stream.write(data)
            return
        self._files.create_dir(str(path.parent))
        beside = str(path.with_name(f".{path.name}{TEMPORARY}"))
        with self._files.open_output_stream(beside) as stream:
            stream.write(data)
        self._files.move(beside, str(path))

    def _push(self) -> int:
        local = self._local()
        changed = sorted((name for name, stamp in local.items() if self._copied.get(name) != stamp), key=_rank)
        # Manifests as they are now: a later one may name objects that are not on the list.
        manifests = {name: self._read(name) for name in changed if _is_manifest(name)}
        for name in changed:
            data = manifests.get(name)
            self.send(name, self._read(name) if data is None else data)
            self._copied[name] = local[name]
        runs = {_run_of(name) for name in local if _is_of_checkpoint(name) or PurePosixPath(name).name == CONFIG}
        old = {name for name in self._only_there if _run_of(name) in runs}
        for name in sorted((old | set(self._copied)) - set(local), key=_rank, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                self._files.delete_file(f"{self._base}/{name}")
            self._copied.pop(name, None)
            self._only_there.discard(name)
        return len(changed)

    def _local(self) -> dict[str, _Stamp]:
        """Return the folder's files; links are no files."""
        names: dict[str, _Stamp] = {}
        for place, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if name not in _NOT_COPIED]
            for file in files:
                path = Path(place, file)
                name = path.relative_to(self._folder).as_posix()
                with contextlib.suppress(FileNotFoundError):
                    if not _is_left_out(name) and stat.S_ISREG(os.lstat(path).st_mode):
                        names[name] = _stamp(path)
        return names

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError as error:
            raise _Replaced(str(error)) from error

    def _fetch(self, name: str) -> None:
        with self._files.open_input_stream(f"{self._base}/{name}") as stream:
            data = stream.read()
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)


@dataclass(frozen=True)
class CopyNote:
    """A folder's note on its copy.

    Attributes:
        address: The copy's.
        writers: Who wrote it last, where the folder has all of that work; two while one takes it over from the other.
    """

    address: str
    writers: tuple[str, ...]


def copy_note(folder: Path) -> CopyNote | None:
    """Read a folder's note; None: it was not worked on for an address.

    Raises:
        OutputError: It is damaged.
    """
    mark = folder / MARK
    if not mark.is_file():
        return None
    try:
        body = parse_json(read_regular(mark, max_bytes=MOST_TEXT_BYTES))
        return CopyNote(str(body["address"]), tuple(map(str, body["writers"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{mark}: damaged: {error}") from error


def has_all(note: CopyNote | None, there: str | None) -> bool:
    """Check if a folder with a note has all work of the copy that a writer had last; None: of a copy without a mark."""
    writers = () if note is None else note.writers
    return bool(writers) if there is None else there in writers


def write_copy_note(folder: Path, address: str, *writers: str) -> None:
    """Replace a folder's note."""
    atomic_write(folder / MARK, json.dumps({"address": address, "writers": writers}).encode())


def writer_of(data: bytes | None) -> str | None:
    """Return who wrote a copy last, by its mark; None: there is no mark; empty: it is damaged."""
    if data is None:
        return None
    try:
        return str(parse_json(data)["writer"])
    except (ValueError, KeyError, TypeError):
        return ""


class _Replaced(OSError):
    """A file of the folder went away between being listed and being read."""


def _stamp(path: Path) -> _Stamp:
    status = os.lstat(path)
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def _is_left_out(name: str) -> bool:
    parts = PurePosixPath(name).parts
    is_temporary = bool(parts) and parts[-1].startswith(".") and parts[-1].endswith(TEMPORARY)
    return not parts or is_temporary or not _NOT_COPIED.isdisjoint(parts)


def _is_of_checkpoint(name: str) -> bool:
    return _PART.fullmatch(name) is not None


def _run_of(name: str) -> str:
    """Return where the run lies that a part of a checkpoint, or a configuration, is of."""
    return name.rpartition(f"{_CHECKPOINTS}/")[0] if _is_of_checkpoint(name) else name.removesuffix(CONFIG)


def _is_object(name: str) -> bool:
    return PurePosixPath(name).parts[-3:-1] == (_CHECKPOINTS, _OBJECTS)


def _is_manifest(name: str) -> bool:
    return PurePosixPath(name).parts[-2:-1] == (_CHECKPOINTS,)


def _rank(name: str) -> tuple[int, str]:
    """Order what is sent: objects, a sweep's plan, the rest, results, which say that it is there, and manifests."""
    if _is_object(name) or _is_manifest(name):
        return (0 if _is_object(name) else 4), name
    return {PLAN: 1, RESULT: 3}.get(PurePosixPath(name).name, 2), name
