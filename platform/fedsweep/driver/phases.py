"""Phases of a run before its first round and after its last: said to the user, and timed for ``result.json``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# The key of result.json.
TIMING = "timing"
_ROUNDS = "rounds"


def process_began() -> float:
    """Return the time when this process began, on the clock of :func:`time.monotonic`, in seconds; to a hundredth."""
    # The name, the second field, may hold blanks and ends with the last bracket; the start is the 22nd field.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


class Phases:
    """One thing after another: entering the next ends the one before, so their times add up to the whole.

    Args:
        began: When the first one began, on the clock; None: now.
        first: Its name.
        say: Takes what is waited for, in a few words.
        clock: Seconds that only go up.
    """

    def __init__(
        self,
        *,
        began: float | None = None,
        first: str = "libraries",
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self._name, self._since = first, clock() if began is None else began
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._rounds: list[float] | None = None

    def enter(self, name: str, notice: str | None = None) -> None:
        """Begin the next phase.

        Args:
            name: Its name in the split; one that was there already goes on.
            notice: The user's line on the wait; None: it is too short for that.
        """
        self._close()
        self._name = name
        if notice is not None:
            self._say(notice)

    def rounds(self) -> None:
        """Note that the first round begins."""
        self.enter(_ROUNDS)
        self._rounds = []

    def round_done(self) -> None:
        """Note that a round is over: played, evaluated, shown."""
        if self._rounds is not None:
            self._close()

    def _close(self) -> None:
        now = self._clock()
        spent, self._since = now - self._since, now
        if self._name == _ROUNDS and self._rounds is not None:
            self._rounds.append(spent)
            return
        place = self._before if self._rounds is None else self._after
        place[self._name] = place.get(self._name, 0.0) + spent

    def split(self) -> Mapping[str, Any]:
        """End the last one; seconds, to a thousandth: see :data:`TIMING` in docs/watching.md."""
        self._close()
        rounds = self._rounds or []
        parts = [sum(self._before.values()), sum(rounds), sum(self._after.values())]
        return {
            "ready_s": round(parts[0], 3),
            "rounds_s": round(parts[1], 3),
            "first_round_s": round(rounds[0], 3) if rounds else None,
            "end_s": round(parts[2], 3),
            "total_s": round(sum(parts), 3),
            "before": {name: round(spent, 3) for name, spent in self._before.items()},
            "after": {name: round(spent, 3) for name, spent in self._after.items()},
        }
