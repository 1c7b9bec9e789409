"""The virtual clock of whole rounds against closed forms for devices with round figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import stopped
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components import LocalTerm, Refinement, SyncContext
from fedsweep.components.planning import FixedInterval, Pacing
from fedsweep.experiment.experiment import Experiment, StopLimits
from fedsweep.method import FederatedMethod
from fedsweep.records import LocalJob, RoundContext, State, SyncPoint
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.world.devices import DeviceProfile
from fedsweep.world.stragglers import Deadline

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


@dataclass(frozen=True, kw_only=True)
class Carried(Pacing):
    """Client 0's work of the first round is waited for in the second; the others' in each."""

    def carries_work(self) -> bool:
        return True

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        start = tuple(
            LocalJob(client=k, steps=context.work[k].steps) for k in context.cohort if k not in context.in_flight
        )
        return (SyncPoint(start=start, attend=tuple(k for k in (0, 1, 2) if k or context.round % 2 == 0)),), state


def test_work_that_nobody_waits_for_does_not_hold_the_round() -> None:
    """Client 0 steps ten times as slowly; its upload waits for its steps, and round 2 for its upload."""
    slow = replace(DEVICE, overhead_s=6.5, flops_per_s=1152.0)
    round_s, job_s = DOWN + 4 * STEP + UP, DOWN + 4 * 7.0
    times = clock(replace(fedavg(), pacing=Carried()), lambda k: slow if k == 0 else DEVICE)
    assert times == [round_s, max(2 * round_s, job_s + UP)]
    late = replace(fedavg(), pacing=Carried())
    experiment = tiny_experiment(late, num_clients=3, cohort_size=3, sizes=(16, 16, 16), rounds=2)
    engine = local_engine(with_devices(experiment, lambda k: slow if k == 0 else DEVICE))
    first = run_rounds(engine, rounds=1)
    assert first.ready == {0: job_s}
    assert engine.planner.plan(first).context.ready == {0: job_s}
    assert run_rounds(engine, first).ready == {}


@dataclass(frozen=True, kw_only=True)
class Chatty(LocalTerm):
    """Sends as many values as the model has, once a job."""

    name: str = "chatty"
    sends = True

    def finish(self, memory: dict[str, object], work: object) -> tuple[dict[str, object], dict[str, Tensor]]:
        return memory, {"more": torch.zeros(28)}


@dataclass(frozen=True, kw_only=True)
class Busy(Refinement):
    """Computes for two seconds on the server."""

    def refine(self, state: State, vector: Tensor, updates: object, sync: SyncContext) -> tuple[Tensor, State]:
        sync.count_flops(2e13)
        return vector, state


# Registration is one value up: 32 bits and a latency.
REGISTERED = 0.25 + 32 / 896
ROUND = DOWN + 4 * STEP + UP


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (fedavg(), 0.0),
        (replace(fedavg(), terms=(Chatty(),)), 1.0),
        (replace(fedavg(), refinements=(Busy(),)), 2.0),
        (replace(fedavg(), pacing=FixedInterval(interval=2), terms=(Chatty(),)), 2.0),
    ],
)
def test_the_full_time_has_payloads_the_server_and_what_goes_before_round_one(
    method: FederatedMethod, more: float
) -> None:
    experiment = tiny_experiment(method, num_clients=3, cohort_size=3, sizes=(16, 16, 16), rounds=2)
    records = run_rounds(local_engine(with_devices(experiment))).records
    times = [float(record.sim_time_s or 0) for record in records]
    full = [float(record.full_time_s or 0) for record in records]
    assert full == pytest.approx([REGISTERED + number * more + time for number, time in enumerate(times, 1)])


def test_the_full_time_waits_for_whoever_is_slowest_with_its_payload() -> None:
    """Client 1 computes a second longer, client 0 sends each model a second longer, and its payload two."""
    slow, narrow = replace(DEVICE, overhead_s=0.5), replace(DEVICE, up_bits_per_s=896 / 2)
    experiment = tiny_experiment(
        replace(fedavg(), terms=(Chatty(),)), num_clients=2, cohort_size=2, sizes=(16, 16), rounds=1
    )
    engine = local_engine(with_devices(experiment, lambda k: slow if k else narrow))
    (record,) = run_rounds(engine).records
    assert record.sim_time_s == ROUND + 1
    assert record.full_time_s == pytest.approx(0.25 + 32 / 448 + max(ROUND + 1 + 1, ROUND + 1 + 2))


@pytest.mark.parametrize(("deadline_s", "more"), [(20.0, 0.0), (ROUND + 1, 0.0), (ROUND + 0.25, 0.75)])
def test_payloads_that_arrive_by_the_deadline_delay_no_round_that_lasts_until_it(
    deadline_s: float, more: float
) -> None:
    """Client 1 is always late; client 0's model is there after ROUND seconds, its payload one second later."""
    experiment = tiny_experiment(
        replace(fedavg(), terms=(Chatty(),)),
        num_clients=2,
        cohort_size=2,
        sizes=(16, 16),
        rounds=3,
        stragglers=Deadline(deadline_s=deadline_s),
    )
    engine = local_engine(with_devices(experiment, lambda k: replace(DEVICE, overhead_s=100.0) if k else DEVICE))
    records = run_rounds(engine).records
    assert [record.sim_time_s for record in records] == [number * deadline_s for number in (1, 2, 3)]
    full = [float(record.full_time_s or 0) for record in records]
    assert full == pytest.approx([REGISTERED + number * (deadline_s + more) for number in (1, 2, 3)])
