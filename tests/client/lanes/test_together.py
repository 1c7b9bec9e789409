"""Runs of one process whose clients share tiles have the bits that each has alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import stage_on_cpu
from torch import nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.lanes.grouping import Lanes
from fedsweep.client.lanes.lane import Lane
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.lanes.together import MakeLanes, Together
from fedsweep.client.messages import LaneSettings
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.driver.run import one_thread
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import ClientJobError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod
from fedsweep.models.networks.chains import Mlp
from fedsweep.testing import tiny_data, tiny_experiment

ROUNDS = 3


def network() -> nn.Module:
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)


def experiment(method: FederatedMethod, *, seed: int, **more: Any) -> Experiment:
    """Six clients of unequal sizes, of which three a round take their batches of four in tiles of five lanes."""
    images = tiny_data(num_samples=40, seed=9, dtype=np.float32)[0]
    settings = {"build": network, "sizes": (20, 17, 9, 13, 30, 7), "cohort_size": 3, "local_epochs": 2}
    made = tiny_experiment(method, seed=seed, **(settings | {"proxy": (images, None)} | more))
    return replace(made, lanes=LaneSettings(width=5))


def rounds_of(experiment: Experiment, make_lanes: MakeLanes = Lanes) -> Callable[[], RunState]:
    """Plays a run's rounds when it is called."""

    def play() -> RunState:
        engine = Engine(experiment, LocalFleet(experiment, make_lanes))
        state = engine.start()
        for _ in range(ROUNDS):
            state, _ = engine.advance(state)
        return state

    return play


def side_by_side(experiments: Sequence[Experiment]) -> list[RunState | Exception]:
    together = Together()
    return together.play([rounds_of(one, together.lanes("a network")) for one in experiments])


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each tile has that is stepped."""
    seen: list[int] = []
    own = Tile.run

    def run(self: Tile, lanes: Sequence[Lane]) -> Any:
        seen.append(len(lanes))
        return own(self, lanes)

    monkeypatch.setattr(Tile, "run", run)
    return seen


def check_same(state: RunState | Exception, alone: RunState) -> None:
    assert isinstance(state, RunState), state
    assert torch.equal(state.vector, alone.vector)
    assert state.total_bytes == alone.total_bytes
    figures = [(r.train_loss, r.test_accuracy, r.bytes_up, r.bytes_down, r.cohort) for r in state.records]
    assert figures == [(r.train_loss, r.test_accuracy, r.bytes_up, r.bytes_down, r.cohort) for r in alone.records]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (fedavg(), {}),
        (fedprox(mu=0.1), {"optimizer": OptimizerSettings(momentum=0.9, keep="persist")}),
        (dynamicfl(), {}),
    ],
    ids=["fedavg", "terms and memories", "sync points inside a round"],
)
def test_three_seeds_that_share_tiles_have_the_bits_and_the_ledgers_that_each_has_alone(
    method: FederatedMethod, more: dict[str, Any], tiles: list[int]
) -> None:
    experiments = [experiment(method, seed=seed, **more) for seed in range(3)]
    alone = [rounds_of(one)() for one in experiments]
    num_alone = len(tiles)
    assert not torch.equal(alone[0].vector, alone[1].vector)
    for state, own in zip(side_by_side(experiments), alone, strict=True):
        check_same(state, own)
    assert len(tiles) - num_alone < num_alone  # else nothing was shared


@pytest.mark.parametrize("num_staged", [1, 8])
@pytest.mark.parametrize("width", [1, 2])
def test_clients_of_one_number_and_round_are_each_runs_own(
    width: int, num_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In narrow tiles they follow one another: neither rates nor batches are the other's."""
    stage_on_cpu(monkeypatch, num_staged)
    worlds: list[dict[str, Any]] = [{"learning_rate": rate} for rate in (0.1, 0.2, 0.3)]
    worlds.append({"sizes": (9, 30, 7, 13, 17, 20)})
    made = [experiment(dynamicsgd(), seed=0, cohort_size=1, local_epochs=None, local_steps=4, **w) for w in worlds]
    experiments = [replace(one, lanes=LaneSettings(width=width)) for one in made]
    alone = [rounds_of(one)() for one in experiments]
    for state, own in zip(side_by_side(experiments), alone, strict=True):
        check_same(state, own)


def test_runs_compute_with_as_many_threads_as_whoever_plays_them() -> None:
    omp = getattr(ctypes.CDLL(None), "omp_get_max_threads", None)
    if omp is None:
        pytest.skip("torch computes without OpenMP here")
    # A new thread has as many as the machine has cores, until it is told.
    with one_thread():
        assert Together.play([omp, omp]) == [1, 1]


def test_a_run_that_fails_ends_alone(tiles: list[int]) -> None:
    experiments = [experiment(fedavg(), seed=seed) for seed in range(3)]
    alone = [rounds_of(one)() for one in experiments]
    training = experiments[1].training
    wild = replace(experiments[1], training=replace(training, schedule=lambda round: 1e30 if round == 2 else 0.1))
    first, failed, last = side_by_side([experiments[0], wild, experiments[2]])
    assert isinstance(failed, ClientJobError) and failed.round == 2
    check_same(first, alone[0])
    check_same(last, alone[2])


def test_an_error_in_shared_lanes_is_each_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Lanes, lanes: Sequence[Lane]) -> Any:
        raise RuntimeError(f"{len(lanes)} lanes")

    monkeypatch.setattr(Lanes, "take", fail)
    failed = side_by_side([experiment(fedavg(), seed=seed) for seed in range(2)])
    assert [isinstance(error, Exception) and "6 lanes" in str(error) for error in failed] == [True, True]


def test_runs_of_other_methods_widths_or_networks_share_no_tile(tiles: list[int]) -> None:
    one, other = experiment(fedavg(), seed=0), experiment(fedprox(mu=0.1), seed=1)
    works = [(one, "a"), (other, "a"), (replace(other, lanes=LaneSettings(width=6)), "a"), (one, "b")]
    alone = [rounds_of(work)() for work, _ in works]
    num_alone, together = len(tiles), Together()
    states = together.play([rounds_of(work, together.lanes(name)) for work, name in works])
    for state, own in zip(states, alone, strict=True):
        check_same(state, own)
    assert len(tiles) == 2 * num_alone
