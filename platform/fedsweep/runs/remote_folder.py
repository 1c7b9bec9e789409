"""Folders with an address, ``s3://bucket/runs/first``: worked on in a folder here, and copied there as they grow.

Whatever pyarrow's file systems open will do: S3 and what speaks its protocol, Google Cloud, Azure, HDFS, and ``file://``
for a network path. Credentials come from where these libraries look for them, never from the address.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from fedsweep.errors import ConfigError, FedsweepError, InputError, OutputError, ResourceError, RunError
from fedsweep.processes import scratch_folder
from fedsweep.runs.background import BackgroundCall
from fedsweep.runs.folder_lock import LOCK, sole_writer
from fedsweep.runs.mirror import MARK, CopyNote, Mirror, copy_note, has_all, write_copy_note, writer_of
from fedsweep.runs.places import WAYS_IN, check_address, check_named, is_address, name_in, stand_for
from fedsweep.runs.run_folder import CONFIG, MEASURED, PLAN

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_LOGGER = logging.getLogger("fedsweep")
# What stays as it is written; blanks and letters with accents, say, go into an address as %20 does.
_OF_ADDRESSES = "%:/?#[]@!$&'()*+,;=~"
# One of these says that there is work at an address.
_BEGUN = (PLAN, CONFIG, MEASURED)
_EVERY_S = 2.0
# How long a file system may be silent, which tries again by itself, before it is given up.
_SILENT_S, _AT_MOST_S = 60.0, 120.0
# At a copy's end it is given as long as this takes beside: what sends a large file says nothing while it does.
_SLOW_BYTES_S = 200_000
_MOST_WORDS = 300
_Place = str | Path | None
_T = TypeVar("_T")
# What is kept to the end of this process.
_BROUGHT = contextlib.ExitStack()
atexit.register(_BROUGHT.close)


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A folder on another file system.

    Attributes:
        address: As the user gave it.
        files: The file system.
        base: The folder's path there.
    """

    address: str
    files: FileSystem
    base: str

    @classmethod
    def at(cls, address: str) -> Remote:
        """Find the file system of an address; nothing is asked of it yet.

        Raises:
            ConfigError: The address is wrong, or has a password in it.
            ResourceError: S3 was asked where a bucket is, and did not answer.
        """
        from pyarrow.fs import FileSystem

        check_address(address)
        try:
            files, base = _patient(lambda: FileSystem.from_uri(quote(address, safe=_OF_ADDRESSES)))
        except OSError as error:
            raise ResourceError(f"{address}: cannot be reached: {_reason(error)}; {WAYS_IN}") from error
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"{address}: no folder can have this address: {_reason(error)}") from error
        base = base.rstrip("/")
        # Work is brought into a folder of the last name, and . and .. would be others' folders.
        if not {"", ".", ".."}.isdisjoint(base.removeprefix("/").split("/")):
            raise ConfigError(f"{address}: no folder can have this address: write it without //, . and ..")
        return cls(address=address, files=files, base=base)

    @property
    def here(self) -> Path:
        """The folder in which it is worked on: below ``runs``, named by the address."""
        name = re.sub(r"[^\w.=,-]", "_", self.base.rpartition("/")[2])
        return Path("runs") / f"{name}-{hashlib.sha256(self.address.encode()).hexdigest()[:8]}"

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes; None: there is no such file.

        Raises:
            ResourceError: It cannot be reached, or not be read.
        """
        from pyarrow.fs import FileType

        path = f"{self.base}/{name}"

        def read() -> bytes | None:
            if self.files.get_file_info(path).type != FileType.File:
                return None
            with self.files.open_input_stream(path) as stream:
                data: bytes = stream.read()
                return data

        with self._told("read"):
            return _patient(read)

    def mirror(self, folder: Path) -> Mirror:
        """Return the pair of a folder and this."""
        return Mirror(folder, self.files, self.base)

    @contextlib.contextmanager
    def _told(self, act: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ResourceError) as error:
            way_in = f"; {WAYS_IN}" if self.files.type_name == "s3" else ""
            raise ResourceError(f"{self.address}: cannot be {act}: {_reason(error)}{way_in}") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file.

        Raises:
            ResourceError: It cannot.
        """

        def write() -> None:
            self.files.create_dir(self.base, recursive=True)
            self.mirror(Path()).send(name, data)

        with self._told("written"):
            _patient(write)

    def bring(self, folder: Path) -> None:
        """Make a folder what this is.

        Raises:
            ResourceError: It cannot be read.
        """
        with self._told("read"):
            folder.mkdir(parents=True, exist_ok=True)
            self.mirror(folder).pull()


