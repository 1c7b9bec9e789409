"""A race along the curve: a run that the front dominates at round after round is not worth its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsweep.config.sweep import Constraint
from fedsweep.errors import ConfigError

# What a run spends: it only grows, so a point of another run is comparable at the same spending, not at the same round.
SPENT = ("total_bytes", "flops", "sim_time_s", "round")
# A tested round is behind the front where the front is better by this share of the span of all points seen.
# Fixed on FedAvg's learning rates and batch sizes (``sweeps/learning_rates``).
SLACK = 0.05
# So many tested rounds in a row must be behind.
PATIENCE = 2


class CurveFront:
    """The front of all tested rounds of a study, and how far each run is behind it.

    A point is behind where another run had spent no more and was better in every other metric by :data:`SLACK` of that
    metric's span.

    A round that misses a constraint is not on the front, and a run that has spent more than one allows is over.

    Args:
        aims: Two or three figures with ``max`` or ``min`` each, of which some are :data:`SPENT`.
        limits: Constraints.
        slack: See :data:`SLACK`.
        patience: See :data:`PATIENCE`.
    """

    def __init__(
        self,
        aims: Mapping[str, str],
        limits: Sequence[Constraint] = (),
        *,
        slack: float = SLACK,
        patience: int = PATIENCE,
    ) -> None:
        signs = {name: 1.0 if mode == "min" else -1.0 for name, mode in aims.items()}
        self._spent = [(name, sign) for name, sign in signs.items() if name in SPENT]
        self._aims = [(name, sign) for name, sign in signs.items() if name not in SPENT]
        self._limits = limits
        self._slack, self._patience = slack, patience
        self._front: list[_Point] = []
        self._ends = [(math.inf, -math.inf)] * len(self._aims)
        self._behind: dict[str, int] = {}

    def is_dominated(self, run: str, figures: Mapping[str, float]) -> bool:
        """Take note of a tested round; true where the run's last ones were all behind the front.

        Args:
            run: Names the run.
            figures: The metrics and what is constrained after the round; one that is no number says nothing.
        """
        spent = tuple(sign * figures[name] for name, sign in self._spent)
        aims = tuple(sign * figures[name] for name, sign in self._aims)
        if any(
            limit.is_most and limit.metric in SPENT and figures[limit.metric] > limit.limit for limit in self._limits
        ):
            return True
        if not all(map(math.isfinite, (*spent, *aims))):
            return False
        self._ends = [(min(low, a), max(high, a)) for (low, high), a in zip(self._ends, aims, strict=True)]
        gaps = [self._slack * (high - low) for low, high in self._ends]
        needed = tuple(a - gap for a, gap in zip(aims, gaps, strict=True))
        aim = _Point(run=run, spent=spent, aims=needed)
        is_behind = any(gaps) and any(point.run != run and point.reaches(aim) for point in self._front)
        self._behind[run] = self._behind.get(run, 0) + 1 if is_behind else 0
        own = _Point(run=run, spent=spent, aims=aims)
        meets = all(limit.holds(figures[limit.metric]) for limit in self._limits)
        if meets and not any(point.reaches(own) for point in self._front):
            self._front = [point for point in self._front if not own.reaches(point)] + [own]
        return self._behind[run] >= self._patience


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A tested round; less is better in all that it spent and aimed for."""

    run: str
    spent: tuple[float, ...]
    aims: tuple[float, ...]

    def reaches(self, other: _Point) -> bool:
        """Check that it is no worse in anything."""
        pairs = zip((*self.spent, *self.aims), (*other.spent, *other.aims), strict=True)
        return all(own <= its for own, its in pairs)


def check_front(aims: Mapping[str, str]) -> None:
    """Refuse metrics of which none says what is spent, or none what is reached.

    Raises:
        ConfigError: They are so.
    """
    spent = [name for name, mode in aims.items() if name in SPENT and mode == "min"]
    if len(aims) not in (2, 3) or not spent or len(spent) == len(aims):
        raise ConfigError(
            "sweep.scheduler=front compares what runs reach for what they spent, so sweep.metric needs two or three"
            f" figures, of which some but not all are {', '.join(SPENT)} with mode min, but is {', '.join(aims)} with"
            f" {', '.join(aims.values())}; e.g. sweep.metric=[test_accuracy, total_bytes] and sweep.mode=[max, min]"
        )
