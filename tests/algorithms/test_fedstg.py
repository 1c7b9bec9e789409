"""FedStg against the numbers of its authors' log, hand-computed weights, and identities in a tiny engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsweep.algorithms.dynamicfl import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fedstg import SamplesSpeedRarity, StagnationAware, fedstg
from fedsweep.components.submodels import FULL_MODEL
from fedsweep.components.weighting import BySamples, Uniform, by_samples
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import ClientProfile, ClientUpdate, RoundRecord, ServerContext, State, SyncContext
from fedsweep.runtime.checkpoint import CheckpointStore
from fedsweep.runtime.experiment import Experiment
from fedsweep.runtime.messages import OptimizerSettings
from fedsweep.runtime.recording import Recorder
from fedsweep.runtime.schedules import FedStgSchedule
from fedsweep.runtime.state import RunState
from fedsweep.streams import stream
from fedsweep.testing import component_conforms, linear_model, local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.trees import layout_of, load_vector, model_vector
from fedsweep.world.availability import AlwaysAvailable, Availability, CapabilityAvailability, ReplayAvailability
from fedsweep.world.drift import CosineRotation, ReplayDrift
from fedsweep.world.replay import ScenarioTrace

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
# Never falls back to every round: rounds 1 to 4 and then the even ones, whatever the accuracy.
CALM = {"decide_on": "test", "patience": 10_000}


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


@functools.cache
def blank_record() -> RoundRecord:
    engine = local_engine(tiny_experiment(fedavg()))
    return Recorder(engine.experiment, engine.planner, engine.costs, engine.layout).start()


def record(round: int, accuracy: float | None) -> RoundRecord:
    return dataclasses.replace(blank_record(), round=round, test_accuracy=accuracy)


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
    return ServerContext(
        num_clients=len(sizes),
        num_classes=4,
        num_rounds=10,
        evaluate_every=evaluate_every,
        profiles=profiles,
        model=model,
        layout=layout,
        vector=model_vector(model, layout),
        stream=stream(0, "test", 0),
    )


def update(client: int, samples: int, classes: Sequence[int] | None = None) -> ClientUpdate:
    return ClientUpdate(
        client=client,
        vector=None,
        layout=layout_of(linear_model()),
        submodel=FULL_MODEL,
        anchor_version=0,
        num_samples=1,
        steps=1,
        effective_steps=1.0,
        learning_rate=0.1,
        samples_since_anchor=samples,
        classes_since_anchor=None if classes is None else tuple(classes),
    )


def sync(classes: dict[int, tuple[int, ...]] | None = None) -> SyncContext:
    model = linear_model()
    layout = layout_of(model)
    return SyncContext(
        round=1,
        index=0,
        ends_round=True,
        vector=model_vector(model, layout),
        layout=layout,
        anchors={},
        learning_rate=0.1,
        cohort=(),
        classes=classes or {},
        model=model,
        stream=stream(0, "test", 1),
        checkpoint=lambda tree: None,
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
    by_size = by_samples([dataclasses.replace(u, num_samples=u.samples_since_anchor) for u in updates])
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
    rate = FedStgSchedule(rate=1e-3, num_rounds=100)
    expected = {1: 0.00099988, 50: 0.00075, 75: 0.00057322, 76: 0.00042582, 91: 0.00019122, 100: 0.0001875}
    for round, value in expected.items():
        assert rate(round) == pytest.approx(value, abs=5e-9)


# -- in an engine ----------------------------------------------------------------------------------------------------


def experiment(method: FederatedMethod, *, rounds: int = 10, **more: object) -> Experiment:
    """Six clients, all asked for in every round."""
    settings: dict[str, object] = {"num_clients": 6, "cohort_size": 6, "rounds": rounds, **more}
    return tiny_experiment(method, **settings)  # type: ignore[arg-type]


def played(method: FederatedMethod, **more: object) -> list[RunState]:
    """The run's state before round 1 and after each round."""
    engine = local_engine(experiment(method, **more))
    states = [engine.start()]
    while engine.finished_by(states[-1]) is None:
        states.append(run_rounds(engine, states[-1], rounds=1))
    return states


