"""Clients that are late or vanish: who is aggregated, when the round ends, and what the lost work costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.ifca import ifca
from fedsweep.components.local import LocalTerm, LocalWork, Memory
from fedsweep.components.planning import Pacing, Selection
from fedsweep.engine.dropouts import close_round
from fedsweep.engine.forecast import check_first_round, forecast
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientWork, LocalJob, Payload, RoundContext, State, SyncPoint
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree
from fedsweep.world.devices import ClientTime, DeviceProfile, fails
from fedsweep.world.stragglers import Deadline, DropOut, OverSelect, PartialWork, StragglerPolicy, WaitForAll

# A sample costs 6 x 24 FLOPs, a model 28 values. At a batch of 4 a step takes 4 x 144 / 1152 + 1/4 = 3/4 s; a model
# takes 1/2 + 896 / 448 = 5/2 s down and 1/4 + 896 / 896 = 5/4 s up. 16 samples are 4 steps, a round 27/4 s.
DEVICE = DeviceProfile(
    flops_per_s=1152.0,
    overhead_s=0.25,
    down_bits_per_s=448.0,
    up_bits_per_s=896.0,
    down_latency_s=0.5,
    up_latency_s=0.25,
)
STEP, DOWN, UP = 0.75, 2.5, 1.25
ROUND = DOWN + 4 * STEP + UP
SLOW = replace(DEVICE, flops_per_s=1152.0 / 4, overhead_s=1.0)  # four times as long for a step: 3 s
MODEL_BYTES, STEP_FLOPS = 4 * 28, 4 * 144


@dataclass(frozen=True, kw_only=True)
class Chosen(Selection):
    """The same clients in every round, or by round."""

    clients: tuple[tuple[int, ...], ...]

    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        return self.clients[(context.round - 1) % len(self.clients)], state


def choosing(method: FederatedMethod, *clients: tuple[int, ...]) -> FederatedMethod:
    return replace(method, selection=Chosen(clients=clients))


def world(
    method: FederatedMethod,
    policy: StragglerPolicy | None,
    change: Callable[[int], DeviceProfile] = lambda k: DEVICE,
    **fields: object,
) -> Experiment:
    options: dict[str, object] = {"num_clients": 3, "cohort_size": 3, "sizes": (16, 16, 16), "rounds": 1} | fields
    experiment = tiny_experiment(method, stragglers=policy or WaitForAll(), **options)  # type: ignore[arg-type]
    profiles = tuple(replace(p, device=change(p.client)) for p in experiment.world.profiles)
    return replace(experiment, world=replace(experiment.world, profiles=profiles))


def played(*args: object, **fields: object) -> RunState:
    return run_rounds(local_engine(world(*args, **fields)))  # type: ignore[arg-type]


def bits(state: RunState) -> bytes:
    return state.vector.numpy().tobytes()


def slow_first(client: int) -> DeviceProfile:
    return SLOW if client == 0 else DEVICE


# -- who is aggregated ---------------------------------------------------------------------------------------------


def test_a_deadline_aggregates_those_in_time_alone() -> None:
    """Client 0 needs 2.5 + 12 + 1.25 s; the others' weights are those of a round without it."""
    late = played(fedavg(), Deadline(deadline_s=8.0), slow_first, sizes=(16, 12, 16))
    without = played(choosing(fedavg(), (1, 2)), None, slow_first, sizes=(16, 12, 16))
    record = late.records[0]
    assert (record.cohort, record.attendees) == ((0, 1, 2), (1, 2))
    assert record.aggregation_weights == pytest.approx((12 / 28, 16 / 28))
    assert bits(late) == bits(without)
    assert late.clock == 8.0


def test_a_deadline_waits_for_the_least_number_of_updates() -> None:
    late = played(fedavg(), Deadline(deadline_s=1.0, min_updates=2), slow_first)
    assert late.records[0].attendees == (1, 2)
    assert late.clock == ROUND


def test_over_selection_asks_more_clients_and_keeps_the_fastest() -> None:
    """Of 1.3 x 3, that is 4 of 6, the three fastest; the round lasts as long as the third."""
    state = played(
        fedavg(),
        OverSelect(over_selection=1.3),
        lambda k: replace(DEVICE, overhead_s=0.25 * (k + 1)),
        num_clients=6,
        sizes=(16,) * 6,
    )
    record = state.records[0]
    assert len(record.cohort) == 4
    assert record.attendees == record.cohort[:3]
    assert state.clock == DOWN + 4 * (0.5 + 0.25 * (record.cohort[2] + 1)) + UP


def test_over_selection_takes_no_more_clients_than_there_are() -> None:
    state = played(fedavg(), OverSelect(over_selection=2.0), slow_first)
    assert (state.records[0].cohort, state.records[0].attendees) == ((0, 1, 2), (0, 1, 2))


