"""The price of a test accuracy: the round, virtual time, bytes and FLOPs of its first crossing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedsweep.records import RoundRecord


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A run's expenses up to the round that first reached a test accuracy.

    Attributes:
        round: The first evaluated round whose test accuracy is at least the target.
        sim_time_s: Virtual seconds at its end; None without devices.
        total_bytes: Bytes both ways up to and with it, from before round 1 on.
        flops: Training FLOPs of all clients up to and with it.
    """

    round: int
    sim_time_s: float | None
    total_bytes: int
    flops: int


def reaches(accuracy: Any, target: float) -> bool:
    """Check that a round's test accuracy, which it may not have, is at least the target."""
    return isinstance(accuracy, int | float) and accuracy >= target


class TargetWatch:
    """Watches rounds come, in their order, for the first crossing of each target.

    Args:
        targets: Test accuracies, 0..1.
    """

    def __init__(self, targets: Sequence[float]) -> None:
        self.reached: dict[float, Crossing | None] = dict.fromkeys(targets)
        self._flops = 0

    def see(self, record: RoundRecord) -> dict[float, Crossing]:
        """Return the targets that this round is the first to reach; a later fall below them does not matter."""
        self._flops += record.flops
        spent = {"total_bytes": record.total_bytes, "flops": self._flops}
        crossing = Crossing(round=record.round, sim_time_s=record.sim_time_s, **spent)
        new = {
            target: crossing
            for target, crossed in self.reached.items()
            if crossed is None and reaches(record.test_accuracy, target)
        }
        self.reached |= new
        return new


def target_key(target: float) -> str:
    """Return a target as it is written in results and metrics: ``0.5``."""
    return f"{target:g}"


def targets_reached(records: Sequence[RoundRecord], targets: Sequence[float]) -> dict[str, dict[str, Any] | None]:
    """Return the targets' entries of ``result.json``: target -> its crossing, None where it was never reached.

    Source: FedDHAD, section on experiments: time to a target accuracy, NaN where it is never reached.
    """
    watch = TargetWatch(targets)
    for record in records:
        watch.see(record)
    return {
        target_key(target): None if crossing is None else asdict(crossing) for target, crossing in watch.reached.items()
    }
