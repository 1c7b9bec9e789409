import multiprocessing
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fedsweep.algorithms.dynamicfl.chooser import GroupProblem
from fedsweep.algorithms.dynamicfl.scores import group_divergence
from fedsweep.algorithms.dynamicfl.search import ExhaustiveGroup, GeneticGroup
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.streams import stream
from fedsweep.world.label_stats import population

WORKED = np.array([[6, 0, 0], [0, 4, 2], [1, 1, 8], [3, 3, 0], [0, 0, 5]])


def problem(counts_AC: np.ndarray, *, max_size: int | None = None, eligible: list[int] | None = None) -> GroupProblem:
    num_clients = len(counts_AC)
    return GroupProblem(
        counts_AC=counts_AC,
        population_C=population(counts_AC),
        eligible_A=np.isin(np.arange(num_clients), range(num_clients) if eligible is None else eligible),
        max_size=num_clients if max_size is None else max_size,
        stream=stream(0, "test"),
    )


def test_exhaustive_gives_the_printed_optimum_of_every_size() -> None:
    optima = {1: (2,), 2: (3, 4), 3: (0, 1, 2), 4: (0, 1, 2, 3), 5: (0, 1, 2, 3, 4)}
    assert {size: ExhaustiveGroup().choose(problem(WORKED), size=size) for size in optima} == optima
    assert ExhaustiveGroup().choose(problem(WORKED, max_size=4)) == (0, 1, 2)
    assert ExhaustiveGroup().choose(problem(WORKED, max_size=4, eligible=[0, 1, 3, 4])) == (3, 4)
    assert ExhaustiveGroup().choose(problem(WORKED, max_size=0)) == ()
    assert ExhaustiveGroup().choose(problem(WORKED, eligible=[])) == ()


def test_exhaustive_takes_the_first_of_equal_groups_across_batches() -> None:
    """All pairs of unlike clients are perfect; there are more groups than a batch holds."""
    counts = np.tile(np.array([[1, 0], [0, 1]]), (8, 1))
    assert ExhaustiveGroup().choose(problem(counts)) == (0, 1)
    assert ExhaustiveGroup().choose(problem(counts), size=8) == tuple(range(8))


def test_exhaustive_equals_a_plain_loop_over_all_groups() -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        chosen = problem(generator.integers(1, 30, (7, 5)), max_size=4)
        groups = [group for size in range(1, 5) for group in combinations(range(7), size)]
        least = min(group_divergence(chosen, group) for group in groups)
        assert group_divergence(chosen, ExhaustiveGroup().choose(chosen)) == pytest.approx(least, abs=2e-12)


def test_exhaustive_refuses_more_groups_than_its_limit_and_says_how_many() -> None:
    counts = np.ones((30, 2), dtype=np.int64)
    with pytest.raises(ConfigError, match=r"max_subsets=4000000 groups, but 30 clients have 1073741823 .* dynacomm"):
        ExhaustiveGroup().choose(problem(counts))
    assert ExhaustiveGroup(max_subsets=30).choose(problem(counts, max_size=1)) == (0,)
    with pytest.raises(ConfigError, match="max_subsets=29"):
        ExhaustiveGroup(max_subsets=29).choose(problem(counts), size=1)
    with pytest.raises(ConfigError, match="max_subsets must be an integer >= 1, but got 0"):
        ExhaustiveGroup(max_subsets=0)


class RandomSearch:
    """Stands in for sko.GA.GA: takes its arguments, draws from the global generator, keeps the best draw."""

    calls: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls.append(options)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        size, width = self.options["size_pop"], self.options["n_dim"]
        individuals = np.random.randint(0, 2, (size, width)).astype(float)
        individuals[0] = 0
        limits = [*self.options.get("constraint_eq", ()), *self.options.get("constraint_ueq", ())]
        penalties = np.array([sum(abs(max(limit(x), 0.0)) for limit in limits) for x in individuals])
        scores = self.options["func"](individuals)
        assert scores[0] == 0
        place = int((scores + 1e5 * penalties).argmin())
        return individuals[place], scores[[place]]


@pytest.fixture
def fake_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RandomSearch]]:
    package, module = ModuleType("sko"), ModuleType("sko.GA")
    module.GA = RandomSearch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sko", package)
    monkeypatch.setitem(sys.modules, "sko.GA", module)
    RandomSearch.calls.clear()
    yield RandomSearch


