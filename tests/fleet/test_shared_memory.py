"""The shared-memory exchange gives the bits of a sum in one process, and notices who is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.client.exchange import InPlace
from fedsweep.components.planning import Selection
from fedsweep.components.spending import Even
from fedsweep.engine.engine import Engine
from fedsweep.errors import WorkerLost
from fedsweep.experiment.experiment import Experiment, Option, StopLimits
from fedsweep.fleet.fleet import Vectors
from fedsweep.fleet.shared_memory import SharedMemoryExchange, make_group_files
from fedsweep.records import RoundContext, State
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

VALUES = 1003
CLIENTS = (0, 2, 3, 5, 8)


def vectors(dtype: torch.dtype) -> dict[int, torch.Tensor]:
    generator = stream(7, "vectors").torch()
    return {k: torch.randn(VALUES, generator=generator, dtype=dtype) for k in CLIENTS}


def averaged(dtype: torch.dtype) -> Vectors:
    return Vectors(num_values=VALUES, dtype=dtype, capacity=len(CLIENTS))


def member(folder: Path, index: int, size: int, dtype: torch.dtype, gate, pipe, rounds: int) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    exchange = SharedMemoryExchange(folder, averaged(dtype), index=index, size=size)
    gate.wait()
    exchange.connect()
    gate.wait()
    own = {k: v for k, v in vectors(dtype).items() if k % size == index}
    out = torch.empty(VALUES, dtype=dtype)
    try:
        for number in range(rounds):
            weights = [1 / (k + number + 1) for k in range(len(CLIENTS))]
            exchange.mean(own, CLIENTS, weights, out, workers={k: k % size for k in CLIENTS})
        pipe.send(out.view(torch.uint8).numpy())
    except WorkerLost as lost:
        pipe.send(str(lost))


def start(tmp_path: Path, size: int, dtype: torch.dtype, rounds: int):  # type: ignore[no-untyped-def]
    make_group_files(tmp_path, averaged(dtype))
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(size)
    pipes, processes = [], []
    for index in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(tmp_path, index, size, dtype, gate, theirs, rounds), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_members_get_the_bits_of_a_sum_in_one_process(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    rounds = 50
    pipes, processes = start(tmp_path, size, dtype, rounds)
    expected = torch.empty(VALUES, dtype=dtype)
    weights = [1 / (k + rounds) for k in range(len(CLIENTS))]
    InPlace().mean(vectors(dtype), CLIENTS, weights, expected, workers={})
    for pipe, process in zip(pipes, processes, strict=True):
        assert pipe.poll(30)
        found = pipe.recv()
        assert isinstance(found, np.ndarray)
        assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes()
        process.join(10)


@pytest.mark.slow
def test_a_killed_member_is_noticed_by_the_others(tmp_path: Path) -> None:
    pipes, processes = start(tmp_path, 3, torch.float32, 10**9)
    assert not pipes[0].poll(0.2)  # they are under way
    os.kill(processes[1].pid, signal.SIGKILL)
    for index in (0, 2):
        assert pipes[index].poll(10)
        assert "gone" in pipes[index].recv()


def test_who_has_left_the_group_averages_nothing(tmp_path: Path) -> None:
    make_group_files(tmp_path, averaged(torch.float32))
    first, other = (SharedMemoryExchange(tmp_path, averaged(torch.float32), index=k, size=2) for k in range(2))
    first.connect()
    first.close()
    with pytest.raises(WorkerLost, match="has left its group"):
        first.mean(vectors(torch.float32), CLIENTS, [0.2] * 5, torch.empty(VALUES), workers={})
    other.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "the next group needs their room"


def averaging(work: Experiment, folder: Path) -> Engine:
    """One that plays in this process what an actor would, alone in its group."""
    engine = local_engine(work)
    make_group_files(folder, own := Vectors.of(work))
    exchange = SharedMemoryExchange(folder, own, index=0, size=1)
    exchange.connect()
    engine.fleet._worker.use_exchange(exchange)
    return engine


def test_a_cohort_that_a_planner_chooses_has_its_places(tmp_path: Path) -> None:
    plain = tiny_experiment(dynamicsgd(), rounds=1, cohort_size=2, stop=StopLimits(total_bytes=10**9))
    larger = replace(plain, training=replace(plain.training, cohort_size=5))
    options = (Option(values={"training.cohort_size": 5}, experiment=larger),)
    found = run_rounds(averaging(replace(plain, spending=Even(), options=options), tmp_path))
    assert len(found.records[0].cohort) == 5 and found.records[0].sync_points > 1
    assert torch.equal(found.vector, run_rounds(local_engine(larger)).vector)


class Everybody(Selection):
    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        return tuple(context.available), state


def test_a_cohort_for_which_there_are_no_places_goes_through_the_server(tmp_path: Path) -> None:
    work = tiny_experiment(replace(dynamicsgd(), selection=Everybody()), rounds=1, cohort_size=2)
    found = run_rounds(averaging(work, tmp_path))
    assert len(found.records[0].cohort) == 6 and found.records[0].sync_points > 1
