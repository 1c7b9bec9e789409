"""Rounds that do not end in an aggregation, clients that keep their work, and plans that cannot be played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import Pacing, Selection
from fedsweep.engine.engine import Engine
from fedsweep.errors import InvariantError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, LocalJob, RoundContext, State, SyncPoint
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment


@dataclass(frozen=True, kw_only=True)
class EverySecondRound(Pacing):
    """Nobody attends in odd rounds; in even ones all who hold work do, and go on from it first.

    Attributes:
        discard: Those who are chosen again start from the server's model instead.
    """

    discard: bool = False

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        start = tuple(
            LocalJob(client=k, steps=context.work[k].steps, resume=k in context.in_flight and not self.discard)
            for k in context.cohort
        )
        attend = tuple(sorted({*context.cohort, *context.in_flight})) if context.round % 2 == 0 else ()
        return (SyncPoint(start=start, attend=attend),), state


@dataclass(frozen=True, kw_only=True)
class Cohorts(Selection):
    """The cohorts that the test names, round by round."""

    rounds: tuple[tuple[int, ...], ...]

    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        return self.rounds[context.round - 1], state


def skipping(
    like: FederatedMethod | None = None, *, cohorts: Sequence[tuple[int, ...]] = (), **fields: object
) -> FederatedMethod:
    like = fedavg() if like is None else like
    if cohorts:
        fields["selection"] = Cohorts(rounds=tuple(cohorts))
    return replace(like, pacing=EverySecondRound(**fields.pop("pacing", {})), **fields)  # type: ignore[arg-type]


def whole_sets(method: FederatedMethod, *, rounds: int, steps: int, **more: object) -> Engine:
    """Three clients whose every batch is all that they have."""
    options: dict[str, object] = {"num_clients": 3, "cohort_size": 3, "sizes": (4, 4, 4), "double": True} | more
    return local_engine(
        tiny_experiment(method, rounds=rounds, local_steps=steps, batch_size=4, **options)  # type: ignore[arg-type]
    )


def vector(update: ClientUpdate) -> Tensor:
    assert update.vector is not None
    return update.vector


NESTEROV = OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
@pytest.mark.parametrize("method", [fedavg(), fedprox(mu=0.8)], ids=["fedavg", "fedprox"])
def test_two_rounds_of_four_steps_with_one_skipped_aggregation_are_one_round_of_eight(
    method: FederatedMethod, keep: str
) -> None:
    optimizer = replace(NESTEROV, keep=keep)
    cut = run_rounds(whole_sets(skipping(method), rounds=4, steps=4, optimizer=optimizer))
    whole = run_rounds(whole_sets(method, rounds=2, steps=8, optimizer=optimizer))
    torch.testing.assert_close(cut.vector, whole.vector, rtol=0, atol=1e-12)
    assert [record.sync_points for record in cut.records] == [0, 1, 0, 1]


def test_a_skipped_round_moves_the_model_down_only_and_its_resumption_up_only() -> None:
    engine = whole_sets(skipping(), rounds=2, steps=4)
    records = run_rounds(engine).records
    assert [(r.values_down, r.values_up) for r in records] == [(3 * 28, 0), (0, 3 * 28)]
    assert [(r.attendees, r.aggregation_weights) for r in records] == [
        ((), ()),
        ((0, 1, 2), pytest.approx((1 / 3, 1 / 3, 1 / 3))),
    ]
    assert [r.local_steps for r in records] == [12, 12]


def test_a_skipped_round_leaves_the_servers_model_as_it_was() -> None:
    engine = whole_sets(skipping(), rounds=1, steps=4)
    start = engine.start()
    state = run_rounds(engine, start)
    assert torch.equal(state.vector, start.vector) and state.version == start.version
    assert sorted(state.held) == [0, 1, 2]
    assert {progress.anchor_version for progress in state.held.values()} == set(state.anchors) == {0}
    assert torch.equal(state.anchors[0], start.vector)


def test_held_work_is_counted_from_its_anchor_on() -> None:
    engine = whole_sets(skipping(), rounds=2, steps=4)
    state = run_rounds(engine, rounds=1)
    update = play_round(engine, state).updates[1]
    assert (update.steps, update.num_samples, update.anchor_version) == (8, 8, 0)
    assert update.effective_steps == 8.0
    losses = [record.train_loss for record in run_rounds(engine).records]
    assert losses[0] is not None and losses[1] is not None
    means = [u.train_loss for u in play_round(engine, state).updates]
    assert np.mean(means) == pytest.approx((losses[0] + losses[1]) / 2, rel=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_effective_steps_of_resumed_work_are_those_of_unbroken_work(nesterov: bool) -> None:
    """The momentum buffer goes on through a skipped aggregation, so the gradients' weights do too."""
    optimizer = OptimizerSettings(momentum=0.9, nesterov=nesterov)
    cut = whole_sets(skipping(), rounds=2, steps=4, optimizer=optimizer)
    whole = whole_sets(fedavg(), rounds=1, steps=8, optimizer=optimizer)
    resumed = play_round(cut, run_rounds(cut, rounds=1)).updates[0]
    unbroken = play_round(whole, whole.start()).updates[0]
    assert resumed.effective_steps == pytest.approx(unbroken.effective_steps, rel=1e-12)


