"""Find, mark and remove the session folders that our own Ray clusters leave behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

_LOGGER = logging.getLogger("fedsweep")
_MARK = ".fedsweep"
_SESSION = re.compile(r"session_[\d_-]+_(\d+)")


def mark_new_sessions(before: Collection[Path]) -> set[Path]:
    """Mark as ours the session folders that this process's clusters have made since, and return them."""
    new = own_sessions() - set(before)
    for folder in new:
        with contextlib.suppress(OSError):
            (folder / _MARK).touch()
    return new


def log_kept(session: Path) -> None:
    """Log where a session's logs are."""
    _LOGGER.info("Ray's own logs are kept in %s (fedsweep doctor --clear removes them)", session / "logs")


def own_sessions() -> set[Path]:
    """List the session folders of the clusters that this process has started."""
    return {folder for folder, process in _sessions() if process == os.getpid()}


def remove_session(folder: Path) -> None:
    """Remove the session folder of a cluster that has ended."""
    shutil.rmtree(folder, ignore_errors=True)


def dead_sessions() -> list[Path]:
    """List our session folders, below Ray's temporary folder, whose driver no longer lives."""
    return [
        folder
        for folder, process in _sessions()
        if (folder / _MARK).is_file() and not Path(f"/proc/{process}").exists()
    ]


def _sessions() -> Iterator[tuple[Path, int]]:
    """Yield each session folder with its driver's process."""
    top = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    with contextlib.suppress(OSError):
        for folder in sorted(top.iterdir()):
            name = _SESSION.fullmatch(folder.name)
            if name is not None and not folder.is_symlink():
                yield folder, int(name[1])
