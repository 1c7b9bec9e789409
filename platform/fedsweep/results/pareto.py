"""Accuracy against communication: which results no other beats, and the best for each budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsweep.results.seed_statistics import Estimate

_STEPS = (1, 2, 5)
_MOST_BUDGETS = 16


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
    """The points that no other beats, cheapest first.

    A point is beaten by one that costs no more and reaches no less, and is better in one of the two. Equal points do
    not beat each other.

    Args:
        points: Cost and accuracy of each; None for one that takes no part. Indices into these come back.
    """
    known = [(cost, -accuracy, index) for index, point in enumerate(points) if point for cost, accuracy in [point]]
    front: list[int] = []
    last: tuple[float, float] | None = None
    for cost, loss, index in sorted(known):
        if last is None or loss < last[1] or (cost, loss) == last:
            front.append(index)
            last = (cost, loss)
    return front


def unsure_steps(front: Sequence[int], accuracies: Sequence[Estimate]) -> list[tuple[int, int]]:
    """Neighbours on the Pareto front, cheapest first, that cannot be told from one another: their intervals overlap."""
    return [
        (cheaper, dearer)
        for cheaper, dearer in itertools.pairwise(front)
        if accuracies[cheaper].low <= accuracies[dearer].high and accuracies[dearer].low <= accuracies[cheaper].high
    ]


def reached(curve: Sequence[tuple[float, float]], budget: float) -> tuple[float, float] | None:
    """The last evaluation within a budget: bytes sent by then, and the accuracy; None where there is none.

    It is the last one, not the best one: picking the best would be choosing by the test set.
    """
    within = [point for point in curve if point[0] <= budget]
    return within[-1] if within else None


def budget_grid(curves: Sequence[Sequence[tuple[float, float]]]) -> list[int]:
    """Budgets 1, 2, 5, 10, ... from the cheapest first evaluation to the dearest last one, in bytes.

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
    """For each budget the result that had reached the highest accuracy when it was used up.

    Of equals the one that sent less is the better one. Curves are as in :func:`budget_grid`, budgets in bytes.
    """
    rows = []
    for budget in budgets:
        found = [(index, point) for index, curve in enumerate(curves) if (point := reached(curve, budget))]
        if not found:
            rows.append(BestUnderBudget(budget=budget, index=None, accuracy=None, used=None))
            continue
        index, (used, accuracy) = max(found, key=lambda item: (item[1][1], -item[1][0]))
        rows.append(BestUnderBudget(budget=budget, index=index, accuracy=accuracy, used=used))
    return rows
