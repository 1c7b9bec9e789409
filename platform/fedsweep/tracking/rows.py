"""The common side of a run's loggers.

They show its configuration's telling keys, and a round with what it reached; some need a library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from fedsweep.runs.tables.rounds import scalar_figures
from fedsweep.runs.targets import Crossing, TargetWatch, target_key
from fedsweep.tracking.mlflow_run import Point

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord

BY_BYTES = "by_bytes/"
# What is worth a second look by bytes: what was learnt. What was spent is asked for by round.
_LEARNT = ("accuracy", "loss")
_ALSO_BY_BYTES = ("comm_ratio", "total_bytes")
# How a run is kept is no part of what it is.
_KEPT = ("checkpoint.", "tracking.")
# These stand whatever they are; of the others, what differs from the default.
_WORLD = ("seed", "scenario.", "model.", "method.", "training.", "evaluation.", "runtime.executor")


@dataclass(frozen=True, kw_only=True)
class TrackedRow:
    """A round with what it reached.

    Attributes:
        record: The round.
        reached: Targets that it is the first to reach.
    """

    record: RoundRecord
    reached: Mapping[float, Crossing] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Return its figures by name, as in ``rounds.parquet``, with the sum of bytes and the best accuracy so far."""
        sums = {"total_bytes": self.record.total_bytes, "best_test_accuracy": self.record.best_accuracy}
        sums_so_far = {name: float(value) for name, value in sums.items() if value is not None}
        return scalar_figures(self.record) | sums_so_far

    def points(self) -> list[Point]:
        """Return its figures by round, what was learnt again by kB sent, and targets. What is infinite is NaN."""
        figures = self.figures()
        by_round = [(name, value, self.record.round) for name, value in figures.items()]
        kilobytes = (self.record.total_bytes or 0) // 1000
        by_bytes = [(BY_BYTES + name, value, kilobytes) for name, value in figures.items() if _is_shown_by_bytes(name)]
        return [
            Point(name, value if math.isfinite(value) else math.nan, self.record.timestamp_ms, step)
            for name, value, step in (*by_round, *by_bytes, *self._crossings())
        ]

    def _crossings(self) -> list[tuple[str, float, int]]:
        """``target/0.5/round`` and the like, at this round."""
        return [
            (f"target/{target_key(target)}/{name}", float(value), self.record.round)
            for target, crossing in self.reached.items()
            for name, value in asdict(crossing).items()
            if value is not None
        ]

    def infinite(self) -> dict[str, str]:
        """Return its infinite figures, which its points cannot say, in words."""
        infinite = {name: value for name, value in scalar_figures(self.record).items() if math.isinf(value)}
        return {name: f"{value} in round {self.record.round}" for name, value in infinite.items()}


class TrackedRows:
    """Makes rows of rounds that come in their order.

    Args:
        targets: Test accuracies whose first crossing is of interest.
    """

    def __init__(self, targets: Sequence[float] = ()) -> None:
        self._targets = TargetWatch(targets)

    def row(self, record: RoundRecord) -> TrackedRow:
        """Return the next round's row."""
        return TrackedRow(record=record, reached=self._targets.see(record))


def telling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that describe a run: the world, the method and its training, and all that is not as by default.

    Where a run is kept says nothing, nor does a key that is null or empty. The configuration is resolved and flat.
    """
    defaults = _defaults()
    return {
        key: value
        for key, value in config.items()
        if value is not None
        and value not in ("[]", "{}")
        and not key.startswith(_KEPT)
        and (key.startswith(_WORLD) or key not in defaults or defaults[key] != value)
    }


def _is_shown_by_bytes(name: str) -> bool:
    return name in _ALSO_BY_BYTES or any(word in name for word in _LEARNT)


@cache
def _defaults() -> Mapping[str, Any]:
    from fedsweep.config.schema import Config

    return Config().flat()
