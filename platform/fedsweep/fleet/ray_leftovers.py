"""What our own Ray clusters leave behind: their processes' ends, what Ray has to say, and their session folders."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

# What Ray says while it ends; a file of the run's folder.
RAY_LOG = "ray.log"
_LOGGER = logging.getLogger("fedsweep")
_MARK = ".fedsweep"
_SESSION = re.compile(r"session_[\d_-]+_(\d+)")
# What a cluster can't do without, by the processes' names, in words.
VITAL = {"gcs_server": "its GCS server", "raylet": "its raylet"}


def lost_process() -> str | None:
    """Which vital process of this process's own cluster has died, in words; None: all live, or there is no cluster.

    The driver must not wait for Ray to notice: it would be ended within C++, without a word to the user.
    """
    node = _own_node()
    if node is None:
        return None
    for name, words in VITAL.items():
        for info in node.all_processes.get(name, ()):
            if info.process.poll() is not None:
                return words
    return None


def keep_what_ray_says(folder: Path | None) -> None:
    """From now on what Ray would print goes to the file ``ray.log`` in a folder; None: it is dropped."""
    from ray._private import worker

    def write(data: dict[str, Any], *unused: Any, **also_unused: Any) -> None:
        if folder is None:
            return
        # Not through a link; and a folder that is gone is the run's own trouble.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError), open(os.open(folder / RAY_LOG, flags, 0o644), "a", errors="replace") as file:
            file.writelines(f"{line}\n" for line in data.get("lines", ()))

    worker.print_to_stdstream = write


def marked_session() -> Path | None:
    """The session folder of this process's own cluster, marked as one of ours."""
    node = _own_node()
    if node is None:
        return None
    folder = Path(node.get_session_dir_path())
    with contextlib.suppress(OSError):
        (folder / _MARK).touch()
    return folder


def mark_new_sessions(before: Collection[Path]) -> set[Path]:
    """The session folders that this process's clusters have made beside those before, marked as ours."""
    new = own_sessions() - set(before)
    for folder in new:
        with contextlib.suppress(OSError):
            (folder / _MARK).touch()
    return new


def tell_kept(session: Path) -> None:
    """Say where a session's logs are."""
    _LOGGER.info("Ray's own logs are kept in %s (fedsweep doctor --clear removes them)", session / "logs")


def own_sessions() -> set[Path]:
    """The session folders of the clusters that this process has started."""
    return {folder for folder, process in _sessions() if process == os.getpid()}


def remove_session(folder: Path) -> None:
    """Remove the session folder of a cluster that has ended."""
    shutil.rmtree(folder, ignore_errors=True)


def dead_sessions() -> list[Path]:
    """Session folders of ours whose driver no longer lives, below Ray's temporary folder."""
    return [
        folder
        for folder, process in _sessions()
        if (folder / _MARK).is_file() and not Path(f"/proc/{process}").exists()
    ]


def _sessions() -> Iterator[tuple[Path, int]]:
    """Each session folder with its driver's process."""
    top = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    with contextlib.suppress(OSError):
        for folder in sorted(top.iterdir()):
            name = _SESSION.fullmatch(folder.name)
            if name is not None and not folder.is_symlink():
                yield folder, int(name[1])


def _own_node() -> Any:
    from ray._private import worker

    node: Any = worker._global_node
    return node if node is not None and node.is_head() else None
