from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from fedsweep.results.seed_statistics import deviation, differences, estimate, mean
from fedsweep.streams import stream


def test_estimate_by_hand() -> None:
    """Of 1, 2, 3: mean 2, sd 1; Student's t for two degrees of freedom has its 97.5 % point at 4.3027."""
    found = estimate([1.0, 2.0, 3.0])
    assert (found.count, found.mean, found.sd) == (3, 2.0, 1.0)
    assert (found.low, found.high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))


@pytest.mark.parametrize("seeds", [3, 5])
def test_an_interval_holds_the_mean_in_95_of_100_cases(seeds: int) -> None:
    draws = stream(0, "cover").numpy().normal(size=(2000, seeds))
    held = sum(found.low <= 0.0 <= found.high for found in map(estimate, draws.tolist()))
    assert held == pytest.approx(1900, abs=3 * math.sqrt(2000 * 0.95 * 0.05))


def test_values_whose_sum_is_beyond_all_numbers_have_no_mean() -> None:
    assert math.isnan(mean([1.7e308, 1.7e308])) and math.isnan(mean([math.inf, -math.inf]))


def test_estimate_leaves_out_what_is_not_known() -> None:
    assert estimate([math.nan, 4.0]).mean == 4.0
    assert math.isnan(estimate([4.0]).sd)
    assert estimate([math.nan]).count == 0


def test_the_deviation_is_the_same_in_whatever_order_the_seeds_come() -> None:
    values = (0.1, 0.7, 1e-9, 0.3, 123.456)
    assert {estimate(order).sd for order in permutations(values)} == {deviation(values)}
    assert deviation([1e200, 3e200]) == deviation([1.3e154, -1.3e154]) == math.inf


def test_an_interval_does_not_depend_on_the_order_of_the_seeds() -> None:
    values = [0.61, 0.58, 0.66, 0.7, 0.63, 0.52, 0.67]
    assert estimate(values) == estimate(values[::-1])


def test_a_steady_gap_is_a_difference_though_seeds_scatter_more_than_it() -> None:
    """Seeds scatter by 1, the gap is 0.1 +- 0.005: only pairing sees it."""
    base = [0.0, 1.0, 2.0, 3.0, 4.0]
    gaps = [0.1, 0.105, 0.095, 0.1, 0.102]
    first = {seed: value + gap for seed, (value, gap) in enumerate(zip(base, gaps, strict=True))}
    [found] = differences([first, dict(enumerate(base))])
    assert found.is_real and found.pairs == 5
    assert found.mean == pytest.approx(0.1004)
    assert found.low > 0


def test_chance_is_called_a_difference_in_about_one_case_in_twenty_at_most() -> None:
    called = 0
    for trial in range(200):
        draws = stream(trial, "chance").numpy().normal(size=(2, 5))
        [found] = differences([dict(enumerate(draws[0])), dict(enumerate(draws[1]))])
        called += found.is_real
    assert called <= 20


def test_many_comparisons_are_corrected_for() -> None:
    """p of the paired t test for gaps 1 +- 0.7 over five seeds is 0.03: real alone, not among ten comparisons."""
    gap = np.array([0.2, 1.8, 0.6, 1.4, 1.0])
    alone = differences([dict(enumerate(gap)), dict.fromkeys(range(5), 0.0)])
    assert alone[0].is_real
    noise = [dict(enumerate(stream(k, "noise").numpy().normal(size=5))) for k in range(3)]
    among = differences([dict(enumerate(gap)), dict.fromkeys(range(5), 0.0), *noise])
    assert among[0].p_value > alone[0].p_value


def test_two_seeds_say_nothing() -> None:
    [found] = differences([{0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.0}])
    assert not found.is_real and math.isnan(found.p_value) and math.isnan(found.low)
    assert math.isnan(estimate([1.0, 2.0]).low)


def test_equal_settings_do_not_differ() -> None:
    same = {0: 0.5, 1: 0.6, 2: 0.7}
    [found] = differences([same, same])
    assert not found.is_real and found.p_value == 1.0


def test_only_shared_seeds_are_paired() -> None:
    [found] = differences([{0: 1.0, 1: 2.0}, {1: 1.0, 2: 5.0}])
    assert (found.pairs, found.mean) == (1, 1.0)
