import numpy as np
import pytest

from fedsweep.algorithms.dynamicfl.chooser import GroupProblem
from fedsweep.algorithms.dynamicfl.similarity import SimilarityGroup, sketch
from fedsweep.streams import stream


def problem(
    sketches_AD: np.ndarray,
    *,
    samples: list[int] | None = None,
    eligible: list[int] | None = None,
    cap: int | None = None,
) -> GroupProblem:
    num_clients = len(sketches_AD)
    weights = np.ones(num_clients) if samples is None else np.asarray(samples, dtype=float)
    return GroupProblem(
        counts_AC=np.zeros((num_clients, 0), dtype=np.int64),
        population_C=np.zeros(0),
        features_AD=sketches_AD,
        num_samples_A=weights,
        population_D=(weights[:, None] * sketches_AD).sum(axis=0) / weights.sum(),
        eligible_A=np.isin(np.arange(num_clients), range(num_clients) if eligible is None else eligible),
        max_size=num_clients if cap is None else cap,
        stream=stream(0, "test"),
    )


def test_the_smallest_group_with_the_populations_mean_is_chosen() -> None:
    """Means: all (0, 0); clients 0 and 1 cancel, 2 and 3 cancel."""
    sketches = np.array([[4.0, 0.0], [-4.0, 0.0], [0.0, 3.0], [0.0, -3.0]])
    assert SimilarityGroup().choose(problem(sketches)) in ((0, 1), (2, 3))
    assert SimilarityGroup().choose(problem(sketches, eligible=[0, 2, 3])) == (2, 3)
    assert SimilarityGroup().choose(problem(sketches, cap=1)) in ((2,), (3,))


def test_members_weigh_by_their_samples() -> None:
    """Three samples at -1 cancel one at 3; the unweighted mean of these two would be 1."""
    sketches = np.array([[3.0], [-1.0], [1.4], [-1.6]])
    assert SimilarityGroup(orders=30).choose(problem(sketches, samples=[1, 3, 2, 2])) != (2, 3)
    even = GroupProblem(**{**vars(problem(sketches, samples=[1, 3, 2, 2])), "population_D": np.zeros(1)})
    assert SimilarityGroup(orders=30).choose(even) == (0, 1)


def test_budgets_hold_and_nobody_gives_the_empty_group() -> None:
    generator = np.random.default_rng(0)
    for seed in range(20):
        eligible = np.flatnonzero(generator.random(8) < 0.6).tolist()
        cap = int(generator.integers(0, 9))
        group = SimilarityGroup().choose(problem(generator.normal(size=(8, 3)) + seed, eligible=eligible, cap=cap))
        assert len(group) <= cap and set(group) <= set(eligible)
        assert bool(group) == bool(eligible and cap)


def test_the_scale_of_the_updates_and_of_the_samples_does_not_matter() -> None:
    generator = np.random.default_rng(1)
    sketches = generator.normal(size=(9, 4))
    chosen = SimilarityGroup().choose(problem(sketches, samples=[2] * 9))
    for scale in (1e-9, 1e9):
        assert SimilarityGroup().choose(problem(sketches * scale, samples=[14] * 9)) == chosen
    assert SimilarityGroup().choose(problem(np.ones((3, 2)))) in ((0,), (1,), (2,))


def test_the_sketch_is_linear_repeatable_and_keeps_norms_roughly() -> None:
    generator = np.random.default_rng(2)
    first, second = generator.normal(size=(2, 5000))
    places = stream(3, "sketch")
    assert sketch(first + 2 * second, features=64, stream=places) == pytest.approx(
        sketch(first, features=64, stream=places) + 2 * sketch(second, features=64, stream=places), abs=1e-9
    )
    ratios = [
        (sketch(first, features=256, stream=stream(seed, "sketch")) ** 2).sum() / (first**2).sum() for seed in range(20)
    ]
    assert np.mean(ratios) == pytest.approx(1, abs=0.1)
    assert np.std(ratios) < 0.2
