"""Folders with an address, ``s3://bucket/runs/first``: worked on in a folder here, and copied there as they grow.

Whatever pyarrow's file systems open will do: S3 and what speaks its protocol, Google Cloud, Azure, HDFS, and ``file://``
for a network path. Credentials come from where these libraries look for them, never from the address.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsweep.errors import FedsweepError, InputError, OutputError, ResourceError, RunError
from fedsweep.processes import scratch_folder
from fedsweep.runs.folder_lock import LOCK, sole_writer
from fedsweep.runs.mirror import MARK, CopyNote, copy_note, has_all, write_copy_note, writer_of
from fedsweep.runs.places import check_named, is_address, name_in, stand_for
from fedsweep.runs.remote import AT_MOST_S, Remote, answer_of, short_reason
from fedsweep.runs.run_folder import CONFIG, MEASURED, PLAN

_LOGGER = logging.getLogger("fedsweep")
# One of these says that there is work at an address.
_BEGUN = (PLAN, CONFIG, MEASURED)
_EVERY_S = 2.0
# At a copy's end it is given as long as this takes beside: what sends a large file says nothing while it does.
_SLOW_BYTES_S = 200_000
_Place = str | Path | None
# What is kept to the end of this process.
_BROUGHT = contextlib.ExitStack()
atexit.register(_BROUGHT.close)


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
        own, writer = copy_note(folder), writer_of(remote.read(MARK))
        is_begun = bool(_begun_at(remote, own, writer, going_on=going_on))
        with read_from([address] if is_begun and not has_all(own, writer) else [folder]) as (there,):
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
    with remote.told("read"):
        names = answer_of(remote.mirror(folder).listing)
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


def _begun_at(remote: Remote, note: CopyNote | None, there: str | None, *, going_on: bool) -> list[str]:
    """Return the files that say that work was begun at an address, which is refused where it should be new."""
    begun = [name for name in _BEGUN if remote.read(name) is not None]
    # Whoever has the mark, and is not dead, will copy something soon.
    if (in_use := begun or ([MARK] if there and not has_all(note, there) else [])) and not going_on:
        way_on = "go on with --resume" if begun else "wait for whoever has just begun there"
        raise OutputError(
            f"{remote.address} is in use already ({', '.join(in_use)}); {way_on}, replace it with"
            " --overwrite, or choose another --out"
        )
    return begun


def _claim(remote: Remote, folder: Path, *, going_on: bool) -> str:
    """Become the one who writes the address; where another was last, the folder becomes what is there."""
    there, note = writer_of(remote.read(MARK)), copy_note(folder)
    begun = _begun_at(remote, note, there, going_on=going_on)
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
            thread.join(AT_MOST_S + slow_s)
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
            answer_of(self._copy, slow_s)
        except (OSError, InputError) as error:
            raise RunError(
                f"{_cannot(self._remote, error)}; {self._folder} has everything; --resume with that folder copies it"
            ) from error


def _cannot(remote: Remote, error: Exception) -> str:
    return f"{remote.address}: cannot be copied to: {short_reason(error)}" if isinstance(error, OSError) else str(error)
