"""Whole runs: folding, lost workers, failing clients, limits, absence, drift and the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.components.local import CrossEntropy, LocalStep, LocalTerm, Objective
from fedsweep.components.pacing import FixedInterval, Pacing
from fedsweep.components.probes import Probe
from fedsweep.errors import ClientJobError, RunError, WorkerLost
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import LocalJob, RoundContext, RoundRecord, State, SyncPoint
from fedsweep.runtime.engine import Engine, experiment_layout
from fedsweep.runtime.experiment import Experiment, StopLimits, client_side
from fedsweep.runtime.fleet import Fleet, Handle, LocalFleet, SegmentResult, combine
from fedsweep.runtime.messages import Arrays, OptimizerSettings, Segment
from fedsweep.runtime.state import RunState
from fedsweep.runtime.worker import Worker
from fedsweep.streams import Stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree
from fedsweep.world.availability import Availability
from fedsweep.world.devices import DeviceProfile
from fedsweep.world.drift import Drift


def worker_of(experiment: Experiment, index: int = 0) -> Worker:
    return Worker(
        client_side(experiment),
        experiment.world.data,
        experiment.build_model(),
        layout=experiment_layout(experiment),
        index=index,
    )


class Workers(Fleet):
    """Several workers in this process that average through the server alone, and that may be lost."""

    def __init__(self, experiment: Experiment, count: int = 1, lost_at: Sequence[int] = ()) -> None:
        self._workers = [worker_of(experiment, index) for index in range(count)]
        self._lost_at, self.plays, self.repairs = list(lost_at), 0, 0

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def folds(self) -> bool:
        return False

    def play(self, segment: Segment, anchor: NDArray[np.float32], memories: Mapping[int, Handle]) -> SegmentResult:
        self.plays += 1
        answers = [worker.run(segment, anchor, memories) for worker in self._workers]
        if self.plays in self._lost_at:
            raise WorkerLost("a worker of the test is gone")
        return combine(answers, {k: m for answer in answers for k, m in answer.memories.items()})

    def measure(
        self, clients: Sequence[int], probes: Sequence[Probe], vector: NDArray[np.float32]
    ) -> Mapping[int, Arrays]:
        return self._workers[0].measure(clients, probes, vector)

    def repair(self) -> None:
        self.repairs += 1


def timeless(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    return [replace(r, timestamp_ms=0, wall_time_s=0, eval_time_s=0, server_time_s=0) for r in records]


def assert_same(found: RunState, expected: RunState) -> None:
    assert torch.equal(found.vector, expected.vector)
    assert found.version == expected.version
    assert timeless(found.records) == timeless(expected.records)
    assert found.held == expected.held


METHODS = {
    "fedavg": fedavg(),
    "dynamicsgd": dynamicsgd(),
    "two speeds": dynamicfl(high_interval=2, low_interval=3, group="random", sync_rule="paper"),
    "only high": dynamicfl(high_interval=2, low_interval=5, group="random", high_only=True, idle_clients="authors"),
    "proximal": merge(fedprox(mu=0.5), dynamicsgd()),
}
KEPT = {keep: OptimizerSettings(momentum=0.9, nesterov=True, keep=keep) for keep in ("reset", "persist", "average")}


# -- the fleet changes no bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("name", METHODS)
def test_aggregating_among_workers_gives_the_servers_bits(name: str, keep: str) -> None:
    experiment = tiny_experiment(METHODS[name], local_steps=7, optimizer=KEPT[keep])
    folded = run_rounds(Engine(experiment, LocalFleet(worker_of(experiment))))
    unfolded = run_rounds(Engine(experiment, Workers(experiment)))
    assert_same(folded, unfolded)


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_workers_changes_no_bit(name: str) -> None:
    experiment = tiny_experiment(METHODS[name], cohort_size=5, local_steps=5, optimizer=KEPT["persist"])
    one, three = (run_rounds(Engine(experiment, Workers(experiment, count))) for count in (1, 3))
    assert_same(one, three)


@pytest.mark.parametrize("lost_at", [(1,), (2,), (4,), (5, 6)])
def test_a_lost_worker_changes_no_bit(lost_at: tuple[int, ...]) -> None:
    experiment = tiny_experiment(METHODS["two speeds"], local_steps=6, optimizer=KEPT["persist"])
    fleet, notes = Workers(experiment, 2, lost_at), []
    found = run_rounds(Engine(experiment, fleet, on_repair=notes.append))
    assert_same(found, run_rounds(Engine(experiment, Workers(experiment, 2))))
    assert fleet.repairs == len(notes) == len(lost_at)
    assert notes[0].startswith("round 1: a worker of the test is gone")


def test_a_fleet_that_is_lost_every_time_ends_the_run() -> None:
    experiment = tiny_experiment(fedavg())
    fleet = Workers(experiment, lost_at=range(1, 100))
    with pytest.raises(RunError, match="round 1"):
        run_rounds(Engine(experiment, fleet))
    assert fleet.plays == fleet.repairs


def test_an_interrupted_round_can_be_played_again_on_the_same_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is a function of the run's state alone: what an unfinished try left on the workers is forgotten."""
    experiment = tiny_experiment(replace(fedavg(), objective=Stumbles(client=None, position=2)), local_steps=4)
    engine, start = local_engine(experiment), local_engine(experiment).start()
    expected = run_rounds(engine, start)
    monkeypatch.setattr(Stumbles, "armed", True)
    with pytest.raises(ClientJobError):
        run_rounds(engine, start)
    monkeypatch.setattr(Stumbles, "armed", False)
    assert_same(run_rounds(engine, start), expected)


