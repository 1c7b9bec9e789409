"""The Pareto front and the best under each budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsweep.results.pareto import (
    best_under_budgets,
    budget_grid,
    curve_front,
    hypervolume,
    pareto_front,
    reached,
)

POINTS = st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 6), st.integers(0, 6))), max_size=12)
CURVE = [(10.0, 0.2), (20.0, 0.6), (30.0, 0.5)]


def test_the_front_is_what_no_other_beats_cheapest_first() -> None:
    points = [(30.0, 0.9), (10.0, 0.5), (20.0, 0.5), None, (20.0, 0.7), (40.0, 0.8)]
    assert pareto_front(points) == [1, 4, 0]


def test_equal_points_are_on_the_front_together() -> None:
    assert pareto_front([(1.0, 0.5), (2.0, 0.4), (1.0, 0.5)]) == [0, 2]
    assert pareto_front([None]) == pareto_front([]) == []


@given(POINTS)
def test_the_front_equals_its_definition(points: list[tuple[int, int] | None]) -> None:
    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a[0] <= b[0] and a[1] >= b[1] and a != b

    known = {index: point for index, point in enumerate(points) if point}
    expected = {i for i, point in known.items() if not any(beats(other, point) for other in known.values())}
    front = pareto_front(points)
    assert set(front) == expected and len(front) == len(expected)
    assert [known[i] for i in front] == sorted(known[i] for i in front)


def test_what_a_budget_reaches_is_the_last_evaluation_within_it_not_the_best() -> None:
    assert reached(CURVE, 9) is None
    assert reached(CURVE, 20) == (20.0, 0.6)
    assert reached(CURVE, 1000) == (30.0, 0.5)


def test_budgets_go_in_steps_of_1_2_5_from_the_first_evaluation_to_the_last() -> None:
    assert budget_grid([[(300.0, 0.1), (4000.0, 0.5)], [], [(700.0, 0.1)]]) == [500, 1000, 2000, 5000]
    assert budget_grid([[(500.0, 0.1)]]) == [500]
    assert budget_grid([[(1.0, 0.1), (1e9, 0.5)]]) == [10**decade for decade in range(10)]
    assert budget_grid([[], [(0.0, 0.5)]]) == []


def test_the_best_under_a_budget_changes_with_the_budget() -> None:
    frugal, lavish, late = [(10.0, 0.4)], [(50.0, 0.3), (100.0, 0.9)], [(120.0, 0.9)]
    rows = best_under_budgets([frugal, lavish, late], [5, 50, 100, 200])
    assert [(row.index, row.accuracy, row.used) for row in rows] == [
        (None, None, None),
        (0, 0.4, 10.0),
        (1, 0.9, 100.0),
        (1, 0.9, 100.0),  # of equals the one that sent less
    ]


def test_the_front_of_curves_counts_every_tested_round() -> None:
    long = [(1.0, 0.2), (2.0, 0.5), (3.0, 0.4), (4.0, 0.8)]
    short = [(1.5, 0.6), (5.0, 0.7)]
    steps = curve_front([long, [], short])
    assert [(step.curve, step.places) for step in steps] == [(0, (0,)), (2, (0,)), (0, (3,))]
    # The ends alone would leave the short one out altogether.
    assert pareto_front([curve[-1] for curve in (long, short)]) == [0]


@pytest.mark.parametrize("objectives", [2, 3])
def test_the_hypervolume_is_optunas(objectives: int) -> None:
    compute_hypervolume = pytest.importorskip("optuna._hypervolume").compute_hypervolume
    generator = np.random.default_rng(objectives)
    for count in (1, 2, 7, 60):
        points = generator.random((count, objectives)) * 1.2
        points[::3] = np.round(points[::3], 1)  # ties, and equal points
        expected = compute_hypervolume(points[(points < 1).all(axis=1)], np.ones(objectives))
        assert hypervolume(points.tolist(), [1.0] * objectives) == pytest.approx(float(expected), rel=1e-12, abs=1e-15)


def test_the_hypervolume_by_hand() -> None:
    """Two boxes of 1 x 2 and 2 x 1 share 1 x 1; in three dimensions the deeper one has a slice less."""
    assert hypervolume([(2, 1), (1, 2), (2, 2), (3, 0)], (3, 3)) == 3.0
    assert hypervolume([(2, 1, 0), (1, 2, 1)], (3, 3, 2)) == 2 * 2 + 1
    assert hypervolume([], (1, 1)) == 0.0
    for points, reference in (([], (1,)), ([(0, 0)], (1, 1, 1))):
        with pytest.raises(ValueError, match="objectives"):
            hypervolume(points, reference)