def test_partial_work_is_the_model_after_the_last_full_epoch() -> None:
    """Two epochs of 4 steps; the slow client is back by 16 s with one: 2.5 + 12 + 1.25 s."""
    state = played(choosing(fedavg(), (0,)), PartialWork(deadline_s=16.0), slow_first, local_epochs=2)
    record = state.records[0]
    assert record.local_steps == 4 and record.flops == 4 * STEP_FLOPS
    assert state.clock == DOWN + 12.0 + UP
    assert bits(state) == bits(played(choosing(fedavg(), (0,)), None, slow_first, local_epochs=1))


def test_partial_work_leaves_clients_in_time_alone() -> None:
    state = played(fedavg(), PartialWork(deadline_s=16.0), slow_first, local_epochs=2)
    assert state.records[0].attendees == (0, 1, 2)
    assert state.records[0].local_steps == 4 + 8 + 8
    assert state.clock is not None and state.clock <= 16.0


@pytest.mark.parametrize(("deadline_s", "steps"), [(30.0, 4), (23.75, 4), (23.0, 0)])
def test_who_stops_early_takes_all_that_its_work_has_outside_its_steps(deadline_s: float, steps: int) -> None:
    """IFCA's three losses of 16 samples are 8 s of the slow client, before the first of its passes of 12 s."""
    method = choosing(ifca(clusters=3), (0,))
    engine = local_engine(world(method, PartialWork(deadline_s=deadline_s), slow_first, local_epochs=4))
    plan = engine.planner.plan(engine.start())
    assert sum(job.steps for point in plan.points for job in point.start) == steps
    assert plan.clock == (DOWN + 8.0 + 12.0 + UP if steps else deadline_s)


def test_partial_work_of_local_steps_stops_at_passes_over_the_data() -> None:
    """Ten steps at 4 a pass: in time for 9 steps are two passes, 8 steps."""
    time = ClientTime(download_s=1.0, compute_s=10.0, upload_s=1.0)
    work = ClientWork(steps=10, batch_size=4, whole_batches=False, num_samples=16)
    policy, fails = PartialWork(deadline_s=11.0), lambda k: False
    closing = close_round(policy, {7: time}, {7: work}, steps_s={7: 10.0}, fails=fails, wanted=1)
    assert closing.cut == {7: 8} and not closing.lost
    assert closing.duration_s == pytest.approx(10.0)


def test_a_round_without_survivors_keeps_the_model_and_moves_the_clock() -> None:
    experiment = world(feddh(), Deadline(deadline_s=2.0, min_updates=0), rounds=2)
    engine = local_engine(experiment)
    start = engine.start()
    state = run_rounds(engine, start)
    assert torch.equal(state.vector, start.vector)
    assert state.clock == 4.0
    assert [r.attendees for r in state.records] == [(), ()]
    assert [r.train_loss for r in state.records] == [None, None]
    assert all(r.test_accuracy is not None for r in state.records)


# -- failures --------------------------------------------------------------------------------------------------------


def failing(experiment: Experiment, rounds: int) -> list[tuple[int, ...]]:
    """The clients that are left of each round."""
    devices = {p.client: p.device for p in experiment.world.profiles if p.device is not None}
    return [
        tuple(k for k in devices if not fails(devices[k], seed=experiment.seed, round=r, client=k))
        for r in range(1, rounds + 1)
    ]


def shaky(client: int) -> DeviceProfile:
    return replace(DEVICE, drop_probability=0.4)


@pytest.mark.parametrize(
    "method",
    [fedavg(), dynamicsgd(sync_rule="paper"), dynamicfl(high_interval=1, low_interval=4, group="random")],
    ids=lambda method: method.name,
)
def test_a_client_that_vanishes_is_out_for_the_whole_round(method: FederatedMethod) -> None:
    """Also where the round has several sync points; who is left is the same for every method."""
    experiment = world(method, None, shaky, rounds=4)
    state = run_rounds(local_engine(experiment))
    left = failing(experiment, 4)
    assert [r.attendees for r in state.records] == left
    assert any(len(clients) < 3 for clients in left) and any(left)


def test_clients_without_a_job_cannot_drop_out() -> None:
    """One client of three works; the others are sent nothing, so nothing of theirs is lost."""
    method = dynamicfl(high_interval=1, low_interval=4, group="random", group_size=1, high_only=True)
    experiment = world(method, None, lambda k: replace(DEVICE, drop_probability=1.0), rounds=2)
    for record in run_rounds(local_engine(experiment)).records:
        assert (record.values_down, record.values_up, record.local_steps) == (28, 0, 4)
    calm = run_rounds(local_engine(world(method, None, rounds=1))).records[0]
    assert calm.local_steps == 4