def drifting(rounds: int = 10) -> dict[str, object]:
    return {
        "rounds": rounds,
        "sizes": [16] * 6,
        "drift": CosineRotation(num_classes=4, num_rounds=rounds, min_classes=2, max_classes=3),
        "availability": CapabilityAvailability(num_rounds=rounds, base=0.7),
    }


def comparable(state: RunState) -> list[RoundRecord]:
    """The rows without what a clock says."""
    clock = {"timestamp_ms": 0, "wall_time_s": 0.0, "eval_time_s": 0.0, "server_time_s": 0.0}
    return [dataclasses.replace(row, **clock) for row in state.records]


@pytest.mark.parametrize("unaggregated", ["continue", "discard"])
def test_a_round_without_aggregation_leaves_the_model_bit_identical(unaggregated: str) -> None:
    states = played(fedstg(unaggregated=unaggregated, **CALM), rounds=8)  # type: ignore[arg-type]
    for round in (5, 7):
        assert torch.equal(states[round].vector, states[round - 1].vector)
        row = states[round].records[-1]
        assert row.attendees == ()
        assert row.sync_points == 0
        assert row.local_steps == states[4].records[-1].local_steps
        assert row.test_accuracy == states[round - 1].records[-1].test_accuracy
    for round in (1, 2, 3, 4, 6, 8):
        assert not torch.equal(states[round].vector, states[round - 1].vector)
        assert states[round].records[-1].attendees == tuple(range(6))


