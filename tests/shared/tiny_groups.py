"""DynamicFL's rounds where the test names the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsweep.algorithms.dynamicfl.chooser import GroupChooser, GroupProblem
from fedsweep.algorithms.dynamicfl.two_speed import TwoSpeed
from fedsweep.components.planning import FixedInterval
from fedsweep.method import FederatedMethod, MethodSettings


@dataclass(frozen=True, kw_only=True)
class Chosen(GroupChooser):
    """A group that the test names, by row of the cohort."""

    rows: tuple[int, ...]

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        return self.rows


def two_speed(*rows: int, high: int = 1, low: int = 10_000, **more: Any) -> FederatedMethod:
    """High and low intervals for that group and the rest of the cohort."""
    pacing = TwoSpeed(high=high, low=low, group=Chosen(rows=rows), **more)
    return FederatedMethod(name="dynamicfl", source="", pacing=pacing, settings=MethodSettings(equal_steps=True))


def every(interval: int, sync_rule: str = "paper") -> FederatedMethod:
    """One interval for everybody."""
    return FederatedMethod(
        name="dynamicsgd",
        source="",
        pacing=FixedInterval(interval=interval, sync_rule=sync_rule),  # type: ignore[arg-type]
        settings=MethodSettings(equal_steps=True),
    )