# -- failing clients -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stumbles(Objective):
    """Cross-entropy that fails at one step, counted from 0, of a client; None: of every client while armed."""

    client: int | None
    position: int
    how: str = "raise"
    armed: ClassVar[bool] = False

    def loss(self, step: LocalStep) -> Tensor:
        loss = CrossEntropy().loss(step)
        here = Stumbles.armed if self.client is None else step.stream.key[3] == self.client
        if here and step.position == self.position:
            if self.how == "raise":
                raise ZeroDivisionError("nothing left")
            return loss * float("nan")
        return loss


@dataclass(frozen=True, kw_only=True)
class Poison(LocalTerm):
    """A gradient that is not a number at one step, counted from 0, of a client."""

    client: int
    position: int
    name: str = "poison"

    def gradient(self, step: LocalStep) -> ParamTree:
        here = step.stream.key[3] == self.client and step.position == self.position
        value = float("nan") if here else 0.0
        return {name: torch.full_like(tensor, value) for name, tensor in step.params.items()}


@pytest.mark.parametrize("how", ["raise", "nan"])
@pytest.mark.parametrize("position", [0, 2, 5])
@pytest.mark.parametrize("pacing", [fedavg().pacing, FixedInterval(interval=1), FixedInterval(interval=4)])
def test_a_failing_client_is_named_with_round_and_step(pacing: Pacing, position: int, how: str) -> None:
    method = replace(fedavg(), objective=Stumbles(client=4, position=position, how=how), pacing=pacing)
    experiment = tiny_experiment(method, cohort_size=6, local_steps=6)
    with pytest.raises(ClientJobError) as caught:
        run_rounds(local_engine(experiment))
    assert (caught.value.client, caught.value.round, caught.value.step) == (4, 1, position + 1)
    assert str(caught.value).startswith(f"client 4 failed in round 1, local step {position + 1}: ")
    assert ("ZeroDivisionError: nothing left" if how == "raise" else "loss is not finite") in caught.value.reason


@pytest.mark.parametrize("pacing", [fedavg().pacing, FixedInterval(interval=1, sync_rule="paper")])
def test_a_model_that_is_not_finite_does_not_reach_the_server(pacing: Pacing) -> None:
    method = FederatedMethod(name="test", source="", terms=(Poison(client=2, position=3),), pacing=pacing)
    with pytest.raises(ClientJobError, match=r"client 2 failed in round 1, local step 4: .*not finite"):
        run_rounds(local_engine(tiny_experiment(method, cohort_size=6, local_steps=4)))


