"""The common side of a run's loggers.

They show its configuration's telling keys, and a round with what it reached; some need a library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsweep.runs.tables.rounds import scalar_figures
from fedsweep.runs.targets import Crossing, target_key

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord

# What is worth a second look by bytes: what was learnt. What was spent is asked for by round.
_BY_BYTES = re.compile("accuracy|loss|^comm_ratio$|^total_bytes$")
# How a run is kept is no part of what it is.
_KEPT = ("checkpoint.", "tracking.")
# These stand whatever they are; of the others, what differs from the default.
_WORLD = ("seed", "scenario.", "model.", "method.", "training.", "evaluation.", "runtime.executor")


class Point(NamedTuple):
    """One value of a metric; ``timestamp_ms`` is Unix time in milliseconds."""

    key: str
    value: float
    timestamp_ms: int
    step: int


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
        so_far = {"total_bytes": self.record.total_bytes, "best_test_accuracy": self.record.best_accuracy}
        return scalar_figures(self.record) | {name: float(value) for name, value in so_far.items() if value is not None}

    def points(self) -> list[Point]:
        """Return its figures by round, what was learnt again by kB sent, and targets. What is infinite is NaN."""
        record, figures = self.record, self.figures()
        kilobytes = (record.total_bytes or 0) // 1000
        values = [(name, value, record.round) for name, value in figures.items()]
        values += [(f"by_bytes/{name}", value, kilobytes) for name, value in figures.items() if _BY_BYTES.search(name)]
        values += [
            (f"target/{target_key(target)}/{name}", float(value), record.round)
            for target, crossing in self.reached.items()
            for name, value in asdict(crossing).items()
            if value is not None
        ]
        return [
            Point(name, value if math.isfinite(value) else math.nan, record.timestamp_ms, step)
            for name, value, step in values
        ]

    def infinite(self) -> dict[str, str]:
        """Return its infinite figures, which its points cannot say, in words."""
        figures = scalar_figures(self.record).items()
        return {name: f"{value} in round {self.record.round}" for name, value in figures if math.isinf(value)}


def telling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that describe a run: the world, the method and its training, and all that is not as by default.

    Where a run is kept says nothing, nor does a key that is null or empty. The configuration is resolved and flat.
    """
    from fedsweep.config.schema import Config

    defaults = Config().flat()
    return {
        key: value
        for key, value in config.items()
        if value is not None
        and value not in ("[]", "{}")
        and not key.startswith(_KEPT)
        and (key.startswith(_WORLD) or key not in defaults or defaults[key] != value)
    }
