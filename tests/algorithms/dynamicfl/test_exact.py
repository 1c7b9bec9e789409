import math

import numpy as np
import pytest

from fedsweep.algorithms.dynamicfl import exact as exact_groups
from fedsweep.algorithms.dynamicfl import exact_levels as group_levels
from fedsweep.algorithms.dynamicfl.chooser import GroupProblem
from fedsweep.algorithms.dynamicfl.dynacomm import DynaComm
from fedsweep.algorithms.dynamicfl.exact import ExactGroup, improve
from fedsweep.algorithms.dynamicfl.exact_levels import LevelSearch, Work, best_centre, centre_at, reach
from fedsweep.algorithms.dynamicfl.scores import LabelDivergence, group_divergence
from fedsweep.algorithms.dynamicfl.search import ExhaustiveGroup
from fedsweep.errors import ConfigError
from fedsweep.streams import stream
from fedsweep.world.label_stats import kl_divergence, population


def instance(seed: int, num_clients: int, num_classes: int, *, concentration: float, budgets: bool) -> GroupProblem:
    generator = np.random.default_rng(seed)
    shares = generator.dirichlet(np.full(num_classes, concentration), num_clients + 5)
    counts = np.floor(shares * generator.integers(20, 400, (num_clients + 5, 1))).astype(np.int64)
    counts[:, 0] += counts.sum(axis=1) == 0
    eligible_A = generator.random(num_clients) < (0.8 if budgets else 2)
    return GroupProblem(
        counts_AC=counts[:num_clients],
        population_C=population(counts),
        eligible_A=eligible_A,
        max_size=int(generator.integers(0, num_clients + 1)) if budgets else num_clients,
        stream=stream(seed, "test"),
    )


