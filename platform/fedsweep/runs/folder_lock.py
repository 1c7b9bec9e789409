"""One writer per folder: a lock that ends with its process, however that ends.

The kernel holds it (``flock``) on the file ``.lock`` in the folder, and lets it go when the last process that holds it
is gone. A driver holds it together with the processes that write for it: so a run whose driver was killed is not gone
on with before its server actor is gone, too. ``filelock`` is of no use here: it knows no shared holding, empties the
file that says who holds it, and falls back on a file that a dead process leaves behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fedsweep.errors import OutputError, RunError
from fedsweep.runs.files import check_no_link, sweep_dead_temporaries

LOCK = ".lock"
# What a dead driver's actors need to notice and to end.
_LEFTOVERS_S = 20.0
_POLL_S = 0.1
_WHO_BYTES = 300

# What runs, sweeps and tables write into or add to; any other file is replaced as a whole, a link included.
_WRITTEN_INTO = (
    *("checkpoints", "checkpoints/objects", "pictures", "figures", "tensorboard", "wandb", ".tune", "optuna.log"),
)

# Folders that this process holds, with the thread that took each: what it calls may ask again.
_held: dict[str, int] = {}


@contextlib.contextmanager
def sole_writer(folder: Path, *, patience_s: float = 0.0) -> Iterator[None]:
    """Be the only one who writes a folder, together with those who join by :func:`write_along`.

    The folder is made where it is not there, and removed again where nothing came into it.

    Args:
        folder: A run's, sweep's or table's.
        patience_s: Seconds to wait for whoever holds it; for what a dead process left behind, 20 s in any case.

    Raises:
        OutputError: Another process holds it; the line names process and machine. Or the folder cannot be written, or
            leads elsewhere by a link.
    """
    name = os.path.realpath(folder)
    if _held.get(name) == threading.get_ident():
        yield
        return
    made = _make(folder)
    try:
        for inner in _WRITTEN_INTO:
            check_no_link(folder / inner)
        handle = _take(folder, patience_s)
    except BaseException:
        _unmake(made)
        raise
    _held[name] = threading.get_ident()
    for place in (folder, folder / "pictures"):
        sweep_dead_temporaries(place)
    try:
        yield
    finally:
        del _held[name]
        if _is_current(handle, folder):
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
        os.close(handle)
        _unmake(made)


def write_along(folder: Path) -> int:
    """Share the lock of the driver that this process writes for, until this process ends.

    Returns:
        A file handle; whoever closes it gives its share back.

    Raises:
        OutputError: The folder is no longer held by that driver.
    """
    handle = _open(folder, create=False)
    if not _try_lock(handle, fcntl.LOCK_SH):
        os.close(handle)
        raise _taken(folder)
    return handle


class FolderGuard:
    """Guards the folder of a run that has begun: one thread at a time writes, and into that very folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, _identity(folder)
        # Reentrant: a checkpoint in the middle of a round is written where the round is, and that may be guarded.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder around whatever changes it.

        Raises:
            RunError: The folder is gone, or a file cannot be written.
        """
        with self._lock:
            if self._place is None or _identity(self._folder) != self._place:
                raise RunError(
                    f"{self._folder} is gone, or another folder is in its place; what the run had written is lost, so"
                    " run it again"
                )
            try:
                yield
            except OutputError as error:
                raise RunError(str(error)) from error


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and number of a folder; None: there is none."""
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        return status.st_dev, status.st_ino
    return None


def _take(folder: Path, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    leftovers = time.monotonic() + _LEFTOVERS_S
    while True:
        handle = _open(folder, create=True)
        # Alone at first, then shared with our own. Whoever slips in between finds it shared and gives it back.
        if _try_lock(handle, fcntl.LOCK_EX) and _is_current(handle, folder):
            with contextlib.suppress(OSError):  # on a disk that is full nobody learns who has it
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            if _try_lock(handle, fcntl.LOCK_SH):
                return handle
        os.close(handle)
        now = time.monotonic()
        if now > deadline and (now > leftovers or not _is_dead(folder)):
            raise _taken(folder)
        time.sleep(_POLL_S)


def _open(folder: Path, *, create: bool) -> int:
    path = folder / LOCK
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    try:
        handle = os.open(path, flags, 0o644)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else (error.strerror or str(error)).lower()
        raise OutputError(f"{path}: cannot be locked: {reason}; see to that, or choose another --out") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OutputError(f"{path}: cannot be locked: it is no regular file; choose another --out")
    return handle


def _try_lock(handle: int, kind: int) -> bool:
    """Lock an open file (``fcntl.LOCK_EX`` or ``LOCK_SH``) where nobody else's lock is in the way; says whether."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_current(handle: int, folder: Path) -> bool:
    """Check that the file is still there by that name: its last holder may have removed it meanwhile."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.lstat(folder / LOCK))
    return False


def _who(folder: Path) -> tuple[int, str]:
    """Return process and machine of the holder; 0 where the file does not say."""
    try:
        handle = _open(folder, create=False)
    except OutputError:
        return 0, ""
    with open(handle, "rb") as file:
        words = file.read(_WHO_BYTES).decode("ascii", "replace").split()
    return (int(words[0]), words[1]) if len(words) == 2 and words[0].isdecimal() else (0, "")


def _is_dead(folder: Path) -> bool:
    process, machine = _who(folder)
    return process > 0 and machine == socket.gethostname() and not Path(f"/proc/{process}").exists()


def _taken(folder: Path) -> OutputError:
    process, machine = _who(folder)
    who = f"process {process} on {machine!r}" if process else "another process"
    return OutputError(f"{folder} is being written by {who}; wait for its end, end it, or choose another --out")


def _make(folder: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were not there, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OutputError(f"{folder}: cannot be made a run's folder: {reason}") from error
    return missing


def _unmake(made: list[Path]) -> None:
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()
