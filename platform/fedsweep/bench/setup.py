"""Set-ups of the benchmark, requests to them, and their figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DEVICES = ("cpu", "cuda")
SCALES = ("quick", "full")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a set-up.

    Attributes:
        device: One of :data:`DEVICES`.
        is_full: The whole set-up; otherwise fewer steps or rounds of it, which show the same ratios more roughly.
        repeats: Measurements of each side, at least 1.
        root: The folder with the data sets; None: the user's cache.
        rounds: Rounds of a set-up that has a number of them; None: its own.
        say: Takes a line on what is being done.
    """

    device: str = "cpu"
    is_full: bool = False
    repeats: int = 5
    root: str | None = None
    rounds: int | None = None
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing that was timed, beside its reference in the same minutes.

    Attributes:
        what: What of fedsweep's was timed.
        against: The reference; empty where there is none.
        ours_s: Seconds, one for each repeat.
        reference_s: The reference's, measured in turns with ours; empty where there is none.
        asked: The least ratio that is good; None: none is asked.
        limit_s: The most seconds that are good (median); None: any.
        data: What the clients trained on, in words.
        facts: What else is to be kept, by name.
    """

    what: str
    ours_s: tuple[float, ...]
    against: str = ""
    reference_s: tuple[float, ...] = ()
    asked: float | None = None
    limit_s: float | None = None
    data: str = ""
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def ratios(self) -> tuple[float, ...]:
        """The reference's seconds over ours, pair by pair; empty where there is no reference."""
        if not self.reference_s:
            return ()
        return tuple(theirs / ours for theirs, ours in zip(self.reference_s, self.ours_s, strict=True))

    @property
    def ratio(self) -> float | None:
        """The median of :attr:`ratios`."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def seconds(self) -> float:
        """The median of ours."""
        return statistics.median(self.ours_s)

    def shown(self) -> str:
        """Return one line."""
        ratio = "" if self.ratio is None else f", {self.ratio:.2f} times as fast as {self.against}"
        return f"{self.what}: {self.seconds:.3g} s{ratio}"

    @property
    def is_good(self) -> bool | None:
        """True where the figure reaches the demands on it; None: there are none."""
        reached = []
        if self.asked is not None and self.ratio is not None:
            reached.append(self.ratio >= self.asked)
        if self.limit_s is not None:
            reached.append(self.seconds <= self.limit_s)
        return all(reached) if reached else None


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """One set-up.

    Attributes:
        name: What the command calls it.
        summary: One line.
        measure: Does it.
        devices: Where it can be measured.
        dataset: The data set that is used where it lies in the data folder; noise of its shape stands in elsewhere.
    """

    name: str
    summary: str
    measure: Callable[[Request], Sequence[Figure]]
    devices: tuple[str, ...] = ("cpu",)
    dataset: str | None = None


def in_turns(
    ours: Callable[[], float], reference: Callable[[], float], repeats: int, *, warm_up: bool = True, **fields: Any
) -> Figure:
    """Measure both sides in turns.

    Args:
        ours: Does the work once; returns its seconds.
        reference: Likewise.
        repeats: How often, at least 1.
        warm_up: Each side first does the work once uncounted.
        fields: The figure's other fields.
    """
    if warm_up:
        reference(), ours()
    pairs = [(ours(), reference()) for _ in range(repeats)]
    seconds, theirs = zip(*pairs, strict=True)
    return Figure(ours_s=seconds, reference_s=theirs, **fields)