@contextlib.contextmanager
def worked_on(place: _Place, *, going_on: bool, dry: bool = False) -> Iterator[Any]:
    """Give the folder of a place to work in; what is written there is copied while the block goes on, and at its end.

    A path is given as it is, with ``~`` for the user's folder, unless it was worked on for an address before.

    Args:
        place: A path or an address; None is handed back.
        going_on: What the place holds is gone on with, added to or replaced.
        dry: Nothing is written, here or there; where the folder here has not all of the address's work, that is brought
            while the block goes on.

    Yields:
        The folder; None for None.

    Raises:
        ConfigError: The address is wrong, or it is neither path nor address.
        OutputError: It holds something already, and is not to be gone on with.
        ResourceError: It cannot be reached or written; nothing was written.
        RunError: The end of what was written could not be copied.
    """
    if place is None:
        yield None
        return
    check_named(place)
    path = None if isinstance(place, str) and is_address(place) else Path(place).expanduser()
    note = None if path is None else copy_note(path)
    if path is not None and note is None:
        yield path
        return
    address = str(place) if note is None else note.address
    remote = Remote.at(address)
    folder = path or remote.here
    if note is None:
        stand_for(folder, address)
    else:
        _check_not_overtaken(note, remote, folder)
    if dry:
        is_begun = any(remote.read(name) is not None for name in _BEGUN)
        is_own = has_all(copy_note(folder), writer_of(remote.read(MARK)))
        with read_from([address] if is_begun and going_on and not is_own else [folder]) as (there,):
            yield there
        return
    with sole_writer(folder), _Copies(remote, folder, _claim(remote, folder, going_on=going_on)).following():
        yield folder


@contextlib.contextmanager
def read_from(places: Iterable[str | Path]) -> Iterator[list[str | Path]]:
    """Give each place as a path, with ``~`` for the user's folder; an address is brought here while the block goes on.

    Raises:
        ConfigError: A place is neither path nor address.
        OutputError: There is nothing at an address.
        ResourceError: It cannot be read.
    """
    with contextlib.ExitStack() as stack:
        paths: list[str | Path] = []
        folders: dict[str, Path] = {}  # each address once, as a path that is named twice is one folder
        for place in places:
            check_named(place)
            if not isinstance(place, str) or not is_address(place):
                paths.append(place.expanduser() if isinstance(place, Path) else os.path.expanduser(place))
                continue
            if place not in folders:
                folders[place] = _fetched(Remote.at(place), stack.enter_context(scratch_folder()))
            paths.append(folders[place])
        try:
            yield paths
        except FedsweepError as error:
            for folder in folders.values():
                name_in(error, folder)
            raise


def _fetched(remote: Remote, top: Path) -> Path:
    folder = top.resolve() / (remote.base.rpartition("/")[2] or "run")
    stand_for(folder, remote.address)
    remote.bring(folder)
    if not any(folder.iterdir()):
        raise OutputError(f"{remote.address}: there is nothing at this address")
    return folder


def brought(place: str | Path) -> Path:
    """Give a place as a path; an address is brought here for as long as this process lives. Raises as the former."""
    return Path(_BROUGHT.enter_context(read_from([place]))[0])


def _check_not_overtaken(note: CopyNote, remote: Remote, folder: Path) -> None:
    """Refuse a folder that a user names whose work would be replaced by another's."""
    there = writer_of(remote.read(MARK))
    if note.writers and there and not has_all(note, there):
        raise OutputError(
            f"another process has written {remote.address} since {folder} did; --resume with the address goes on with"
            f" what is there, and with {folder} once {MARK} is removed there"
        )


def runs_there(folder: Path) -> list[str]:
    """Return where runs lie below the address that a folder is worked on for, sorted; it may not have all of them.

    Raises:
        ResourceError: It cannot be read.
    """
    if (note := copy_note(folder)) is None:
        return []
    remote = Remote.at(note.address)
    with remote._told("read"):
        names = _patient(remote.mirror(folder).listing)
    return sorted(name.removesuffix(f"/{CONFIG}") for name in names if name.endswith(f"/{CONFIG}"))


def sweep_of(run: Path) -> str | None:
    """Return the path or address of the sweep that has a run's folder as a trial's; None: there is none.

    Raises:
        ResourceError: The address that the folder is worked on for cannot be read.
    """
    if (run.parent / PLAN).exists():
        return str(run.parent)
    if (note := copy_note(run)) is None:
        return None
    remote, (place, mark, options) = Remote.at(note.address), note.address.partition("?")
    address = f"{place.rstrip('/').rpartition('/')[0]}{mark}{options}"
    above = replace(remote, address=address, base=remote.base.rpartition("/")[0])
    return None if above.read(PLAN) is None else address


