"""FedStg against the numbers of its authors' log, hand-computed weights, and identities in a tiny engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_server, tiny_sync, tiny_update

from fedsweep.algorithms.fedstg import SamplesSpeedRarity, StagnationAware
from fedsweep.components.aggregation import by_samples
from fedsweep.experiment.schedules import HalfCosineWithDrops
from fedsweep.records import (
    ClientProfile,
    ClientUpdate,
    ClientWork,
    RoundContext,
    RoundRecord,
    ServerContext,
    State,
    SyncContext,
)
from fedsweep.streams import stream
from fedsweep.testing import linear_model
from fedsweep.trees import layout_of, model_vector

# Global test accuracy of the authors' run, rounds 0 to 100.
LOGGED = """
.1001 .4753 .5277 .5892 .6476 .6476 .6951 .6951 .6905 .6905 .7088 .7088 .7282 .7282 .7387 .7387 .7465 .7465 .7370 .7370
.7159 .7498 .7701 .7701 .7727 .7727 .7835 .7835 .7668 .7668 .7802 .7693 .7957 .7957 .7917 .7917 .7924 .8095 .7824 .7824
.7935 .7850 .8075 .8038 .8020 .8151 .7963 .7963 .7907 .8170 .7821 .7821 .8182 .8182 .8374 .8374 .8080 .8080 .8012 .8222
.8296 .8215 .8014 .7600 .7927 .8432 .8382 .8382 .8271 .8223 .8041 .8335 .8498 .8498 .8303 .8303 .8100 .8158 .8000 .8211
.8429 .8404 .8338 .8458 .8505 .8505 .8337 .8337 .8496 .8411 .8344 .8521 .8491 .8491 .8229 .8228 .8551 .8551 .8614 .8614
.8238
"""
LOGGED_AGGREGATIONS = [
    *(1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21, 22, 24, 26, 28, 30, 31, 32, 34, 36, 37, 38),
    *(*range(40, 47), 48, 49, 50, 52, 54, 56, *range(58, 67), *range(68, 73), 74, *range(76, 85), 86),
    *(*range(88, 93), 94, 95, 96, 98, 100),
]


def aggregations(accuracies: Sequence[float], pacing: StagnationAware | None = None) -> list[int]:
    """The rounds that aggregate where the rounds from 0 end with these accuracies."""
    pacing = pacing or StagnationAware(decide_on="test")
    state = pacing.init(context([1]))
    state = pacing.observe(state, record(0, accuracies[0]))
    found = []
    for round in range(1, len(accuracies)):
        if pacing.aggregates(state, round):
            found.append(round)
        state = pacing.observe(state, record(round, accuracies[round]))
    return found


def record(round: int, accuracy: float | None) -> RoundRecord:
    return RoundRecord(round=round, test_accuracy=accuracy)


def context(
    sizes: Sequence[int], *, capabilities: Sequence[float] | None = None, evaluate_every: int = 1
) -> ServerContext:
    """A federation of clients with all of four classes."""
    capabilities = capabilities or [1.0] * len(sizes)
    model = linear_model()
    layout = layout_of(model)
    profiles = [
        ClientProfile(client=k, num_samples=n, label_counts=np.full(4, n), capability=c)
        for k, (n, c) in enumerate(zip(sizes, capabilities, strict=True))
    ]
    return tiny_server(
        model,
        model_vector(model, layout),
        num_clients=len(sizes),
        evaluate_every=evaluate_every,
        profiles=profiles,
        layout=layout,
        stream=stream(0, "test", 0),
    )


def update(client: int, samples: int, classes: Sequence[int] | None = None) -> ClientUpdate:
    return tiny_update(
        client,
        layout=layout_of(linear_model()),
        num_samples=samples,
        classes_since_anchor=None if classes is None else tuple(classes),
    )


def sync(classes: dict[int, tuple[int, ...]] | None = None) -> SyncContext:
    model = linear_model()
    layout = layout_of(model)
    return tiny_sync(
        model, model_vector(model, layout), layout=layout, cohort=(), classes=classes or {}, stream=stream(0, "test", 1)
    )


def weights(
    weighting: SamplesSpeedRarity,
    updates: Sequence[ClientUpdate],
    *,
    capabilities: Sequence[float] | None = None,
    num_clients: int | None = None,
    classes: dict[int, tuple[int, ...]] | None = None,
) -> list[float]:
    state = weighting.init(context([1] * (num_clients or len(updates)), capabilities=capabilities))
    found, after = weighting.weigh(state, updates, sync(classes))
    assert after is state
    assert found.dtype == torch.float64
    assert float(found.sum()) == pytest.approx(1.0)
    values: list[float] = found.tolist()
    return values


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_samples_times_speed_times_rarity() -> None:
    """Sets {0,1}, {0,1}, {0,2}, {0,3}: N / f = (1, 2, 4, 4); b = 1.5, 1.5, 2.5, 2.5; r = 1.125, 1.125, 1.375, 1.375.

    With n = 10, 20, 30, 40 and s = 1, .9, .8, 1: w = 11.25, 20.25, 33, 55; their sum is 119.5.
    """
    updates = [update(0, 10, (0, 1)), update(1, 20, (0, 1)), update(2, 30, (0, 2)), update(3, 40, (0, 3))]
    found = weights(SamplesSpeedRarity(), updates, capabilities=[1.0, 0.9, 0.8, 1.0])
    assert found == pytest.approx([11.25 / 119.5, 20.25 / 119.5, 33 / 119.5, 55 / 119.5], rel=1e-12)


def test_same_classes_and_speeds_give_fedavgs_weights_bit_for_bit() -> None:
    updates = [update(k, n, (0, 2)) for k, n in enumerate((7, 11, 3))]
    by_size = by_samples(updates)
    assert weights(SamplesSpeedRarity(), updates) == by_size.tolist()
    assert weights(SamplesSpeedRarity(), [update(k, 5, (1,)) for k in range(3)]) == pytest.approx([1 / 3] * 3)


def test_weights_do_not_depend_on_the_unit_of_samples() -> None:
    sets = [(0, 1), (1, 2), (3,)]
    small = weights(SamplesSpeedRarity(), [update(k, 3 + k, sets[k]) for k in range(3)])
    large = weights(SamplesSpeedRarity(), [update(k, 1000 * (3 + k), sets[k]) for k in range(3)])
    assert small == pytest.approx(large, rel=1e-12)


def test_a_class_of_one_client_in_twenty_is_capped_at_one_and_a_half() -> None:
    """One-class sets: the rare one has b = 20, r = min(1.5, 5.75); the others b = 20/19, r = 1 + .25/19."""
    updates = [update(0, 1, (0,)), *(update(k, 1, (1,)) for k in range(1, 20))]
    found = weights(SamplesSpeedRarity(), updates)
    assert found[0] / found[1] == pytest.approx(1.5 / (1 + 0.25 / 19), rel=1e-12)
    uncapped = weights(SamplesSpeedRarity(rarity_cap=10.0), updates)
    assert uncapped[0] / uncapped[1] == pytest.approx(5.75 / (1 + 0.25 / 19), rel=1e-12)


def test_one_client_has_all_the_weight() -> None:
    assert weights(SamplesSpeedRarity(), [update(0, 5, (1, 3))]) == [1.0]


def test_absent_clients_count_only_where_asked() -> None:
    """Attending {0}, {1}; absent {0}, {0}: trained: f = 1, 1 of 2; all: f = 3, 1 of 4, b = 4/3, 4, r = 13/12, 1.5."""
    updates = [update(0, 1, (0,)), update(1, 1, (1,))]
    today: dict[int, tuple[int, ...]] = {0: (0,), 1: (1,), 2: (0,), 3: (0,)}
    assert weights(SamplesSpeedRarity(), updates, num_clients=4, classes=today) == [0.5, 0.5]
    found = weights(SamplesSpeedRarity(counted="all"), updates, num_clients=4, classes=today)
    assert found[1] / found[0] == pytest.approx(1.5 / (13 / 12), rel=1e-12)


def test_without_drift_the_classes_are_those_of_the_data() -> None:
    weighting = SamplesSpeedRarity()
    state = weighting.init(context([1, 1]))
    state = {**state, "has_class": np.array([[True, True, False, False], [True, False, False, False]])}
    found, _ = weighting.weigh(state, [update(0, 1), update(1, 1)], sync())
    # N / f = (1, 2): b = 1.5 and 1, r = 1.125 and 1.
    assert found.tolist() == pytest.approx([1.125 / 2.125, 1 / 2.125])


# -- schedule --------------------------------------------------------------------------------------------------------


def test_schedule_repeats_the_72_aggregations_of_the_authors_log() -> None:
    accuracies = [float(word) for word in LOGGED.split()]
    assert len(accuracies) == 101
    found = aggregations(accuracies)
    assert found == LOGGED_AGGREGATIONS
    assert len(found) == 72


@pytest.mark.parametrize("unaggregated", ["continue", "discard"])
def test_planned_rounds_repeat_the_authors_log_and_what_becomes_of_the_others(unaggregated: Any) -> None:
    """Two clients, always there; who continues holds what it trained until the next aggregation."""
    pacing = StagnationAware(decide_on="test", unaggregated=unaggregated)
    accuracies = [float(word) for word in LOGGED.split()]
    state = pacing.observe(pacing.init(context([1, 1])), record(0, accuracies[0]))
    work = ClientWork(steps=3, batch_size=1, whole_batches=False, num_samples=1)
    held: tuple[int, ...] = ()
    found = []
    for round in range(1, 101):
        (point,), state = pacing.plan(
            state,
            RoundContext(
                round=round,
                available=(0, 1),
                cohort_size=2,
                profiles=(),
                cohort=(0, 1),
                work={0: work, 1: work},
                in_flight=held,
            ),
        )
        aggregated = bool(point.attend) and not point.discard
        assert [job.resume for job in point.start] == [bool(held)] * 2
        assert point.discard is (unaggregated == "discard" and not aggregated)
        held = () if aggregated or unaggregated == "discard" else (0, 1)
        found += [round] * aggregated
        state = pacing.observe(state, record(round, accuracies[round]))
    assert found == LOGGED_AGGREGATIONS


def test_ever_better_accuracy_aggregates_52_rounds_of_100() -> None:
    found = aggregations([0.001 * round for round in range(101)])
    assert found == [1, 2, 3, *range(4, 101, 2)]
    assert len(found) == 52


def test_constant_accuracy_aggregates_every_round() -> None:
    assert aggregations([0.3] * 101) == list(range(1, 101))


def test_two_aggregations_without_a_new_best_bring_every_round_back() -> None:
    found = aggregations([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert found == [1, 2, 3, 4, 6, 8, 9, 10, 11]


def test_a_new_best_goes_back_to_the_reduced_interval_and_forgets_the_count() -> None:
    """Every round from 9 on; 9 is a new best, so 10 is due as an even round only; one failure there is not enough."""
    found = aggregations([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.7, 0.7, 0.7, 0.7])
    assert found == [1, 2, 3, 4, 6, 8, 9, 10, 12, 14]


def test_a_model_without_any_hit_before_round_1_is_not_counted_as_stagnation() -> None:
    """0 is not above 0, but round 0 is no aggregation: rounds 1 and 2 make the two that count."""
    pacing = StagnationAware(decide_on="test", first_rounds=1)
    assert aggregations([0.0, 0.0, 0.0, 0.1, 0.2, 0.3], pacing) == [1, 2, 3, 4]


def test_reduced_interval_divides_the_round_numbers() -> None:
    found = aggregations([0.01 * round for round in range(20)], StagnationAware(decide_on="test", reduced_interval=3))
    assert found == [1, 2, 3, 4, 6, 9, 12, 15, 18]


def test_learning_rates_are_those_of_the_authors_log() -> None:
    rate = HalfCosineWithDrops(rate=1e-3, num_rounds=100)
    expected = {1: 0.00099988, 50: 0.00075, 75: 0.00057322, 76: 0.00042582, 91: 0.00019122, 100: 0.0001875}
    for round, value in expected.items():
        assert rate(round) == pytest.approx(value, abs=5e-9)


# -- ranges ----------------------------------------------------------------------------------------------------------


def test_observing_leaves_the_earlier_state_alone() -> None:
    pacing = StagnationAware(decide_on="test")
    state: State = pacing.init(context([1]))
    pacing.observe(state, record(1, 0.5))
    pacing.observe(state, record(2, 0.0))
    assert state == {"every": False, "count": 0, "best": 0.0}
    assert pacing.observe(state, record(1, None)) is state