def test_vanished_clients_leave_the_bits_of_a_round_without_them() -> None:
    experiment = world(dynamicsgd(), None, shaky, rounds=4, local_steps=4)
    left = failing(experiment, 4)
    assert () not in left
    without = world(choosing(dynamicsgd(), *left), None, rounds=4, local_steps=4)
    assert bits(run_rounds(local_engine(experiment))) == bits(run_rounds(local_engine(without)))


def test_vanished_clients_are_noticed_when_the_others_are_through_or_at_the_deadline() -> None:
    gone = replace(SLOW, drop_probability=1.0)
    assert played(fedavg(), None, lambda k: gone if k == 0 else DEVICE).clock == ROUND
    assert played(fedavg(), DropOut(deadline_s=20.0), lambda k: gone if k == 0 else DEVICE).clock == 20.0
    assert played(fedavg(), None, lambda k: gone).clock == DOWN + 4 * 3.0 + UP


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_lost_work_counts_as_far_as_it_was_spent() -> None:
    """By 8 s the slow client has the model (2.5 s) and one of its steps of 3 s; it has not begun to send."""
    record = played(fedavg(), Deadline(deadline_s=8.0), slow_first).records[0]
    assert record.bytes_down == 3 * MODEL_BYTES and record.bytes_up == 2 * MODEL_BYTES
    assert record.local_steps == 4 + 4 + 1
    assert record.flops == 9 * STEP_FLOPS
    assert record.comm_cost == record.values_up + record.values_down == 5 * 28


def test_an_upload_that_had_begun_counts_in_full() -> None:
    """Done with its steps at 14.5 s, back at 15.75 s; the deadline is at 15 s."""
    record = played(fedavg(), Deadline(deadline_s=15.0), slow_first).records[0]
    assert record.attendees == (1, 2)
    assert record.bytes_up == 3 * MODEL_BYTES and record.local_steps == 12


@pytest.mark.parametrize(("local_epochs", "steps"), [(1, 4), (2, 8)])
def test_partial_work_that_is_late_is_not_sent(local_epochs: int, steps: int) -> None:
    """The slow one has its first four steps at 14.5 s, but would be back at 15.75 s; by 15 s it has no other."""
    record = played(fedavg(), PartialWork(deadline_s=15.0), slow_first, local_epochs=local_epochs).records[0]
    assert (record.attendees, record.sim_time_s) == ((1, 2), 15.0)
    assert record.bytes_down == 3 * MODEL_BYTES and record.bytes_up == 2 * MODEL_BYTES
    assert record.local_steps == 4 + 2 * steps


def test_a_client_that_vanishes_sends_nothing() -> None:
    gone = replace(DEVICE, drop_probability=1.0)
    record = played(fedavg(), None, lambda k: gone if k == 0 else DEVICE).records[0]
    assert record.bytes_down == 3 * MODEL_BYTES and record.bytes_up == 2 * MODEL_BYTES
    assert record.local_steps == 12


def test_a_client_that_vanishes_from_a_round_of_several_sync_points_trains_until_its_end() -> None:
    """The others end after 3 (DOWN + UP) + 4 STEP = 14.25 s; by then the slow one has taken 3 of its steps of 3 s."""
    gone = replace(SLOW, drop_probability=1.0)
    state = played(dynamicsgd(), None, lambda k: gone if k == 0 else DEVICE)
    assert state.clock == 3 * (DOWN + UP) + 4 * STEP
    assert state.records[0].attendees == (1, 2) and state.records[0].local_steps == 4 + 4 + 3


def test_the_forecast_is_the_run() -> None:
    experiment = world(fedavg(), Deadline(deadline_s=8.0), lambda k: replace(slow_first(k), drop_probability=0.3))
    experiment = replace(experiment, training=replace(experiment.training, rounds=5))
    state, expected = run_rounds(local_engine(experiment)), forecast(experiment)
    assert expected.local_steps == sum(r.local_steps for r in state.records)
    assert expected.total_bytes == state.total_bytes
    assert expected.flops == sum(r.flops for r in state.records)
    assert expected.sim_time_s == state.clock


@dataclass(frozen=True, kw_only=True)
class Visits(LocalTerm):
    """Remembers how often its client was there."""

    name: str = "visits"
    stateful: bool = True

    def init(self, params: ParamTree) -> Memory:
        return {"visits": torch.zeros(1)}

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return {"visits": memory["visits"] + 1}, {}


