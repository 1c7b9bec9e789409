from __future__ import annotations

import numpy as np
import pytest

from fedsweep.sweeps.search.rungs import Noise, TriedSetting, most_doubtful, told_means


def tried(*results: list[float], seeds: int | None = None) -> list[TriedSetting]:
    return [
        TriedSetting(values={"k": k}, seeds=[*range(seeds or len(own))], results=[(value,) for value in own])
        for k, own in enumerate(results)
    ]


def test_noise_is_pooled_over_the_settings_with_several_seeds() -> None:
    # Sums of squares 2 and 8 with 1 and 2 degrees of freedom: variance 10 / 3.
    noise = Noise.of(tried([1.0, 3.0], [0.0, 2.0, 4.0], [100.0]))
    assert noise.freedom == 3
    assert noise.deviations == pytest.approx(((10 / 3) ** 0.5,))
    # t at 97.5 % with 3 degrees of freedom is 3.1824.
    assert noise.half_widths(4) == pytest.approx((3.182446 / 2 * (10 / 3) ** 0.5,))


def test_leader_and_strongest_challenger_take_turns() -> None:
    settings = tried([0.9], [0.8], [0.1])
    order = []
    for _ in range(6):
        chosen = most_doubtful(settings, most_seeds=9)
        assert chosen is not None
        order.append(chosen.values["k"])
        chosen.seeds.append(len(chosen.seeds))
        chosen.results.append((chosen.results[0][0] + (-1) ** len(chosen.seeds) * 0.2,))
    assert order[:2] == [0, 1] and 2 not in order[:3]


def test_what_is_surely_worse_is_settled_and_what_may_be_the_best_is_not() -> None:
    near = tried([0.80, 0.82, 0.78, 0.80], [0.79, 0.81, 0.77, 0.79], [0.2])
    chosen = most_doubtful(near, most_seeds=9)
    assert chosen is not None and chosen.values["k"] == 0
    far = tried([0.80, 0.82, 0.78, 0.80], [0.39, 0.41, 0.37, 0.39], [0.2])
    assert most_doubtful(far, most_seeds=9) is None


def test_nobody_gets_more_seeds_than_there_are_or_after_a_failure() -> None:
    assert most_doubtful(tried([0.5, 0.6], [0.4, 0.5]), most_seeds=2) is None
    settings = tried([0.5], [0.4])
    settings[0].is_given_up = True
    chosen = most_doubtful(settings, most_seeds=5)
    assert chosen is settings[1]
    assert most_doubtful([], most_seeds=5) is None


def test_of_several_metrics_those_on_the_front_go_on_and_the_dominated_is_settled() -> None:
    def setting(k: int, accuracy: float, cost: float) -> TriedSetting:
        results = [(accuracy + d, -cost) for d in (-0.02, 0.0, 0.02, 0.0)]
        return TriedSetting(values={"k": k}, seeds=[0, 1, 2, 3], results=results)

    # 0 and 1 cost the same and cannot be told apart; 2 is cheaper and much worse: settled on the front; 3 is beaten.
    settings = [setting(0, 0.80, 9.0), setting(1, 0.79, 9.0), setting(2, 0.5, 1.0), setting(3, 0.3, 2.0)]
    picked = set()
    for _ in range(4):
        chosen = most_doubtful(settings, most_seeds=6)
        assert chosen is not None
        picked.add(chosen.values["k"])
        chosen.seeds.append(9)
    assert picked == {0, 1}


def test_seeds_go_to_settings_that_keep_the_constraints_wherever_there_are_such() -> None:
    settings = tried([0.9], [0.8], [0.7], [0.6])
    for setting, excess in zip(settings, (3.0, 1.0, -1.0, -2.0), strict=True):
        setting.excesses = [(-5.0, excess)]
    picked = []
    for _ in range(4):
        chosen = most_doubtful(settings, most_seeds=3)
        assert chosen is not None
        picked.append(chosen.values["k"])
        chosen.seeds.append(len(chosen.seeds))
    assert picked == [2, 3, 2, 3] and most_doubtful(settings, most_seeds=3) is None
    # A seed that misses one does not take a setting out that keeps it in the mean.
    settings[2].seeds, settings[2].excesses = [0, 1], [(-5.0, -1.0), (-5.0, 0.5)]
    assert most_doubtful(settings, most_seeds=3) is settings[2]
    for setting in settings:
        setting.excesses = [(-5.0, 1.0)]
    assert most_doubtful(settings, most_seeds=3) is settings[0]


def test_means_of_few_seeds_are_drawn_towards_the_mean_of_all() -> None:
    settings = tried([0.5, 0.7, 0.6, 0.6], [0.9], [0.2, 0.4, 0.3, 0.3])
    table = np.array([0.6, 0.9, 0.3])
    # Within: (0.02 + 0.02) / 6; between: the means' variance 0.09 less within times the mean of 1/4, 1, 1/4.
    within = 0.04 / 6
    between = 0.09 - within * 0.5
    expected = 0.6 + between / (between + within / np.array([4, 1, 4])) * (table - 0.6)
    assert np.array(told_means(settings)).ravel() == pytest.approx(expected)
    assert told_means(tried([0.5], [0.7])) == [(0.5,), (0.7,)]
    assert told_means([*tried([0.5]), TriedSetting(values={})]) == [(0.5,), None]
