import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsweep.errors import InvariantError
from fedsweep.world.label_stats import js_divergence, kl_divergence, label_counts, population
from fedsweep.world.label_stats import test_owners as owners_of

COUNTS = hnp.arrays(np.int64, 5, elements=st.integers(0, 50)).filter(lambda counts: counts.sum() > 0)


def test_label_counts_has_a_row_per_client_and_zeros_for_an_empty_one() -> None:
    labels = np.array([0, 2, 2, 1])
    parts = [np.array([1, 2]), np.array([], np.int64), np.array([0, 3])]
    assert label_counts(labels, parts, 4).tolist() == [[0, 0, 2, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert label_counts(labels, [np.array([], np.int64)], 2).tolist() == [[0, 0]]


def test_clients_that_share_all_samples_are_counted_in_the_memory_of_one() -> None:
    labels, all_of_them = np.arange(20_000) % 10, np.arange(20_000)
    tracemalloc.start()
    counts = label_counts(labels, (all_of_them,) * 50, 10)
    assert owners_of((all_of_them,) * 50, labels, labels) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.tolist() == [[2000] * 10] * 50 and peak < 10 * all_of_them.nbytes


def test_population_is_the_shares_of_all_samples() -> None:
    assert population([[6, 0], [0, 2]]).tolist() == [0.75, 0.25]


def test_kl_of_a_single_class_against_ten_balanced_ones_is_ln_10() -> None:
    single = np.eye(10)[3]
    assert kl_divergence(single, np.ones(10)) == pytest.approx(2.302585092994046, abs=1e-15)


def test_kl_is_zero_for_equal_shares_and_infinite_where_the_population_lacks_a_class() -> None:
    assert kl_divergence([1, 2, 0], [10, 20, 0]) == 0.0
    assert kl_divergence([1, 1], [1, 0]) == np.inf
    assert np.isfinite(kl_divergence([1, 0], [1e-300, 1]))


def test_kl_matches_the_worked_dynacomm_example() -> None:
    """Five clients' counts; the printed optima by group size of DynamicFL's worked example."""
    counts = np.array([[6, 0, 0], [0, 4, 2], [1, 1, 8], [3, 3, 0], [0, 0, 5]])
    groups = {(2,): 0.2528329, (3, 4): 0.0033880, (0, 1, 2): 0.0008563, (0, 1, 2, 3): 0.0194941, (0, 1, 2, 3, 4): 0.0}
    for group, expected in groups.items():
        assert kl_divergence(counts[list(group)].sum(0), population(counts)) == pytest.approx(expected, abs=5e-8)


def test_js_matches_feddhad_worked_example() -> None:
    """P = (1,0), (.5,.5), (.25,.75) with n = 100, 200, 100: P_m = (.5625,.4375)."""
    counts = np.array([[100, 0], [100, 100], [25, 75]])
    assert population(counts).tolist() == [0.5625, 0.4375]
    assert js_divergence(counts, population(counts)) == pytest.approx([0.1826642, 0.0019621, 0.0516399], abs=5e-8)


def test_js_of_disjoint_distributions_is_ln_2() -> None:
    assert js_divergence([1, 0], [0, 7]) == pytest.approx(np.log(2), abs=1e-15)


@settings(deadline=None)
@given(COUNTS, COUNTS)
def test_js_is_symmetric_and_between_0_and_ln_2(p: np.ndarray, q: np.ndarray) -> None:
    assert js_divergence(p, q) == pytest.approx(js_divergence(q, p), abs=1e-15)
    assert 0 <= js_divergence(p, q) <= np.log(2) + 1e-12
    assert js_divergence(p, p) == 0


@given(COUNTS, COUNTS, st.permutations(range(5)))
def test_kl_is_not_negative_and_does_not_depend_on_the_order_of_classes(
    p: np.ndarray, q: np.ndarray, order: list[int]
) -> None:
    assert kl_divergence(p, q) >= 0
    assert kl_divergence(p[order], q[order]) == pytest.approx(float(kl_divergence(p, q)), abs=1e-12)


@pytest.mark.parametrize("bad", [[0, 0], [-1, 2], [np.nan, 1]])
def test_a_distribution_without_mass_or_with_negative_entries_is_refused(bad: list[float]) -> None:
    with pytest.raises(InvariantError, match="positive sum"):
        kl_divergence(bad, [1, 1])
