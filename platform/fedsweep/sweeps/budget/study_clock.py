"""The real time that a study has been under way."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from fedsweep.results.seed_statistics import finite
from fedsweep.runs.files import atomic_write, read_note

ELAPSED = "elapsed.json"
_WRITTEN_EVERY_S = 5.0


class StudyClock:
    """Counts the real time that a study has been under way, over kills and resumes.

    Args:
        folder: The sweep's.
        hours: The most; None: no limit, and nothing is written.
    """

    def __init__(self, folder: Path, hours: float | None) -> None:
        self._path, self._hours = folder / ELAPSED, hours
        self._before = 0.0 if hours is None else elapsed_seconds(folder)
        self._began = self._written = time.monotonic()
        self._was_over = False

    @property
    def seconds(self) -> float:
        """Real time under way, in all."""
        return self._before + time.monotonic() - self._began

    def is_over(self) -> bool:
        """Check that the hours have passed; also notes every few seconds how many have."""
        if self._hours is None:
            return False
        is_over = self.seconds >= 3600 * self._hours
        if is_over != self._was_over or time.monotonic() - self._written >= _WRITTEN_EVERY_S:
            self.write()
        self._was_over = is_over
        return is_over

    def write(self) -> None:
        """Note the time down."""
        if self._hours is None:
            return
        self._written = time.monotonic()
        body = {"seconds": round(self.seconds, 3)}
        # Without it a resumed study only has more time.
        with contextlib.suppress(OSError):
            atomic_write(self._path, f"{json.dumps(body)}\n".encode())


def elapsed_seconds(folder: Path) -> float:
    """Read how long a study has been under way; 0 where nothing sound says so."""
    return max(0.0, finite(read_note(folder / ELAPSED).get("seconds")) or 0.0)
