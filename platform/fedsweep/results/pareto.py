"""Accuracy against communication: which results no other beats, the volume they cover, the best for each budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsweep.results.seed_statistics import Estimate

_STEPS = (1, 2, 5)
_MOST_BUDGETS = 16


@dataclass(frozen=True, kw_only=True)
class FrontStep:
    """Consecutive points of one curve on a Pareto front.

    Attributes:
        curve: Whose points they are.
        places: Their places in the curve, ascending, one or more.
    """

    curve: int
    places: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BestUnderBudget:
    """The best result for a budget.

    Attributes:
        budget: In bytes.
        index: Whose it is; None where nobody was evaluated within the budget.
        accuracy: The accuracy reached there, 0..1.
        used: Bytes sent by then.
    """

    budget: int
    index: int | None
    accuracy: float | None
    used: float | None


def pareto_front(points: Sequence[tuple[float, float] | None]) -> list[int]:
    """Return the points that no other beats, cheapest first.

    A point is beaten by one that costs no more and reaches no less, and is better in one of the two. Equal points do
    not beat each other.

    Args:
        points: Cost and accuracy of each; None for one that takes no part. Indices into these come back.
    """
    ordered = [(cost, -accuracy, index) for index, point in enumerate(points) if point for cost, accuracy in [point]]
    front: list[int] = []
    last: tuple[float, float] | None = None
    for cost, loss, index in sorted(ordered):
        if last is None or loss < last[1] or (cost, loss) == last:
            front.append(index)
            last = (cost, loss)
    return front


def curve_front(curves: Sequence[Sequence[tuple[float, float]]]) -> list[FrontStep]:
    """Return the Pareto front of all points of some curves, cheapest first.

    A run of many rounds holds the results of all shorter ones, so each tested round is a point, not the last one alone.
    Of equal points of several curves the first one's stands for all.

    Args:
        curves: Cost and accuracy of each point, as in :func:`budget_grid`.
    """
    owners = [(curve, place) for curve, points in enumerate(curves) for place in range(len(points))]
    points = [curves[curve][place] for curve, place in owners]
    front = [next(equal) for _, equal in itertools.groupby(pareto_front(points), key=points.__getitem__)]
    return [
        FrontStep(curve=curve, places=tuple(place for _, place in own))
        for curve, own in itertools.groupby((owners[index] for index in front), key=lambda owner: owner[0])
    ]


def hypervolume(points: Iterable[Sequence[float]], reference: Sequence[float]) -> float:
    """Compute the volume that some points dominate, up to a reference point; exact, for two or three objectives.

    Source: Zitzler and Thiele, PPSN 1998; three objectives by slices of two, in O(n^2 log n).

    Args:
        points: Objectives of each, all to be minimised; those that do not dominate the reference count nothing.
        reference: The worst value of each objective that is of any interest.

    Returns:
        The volume, 0 without a point that counts.

    Raises:
        ValueError: There are not two or three objectives, or not as many in each point.
    """
    if len(reference) not in (2, 3):
        raise ValueError(f"hypervolume takes two or three objectives, but the reference has {len(reference)}")
    every = [tuple(point) for point in points]
    if any(len(point) != len(reference) for point in every):
        raise ValueError(f"each point must have {len(reference)} objectives, as the reference has")
    inside = [point for point in every if all(x < worst for x, worst in zip(point, reference, strict=True))]
    if len(reference) == 2:
        return _area(inside, reference)
    depths = sorted({point[2] for point in inside})
    slices = itertools.pairwise([*depths, reference[2]])
    return math.fsum(
        (end - depth) * _area([point[:2] for point in inside if point[2] <= depth], reference[:2])
        for depth, end in slices
    )


def _area(points: Iterable[Sequence[float]], reference: Sequence[float]) -> float:
    strips, lowest = [], reference[1]
    for x, y in sorted((point[0], point[1]) for point in points):
        if y < lowest:
            strips.append((reference[0] - x) * (lowest - y))
            lowest = y
    return math.fsum(strips)


def overlap(first: Estimate, second: Estimate) -> bool:
    """Tell whether two results cannot be told from one another, since their intervals over seeds overlap."""
    return first.low <= second.high and second.low <= first.high


def reached(curve: Sequence[tuple[float, float]], budget: float) -> tuple[float, float] | None:
    """Return the last evaluation within a budget: bytes sent by then, and the accuracy; None where there is none.

    It is the last one, not the best one: picking the best would be choosing by the test set.
    """
    within = [point for point in curve if point[0] <= budget]
    return within[-1] if within else None


def budget_grid(curves: Sequence[Sequence[tuple[float, float]]]) -> list[int]:
    """Return budgets 1, 2, 5, 10, ... from the cheapest first evaluation to the dearest last one, in bytes.

    A curve has bytes and accuracy, ascending in bytes.
    """
    firsts = [curve[0][0] for curve in curves if curve and curve[0][0] > 0]
    if not firsts:
        return []
    low, high = min(firsts), max(curve[-1][0] for curve in curves if curve)
    decades = range(max(0, math.floor(math.log10(low))), math.ceil(math.log10(high)) + 1)
    grid: list[int] = []
    for steps in (_STEPS, (1,)):
        enough = [budget for decade in decades for step in steps if (budget := step * 10**decade) >= low]
        grid = enough[: sum(budget < high for budget in enough) + 1]
        if len(grid) <= _MOST_BUDGETS:
            break
    return grid


def best_under_budgets(
    curves: Sequence[Sequence[tuple[float, float]]], budgets: Sequence[int]
) -> list[BestUnderBudget]:
    """Return, for each budget, the result that had reached the highest accuracy when it was used up.

    Of equals the one that sent less is the better one. Curves are as in :func:`budget_grid`, budgets in bytes.
    """
    rows = []
    for budget in budgets:
        candidates = [(index, point) for index, curve in enumerate(curves) if (point := reached(curve, budget))]
        if not candidates:
            rows.append(BestUnderBudget(budget=budget, index=None, accuracy=None, used=None))
            continue
        index, (used, accuracy) = max(candidates, key=lambda item: (item[1][1], -item[1][0]))
        rows.append(BestUnderBudget(budget=budget, index=index, accuracy=accuracy, used=used))
    return rows