def test_continue_saves_the_bytes_of_the_skipped_aggregations() -> None:
    """Rounds 1-4, 6, 8, 10 aggregate: 7 of 10. A client uploads at each, and downloads after each but the last."""
    rows = played(fedstg(**CALM))[-1].records  # type: ignore[arg-type]
    plain = played(fedavg())[-1].records
    assert sum(r.bytes_up for r in rows) * 10 == sum(r.bytes_up for r in plain) * 7
    assert sum(r.bytes_down for r in rows) * 10 == sum(r.bytes_down for r in plain) * 7
    model = plain[0].values_up // 6
    assert [r.values_up // model for r in rows] == [6, 6, 6, 6, 0, 6, 0, 6, 0, 6]
    assert [r.values_down // model for r in rows] == [6, 6, 6, 6, 6, 0, 6, 0, 6, 0]


def test_discard_saves_no_bytes_and_starts_again_from_the_unchanged_model() -> None:
    rows = played(fedstg(unaggregated="discard", **CALM))[-1].records  # type: ignore[arg-type]
    plain = played(fedavg())[-1].records
    assert [(r.bytes_up, r.bytes_down) for r in rows] == [(r.bytes_up, r.bytes_down) for r in plain]


def test_two_rounds_with_one_skipped_aggregation_are_one_round_of_all_steps() -> None:
    """Full batches, so that the order of the samples does not matter; momentum lasts through the resumed job."""
    momentum = OptimizerSettings(momentum=0.9)
    more = {"batch_size": 16, "double": True, "optimizer": momentum, "sizes": [16] * 6}
    pacing = StagnationAware(**CALM, first_rounds=0)  # type: ignore[arg-type]
    skipping = FederatedMethod(name="skipping", source="", pacing=pacing)
    two = played(skipping, rounds=2, local_steps=4, **more)[-1]
    one = played(fedavg(), rounds=1, local_steps=8, **more)[-1]
    assert two.held == {} and two.anchors == {}
    torch.testing.assert_close(two.vector, one.vector, rtol=1e-12, atol=1e-14)


def test_updates_of_skipped_rounds_count_all_their_samples_and_classes() -> None:
    trace = ScenarioTrace(num_clients=2, num_classes=4)
    trace = trace.with_round([0], {0: [0], 1: [3]})
    trace = trace.with_round([0, 1], {0: [1], 1: [3]})
    pacing = StagnationAware(**CALM, first_rounds=0)  # type: ignore[arg-type]
    method = FederatedMethod(name="fedstg", source="", pacing=pacing, weighting=SamplesSpeedRarity())
    images, labels = tiny_data(num_samples=48)
    world = {"drift": ReplayDrift(trace=trace), "availability": ReplayAvailability(trace=trace)}
    states = played(
        method, num_clients=2, cohort_size=2, rounds=2, sizes=[24, 24], images=images, labels=labels, **world
    )
    row = states[-1].records[-1]
    assert row.attendees == (0, 1)
    # Client 0: 6 + 6 samples of classes 0 and 1; client 1: 6 of class 3. Each class is held by one of two: r alike.
    assert row.aggregation_weights == pytest.approx((12 / 18, 6 / 18))


def test_who_trained_in_a_skipped_round_takes_part_though_absent_at_the_aggregation() -> None:
    trace = ScenarioTrace(num_clients=6, num_classes=4)
    for present in ([0, 1], [2], [3], [], [5], []):
        trace = trace.with_round(present, {})
    pacing = StagnationAware(**CALM, first_rounds=0)  # type: ignore[arg-type]
    method = FederatedMethod(name="fedstg", source="", pacing=pacing)
    states = played(method, rounds=6, availability=ReplayAvailability(trace=trace))
    rows = states[-1].records
    assert [r.attendees for r in rows] == [(), (0, 1, 2), (), (3,), (), (5,)]
    assert [r.cohort for r in rows] == [(0, 1), (2,), (3,), (), (5,), ()]
    assert [r.present for r in rows] == list(trace.present)
    model = rows[1].values_up // 3
    assert [(r.values_down // model, r.values_up // model) for r in rows] == [
        *((2, 0), (1, 3), (1, 0), (0, 1), (1, 0), (0, 1)),
    ]
    assert states[-1].held == {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nobody(Availability):
    """Nobody is there in some rounds."""

    rounds: tuple[int, ...]

    def probability(self, round: int, **kwargs: object) -> np.ndarray:
        return np.full(6, 0.0 if round in self.rounds else 1.0)


@pytest.mark.parametrize("unaggregated", ["continue", "discard"])
def test_a_round_that_everybody_skips_keeps_the_model(unaggregated: str) -> None:
    method = fedstg(unaggregated=unaggregated, **CALM)  # type: ignore[arg-type]
    states = played(method, rounds=4, availability=Nobody(rounds=(1, 3)))
    assert torch.equal(states[1].vector, states[0].vector)
    assert torch.equal(states[3].vector, states[2].vector)
    assert not torch.equal(states[4].vector, states[3].vector)
    assert states[3].records[-1].cohort == ()
    assert states[3].records[-1].bytes_up == states[3].records[-1].bytes_down == 0


def test_without_its_weights_and_schedule_it_is_fedavg_on_the_same_scenario_bit_for_bit() -> None:
    bare = dataclasses.replace(fedstg(reduced_interval=1), weighting=BySamples())
    always = FederatedMethod(
        name="always", source="", pacing=StagnationAware(decide_on="test", first_rounds=100, unaggregated="continue")
    )
    plain = played(fedavg(), **drifting())[-1]
    for method in (bare, always):
        state = played(method, **drifting())[-1]
        assert torch.equal(state.vector, plain.vector)
        rows = [dataclasses.replace(row, extra={}) for row in comparable(state)]
        assert rows == comparable(plain)
    weighted = played(fedstg(reduced_interval=1), **drifting())[-1]
    assert not torch.equal(weighted.vector, plain.vector)


def test_one_client_with_all_classes_is_centralised_sgd_with_the_same_schedule() -> None:
    """24 samples, one full batch a round: each round is one step on everything at the round's rate."""
    images, labels = tiny_data(num_samples=24, dtype=np.float64)
    drift = CosineRotation(num_classes=4, num_rounds=6, rotation_speed=1.0, min_classes=4, max_classes=4)
    one = experiment(
        fedstg(reduced_interval=1),
        rounds=6,
        num_clients=1,
        cohort_size=1,
        batch_size=24,
        sizes=[24],
        images=images,
        labels=labels,
        double=True,
        drift=drift,
    )
    schedule = FedStgSchedule(rate=0.5, num_rounds=6)
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, schedule=schedule))
    engine = local_engine(one)
    model: nn.Module = one.build_model()
    load_vector(model, engine.layout, engine.start().vector)
    inputs, targets = torch.from_numpy(images), torch.from_numpy(labels)
    for round in range(1, 7):
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= schedule(round) * gradient
    found = run_rounds(engine).vector
    torch.testing.assert_close(found, model_vector(model, engine.layout), rtol=1e-12, atol=1e-14)


def test_the_first_decision_knows_the_initial_models_accuracy() -> None:
    engine = local_engine(experiment(fedstg(decide_on="test")))
    state = engine.start()
    accuracy, _ = engine._test.test(engine.experiment.method.evaluation, {}, engine.experiment.build_model().eval(), ())
    assert accuracy > 0
    assert state.components["pacing"] == {"every": False, "count": 0, "best": accuracy}
    assert state.records == ()


def test_the_schedule_follows_validation_accuracy_by_default() -> None:
    images, labels = tiny_data(num_samples=20, seed=3)
    engine = local_engine(experiment(fedstg(), validation=(images, labels)))
    state = engine.start()
    best = state.components["pacing"]["best"]
    for _ in range(6):
        state = run_rounds(engine, state, rounds=1)
        best = max(best, state.records[-1].validation_accuracy or 0.0)
        assert state.components["pacing"]["best"] == best
    assert {r.validation_accuracy for r in state.records} != {r.test_accuracy for r in state.records}


def test_the_columns_tell_why_a_round_aggregated() -> None:
    rows = played(fedstg(decide_on="test"), learning_rate=1e-9, rounds=6)[-1].records
    assert [row.extra["aggregations_without_best"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.extra["aggregates_every_round"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert all(row.sync_points == 1 for row in rows)


@pytest.mark.parametrize("interrupted_after", [5, 6])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(interrupted_after: int, tmp_path: Path) -> None:
    method = merge(fedstg(**CALM), fedprox(mu=0.1))  # type: ignore[arg-type]
    more: dict[str, object] = {**drifting(), "optimizer": OptimizerSettings(momentum=0.9)}
    whole = played(method, **more)[-1]
    engine = local_engine(experiment(method, **more))
    half = run_rounds(engine, rounds=interrupted_after)
    assert bool(half.held) is (interrupted_after == 5)
    CheckpointStore(tmp_path, keep=1, config_hash="x").save(half, fetch=engine.fleet.fetch)

    again = local_engine(experiment(method, **more))
    found = CheckpointStore(tmp_path, keep=1, config_hash="x").newest(keep_handle=again.fleet.keep).state
    assert found is not None and found.round == interrupted_after
    resumed = run_rounds(again, found)
    assert torch.equal(resumed.vector, whole.vector)
    assert comparable(resumed) == comparable(whole)
    assert resumed.components["pacing"] == whole.components["pacing"]


def test_fedprox_pulls_towards_the_model_of_the_last_download_over_skipped_rounds() -> None:
    """Rounds 1 and 2 in one: the anchor is round 1's, in a resumed job as in a single round of all steps."""
    more = {"batch_size": 16, "double": True, "sizes": [16] * 6}
    pacing = StagnationAware(**CALM, first_rounds=0)  # type: ignore[arg-type]
    skipping = merge(FederatedMethod(name="skipping", source="", pacing=pacing), fedprox(mu=0.5))
    two = played(skipping, rounds=2, local_steps=4, **more)[-1]
    one = played(fedprox(mu=0.5), rounds=1, local_steps=8, **more)[-1]
    torch.testing.assert_close(two.vector, one.vector, rtol=1e-12, atol=1e-14)


# -- the scenario under other methods --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [fedavg(), fedprox(mu=0.1), dynamicfl(high_interval="a"), fedstg(decide_on="test")], ids=lambda m: m.name
)
def test_every_method_can_face_rotation_and_participation(method: FederatedMethod) -> None:
    states = played(method, **drifting())
    rows = states[-1].records
    present = [row.present for row in rows]
    assert all(row.cohort == there for row, there in zip(rows, present, strict=True))
    assert len({len(there or ()) for there in present}) > 1
    assert not torch.equal(states[-1].vector, states[0].vector)


def test_a_recorded_scenario_shows_other_methods_the_same_presence_and_classes() -> None:
    first = local_engine(experiment(fedstg(decide_on="test"), **drifting()))
    recorded = run_rounds(first)
    trace = ScenarioTrace(num_clients=6, num_classes=4)
    for row in recorded.records:
        trace = trace.with_round(row.present or (), first.planner.classes(row.round))
    trace = ScenarioTrace.from_json(trace.to_json())
    replayed: dict[str, object] = {
        "drift": ReplayDrift(trace=trace),
        "availability": ReplayAvailability(trace=trace),
        "sizes": [16] * 6,
    }
    other = local_engine(experiment(fedavg(), seed=5, **replayed))
    rows = run_rounds(other).records
    assert [r.present for r in rows] == [r.present for r in recorded.records]
    assert all(other.planner.classes(n) == first.planner.classes(n) for n in range(1, 11))
    again = run_rounds(local_engine(experiment(fedstg(decide_on="test"), **replayed)))
    assert torch.equal(again.vector, recorded.vector)


def test_presence_is_told_where_the_scenario_has_availability() -> None:
    assert played(fedavg(), rounds=1)[-1].records[0].present is None
    assert played(fedavg(), rounds=1, availability=AlwaysAvailable())[-1].records[0].present == tuple(range(6))


# -- what it does not go with ----------------------------------------------------------------------------------------


def test_its_schedule_excludes_dynamicfls() -> None:
    with pytest.raises(ConfigError, match=r"dynamicfl and fedstg can't be merged: both have a pacing of their own"):
        merge(dynamicfl(), fedstg(decide_on="test"))


def test_its_weights_exclude_another_methods() -> None:
    other = FederatedMethod(name="other", source="", weighting=Uniform())
    with pytest.raises(ConfigError, match=r"other and fedstg can't be merged: both have a weighting of their own"):
        merge(other, fedstg(decide_on="test"))


def test_its_weights_alone_go_with_dynamicfl() -> None:
    method = merge(dynamicfl(high_interval="a"), fedstg(reduced_interval=1))
    rows = played(method, **drifting())[-1].records
    assert max(row.sync_points for row in rows) > 1
    assert all(sum(row.aggregation_weights) == pytest.approx(1.0) for row in rows if row.attendees)


def test_deciding_on_validation_needs_validation_data() -> None:
    engine = local_engine(experiment(fedstg()))
    with pytest.raises(ConfigError, match=r"decide_on=validation needs validation data.*or set method.decide_on=test"):
        engine.start()


def test_deciding_needs_an_evaluation_in_every_round() -> None:
    seldom = dataclasses.replace(experiment(fedstg(decide_on="test")), evaluate_every=2)
    with pytest.raises(ConfigError, match=r"evaluation.every must be 1, but got 2"):
        local_engine(seldom).start()
    always = dataclasses.replace(experiment(fedstg(reduced_interval=1), rounds=2), evaluate_every=2)
    assert run_rounds(local_engine(always)).round == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reduced_interval": 0}, "reduced_interval must be at least 1 round, but got 0"),
        ({"first_rounds": -1}, "first_rounds must be at least 0, but got -1"),
        ({"patience": 0}, "patience must be at least 1, but got 0"),
        ({"unaggregated": "keep"}, "unaggregated must be 'continue' or 'discard', but got 'keep'"),
        ({"decide_on": "train"}, "decide_on must be 'validation' or 'test', but got 'train'"),
        ({"counted": "some"}, "counted must be 'trained' or 'all', but got 'some'"),
        ({"rarity_strength": -0.1}, "rarity_strength must be a number of at least 0, but got -0.1"),
        ({"rarity_cap": 0.9}, "rarity_cap must be a number of at least 1, but got 0.9"),
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fedstg(**wrong)  # type: ignore[arg-type]


def test_components_conform() -> None:
    component_conforms(SamplesSpeedRarity(counted="all"))
    component_conforms(StagnationAware(unaggregated="discard"))


def test_observing_leaves_the_earlier_state_alone() -> None:
    pacing = StagnationAware(decide_on="test")
    state: State = pacing.init(context([1]))
    pacing.observe(state, record(1, 0.5))
    pacing.observe(state, record(2, 0.0))
    assert state == {"every": False, "count": 0, "best": 0.0}
    assert pacing.observe(state, record(1, None)) is state
