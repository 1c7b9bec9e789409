"""One world of a report: its Pareto front over all tested rounds, and the best under each budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedsweep.results.pareto import (
    BestUnderBudget,
    FrontStep,
    best_under_budgets,
    budget_grid,
    curve_front,
    hypervolume,
    overlap,
)
from fedsweep.results.seed_statistics import Estimate, estimate, finite
from fedsweep.results.settings import Setting
from fedsweep.results.worlds import World

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class FrontRow:
    """Neighbouring points of a setting on the Pareto front.

    Attributes:
        setting: The setting's place.
        rounds: The rounds of the first and the last of them.
        accuracy: Test accuracy of the last, 0..1.
        total_bytes: Bytes both ways until then.
        is_unsure: Its interval over seeds overlaps with that of the cheaper neighbour, so the step may be chance.
    """

    setting: int
    rounds: tuple[int, int]
    accuracy: float
    total_bytes: float
    is_unsure: bool


@dataclass(frozen=True, kw_only=True)
class WorldPart:
    """A world on a page.

    Attributes:
        world: Which one.
        best: Places of the settings with the highest mean accuracy; none where there is nothing to compare.
        front: Cheapest first.
        budgets: The best setting for each budget; its index is a setting's place.
        volume: Mean over all budgets, up to what the dearest sent, of the accuracy on the front; None without a front.
        ends_volume: The same of last rounds alone.
    """

    world: World
    best: tuple[int, ...]
    front: tuple[FrontRow, ...]
    budgets: tuple[BestUnderBudget, ...]
    volume: float | None
    ends_volume: float | None

    @property
    def unsure(self) -> set[int]:
        """Places of settings that are on the front by what may be chance."""
        return {row.setting for row in self.front if row.is_unsure}


def world_part(world: World, settings: Sequence[Setting]) -> WorldPart:
    """Put together a world's part of a page."""
    places = world.settings
    curves = [curve.accuracy_by_bytes() if (curve := settings[place].curve) else [] for place in places]
    judged = [place for place in places if not settings[place].is_under_way]
    means = {place: mean for place in judged if (mean := settings[place].figure("test_accuracy")) is not None}
    highest = max(means.values(), default=None)
    steps, most = curve_front(curves), most_sent(curves)
    budgets = [
        row if row.index is None else replace(row, index=places[row.index])
        for row in best_under_budgets(curves, budget_grid(curves))
    ]
    return WorldPart(
        world=world,
        best=tuple(p for p, mean in means.items() if mean == highest) if len(judged) > 1 else (),
        front=tuple(_front_rows(steps, curves, [settings[place] for place in places], places)),
        budgets=tuple(budgets),
        volume=share_of_box([point for curve in curves for point in curve], most=most),
        ends_volume=share_of_box([curve[-1] for curve in curves if curve], most=most),
    )


def most_sent(curves: Iterable[Points]) -> float:
    """Return the most bytes of all points."""
    return max((sent for curve in curves for sent, _ in curve), default=0.0)


def share_of_box(points: Points, *, most: float) -> float | None:
    """Compute the hypervolume of bytes and accuracies, as a share of the box up to accuracy 1 and the most bytes."""
    if most <= 0:
        return None
    return hypervolume([(sent / most, -accuracy) for sent, accuracy in points], (1.0, 0.0))


def _front_rows(
    steps: Sequence[FrontStep], curves: Sequence[Points], settings: Sequence[Setting], places: Sequence[int]
) -> list[FrontRow]:
    by_round = [tested_accuracies(setting) for setting in settings]
    rows: list[FrontRow] = []
    before: Estimate | None = None
    for step in steps:
        curve, tested = curves[step.curve], list(by_round[step.curve])
        first, last = step.places[0], step.places[-1]
        ends = [by_round[step.curve][tested[place]] for place in (first, last)]
        rows.append(
            FrontRow(
                setting=places[step.curve],
                rounds=(tested[first], tested[last]),
                accuracy=curve[last][1],
                total_bytes=curve[last][0],
                is_unsure=before is not None and overlap(before, estimate(ends[0])),
            )
        )
        before = estimate(ends[1])
    return rows


def tested_accuracies(setting: Setting) -> Mapping[int, list[float]]:
    """By tested round of the setting's curve the accuracy of each run."""
    curve = setting.curve
    if curve is None:
        return {}
    tested = [
        r for r, mean in zip(curve.rounds, curve.figures.get("test_accuracy", ()), strict=False) if mean is not None
    ]
    runs = [dict(zip(view.column("round"), view.column("test_accuracy"), strict=True)) for view in setting.views]
    return {r: [value for run in runs if (value := finite(run.get(r))) is not None] for r in tested}


def handovers(front: Sequence[FrontRow]) -> list[tuple[FrontRow, FrontRow]]:
    """Return neighbours on the front of which the dearer cannot be told from the cheaper."""
    return [(cheaper, dearer) for cheaper, dearer in itertools.pairwise(front) if dearer.is_unsure]
