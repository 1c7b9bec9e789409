"""FedStg in a tiny engine: what travels, what is kept, and the scenario that other methods share with it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import resumed, timeless
from torch import nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.algorithms.fednova import fednova
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fedstg import SamplesSpeedRarity, StagnationAware, fedstg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.aggregation import BySamples, Uniform
from fedsweep.components.compression.sparsifiers import TopK
from fedsweep.config.load import load_config
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.experiment.schedules import Exponential, HalfCosineWithDrops
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.trees import load_vector, model_vector
from fedsweep.world.availability import AlwaysAvailable, Availability, CapabilityAvailability, ReplayAvailability
from fedsweep.world.drift import CosineRotation, ReplayDrift
from fedsweep.world.replay import ScenarioTrace

# Never falls back to every round: rounds 1 to 4 and then the even ones, whatever the accuracy.
CALM: dict[str, Any] = {"decide_on": "test", "patience": 10_000}


def experiment(method: FederatedMethod, *, rounds: int = 10, **more: Any) -> Experiment:
    """Six clients, all asked for in every round."""
    settings: dict[str, Any] = {"num_clients": 6, "cohort_size": 6, "rounds": rounds, **more}
    return tiny_experiment(method, **settings)


def played(method: FederatedMethod, **more: Any) -> list[RunState]:
    """The run's state before round 1 and after each round."""
    engine = local_engine(experiment(method, **more))
    states = [engine.start()]
    while engine.finished_by(states[-1]) is None:
        states.append(run_rounds(engine, states[-1], rounds=1))
    return states


@pytest.mark.parametrize("method", [fednova(), feddh()], ids=lambda m: m.name)
def test_moves_of_work_at_several_rates_are_not_divided_by_one(method: FederatedMethod) -> None:
    """A client that worked at 0.1 and then at 0.01 has gone as far as 1.1 steps of the first rate, not as 2."""
    for unaggregated in ("continue", "discard"):
        merged = merge(fedstg(weights="size", unaggregated=unaggregated, **CALM), method)
        changing = experiment(merged)
        check_experiment(changing)  # a constant rate
        schedule = Exponential(rate=0.1, decay=0.1)
        changing = dataclasses.replace(changing, training=dataclasses.replace(changing.training, schedule=schedule))
        if unaggregated == "discard":
            check_experiment(changing)
            continue
        with pytest.raises(ConfigError, match=f"{method.name} divides .* training.schedule changes the rate between"):
            check_experiment(changing)


def test_what_is_thrown_away_does_not_come_back_with_the_next_message() -> None:
    coded = {name: TopK(share=0.1, error_feedback=name == "owed") for name in ("owed", "lost")}
    for name, codec in coded.items():
        made = experiment(dataclasses.replace(fedstg(unaggregated="discard", **CALM), codec=codec))
        with pytest.raises(ConfigError, match="feedback of the codec TopK") if name == "owed" else nullcontext():
            check_experiment(made)


def drifting(rounds: int = 10) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "sizes": [16] * 6,
        "drift": CosineRotation(num_classes=4, num_rounds=rounds, min_classes=2, max_classes=3),
        "availability": CapabilityAvailability(num_rounds=rounds, base=0.7),
    }