def test_a_held_client_that_is_absent_attends_with_its_work() -> None:
    """Clients 0 and 1 work in round 1, client 2 in round 2; all three attend then, only client 2 received a model."""
    method = skipping(cohorts=[(0, 1), (2,)])
    engine = whole_sets(method, rounds=2, steps=4, cohort_size=2)
    state = run_rounds(engine, rounds=1)
    round = play_round(engine, state)
    assert round.attendees == (0, 1, 2)
    moved = {(k, way): n for (k, way, _), n in round.ledger.values.items()}
    assert moved == {(0, "up"): 28, (1, "up"): 28, (2, "up"): 28, (2, "down"): 28}
    alone = whole_sets(fedavg(), rounds=1, steps=4)
    first = play_round(alone, alone.start())
    torch.testing.assert_close(vector(round.updates[0]), vector(first.updates[0]), rtol=0, atol=0)
    assert [u.steps for u in round.updates] == [4, 4, 4]
    torch.testing.assert_close(
        round.vector, torch.stack([vector(u) for u in round.updates]).mean(0), rtol=0, atol=1e-14
    )
    assert run_rounds(engine).held == {}


def test_a_held_client_keeps_waiting_until_it_is_asked() -> None:
    @dataclass(frozen=True, kw_only=True)
    class FirstOnly(Pacing):
        def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
            start = tuple(LocalJob(client=k, steps=context.work[k].steps) for k in context.cohort)
            return (SyncPoint(start=start, attend=context.cohort[:1]),), state

    method = replace(fedavg(), pacing=FirstOnly(), selection=Cohorts(rounds=((0, 1), (0, 2), (0, 1))))
    states = []
    engine = whole_sets(method, rounds=3, steps=2, cohort_size=2)
    state = engine.start()
    for _ in range(3):
        state = run_rounds(engine, state, rounds=1)
        states.append(state)
    assert [sorted(s.held) for s in states] == [[1], [1, 2], [1, 2]]
    assert [sorted(s.anchors) for s in states] == [[0], [0, 1], [1, 2]]
    assert {k: t.anchor_version for k, t in states[2].held.items()} == {1: 2, 2: 1}


def test_work_that_is_not_resumed_is_thrown_away() -> None:
    method = skipping(pacing={"discard": True})
    found = run_rounds(whole_sets(method, rounds=2, steps=4))
    expected = run_rounds(whole_sets(fedavg(), rounds=1, steps=4))
    torch.testing.assert_close(found.vector, expected.vector, rtol=0, atol=1e-12)
    assert found.held == {}


def test_held_work_leaves_no_memory_behind_once_it_is_aggregated() -> None:
    engine = whole_sets(skipping(), rounds=2, steps=4)
    assert sorted(run_rounds(engine, rounds=1).memories) == [0, 1, 2]
    assert run_rounds(engine).memories == {}


