"""Work that clients keep over a round's end: what it goes with, what it costs, and what becomes of thrown-away work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedmix import fedmix
from fedsweep.components.local import LocalTerm, LocalWork, Memory
from fedsweep.components.planning import Pacing, SubModelPolicy, UniformSelection
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.records import (
    ClientProfile,
    LocalJob,
    Payload,
    RoundContext,
    RoundRecord,
    ServerContext,
    State,
    SyncPoint,
)
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.world.availability import ReplayAvailability
from fedsweep.world.devices import DeviceProfile
from fedsweep.world.replay import ScenarioTrace


@dataclass(frozen=True, kw_only=True)
class EverySecond(Pacing):
    """Odd rounds aggregate nothing; their work is kept by the clients, or sent and thrown away."""

    discard: bool = False
    observes_start: ClassVar[bool] = True

    def carries_work(self) -> bool:
        return not self.discard

    def init(self, context: ServerContext) -> State:
        return {"seen": []}

    def observe(self, state: State, record: RoundRecord) -> State:
        return {"seen": [*state["seen"], [record.round, record.test_accuracy]]}

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        start = tuple(
            LocalJob(client=k, steps=context.work[k].steps, resume=k in context.in_flight) for k in context.cohort
        )
        due = context.round % 2 == 0
        if self.discard:
            return (SyncPoint(start=start, attend=context.cohort, discard=not due),), state
        everybody = tuple(sorted({*context.cohort, *context.in_flight}))
        return (SyncPoint(start=start, attend=everybody if due else ()),), state


def method(*, discard: bool = False, **parts: Any) -> FederatedMethod:
    return FederatedMethod(name="every-second", source="", pacing=EverySecond(discard=discard), **parts)


@dataclass(frozen=True, kw_only=True)
class Sends(LocalTerm):
    sends: ClassVar[bool] = True
    name: str = "sender"

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return memory, {"one": torch.ones(1)}


@dataclass(frozen=True, kw_only=True)
class Cuts(SubModelPolicy):
    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        return dict.fromkeys(context.cohort, FULL_MODEL), state


def test_carried_work_does_not_go_with_terms_that_send() -> None:
    with pytest.raises(ConfigError, match="over several rounds, which does not go with the term sender"):
        check_experiment(tiny_experiment(method(terms=(Sends(),))))
    check_experiment(tiny_experiment(method(terms=(Sends(),), discard=True)))


def test_what_a_client_was_sent_it_has_when_it_goes_on() -> None:
    """FedMix's averages were sent in round 1, before which they were made; in round 2 clients go on."""
    method = dataclasses.replace(fedmix(), pacing=EverySecond())
    state = run_rounds(local_engine(tiny_experiment(method, rounds=2, cohort_size=6)))
    assert [record.sync_points for record in state.records] == [0, 1]
    assert [record.bytes_down > 0 for record in state.records] == [True, False]


@dataclass(frozen=True, kw_only=True)
class Measured(EverySecond):
    """In even rounds clients are measured, in a job without steps, before they go on."""

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        points, state = super().plan(state, context)
        if context.round % 2:
            return points, state
        waiting = tuple(dataclasses.replace(job, steps=0) for job in points[0].start)
        (point,) = points
        return (SyncPoint(start=waiting, attend=point.attend, discard=True), point), state


@pytest.mark.parametrize("pacing", [EverySecond(), Measured()])
def test_work_that_goes_on_is_carried_into_a_round_once(pacing: Pacing) -> None:
    """Each client has 16 samples in both rounds."""
    engine = local_engine(tiny_experiment(dataclasses.replace(fedavg(), pacing=pacing), rounds=2, cohort_size=6))
    updates = play_round(engine, run_rounds(engine, rounds=1)).updates
    assert [update.num_samples for update in updates] == [32] * 6


def test_who_is_absent_where_its_work_is_aggregated_counts_by_the_same_rounds_as_the_others() -> None:
    """Of 16 samples in each round: three trained in both, one in the first alone, two in none."""

    class Absent(UniformSelection):
        def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
            return ((0, 1, 2, 3) if context.round == 1 else (0, 1, 2)), state

    method = dataclasses.replace(fedavg(), pacing=EverySecond(), selection=Absent())
    state = run_rounds(local_engine(tiny_experiment(method, rounds=2, cohort_size=4)))
    assert state.records[-1].aggregation_weights == pytest.approx((2 / 7, 2 / 7, 2 / 7, 1 / 7))


def test_carried_work_does_not_go_with_sub_models() -> None:
    with pytest.raises(ConfigError, match="over several rounds, which does not go with sub-models"):
        check_experiment(tiny_experiment(method(submodels=Cuts())))
    check_experiment(tiny_experiment(method(submodels=Cuts(), discard=True)))


def test_a_discarded_point_is_metered_but_changes_nothing() -> None:
    engine = local_engine(tiny_experiment(method(discard=True, terms=(Sends(),))))
    start = engine.start()
    state = run_rounds(engine, start, rounds=1)
    row = state.records[0]
    assert torch.equal(state.vector, start.vector)
    assert (state.version, row.sync_points, row.attendees, row.aggregation_weights) == (start.version, 0, (), ())
    assert row.values_down == 3 * 28
    assert row.values_up == 3 * (28 + 1)
    assert state.held == {} and state.memories == {}


def test_components_that_ask_see_the_initial_model_as_round_0() -> None:
    engine = local_engine(tiny_experiment(method()))
    start = engine.start()
    ((round, accuracy),) = start.components["pacing"]["seen"]
    assert round == 0 and 0 <= accuracy <= 1
    assert start.records == ()
    after = run_rounds(engine, start, rounds=1)
    assert after.components["pacing"]["seen"][1] == [1, accuracy], "nothing was aggregated in round 1"


def with_devices(trace: ScenarioTrace) -> Experiment:
    """Links of 32 bits a second each way, no latency, no time to compute: a message takes 28 seconds."""
    device = DeviceProfile(
        flops_per_s=1e30, overhead_s=0.0, down_bits_per_s=32.0, up_bits_per_s=32.0, down_latency_s=0.0, up_latency_s=0.0
    )
    profiles = tuple(
        ClientProfile(client=k, num_samples=16, label_counts=np.full(4, 4), device=device) for k in range(2)
    )
    one = tiny_experiment(method(), num_clients=2, cohort_size=2, sizes=[16, 16], rounds=2)
    world = dataclasses.replace(one.world, profiles=profiles, availability=ReplayAvailability(trace=trace))
    return dataclasses.replace(one, world=world)


def test_delivering_earlier_work_takes_the_time_of_the_upload() -> None:
    """Round 1: client 0 downloads, 28 s. Round 2, nobody is there: it uploads, 28 s."""
    trace = ScenarioTrace(num_clients=2, num_classes=4).with_round([0], {}).with_round([], {})
    rows = run_rounds(local_engine(with_devices(trace))).records
    assert [row.sim_time_s for row in rows] == pytest.approx([28.0, 56.0])
    assert [row.attendees for row in rows] == [(), (0,)]


def test_forecast_of_carried_work_is_what_the_run_sends() -> None:
    for one in (method(), method(discard=True), fedavg()):
        experiment = tiny_experiment(one, rounds=7)
        state = run_rounds(local_engine(experiment))
        assert forecast(experiment).total_bytes == state.total_bytes