def test_a_diverging_run_names_the_first_client_that_diverged() -> None:
    experiment = tiny_experiment(fedavg(), learning_rate=1e38, rounds=50, local_steps=4)
    with pytest.raises(ClientJobError, match=r"client \d failed in round 1, local step [1-4]: .*learning rate"):
        run_rounds(local_engine(experiment))


# -- limits ----------------------------------------------------------------------------------------------------------

ROUND_BYTES = 4 * 2 * 3 * 28


def stopped(experiment: Experiment) -> tuple[int, str | None]:
    engine = local_engine(experiment)
    state, reason = engine.start(), None
    while reason is None:
        reason = engine.finished_by(state)
        if reason is None:
            state, reason = engine.advance(state)
    return state.round, reason


@pytest.mark.parametrize(("spare", "rounds"), [(0, 2), (-1, 1), (ROUND_BYTES - 1, 2), (-ROUND_BYTES - 1, 0)])
def test_a_byte_limit_ends_the_run_before_the_round_that_would_pass_it(spare: int, rounds: int) -> None:
    stop = StopLimits(total_bytes=2 * ROUND_BYTES + spare)
    assert stopped(tiny_experiment(fedavg(), rounds=9, stop=stop)) == (rounds, "total_bytes")


@dataclass(frozen=True, kw_only=True)
class Chatty(LocalTerm):
    """Sends 28 values more."""

    name: str = "chatty"
    sends = True

    def finish(self, memory: dict[str, object], work: object) -> tuple[dict[str, object], dict[str, Tensor]]:  # type: ignore[override]
        return memory, {"more": torch.zeros(28)}


@pytest.mark.parametrize(("spare", "rounds"), [(0, 2), (-1, 1)])
def test_a_byte_limit_counts_what_terms_send(spare: int, rounds: int) -> None:
    method = FederatedMethod(name="test", source="", terms=(Chatty(),))
    stop = StopLimits(total_bytes=3 * ROUND_BYTES + spare)  # a round costs half as much again
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


# -- the virtual clock -----------------------------------------------------------------------------------------------

# One sample costs 6 x 24 FLOPs, a model 28 x 32 bits. At a batch of 4: 4 x 144 / 1152 = 1/2 s and 1/4 s overhead a
# step; down 1/2 + 896 / 448 = 5/2 s, up 1/4 + 896 / 896 = 5/4 s.
DEVICE = DeviceProfile(
    flops_per_s=1152.0,
    overhead_s=0.25,
    down_bits_per_s=448.0,
    up_bits_per_s=896.0,
    down_latency_s=0.5,
    up_latency_s=0.25,
)
STEP, DOWN, UP = 0.75, 2.5, 1.25


def with_devices(experiment: Experiment, change: Callable[[int], DeviceProfile] = lambda k: DEVICE) -> Experiment:
    profiles = tuple(replace(p, device=change(p.client)) for p in experiment.world.profiles)
    return replace(experiment, world=replace(experiment.world, profiles=profiles))


def clock(
    method: FederatedMethod, change: Callable[[int], DeviceProfile] = lambda k: DEVICE, **fields: object
) -> list[float]:
    options: dict[str, object] = {"num_clients": 3, "cohort_size": 3, "sizes": (16, 16, 16), "rounds": 2} | fields
    state = run_rounds(local_engine(with_devices(tiny_experiment(method, **options), change)))  # type: ignore[arg-type]
    assert state.clock == state.records[-1].sim_time_s
    return [float(r.sim_time_s) for r in state.records if r.sim_time_s is not None]


def test_the_clock_adds_download_steps_and_upload() -> None:
    assert clock(fedavg()) == [DOWN + 4 * STEP + UP, 2 * (DOWN + 4 * STEP + UP)]


def test_the_clock_counts_the_samples_of_the_last_small_batch() -> None:
    """Ten samples in batches of 4: three steps of overhead, ten samples of arithmetic."""
    assert clock(fedavg(), sizes=(10, 10, 10), rounds=1) == [DOWN + 3 * 0.25 + 10 * 144 / 1152 + UP]


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    slow = replace(DEVICE, flops_per_s=1152.0 / 4, down_bits_per_s=112.0)
    times = clock(fedavg(), lambda k: slow if k == 1 else DEVICE, rounds=1)
    assert times == [(0.5 + 8.0) + 4 * (0.25 + 2.0) + UP]