def test_genetic_hands_the_papers_settings_to_the_library(fake_library: type[RandomSearch]) -> None:
    GeneticGroup(orders=3).choose(problem(WORKED, eligible=[0, 1, 3, 4]), size=2)
    assert len(fake_library.calls) == 3
    for call in fake_library.calls:
        told = {key: value for key, value in call.items() if key not in ("func", "constraint_eq")}
        assert told == {
            "n_dim": 4,
            "size_pop": 50,
            "max_iter": 200,
            "prob_mut": 0.001,
            "lb": 0,
            "ub": 1,
            "precision": 1,
        }
        (constraint,) = call["constraint_eq"]
        assert [constraint(np.array(bits)) for bits in ([0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0])] == [2, 0, -1]


def test_genetic_group_of_free_size_has_a_member_and_keeps_the_cap(fake_library: type[RandomSearch]) -> None:
    GeneticGroup(orders=1).choose(problem(WORKED, max_size=3))
    (call,) = fake_library.calls
    (limit,) = call["constraint_ueq"]
    sizes = np.tri(6, 5, -1)
    assert [limit(bits) > 0 for bits in sizes] == [True, False, False, False, True, True]


def test_genetic_leaves_the_global_generator_as_it_was_and_repeats_itself(fake_library: type[RandomSearch]) -> None:
    generator = np.random.default_rng(0)
    chosen = problem(generator.integers(1, 30, (12, 5)), max_size=6)
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    first = GeneticGroup(individuals=4).choose(chosen)
    assert (np.random.get_state(legacy=False)["state"]["key"] == before).all()
    np.random.seed(1)
    try:
        assert GeneticGroup(individuals=4).choose(chosen) == first
    finally:
        np.random.seed(None)


def test_genetic_answer_outside_the_constraints_is_brought_inside(fake_library: type[RandomSearch]) -> None:
    """Two random individuals of forty clients, one of them empty, are never of size 1 or 40."""
    generator = np.random.default_rng(0)
    chosen = problem(generator.integers(1, 30, (40, 5)))
    for size in (1, 2, 39, 40):
        assert len(set(GeneticGroup(individuals=2, orders=1).choose(chosen, size=size))) == size
    eligible = list(range(0, 40, 2))
    group = GeneticGroup(individuals=2, orders=1).choose(
        GroupProblem(**{**vars(chosen), "max_size": 2, "eligible_A": np.isin(np.arange(40), eligible)})
    )
    assert 1 <= len(group) <= 2 and set(group) <= set(eligible)


def test_genetic_with_nobody_to_choose_from_is_empty() -> None:
    assert GeneticGroup().choose(problem(WORKED, eligible=[])) == ()
    assert GeneticGroup().choose(problem(WORKED, max_size=0)) == ()


def test_missing_library_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "sko":
                raise ModuleNotFoundError("No module named 'sko'", name="sko")

    for name in [name for name in sys.modules if name.partition(".")[0] == "sko"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    before = multiprocessing.get_start_method(allow_none=True)
    with pytest.raises(ResourceError, match=r"pip install 'fedsweep\[genetic\]'"):
        GeneticGroup().choose(problem(WORKED))
    assert multiprocessing.get_start_method(allow_none=True) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"individuals": 5}, "individuals must be an integer >= 2 and a multiple of 2, but got 5"),
        ({"generations": 0}, "generations must be an integer >= 1, but got 0"),
        ({"orders": 0}, "orders must be an integer >= 1 and <= 100000, but got 0"),
        ({"mutation": 1.5}, "got 1.5"),
    ],
)
def test_genetic_refuses_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    build: Callable[..., GeneticGroup] = GeneticGroup
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_the_library_itself_finds_the_worked_optima_and_sets_no_start_method() -> None:
    pytest.importorskip("scipy")
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        group = GeneticGroup(orders=2, generations=40).choose(problem(WORKED), size=2)
    except ResourceError:
        pytest.skip("scikit-opt is not installed")
    assert group == (3, 4)
    assert multiprocessing.get_start_method(allow_none=True) == before
    assert GeneticGroup(orders=2, generations=40).choose(problem(WORKED, max_size=4)) == (0, 1, 2)
