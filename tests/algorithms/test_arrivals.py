"""Asynchrony on the virtual clock: who starts when, who arrives in which round, and what that costs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsweep.algorithms.fedasync import fedasync
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedbuff import fedbuff
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fedopt import fedavgm
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.parts.arrivals import Discount
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.aggregation import Uniform
from fedsweep.engine.forecast import forecast
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.testing import (
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    with_devices,
)
from fedsweep.world.availability import ReplayAvailability
from fedsweep.world.replay import ScenarioTrace

SAME = (tiny_device(1e4),)
MIXED = tuple(tiny_device(1e4 / (1 + k * k)) for k in range(5))
SIZES = (8,) * 10


def world(method: FederatedMethod, *, devices: tuple = MIXED, **options: object) -> Experiment:
    given: dict[str, object] = {"num_clients": 10, "cohort_size": 4, "sizes": SIZES, "rounds": 12} | options
    return with_devices(tiny_experiment(method, **given), devices)  # type: ignore[arg-type]


def run(method: FederatedMethod, **options: object) -> RunState:
    return run_rounds(local_engine(world(method, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("discount", "expected"),
    [
        (Discount(kind="constant"), [1, 1, 1, 1]),
        (Discount(kind="polynomial"), [1, 2**-0.5, 5**-0.5, 6**-0.5]),
        (Discount(kind="hinge"), [1, 1, 1, 1 / 11]),
        (Discount(kind="hinge", slope=0.5, grace=1), [1, 1, 1 / 2.5, 1 / 3]),
    ],
)
def test_what_a_stale_update_counts(discount: Discount, expected: list[float]) -> None:
    staleness = torch.tensor([0, 1, 4, 5], dtype=torch.float64)
    torch.testing.assert_close(discount(staleness), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


@dataclass(frozen=True)
class Event:
    """An update that arrived: when, whose, and the server's versions at its start and at its arrival."""

    at: float
    client: int
    started: int
    version: int


def by_hand(cohorts: list[tuple[int, ...]], times: Callable[[int], float], *, concurrency: int) -> list[Event]:
    """The events of a plain event loop where each arrival makes a version, over the run's order of starting."""
    log: list[Event] = []
    working: list[tuple[float, int, int]] = []
    now, version = 0.0, 0
    for cohort in cohorts:
        for client in cohort:
            assert len(working) < concurrency
            heapq.heappush(working, (now + times(client), client, version))
        now, client, started = heapq.heappop(working)
        log.append(Event(now, client, started, version))
        version += 1
    return log


@pytest.mark.parametrize("concurrency", [4, 3, 1])
def test_events_follow_a_plain_event_loop(concurrency: int) -> None:
    engine = local_engine(world(fedasync(concurrency=concurrency)))
    states = [engine.start()]
    while engine.finished_by(states[-1]) is None:
        states.append(engine.advance(states[-1])[0])
    seconds = {k: s for state in states[:-1] for k, s in engine.planner.plan(state).context.durations.items()}
    records = states[-1].records
    events = by_hand([r.cohort for r in records], seconds.__getitem__, concurrency=concurrency)
    assert [r.attendees for r in records] == [(e.client,) for e in events]
    assert [r.sim_time_s for r in records] == [e.at for e in events]
    assert [r.staleness for r in records] == [(e.version - e.started,) for e in events]
    assert concurrency == 1 or max(e.version - e.started for e in events) >= concurrency


def test_a_place_that_becomes_free_in_a_round_is_filled_at_once_from_the_same_model() -> None:
    """Three updates to a buffer, two clients at work at every moment somebody starts."""
    engine = local_engine(world(fedbuff(buffer_size=3, concurrency=2), rounds=6))
    state = engine.start()
    for _ in range(6):
        plan = engine.planner.plan(state)
        (point,) = plan.points
        begins = {job.client: job.not_before for job in point.start}
        seconds = plan.context.durations
        known = {**state.ready, **{k: begins[k] + seconds[k] for k in begins}}
        assert plan.clock == max(known[k] for k in point.attend)
        assert all(known[k] >= plan.clock for k in known if k not in point.attend)
        late = [begin for begin in begins.values() if begin > state.clock]  # type: ignore[operator]
        arrivals = sorted(known[k] for k in point.attend)
        assert set(late) <= set(arrivals[:-1])
        at_work = [(begins.get(k, 0.0), known[k]) for k in known]
        for moment in begins.values():
            assert sum(begin <= moment < end for begin, end in at_work) == 2
        state, _ = engine.advance(state)
        assert state.ready == {k: known[k] for k in known if k not in point.attend}
        assert len(state.held) == len(state.ready) == len(state.memories) <= 2


