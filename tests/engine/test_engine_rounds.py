"""Whole runs: limits, absence, drift, and the figures of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import KEPT, METHODS, assert_same, stopped
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedmix import fedmix
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.catalog import built_in_card
from fedsweep.components.local import LocalStep, LocalTerm, Objective, TaskLoss
from fedsweep.components.planning import Pacing, UniformSelection
from fedsweep.config.load import load_config
from fedsweep.engine.ahead.card_traffic import CardTraffic
from fedsweep.engine.dropouts import LostWork
from fedsweep.engine.forecast import forecast
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import StopLimits
from fedsweep.method import FederatedMethod
from fedsweep.records import LocalJob, RoundContext, RoundRecord, State, SyncPoint
from fedsweep.streams import Stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_device, tiny_experiment, with_devices
from fedsweep.world.availability import Availability
from fedsweep.world.drift import Drift
from fedsweep.world.stragglers import DropOut

ROUND_BYTES, REGISTRATION_BYTES = 4 * 2 * 3 * 28, 4 * 6


@pytest.mark.parametrize(("spare", "rounds"), [(0, 2), (-1, 1), (ROUND_BYTES - 1, 2), (-ROUND_BYTES - 1, 0)])
def test_a_byte_limit_ends_the_run_before_the_round_that_would_pass_it(spare: int, rounds: int) -> None:
    stop = StopLimits(total_bytes=REGISTRATION_BYTES + 2 * ROUND_BYTES + spare)
    assert stopped(tiny_experiment(fedavg(), rounds=9, stop=stop)) == (rounds, "total_bytes")


@dataclass(frozen=True, kw_only=True)
class Chatty(LocalTerm):
    """Sends 28 values more."""

    name: str = "chatty"
    sends = True

    def finish(self, memory: dict[str, object], work: object) -> tuple[dict[str, object], dict[str, Tensor]]:
        return memory, {"more": torch.zeros(28)}


@pytest.mark.parametrize(("spare", "rounds"), [(0, 2), (-1, 1)])
def test_a_byte_limit_counts_what_terms_send(spare: int, rounds: int) -> None:
    method = FederatedMethod(name="test", source="", terms=(Chatty(),))
    stop = StopLimits(total_bytes=REGISTRATION_BYTES + 3 * ROUND_BYTES + spare)  # a round costs half as much again
    assert stopped(tiny_experiment(method, rounds=9, stop=stop)) == (rounds, "total_bytes")


def test_target_accuracy_and_wall_time_end_the_run_after_the_round_that_reached_them() -> None:
    free = run_rounds(local_engine(tiny_experiment(fedavg(), rounds=9)))
    target = free.records[3].test_accuracy
    assert target is not None
    first = next(r.round for r in free.records if (r.test_accuracy or 0) >= target)
    stop = StopLimits(target_accuracy=target)
    assert stopped(tiny_experiment(fedavg(), rounds=9, stop=stop)) == (first, "target_accuracy")
    assert stopped(tiny_experiment(fedavg(), rounds=9, stop=StopLimits(wall_time_s=0.0))) == (1, "wall_time_s")
    assert stopped(tiny_experiment(fedavg(), rounds=4)) == (4, "rounds")


@dataclass(frozen=True, kw_only=True)
class Present(Availability):
    """The clients of each round."""

    rounds: tuple[tuple[int, ...], ...]

    def probability(
        self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> NDArray[np.float64]:
        there = self.rounds[round - 1]
        return np.array([float(k in there) for k in range(len(capabilities))])


@pytest.mark.parametrize("name", METHODS)
def test_a_round_without_anybody_changes_nothing_and_is_recorded(name: str) -> None:
    world = {"availability": Present(rounds=((0, 1, 2, 3), (), (4,)))}
    engine = local_engine(tiny_experiment(METHODS[name], local_steps=4, **world))  # type: ignore[arg-type]
    first = run_rounds(engine, rounds=1)
    second = run_rounds(engine, first, rounds=1)
    record = second.records[1]
    assert torch.equal(second.vector, first.vector) and second.version == first.version
    assert (record.cohort, record.attendees, record.local_steps, record.sync_points) == ((), (), 0, 0)
    assert (record.comm_cost, record.flops, record.train_loss, record.comm_ratio) == (0, 0, None, None)
    assert record.test_accuracy == first.records[0].test_accuracy
    assert not record.high_frequency and record.kl_divergence is None
    third = run_rounds(engine, second)
    assert third.records[2].cohort == (4,)


def test_the_cohort_is_capped_by_who_is_there() -> None:
    world = {"availability": Present(rounds=((1, 5), (0, 2, 3, 4, 5), (3,)))}
    records = run_rounds(local_engine(tiny_experiment(fedavg(), cohort_size=4, **world))).records  # type: ignore[arg-type]
    assert records[0].cohort == (1, 5) and records[2].cohort == (3,)
    assert len(records[1].cohort) == 4 and set(records[1].cohort) <= {0, 2, 3, 4, 5}


def test_training_accuracies_of_the_last_three_passes_reach_the_availability() -> None:
    seen: list[Mapping[int, Sequence[float]]] = []

    class Curious(Present):
        def probability(
            self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
        ) -> NDArray[np.float64]:
            seen.append(history)
            return super().probability(round, capabilities=capabilities, history=history)

    world = {"availability": Curious(rounds=((0,), (0, 1), (0, 1)))}
    run_rounds(local_engine(tiny_experiment(fedavg(), local_epochs=2, **world)))  # type: ignore[arg-type]
    assert [{k: len(v) for k, v in h.items()} for h in seen] == [{}, {0: 2}, {0: 3, 1: 2}]
    assert all(0.0 <= a <= 1.0 for h in seen for v in h.values() for a in v)


@dataclass(frozen=True, kw_only=True)
class OneClass(Drift):
    """Round r has class r - 1 alone."""

    def class_probabilities(self, client: int, round: int) -> NDArray[np.float64]:
        return np.eye(4)[round - 1]

    def class_set(self, client: int, round: int, stream: Stream) -> tuple[int, ...]:
        return (round - 1,)


TARGETS: list[tuple[int, ...]] = []


@dataclass(frozen=True, kw_only=True)
class Watched(Objective):
    """Cross-entropy that notes the labels."""

    def loss(self, step: LocalStep) -> Tensor:
        TARGETS.append(tuple(step.targets.tolist()))
        return TaskLoss().loss(step)


def test_drift_leaves_only_the_rounds_classes() -> None:
    TARGETS.clear()
    method = FederatedMethod(name="test", source="", objective=Watched())
    engine = local_engine(
        tiny_experiment(method, num_clients=6, sizes=(16,) * 6, batch_size=3, local_epochs=2, drift=OneClass())
    )
    state = run_rounds(engine)
    work = engine.planner.plan(engine.start()).context.work
    assert {w.num_samples for w in work.values()} == {4} and {w.steps for w in work.values()} == {4}
    assert TARGETS == [(r,) * size for r in range(3) for _ in range(3) for size in (3, 1, 3, 1)]
    assert [r.local_steps for r in state.records] == [12, 12, 12]


def test_a_client_without_samples_in_a_round_is_absent() -> None:
    """Sorted by label, clients 0 and 1 have class 0, clients 1 and 2 class 1."""
    engine = local_engine(tiny_experiment(fedavg(), cohort_size=6, rounds=2, drift=OneClass()))
    assert [r.cohort for r in run_rounds(engine).records] == [(0, 1), (1, 2)]


def test_classes_of_resumed_work_are_those_of_all_its_rounds() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Skip(Pacing):
        def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
            second = context.round % 2 == 0
            start = tuple(LocalJob(client=k, steps=context.work[k].steps, resume=second) for k in context.cohort)
            return (SyncPoint(start=start, attend=context.cohort if second else ()),), state

    method = replace(fedavg(), pacing=Skip())
    engine = local_engine(
        tiny_experiment(method, num_clients=3, cohort_size=3, sizes=(16, 8, 4), rounds=2, drift=OneClass())
    )
    state = run_rounds(engine, rounds=1)
    played = play_round(engine, state)
    assert [u.classes_since_anchor for u in played.updates] == [(0, 1)] * 3
    assert [u.num_samples for u in played.updates] == [8, 4, 2]


def test_flops_are_six_macs_per_sample_and_count_repeats() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))

    record = run_rounds(local_engine(tiny_experiment(fedavg(), build=build, local_epochs=2, rounds=1))).records[0]
    assert record.fwd_macs_per_sample == 50
    assert record.flops == 6 * 50 * (3 * 16 * 2)


def test_rounds_between_two_evaluations_have_no_accuracy_but_the_last_has() -> None:
    experiment = replace(tiny_experiment(fedavg(), rounds=5), evaluate_every=3)
    records = run_rounds(local_engine(experiment)).records
    assert [r.test_accuracy is not None for r in records] == [False, False, True, False, True]
    assert all(r.train_loss is not None for r in records)


@pytest.mark.parametrize("limit", ["bytes", "time", "clock"])
def test_the_last_round_is_tested_whatever_ends_the_run(limit: str) -> None:
    """Though nobody knew, when the run began, that it would be the last."""
    plain = with_devices(tiny_experiment(fedavg(), rounds=9), [tiny_device(1e6)])
    every = run_rounds(local_engine(plain)).records
    limits = {
        "bytes": StopLimits(total_bytes=every[3].total_bytes),
        "time": StopLimits(sim_time_s=every[3].sim_time_s),
        "clock": StopLimits(wall_time_s=0.0),
    }
    last = 1 if limit == "clock" else 4
    ended = replace(plain, training=replace(plain.training, stop=limits[limit]), evaluate_every=3)
    engine = local_engine(ended)
    state = run_rounds(engine)
    assert state.round == last
    assert [r.test_accuracy is not None for r in state.records] == [r in (3, last) for r in range(1, last + 1)]
    assert state.records[-1].test_loss == every[last - 1].test_loss
    assert state.records[-1].best_accuracy == state.records[-1].test_accuracy or last == 4
    assert engine.as_planned(state) == state


def test_what_travels_beside_models_counts_where_a_run_ends() -> None:
    """By the method's card: by its models alone a fifth round would fit."""
    plain = replace(tiny_experiment(scaffold(), rounds=9), cards=((built_in_card("scaffold"), {"rebuild": False}),))
    sent = run_rounds(local_engine(plain)).records
    limit = StopLimits(total_bytes=sent[4].total_bytes - 1)
    ended = replace(plain, training=replace(plain.training, stop=limit), evaluate_every=3)
    tested = [record.test_accuracy is not None for record in run_rounds(local_engine(ended)).records]
    assert tested == [False, False, True, True]