def test_every_sync_point_waits_for_its_attendees_and_pays_its_messages() -> None:
    cut = replace(fedavg(), pacing=FixedInterval(interval=2, sync_rule="paper"))
    assert clock(cut, rounds=1) == [2 * (DOWN + 2 * STEP + UP)]
    slow = replace(DEVICE, overhead_s=10.0)
    assert clock(cut, lambda k: slow if k == 0 else DEVICE, rounds=1) == [2 * (DOWN + 2 * 10.5 + UP)]


def test_a_low_client_that_is_through_early_costs_no_time() -> None:
    """Two fast high clients at interval 1 take four exchanges; the low one's single job fits beside them."""
    method = dynamicfl(high_interval=1, low_interval=4, group="random", sync_rule="paper")
    assert clock(method, rounds=1, local_steps=4) == [4 * (DOWN + STEP + UP)]


def test_a_skipped_aggregation_saves_an_upload_and_its_resumption_a_download() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Skip(Pacing):
        def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
            second = context.round % 2 == 0
            start = tuple(LocalJob(client=k, steps=context.work[k].steps, resume=second) for k in context.cohort)
            return (SyncPoint(start=start, attend=context.cohort if second else ()),), state

    assert clock(replace(fedavg(), pacing=Skip())) == [DOWN + 4 * STEP, DOWN + 8 * STEP + UP]


def test_a_job_starts_no_earlier_than_it_may() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(Pacing):
        def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
            start = tuple(LocalJob(client=k, steps=1, not_before=10.0 * k) for k in context.cohort)
            return (SyncPoint(start=start, attend=context.cohort),), state

    assert clock(replace(fedavg(), pacing=Later()), rounds=1) == [20.0 + DOWN + STEP + UP]


@pytest.mark.parametrize(("spare", "rounds"), [(0.0, 2), (-0.01, 1), (6.7, 2)])
def test_a_time_limit_ends_the_run_before_the_round_that_would_pass_it(spare: float, rounds: int) -> None:
    stop = StopLimits(sim_time_s=2 * (DOWN + 4 * STEP + UP) + spare)
    experiment = tiny_experiment(fedavg(), num_clients=3, sizes=(16, 16, 16), rounds=9, stop=stop)
    assert stopped(with_devices(experiment)) == (rounds, "sim_time_s")


def test_without_devices_there_is_no_clock_and_no_time_limit() -> None:
    state = run_rounds(local_engine(tiny_experiment(fedavg(), stop=StopLimits(sim_time_s=0.0))))
    assert state.clock is None and state.round == 3
    assert [r.sim_time_s for r in state.records] == [None] * 3


# -- who is there, and with what -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Present(Availability):
    """The clients of each round."""

    rounds: tuple[tuple[int, ...], ...]

    def probability(
        self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> NDArray[np.float64]:
        there = self.rounds[round - 1]
        return np.array([1.0 if k in there else -1.0 for k in range(len(capabilities))])


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
        return CrossEntropy().loss(step)


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
    played = engine._player.play(engine.planner.plan(state), state, attempt=0, keep=lambda seam, tree: None)
    assert [u.classes_since_anchor for u in played.updates] == [(0, 1)] * 3
    assert [u.samples_since_anchor for u in played.updates] == [8, 4, 2]
    assert [u.num_samples for u in played.updates] == [4, 2, 1]


# -- figures ---------------------------------------------------------------------------------------------------------


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


def test_a_finished_run_is_a_chain_of_states_that_are_never_changed() -> None:
    engine = local_engine(tiny_experiment(METHODS["two speeds"], local_steps=6, optimizer=KEPT["persist"]))
    states = [engine.start()]
    copies = [states[0].vector.clone()]
    for _ in range(3):
        states.append(run_rounds(engine, states[-1], rounds=1))
        copies.append(states[-1].vector.clone())
    assert all(torch.equal(s.vector, c) for s, c in zip(states, copies, strict=True))
    assert_same(run_rounds(engine, states[1]), states[3])
