"""Writing into a run's folder while the run goes on: one thread at a time, and into that very folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsweep.errors import OutputError, RunError


class FolderGuard:
    """Guards the folder of a run that has begun.

    Args:
        folder: It; exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, _identity(folder)
        # Reentrant: a checkpoint in the middle of a round is written where the round is, and that may be guarded.
        self._lock = threading.RLock()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around whatever changes the folder.

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
    """Device and number of a folder; None: there is none."""
    with suppress(OSError):
        found = os.stat(folder)
        return found.st_dev, found.st_ino
    return None