def test_who_drops_out_of_its_first_round_is_sent_everything_again_where_a_run_ends() -> None:
    """By who took part, whether it dropped out or not, a fourth round would seem to fit."""
    device = replace(tiny_device(1e6), drop_probability=0.5)
    plain = tiny_experiment(fedmix(), rounds=9, cohort_size=5)
    plain = replace(
        with_devices(plain, [device]), cards=((built_in_card("fedmix"), {"strength": 0.2, "group_size": None}),)
    )
    plain = replace(plain, world=replace(plain.world, stragglers=DropOut()))
    sent = run_rounds(local_engine(plain)).records
    for number in range(1, 9):
        limit = StopLimits(total_bytes=sent[number].total_bytes - 1)
        ended = replace(plain, training=replace(plain.training, stop=limit), evaluate_every=20)
        records = run_rounds(local_engine(ended)).records
        assert [record.test_accuracy is not None for record in records] == [False] * (number - 1) + [True]


def test_components_hear_of_a_last_round_once() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Counting(UniformSelection):
        def observe(self, state: State, record: RoundRecord) -> State:
            return {**(state or {}), "heard": [*(state or {}).get("heard", []), record.test_accuracy is not None]}

    plain = tiny_experiment(replace(fedavg(), selection=Counting()), rounds=9)
    limit = StopLimits(total_bytes=run_rounds(local_engine(plain)).records[3].total_bytes)
    ended = replace(plain, training=replace(plain.training, stop=limit), evaluate_every=3)
    assert run_rounds(local_engine(ended)).components["selection"]["heard"] == [False, False, True, True]