def test_equal_speeds_and_a_buffer_of_all_are_fedavg_with_equal_weights_bit_for_bit() -> None:
    buffered = run(fedbuff(buffer_size=4), devices=SAME)
    plain = run(replace(fedavg(), weighting=Uniform()), devices=SAME)
    assert torch.equal(buffered.vector, plain.vector)
    assert [r.cohort for r in buffered.records] == [r.cohort for r in plain.records]
    assert [r.sim_time_s for r in buffered.records] == [r.sim_time_s for r in plain.records]
    assert [r.total_bytes for r in buffered.records] == [r.total_bytes for r in plain.records]
    assert {r.staleness for r in buffered.records} == {(0, 0, 0, 0)}


def test_one_client_at_a_time_mixed_in_whole_is_training_in_turn() -> None:
    found = run(fedasync(mixing=1.0, mu=0.0, concurrency=1))
    one = run(fedavg(), cohort_size=1)
    assert torch.equal(found.vector, one.vector)
    assert {r.staleness for r in found.records} == {(0,)}


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 4))


def test_mixing_is_a_step_towards_the_model_that_arrives() -> None:
    method = fedasync(mixing=0.5, staleness="hinge", slope=1.0, grace=1.0)
    engine = local_engine(world(method, build=with_batch_norm, double=True))
    state, seen = engine.start(), set()
    for _ in range(12):
        round = play_round(engine, state)
        (update,) = round.updates
        late = state.version - update.anchor_version
        seen.add(late)
        weight = 0.5 if late <= 1 else 0.5 / late
        assert update.vector is not None
        torch.testing.assert_close(
            round.vector, (1 - weight) * state.vector + weight * update.vector, rtol=0, atol=1e-14
        )
        state, _ = engine.advance(state)
    assert max(seen) > 2


def test_a_buffer_moves_by_the_mean_of_discounted_moves() -> None:
    engine = local_engine(world(fedbuff(buffer_size=2, server_learning_rate=0.7, exponent=1.0), double=True))
    state, stale = engine.start(), 0
    for _ in range(8):
        round = play_round(engine, state)
        moves = [(u.vector - {**state.anchors, **round.anchors}[u.anchor_version]) for u in round.updates]  # type: ignore[operator]
        late = [state.version - u.anchor_version for u in round.updates]
        mean = sum(move / (1 + s) for move, s in zip(moves, late, strict=True)) / 2
        torch.testing.assert_close(round.vector, state.vector + 0.7 * mean, rtol=0, atol=1e-14)
        stale += max(late)
        state, _ = engine.advance(state)
        assert state.records[-1].staleness == tuple(late)
    assert stale > 0


def test_nothing_mixed_in_leaves_the_model() -> None:
    state = run(fedasync(mixing=0.0))
    assert torch.equal(state.vector, world(fedasync()).initial_vector)


KEPT = OptimizerSettings(momentum=0.5, keep="persist")


@pytest.mark.parametrize("method", [fedasync(), fedbuff(buffer_size=3)])
@pytest.mark.parametrize("optimizer", [None, KEPT])
def test_it_resumes_with_work_under_way(method: FederatedMethod, optimizer: object, tmp_path: Path) -> None:
    work = world(method, optimizer=optimizer)
    whole, engine = run_rounds(local_engine(work)), local_engine(work)
    for cut in (1, 5):
        half = run_rounds(engine, rounds=cut)
        store = CheckpointStore(tmp_path / str(cut), keep=1, config_hash="x")
        store.save(half, fetch=engine.fleet.fetch)
        again = local_engine(work)
        read = store.newest(keep_handle=again.fleet.keep).state
        assert read is not None and read.held and (read.held, read.ready) == (half.held, half.ready)
        found = run_rounds(again, read)
        assert torch.equal(found.vector, whole.vector)
        assert [r.staleness for r in found.records] == [r.staleness for r in whole.records]
        assert (found.clock, found.ready, found.total_bytes) == (whole.clock, whole.ready, whole.total_bytes)