@pytest.mark.parametrize("budgets", [False, True])
@pytest.mark.parametrize("small_blocks", [False, True])
def test_exact_equals_exhaustive(budgets: bool, small_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small_blocks:
        monkeypatch.setattr(group_levels, "_BLOCK", 4)
        monkeypatch.setattr(group_levels, "_CHUNK", 8)
        monkeypatch.setattr(exact_groups, "_FEW_PAIRS", 0)
    for seed in range(40):
        concentration = (0.05, 0.3, 1.0, 10.0)[seed % 4]
        chosen = instance(seed, 1 + seed % 12, 2 + seed % 7, concentration=concentration, budgets=budgets)
        solution = ExactGroup(orders=1).solve(chosen)
        optimum = group_divergence(chosen, ExhaustiveGroup().choose(chosen))
        assert solution.kl == (pytest.approx(optimum, abs=2e-12) if optimum < math.inf else math.inf)
        assert solution.certified
        assert solution.kl == group_divergence(chosen, solution.group)
        assert len(solution.group) <= chosen.max_size
        assert chosen.eligible_A[list(solution.group)].all()


def test_exact_equals_exhaustive_for_a_given_size() -> None:
    for seed in range(30):
        chosen = instance(seed, 9, 5, concentration=0.4, budgets=False)
        size = 1 + seed % 9
        solution = ExactGroup(orders=1).solve(chosen, size=size)
        optimum = group_divergence(chosen, ExhaustiveGroup().choose(chosen, size=size))
        assert solution.kl == pytest.approx(optimum, abs=2e-12)
        assert solution.certified
        assert len(solution.group) == size


@pytest.mark.parametrize(("num_clients", "num_classes"), [(15, 10), (12, 100)])
def test_exact_equals_exhaustive_on_larger_instances(num_clients: int, num_classes: int) -> None:
    for seed, concentration in enumerate((0.05, 0.3, 3.0)):
        chosen = instance(seed, num_clients, num_classes, concentration=concentration, budgets=False)
        optimum = group_divergence(chosen, ExhaustiveGroup().choose(chosen))
        assert ExactGroup().solve(chosen).kl == pytest.approx(optimum, abs=2e-12)


def test_twenty_clients_of_ten_classes_are_certified_and_beat_dynacomm() -> None:
    gains = []
    for seed in range(8):
        chosen = instance(seed, 20, 10, concentration=0.3, budgets=False)
        solution = ExactGroup().solve(chosen)
        assert solution.certified
        gains.append(group_divergence(chosen, DynaComm().choose(chosen)) - solution.kl)
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-5


def test_a_limit_leaves_a_valid_bound_and_an_admissible_group() -> None:
    unlimited = ExactGroup(max_pairs=None)
    for seed in range(4):
        chosen = instance(seed, 22, 10, concentration=0.3, budgets=False)
        optimum = unlimited.solve(chosen)
        limited = ExactGroup(max_pairs=50_000 * 4**seed).solve(chosen)
        assert limited.lower_bound <= optimum.kl + 1e-12 <= limited.kl + 2e-12
        assert limited.group == ExactGroup(max_pairs=50_000 * 4**seed).solve(chosen).group
    assert not ExactGroup(max_pairs=1).solve(chosen).certified


def test_a_limit_of_one_pair_still_gives_a_group_and_a_bound() -> None:
    chosen = instance(0, 26, 10, concentration=0.3, budgets=False)
    solution = ExactGroup(max_pairs=1).solve(chosen)
    assert solution.group
    assert not solution.certified
    assert 0 <= solution.lower_bound < solution.kl


def test_more_clients_than_fit_give_the_improved_group_uncertified() -> None:
    generator = np.random.default_rng(3)
    counts = generator.multinomial(200, generator.dirichlet(np.full(10, 0.3)), 1).repeat(80, axis=0)
    counts = generator.permuted(counts, axis=1)
    chosen = GroupProblem(
        counts_AC=counts[:60],
        population_C=population(counts),
        eligible_A=np.ones(60, dtype=bool),
        max_size=20,
        stream=stream(0, "test"),
    )
    assert not LevelSearch.fits(60, 10, 20)
    solution = ExactGroup().solve(chosen)
    assert solution.kl <= group_divergence(chosen, DynaComm().choose(chosen)) + 1e-12
    assert solution.certified == (solution.kl - solution.lower_bound <= 1e-12)


def test_missing_classes_are_certified_by_the_bound_alone() -> None:
    """One class per client, seven of ten classes there: no group is below ln(10/7), and nothing needs searching."""
    counts = np.eye(10, dtype=np.int64)[np.arange(24) % 7] * 50
    chosen = GroupProblem(
        counts_AC=counts,
        population_C=np.full(10, 0.1),
        eligible_A=np.ones(24, dtype=bool),
        max_size=24,
        stream=stream(0, "test"),
    )
    solution = ExactGroup().solve(chosen)
    assert solution.kl == pytest.approx(math.log(10 / 7), abs=1e-12)
    assert (solution.certified, solution.pairs, len(solution.group)) == (True, 0, 7)


def test_nobody_to_choose_from_gives_the_empty_group() -> None:
    chosen = instance(0, 5, 3, concentration=1.0, budgets=False)
    nobody = GroupProblem(**{**vars(chosen), "eligible_A": np.zeros(5, dtype=bool)})
    solution = ExactGroup().solve(nobody)
    assert (solution.group, solution.kl, solution.certified) == ((), math.inf, True)
    assert ExactGroup().choose(GroupProblem(**{**vars(chosen), "max_size": 0})) == ()


def test_improve_reaches_a_set_that_no_single_move_betters() -> None:
    for seed in range(10):
        chosen = instance(seed, 9, 4, concentration=0.5, budgets=False)
        counts = chosen.counts_AC.astype(np.float64)
        score = LabelDivergence(np.log(chosen.population_C))
        members, reached = improve(counts, score, [0, 1], sizes=(2, 4))
        assert 2 <= len(members) <= 4
        assert reached == pytest.approx(group_divergence(chosen, members), abs=1e-12)
        others = [place for place in range(9) if place not in members]
        for leaves in members:
            for joins in others:
                swapped = [place for place in members if place != leaves] + [joins]
                assert group_divergence(chosen, swapped) >= reached - 2e-12


def test_any_centre_bounds_every_group_from_below() -> None:
    generator = np.random.default_rng(0)
    for seed in range(20):
        chosen = instance(seed, 7, 12, concentration=0.3, budgets=False)
        counts = chosen.counts_AC[:, chosen.counts_AC.any(axis=0)].astype(np.float64)
        shares = chosen.population_C[chosen.counts_AC.any(axis=0)]
        distributions = counts / counts.sum(axis=1, keepdims=True)
        optimum = group_divergence(chosen, ExhaustiveGroup().choose(chosen))
        random_centre = centre_at(generator.dirichlet(np.ones(len(shares))), distributions, shares)
        best = best_centre(counts, shares, incumbent=optimum)
        assert random_centre.bound <= optimum + 1e-12
        assert best.bound <= optimum + 1e-12
        assert best.bound >= random_centre.bound


def test_best_centre_finds_the_nearest_point_of_a_segment() -> None:
    """Between (0.9, 0.1) and (0.6, 0.4), the point nearest to (0.5, 0.5) is the second end."""
    counts = np.array([[90.0, 10.0], [60.0, 40.0]])
    found = best_centre(counts, np.array([0.5, 0.5]), incumbent=0.021)
    assert found.bound == pytest.approx(float(kl_divergence([0.6, 0.4], [0.5, 0.5])), rel=1e-2)


def test_reach_bounds_a_direction_over_the_ball_and_is_nearly_tight() -> None:
    generator = np.random.default_rng(1)
    shares = generator.dirichlet(np.ones(5))
    for radius in (1e-4, 1e-2, 0.5):
        direction = generator.normal(size=5)
        bound = reach(direction[None], shares, radius)[0]
        # The furthest points are tilted shares, p ~ shares x exp(direction / t).
        tilted = shares * np.exp(direction / np.geomspace(1e-2, 1e4, 4000)[:, None])
        tilted /= tilted.sum(axis=1, keepdims=True)
        inside = tilted[kl_divergence(tilted, shares) <= radius]
        furthest = (inside @ direction).max()
        assert furthest <= bound + 1e-12
        assert bound - shares @ direction <= 1.05 * (furthest - shares @ direction)


def test_a_level_below_the_optimum_holds_no_group_and_one_above_holds_it() -> None:
    for seed in range(10):
        chosen = instance(seed, 11, 6, concentration=0.3, budgets=False)
        held = chosen.counts_AC.any(axis=0)
        counts, shares = chosen.counts_AC[:, held].astype(np.float64), chosen.population_C[held]
        optimum = group_divergence(chosen, ExhaustiveGroup().choose(chosen))
        centre = centre_at(shares / shares.sum(), counts / counts.sum(axis=1, keepdims=True), shares)
        search = LevelSearch(counts, LabelDivergence(np.log(shares)), centre=centre, min_size=1, max_size=11)
        if centre.bound < 0.99 * optimum:
            low = search.below(0.99 * optimum, Work(max_pairs=None))
            assert (low.members, low.complete) == ((), True)
        high = search.below(1.01 * optimum, Work(max_pairs=None))
        assert high.score == pytest.approx(optimum, abs=2e-12)
        assert group_divergence(chosen, high.members) == pytest.approx(optimum, abs=2e-12)


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_pairs must be an integer >= 1 or null, but got 0"):
        ExactGroup(max_pairs=0)
    with pytest.raises(ConfigError, match="orders must be an integer >= 1 and <= 100000, but got 0"):
        ExactGroup(orders=0)
    with pytest.raises(ConfigError, match="but got 9"):
        ExactGroup().choose(instance(0, 5, 3, concentration=1.0, budgets=False), size=9)


def test_a_search_that_went_over_its_limit_never_says_that_it_is_complete() -> None:
    chosen = instance(3, 11, 6, concentration=0.3, budgets=False)
    held = chosen.counts_AC.any(axis=0)
    counts, shares = chosen.counts_AC[:, held].astype(np.float64), chosen.population_C[held]
    optimum = group_divergence(chosen, ExhaustiveGroup().choose(chosen))
    centre = centre_at(shares / shares.sum(), counts / counts.sum(axis=1, keepdims=True), shares)
    whole = Work(max_pairs=None)
    LevelSearch(counts, LabelDivergence(np.log(shares)), centre=centre, min_size=1, max_size=11).below(
        1.01 * optimum, whole
    )
    for limit in (*range(0, whole.pairs, max(1, whole.pairs // 20)), whole.pairs - 1):
        search = LevelSearch(counts, LabelDivergence(np.log(shares)), centre=centre, min_size=1, max_size=11)
        work = Work(max_pairs=limit)
        found = search.below(1.01 * optimum, work)
        assert not (found.complete and work.pairs > limit)