def test_a_finished_run_is_a_chain_of_states_that_are_never_changed() -> None:
    engine = local_engine(tiny_experiment(METHODS["two speeds"], local_steps=6, optimizer=KEPT["persist"]))
    states = [engine.start()]
    copies = [states[0].vector.clone()]
    for _ in range(3):
        states.append(run_rounds(engine, states[-1], rounds=1))
        copies.append(states[-1].vector.clone())
    assert all(torch.equal(s.vector, c) for s, c in zip(states, copies, strict=True))
    assert_same(run_rounds(engine, states[1]), states[3])


def test_a_run_is_tested_at_its_end_where_clients_send_more_than_cards_say() -> None:
    """They aggregate several times in a round, and cards count what travels beside models once."""
    merged = [{"name": "dynamicfl", "group_size": 2, "high_interval": 2}, {"name": "scaffold"}]
    tree = {
        "scenario": {"clients": 4},
        "model": {"name": "mlp"},
        "method": {"merge": merged},
        "training": {"rounds": 6, "cohort_size": 4, "local_steps": 6, "batch_size": 16},
        "evaluation": {"every": 5},
    }
    free = build_experiment(load_config(tree))
    sent = run_rounds(local_engine(free)).records
    costs = forecast(replace(free, training=replace(free.training, rounds=4)))
    assert costs.total_bytes < sent[3].total_bytes and not costs.exact
    # By the cards a fourth round would fit.
    limit = StopLimits(total_bytes=sent[3].total_bytes - 1)
    records = run_rounds(local_engine(replace(free, training=replace(free.training, stop=limit)))).records
    assert [record.round for record in records] == [1, 2, 3] and records[-1].test_accuracy is not None


def test_what_is_sent_to_those_who_drop_out_counts_where_all_others_go_on_with_their_work() -> None:
    experiment = replace(tiny_experiment(scaffold()), cards=((built_in_card("scaffold"), {"rebuild": False}),))
    engine = local_engine(experiment)
    plan = engine.planner.plan(engine.start())
    first, *_ = plan.points
    lost = plan.context.cohort[0]
    going_on = tuple(replace(job, resume=True) for job in first.start if job.client != lost)
    plan = replace(plan, points=(replace(first, start=going_on),), lost={lost: LostWork(steps=1, sends=False)})
    traffic = CardTraffic(experiment, engine.costs)
    sent = sum(traffic.in_round(plan, set()))
    assert sent > 0 and traffic.most_in_round(plan, set()) == sent