def test_a_client_that_drops_out_remembers_nothing_of_the_round() -> None:
    state = played(replace(fedavg(), terms=(Visits(),)), Deadline(deadline_s=8.0), slow_first, rounds=2)
    visits = {k: float(memory["terms"]["visits"]["visits"]) for k, memory in state.memories.items()}
    assert visits == {1: 2.0, 2: 2.0}
    assert not state.held


# -- what stays as it was, and what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("method", [fedavg(), fedprox(mu=0.1), dynamicsgd()], ids=lambda method: method.name)
def test_waiting_for_all_without_failures_changes_no_bit(method: FederatedMethod) -> None:
    plain, waiting = played(method, None, slow_first, rounds=3), played(method, DropOut(), slow_first, rounds=3)
    assert bits(plain) == bits(waiting) and plain.clock == waiting.clock
    kept = [replace(r, timestamp_ms=0, wall_time_s=0, eval_time_s=0, server_time_s=0) for r in plain.records]
    assert kept == [replace(r, timestamp_ms=0, wall_time_s=0, eval_time_s=0, server_time_s=0) for r in waiting.records]


def test_a_run_goes_on_to_the_same_bits() -> None:
    def chaotic(client: int) -> DeviceProfile:
        return replace(slow_first(client), drop_probability=0.3, jitter=0.4, compute_jitter=0.05)

    experiment = world(fedavg(), Deadline(deadline_s=9.0), chaotic, rounds=6)
    whole = run_rounds(local_engine(experiment))
    half = run_rounds(local_engine(experiment), rounds=3)
    again = run_rounds(local_engine(experiment), half)
    assert bits(again) == bits(whole) and again.clock == whole.clock
    assert [r.attendees for r in again.records] == [r.attendees for r in whole.records]
    assert len({r.attendees for r in whole.records}) > 1


@pytest.mark.parametrize("policy", [Deadline(deadline_s=9.0), OverSelect(), DropOut(deadline_s=9.0)])
def test_policies_that_judge_whole_rounds_refuse_several_sync_points(policy: StragglerPolicy) -> None:
    with pytest.raises(ConfigError, match="dynamicsgd synchronises 4 times in a round, but"):
        check_first_round(world(dynamicsgd(sync_rule="paper"), policy))


def test_work_that_is_carried_over_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Carrying(Pacing):
        def carries_work(self) -> bool:
            return True

        def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
            start = tuple(LocalJob(client=k, steps=1) for k in context.cohort)
            return (SyncPoint(start=start, attend=context.cohort),), state

    method = replace(fedavg(), pacing=Carrying())
    check_experiment(world(method, None))
    for refused in (world(method, Deadline(deadline_s=9.0)), world(method, None, shaky)):
        with pytest.raises(ConfigError, match="it is not defined what a client that drops out"):
            check_experiment(refused)


def test_two_methods_see_the_same_devices_noise_and_failures() -> None:
    def chaotic(client: int) -> DeviceProfile:
        return replace(slow_first(client), drop_probability=0.3, jitter=0.4, compute_jitter=0.05)

    policy = Deadline(deadline_s=9.0)
    states = [played(method, policy, chaotic, rounds=6) for method in (fedavg(), fedprox(mu=0.5), feddh())]
    for name in ("sim_time_s", "attendees", "cohort", "local_steps", "flops"):
        first, *others = [[getattr(record, name) for record in state.records] for state in states]
        assert all(other == first for other in others), name
    assert bits(states[0]) != bits(states[1])


def test_noise_is_the_same_for_methods_that_choose_other_clients() -> None:
    devices = [replace(DEVICE, drop_probability=0.5)] * 40
    everybody = np.array([[fails(d, seed=3, round=r, client=k) for k, d in enumerate(devices)] for r in (1, 2, 3)])
    again = np.array([[fails(devices[k], seed=3, round=r, client=k) for k in reversed(range(40))] for r in (1, 2, 3)])
    assert np.array_equal(everybody, again[:, ::-1])
    assert 0.3 < everybody.mean() < 0.7


@dataclass(frozen=True, kw_only=True)
class SeveralLater(Pacing):
    """One sync point in each of the first rounds, then two, as where a group is empty at first."""

    first: int

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        halves = [LocalJob(client=k, steps=1) for k in context.cohort]
        point = SyncPoint(start=tuple(halves), attend=context.cohort)
        return (point,) if context.round < self.first else (point, point), state


@pytest.mark.parametrize("first", [1, 2, 7])
def test_several_sync_points_in_a_later_round_are_refused_before_the_first(first: int) -> None:
    method = replace(fedavg(), pacing=SeveralLater(first=first))
    experiment = world(method, Deadline(deadline_s=1e9), rounds=10)
    with pytest.raises(ConfigError, match="synchronises 2 times in a round"):
        check_first_round(experiment)
    check_first_round(world(method, WaitForAll(), rounds=10))