def test_each_event_is_charged_when_it_happens() -> None:
    """A model of 28 values goes down when a client starts and up when its update arrives."""
    for method in (fedasync(), fedbuff(buffer_size=3)):
        state = run(method)
        for record in state.records:
            assert (record.values_down, record.values_up) == (28 * len(record.cohort), 28 * len(record.attendees))
        started = sum(len(r.cohort) for r in state.records)
        assert started == sum(len(r.attendees) for r in state.records) + len(state.held)
        assert forecast(world(method)).total_bytes == state.total_bytes
        assert forecast(world(method)).sim_time_s == state.clock


def test_clients_that_are_away_leave_places_empty() -> None:
    """Round 1 has three of the clients; a buffer of four ends with them, and the next ones find the others."""
    trace = ScenarioTrace(num_clients=10, num_classes=4, present=((0, 1, 2), *[tuple(range(10))] * 11))
    state = run(fedbuff(buffer_size=4), availability=ReplayAvailability(trace=trace))
    assert state.records[0].attendees == (0, 1, 2)
    assert [len(r.attendees) for r in state.records[1:]] == [4] * 11


@pytest.mark.parametrize(
    ("method", "written_out"),
    [
        (fedasync(), fedasync(concurrency=4)),
        (fedbuff(), fedbuff(buffer_size=2, concurrency=4)),
        (fedbuff(buffer_size=1), fedbuff(buffer_size=1, concurrency=4)),
    ],
)
def test_by_default_as_many_work_as_the_cohort_has_however_few_are_there(
    method: FederatedMethod, written_out: FederatedMethod
) -> None:
    """Two clients are there in every other round; four, or one more, may be at work in each."""
    present = tuple((0, 1) if round % 2 else tuple(range(10)) for round in range(12))
    trace = ReplayAvailability(trace=ScenarioTrace(num_clients=10, num_classes=4, present=present))
    by_default, as_written = (run(each, availability=trace) for each in (method, written_out))
    assert torch.equal(by_default.vector, as_written.vector)
    columns = [[(r.cohort, r.attendees, r.sim_time_s) for r in state.records] for state in (by_default, as_written)]
    assert columns[0] == columns[1]


def test_moves_go_with_server_optimisers_and_a_pull() -> None:
    found = run(merge(fedbuff(buffer_size=3), fedavgm(momentum=0.5), fedprox(mu=0.1)))
    assert bool(torch.isfinite(found.vector).all())
    with pytest.raises(ConfigError, match="fedasync and fedbuff can't be merged"):
        merge(fedasync(), fedbuff())
    with pytest.raises(ConfigError, match="over several rounds, which does not go with sub-models"):
        check_experiment(world(merge(fedbuff(buffer_size=3), federated_dropout(keep=0.5))))


@pytest.mark.parametrize("method", [fedasync(), fedbuff(buffer_size=3)])
def test_a_scenario_without_devices_is_refused(method: FederatedMethod) -> None:
    with pytest.raises(ConfigError, match=r"scenario\.devices is null; set it to \{profile: phone-wifi\}, say"):
        check_experiment(tiny_experiment(method))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: check_experiment(world(fedbuff(buffer_size=11))),
            "method.buffer_size must be at most scenario.clients=10",
        ),
        (
            lambda: check_experiment(world(fedasync(concurrency=11))),
            "method.concurrency must be at most scenario.clients=10",
        ),
    ],
)
def test_wrong_input_is_said(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.slow
def test_where_a_tenth_is_slow_a_target_is_reached_in_less_virtual_time() -> None:
    fleet = (*[tiny_device(1e4)] * 9, tiny_device(1e3))

    def reached(method: FederatedMethod, updates_a_round: int) -> float:
        more = {"num_clients": 20, "cohort_size": 5, "sizes": (4,) * 20, "rounds": 150 // updates_a_round}
        rows = run(method, devices=fleet, **more).records
        return next(r.sim_time_s for r in rows if (r.test_accuracy or 0.0) >= 0.9 and r.sim_time_s is not None)

    waits = reached(fedavg(), 5)
    assert reached(fedasync(), 1) < 0.7 * waits
    assert reached(fedbuff(buffer_size=2), 2) < 0.7 * waits