@dataclass(frozen=True, kw_only=True)
class Given(Pacing):
    """The plan that the test names."""

    points: tuple[SyncPoint, ...]

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        return self.points, state


def job(client: int, steps: int = 2, *, resume: bool = False) -> LocalJob:
    return LocalJob(client=client, steps=steps, resume=resume)


BROKEN = {
    "a client that is not of the cohort": (SyncPoint(start=(job(2),), attend=(2,)),),
    "more steps than the client has": (SyncPoint(start=(job(0, 5),), attend=(0,)),),
    "more steps in all": (SyncPoint(start=(job(0, 3),), attend=(0,)), SyncPoint(start=(job(0, 3),), attend=(0,))),
    "an attendee without work": (SyncPoint(start=(job(0),), attend=(0, 1)),),
    "an attendee without work before the last point": (
        SyncPoint(start=(job(0),), attend=(0, 1)),
        SyncPoint(start=(job(0),), attend=(0,)),
    ),
    "a resumption of nothing": (SyncPoint(start=(job(0, resume=True),), attend=(0,)),),
    "a second job while the first is out": (
        SyncPoint(start=(job(0), job(1)), attend=(1,)),
        SyncPoint(start=(job(0),), attend=(0,)),
    ),
}


@pytest.mark.parametrize("points", BROKEN.values(), ids=BROKEN.keys())
def test_a_plan_that_cannot_be_played_is_refused_and_names_the_client(points: tuple[SyncPoint, ...]) -> None:
    method = replace(fedavg(), pacing=Given(points=points), selection=Cohorts(rounds=((0, 1),)))
    engine = whole_sets(method, rounds=1, steps=4, cohort_size=2)
    with pytest.raises(InvariantError, match=r"client [012]"):
        run_rounds(engine)


def test_a_client_may_go_on_from_its_own_parameters_within_a_round() -> None:
    """Two jobs of two steps, the second resumed without a sync point of its own, are one of four."""
    points = (
        SyncPoint(start=(job(0), job(1, 4)), attend=(0,)),
        SyncPoint(start=(job(0, resume=True),), attend=(0, 1)),
    )
    method = replace(fedavg(), pacing=Given(points=points), selection=Cohorts(rounds=((0, 1),)))
    engine = whole_sets(method, rounds=1, steps=4, cohort_size=2, optimizer=NESTEROV)
    round = play_round(engine, engine.start())
    plain = whole_sets(replace(fedavg(), selection=Cohorts(rounds=((0, 1),))), rounds=1, steps=4, optimizer=NESTEROV)
    expected = play_round(plain, plain.start())
    for found, wanted in zip(round.updates, expected.updates, strict=True):
        assert torch.equal(vector(found), vector(wanted))
    assert [u.steps for u in round.updates] == [4, 4]
    assert {(k, way): n for (k, way, _), n in round.ledger.values.items()} == {
        (0, "down"): 28,
        (1, "down"): 28,
        (0, "up"): 56,
        (1, "up"): 28,
    }


def test_a_job_of_no_steps_sends_the_anchor_back() -> None:
    points = (SyncPoint(start=(job(0, 0), job(1, 0)), attend=(0, 1)),)
    method = replace(fedavg(), pacing=Given(points=points), selection=Cohorts(rounds=((0, 1),)))
    engine = whole_sets(method, rounds=1, steps=4, cohort_size=2)
    start = engine.start()
    round = play_round(engine, start)
    assert all(torch.equal(vector(u), start.vector) for u in round.updates)
    assert [np.isnan(u.train_loss) for u in round.updates] == [True, True]


def test_clients_in_turn_on_one_module_do_not_touch_each_other() -> None:
    """Batch norm's statistics and gradients are a client's own, whoever shares the process."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    together = whole_sets(fedavg(), rounds=1, steps=4, build=build)
    crowd = play_round(together, together.start())
    for client in range(3):
        alone = whole_sets(replace(fedavg(), selection=Cohorts(rounds=((client,),))), rounds=1, steps=4, build=build)
        assert torch.equal(vector(crowd.updates[client]), vector(play_round(alone, alone.start()).updates[0]))