def _claim(remote: Remote, folder: Path, *, going_on: bool) -> str:
    """Become the one who writes the address; where another was last, the folder becomes what is there."""
    there = writer_of(remote.read(MARK))
    begun, note = [name for name in _BEGUN if remote.read(name) is not None], copy_note(folder)
    # Whoever has the mark, and is not dead, will copy something soon.
    if (in_use := begun or ([MARK] if there and not has_all(note, there) else [])) and not going_on:
        way_on = "go on with --resume" if begun else "wait for whoever has just begun there"
        raise OutputError(
            f"{remote.address} is in use already ({', '.join(in_use)}); {way_on}, replace it with"
            " --overwrite, or choose another --out"
        )
    if there == "":
        raise OutputError(
            f"{MARK} at {remote.address} is damaged, so whose work is there can't be told; remove it, and --resume goes"
            f" on with {folder}, or, where that is gone, with what is at the address"
        )
    writers = None if note is None else note.writers
    if (begun or there is not None) and not has_all(note, there):
        if writers is None and any(path.name != LOCK for path in folder.iterdir()):
            raise OutputError(
                f"{folder} is where {remote.address} is worked on, but holds something else; move it away"
            )
        # Nobody's work until all of it is here: where this breaks off it is brought again.
        write_copy_note(folder, remote.address)
        remote.bring(folder)
    writer = uuid.uuid4().hex
    if (folder / MARK).is_file():
        # Whether this one's mark or the former is there when the answer is lost, the folder has all of that work.
        write_copy_note(folder, remote.address, *([] if there is None else [there]), writer)
    remote.write(MARK, json.dumps({"address": remote.address, "writer": writer}).encode())
    write_copy_note(folder, remote.address, writer)
    return writer


class _Copies:
    """Copies a folder again and again in a thread, so that nobody waits for it."""

    def __init__(self, remote: Remote, folder: Path, writer: str) -> None:
        self._remote, self._folder, self._writer = remote, folder, writer
        self._mirror = remote.mirror(folder)
        self._is_over = threading.Event()
        self._has_warned = False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Copy while the block goes on, and what is left at its end."""
        thread = threading.Thread(target=self._follow, name="fedsweep-copies", daemon=True)
        self._mirror.trust()
        thread.start()
        try:
            yield
        except FedsweepError as error:
            if not self._is_begun:
                name_in(error, self._folder)
            raise
        finally:
            self._is_over.set()
            slow_s = self._mirror.bytes_left() / _SLOW_BYTES_S
            thread.join(_AT_MOST_S + slow_s)
            if self._is_begun:
                self._end(slow_s)
            else:
                self._withdraw()

    @property
    def _is_begun(self) -> bool:
        return not self._folder.is_dir() or any(path.name not in (MARK, LOCK) for path in self._folder.iterdir())

    def _follow(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            try:
                self._copy()
                self._has_warned = False
            except (OSError, FedsweepError) as error:
                if not self._has_warned:
                    _LOGGER.warning("%s; the run goes on in %s", _cannot(self._remote, error), self._folder)
                self._has_warned = True

    def _copy(self) -> None:
        writer, address = writer_of(self._remote.read(MARK)), self._remote.address
        if copy_note(self._folder) is None:  # what is gone here would be removed there
            raise RunError(f"{self._folder} is gone, so nothing is copied any more; --resume {address} goes on there")
        if not writer:
            raise ResourceError(f"{address}: its {MARK} is gone or damaged, so nothing is copied any more")
        if writer != self._writer:
            raise RunError(
                f"{address}: another process writes there now, so nothing is copied any more; move {self._folder} away"
                " to keep what it has"
            )
        self._mirror.push()

    def _withdraw(self) -> None:
        """Leave no trace where nothing was begun."""
        with contextlib.suppress(OSError, FedsweepError):
            if writer_of(self._remote.read(MARK)) == self._writer:  # or another has begun there meanwhile
                self._remote.files.delete_file(f"{self._remote.base}/{MARK}")
        (self._folder / MARK).unlink()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _end(self, slow_s: float) -> None:
        try:
            _patient(self._copy, slow_s)
        except (OSError, InputError) as error:
            raise RunError(
                f"{_cannot(self._remote, error)}; {self._folder} has everything; --resume with that folder copies it"
            ) from error


def _cannot(remote: Remote, error: Exception) -> str:
    return f"{remote.address}: cannot be copied to: {_reason(error)}" if isinstance(error, OSError) else str(error)


def _patient(call: Callable[[], _T], slow_s: float = 0.0) -> _T:
    return BackgroundCall(call).wait(silent_s=_SILENT_S + slow_s, at_most_s=_AT_MOST_S + slow_s)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_WORDS].rstrip(".")