@pytest.mark.parametrize("unaggregated", ["continue", "discard"])
def test_a_round_without_aggregation_leaves_the_model_bit_identical(unaggregated: Any) -> None:
    states = played(fedstg(unaggregated=unaggregated, **CALM), rounds=8)
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
    rows = played(fedstg(**CALM))[-1].records
    plain = played(fedavg())[-1].records
    assert sum(r.bytes_up for r in rows) * 10 == sum(r.bytes_up for r in plain) * 7
    assert sum(r.bytes_down for r in rows) * 10 == sum(r.bytes_down for r in plain) * 7
    model = plain[0].values_up // 6
    assert [r.values_up // model for r in rows] == [6, 6, 6, 6, 0, 6, 0, 6, 0, 6]
    assert [r.values_down // model for r in rows] == [6, 6, 6, 6, 6, 0, 6, 0, 6, 0]


def test_discard_saves_no_bytes_and_starts_again_from_the_unchanged_model() -> None:
    rows = played(fedstg(unaggregated="discard", **CALM))[-1].records
    plain = played(fedavg())[-1].records
    assert [(r.bytes_up, r.bytes_down) for r in rows] == [(r.bytes_up, r.bytes_down) for r in plain]


def test_two_rounds_with_one_skipped_aggregation_are_one_round_of_all_steps() -> None:
    """Full batches, so that the order of the samples does not matter; momentum lasts through the resumed job."""
    momentum = OptimizerSettings(momentum=0.9)
    more: dict[str, Any] = {"batch_size": 16, "double": True, "optimizer": momentum, "sizes": [16] * 6}
    pacing = StagnationAware(**CALM, first_rounds=0)
    skipping = FederatedMethod(name="skipping", source="", pacing=pacing)
    two = played(skipping, rounds=2, local_steps=4, **more)[-1]
    one = played(fedavg(), rounds=1, local_steps=8, **more)[-1]
    assert two.held == {} and two.anchors == {}
    torch.testing.assert_close(two.vector, one.vector, rtol=1e-12, atol=1e-14)


def test_updates_of_skipped_rounds_count_all_their_samples_and_classes() -> None:
    trace = ScenarioTrace(num_clients=2, num_classes=4)
    trace = trace.with_round([0], {0: [0], 1: [3]})
    trace = trace.with_round([0, 1], {0: [1], 1: [3]})
    pacing = StagnationAware(**CALM, first_rounds=0)
    method = FederatedMethod(name="fedstg", source="", pacing=pacing, weighting=SamplesSpeedRarity())
    images, labels = tiny_data(num_samples=48)
    world: dict[str, Any] = {"drift": ReplayDrift(trace=trace), "availability": ReplayAvailability(trace=trace)}
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
    pacing = StagnationAware(**CALM, first_rounds=0)
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

    def probability(self, round: int, **kwargs: Any) -> np.ndarray:
        return np.full(6, 0.0 if round in self.rounds else 1.0)


@pytest.mark.parametrize("unaggregated", ["continue", "discard"])
def test_a_round_that_everybody_skips_keeps_the_model(unaggregated: Any) -> None:
    method = fedstg(unaggregated=unaggregated, **CALM)
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
        rows = [dataclasses.replace(row, extra={}, staleness=None) for row in timeless(state.records)]
        assert rows == timeless(plain.records)
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
    schedule = HalfCosineWithDrops(rate=0.5, num_rounds=6)
    one = dataclasses.replace(one, training=dataclasses.replace(one.training, schedule=schedule))
    engine = local_engine(one)
    model: nn.Module = one.build_model()
    load_vector(model, engine.layout, engine.start().vector)
    inputs, targets = torch.from_numpy(images), torch.from_numpy(labels)
    for round in range(1, 7):
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(schedule(round) * gradient)
    found = run_rounds(engine).vector
    torch.testing.assert_close(found, model_vector(model, engine.layout), rtol=1e-12, atol=1e-14)


def test_the_first_decision_knows_the_initial_models_accuracy() -> None:
    engine = local_engine(experiment(fedstg(decide_on="test")))
    state = engine.start()
    model = engine.experiment.build_model().eval()
    accuracy = engine.tester._test.test(engine.experiment.method.evaluation, {}, model, ()).accuracy
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
    method = merge(fedstg(**CALM), fedprox(mu=0.1))
    more: dict[str, Any] = {**drifting(), "optimizer": OptimizerSettings(momentum=0.9)}
    whole = played(method, **more)[-1]
    engine = local_engine(experiment(method, **more))
    half = run_rounds(engine, rounds=interrupted_after)
    assert bool(half.held) is (interrupted_after == 5)
    other = resumed(experiment(method, **more), tmp_path, rounds=interrupted_after)
    assert torch.equal(other.vector, whole.vector)
    assert timeless(other.records) == timeless(whole.records)
    assert other.components["pacing"] == whole.components["pacing"]


def test_fedprox_pulls_towards_the_model_of_the_last_download_over_skipped_rounds() -> None:
    """Rounds 1 and 2 in one: the anchor is round 1's, in a resumed job as in a single round of all steps."""
    more: dict[str, Any] = {"batch_size": 16, "double": True, "sizes": [16] * 6}
    pacing = StagnationAware(**CALM, first_rounds=0)
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
        trace = trace.with_round(row.present or (), first.experiment.classes(row.round))
    trace = ScenarioTrace.from_json(trace.to_json())
    replayed: dict[str, Any] = {
        "drift": ReplayDrift(trace=trace),
        "availability": ReplayAvailability(trace=trace),
        "sizes": [16] * 6,
    }
    other = local_engine(experiment(fedavg(), seed=5, **replayed))
    rows = run_rounds(other).records
    assert [r.present for r in rows] == [r.present for r in recorded.records]
    assert all(other.experiment.classes(n) == first.experiment.classes(n) for n in range(1, 11))
    again = run_rounds(local_engine(experiment(fedstg(decide_on="test"), **replayed)))
    assert torch.equal(again.vector, recorded.vector)


def test_presence_is_told_where_the_scenario_has_availability() -> None:
    assert played(fedavg(), rounds=1)[-1].records[0].present is None
    assert played(fedavg(), rounds=1, availability=AlwaysAvailable())[-1].records[0].present == tuple(range(6))


# -- what it does not go with ----------------------------------------------------------------------------------------


def test_its_schedule_excludes_dynamicfls() -> None:
    with pytest.raises(ConfigError, match=r"dynamicfl and fedstg can't be merged: both have their own pacing"):
        merge(dynamicfl(), fedstg(decide_on="test"))


def test_its_weights_exclude_another_methods() -> None:
    other = FederatedMethod(name="other", source="", weighting=Uniform())
    with pytest.raises(ConfigError, match=r"other and fedstg can't be merged: both have their own weighting"):
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


# -- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("no_rotation", {"scenario.drift.frozen": True}),
        ("no_adaptive_participation", {"scenario.availability.adaptive": False}),
        ("no_stagnation", {"method.reduced_interval": 1}),
        ("fedavg", {"method.name": "fedavg"}),
        ("fedprox", {"method.name": "fedprox", "method.mu": 0.01}),
    ],
)
def test_ablations_and_baselines_change_what_they_say_and_nothing_else(name: str, changed: dict[str, Any]) -> None:
    paper, other = load_config("fedstg/paper").flat(), load_config(f"fedstg/{name}").flat()
    same = [key for key in paper if key != "name" and not key.startswith("method.")]
    differing = {key for key in {*same, *other} if key != "name" and paper.get(key) != other.get(key)}
    assert {key: other[key] for key in changed} == changed
    if name in ("fedavg", "fedprox"):
        assert not [key for key in differing if not key.startswith("method")]
    else:
        assert differing == set(changed)


def test_presets_have_the_constants_of_paper_and_program() -> None:
    paper, code = load_config("fedstg/paper").flat(), load_config("fedstg/code").flat()
    assert paper["training.local_epochs.range"] == "[3, 5]"
    assert paper["training.batch_size.range"] == "[32, 64]"
    assert paper["scenario.server_data.validation"] == 0.1
    assert (code["training.local_epochs"], code["training.batch_size"]) == (2, 32)
    assert (code["method.unaggregated"], code["method.decide_on"], code["method.counted"]) == ("discard", "test", "all")
    for preset in (paper, code):
        assert preset["training.cohort_fraction"] == 1.0
        assert preset["training.rounds"] == 100
        assert preset["training.schedule"] == "fedstg"
        assert preset["training.optimizer.lr"] == 1e-3
