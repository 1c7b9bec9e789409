"""Fleets that fold, divide or lose a round's work, and clients that fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from tiny import KEPT, METHODS, assert_same
from torch import Tensor

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.messages import Handle, Question, Segment, SegmentReply
from fedsweep.components.local import LocalStep, LocalTerm, Objective, TaskLoss
from fedsweep.components.planning import FixedInterval, Pacing
from fedsweep.engine.engine import Engine
from fedsweep.errors import ClientJobError, RunError, WorkerLost
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Fleet, LocalFleet, make_worker, merged_answers
from fedsweep.method import FederatedMethod
from fedsweep.records import Payload
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree


class Workers(Fleet):
    """Several workers in this process that average through the server alone, and that may be lost."""

    def __init__(self, experiment: Experiment, count: int = 1, lost_at: Sequence[int] = ()) -> None:
        self._workers = [make_worker(experiment, index) for index in range(count)]
        self._lost_at, self.plays, self.repairs = list(lost_at), 0, 0

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def folds(self) -> bool:
        return False

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        self.plays += 1
        answers = [worker.run(segment, anchor, memories) for worker in self._workers]
        if self.plays in self._lost_at:
            raise WorkerLost("a worker of the test is gone")
        return merged_answers(answers)

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        return self._workers[0].measure(question, vector, memories)

    def repair(self) -> None:
        self.repairs += 1


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("name", METHODS)
def test_aggregating_among_workers_gives_the_servers_bits(name: str, keep: str) -> None:
    experiment = tiny_experiment(METHODS[name], local_steps=7, optimizer=KEPT[keep])
    folded = run_rounds(Engine(experiment, LocalFleet(experiment)))
    unfolded = run_rounds(Engine(experiment, Workers(experiment)))
    assert_same(folded, unfolded)


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_workers_changes_no_bit(name: str) -> None:
    experiment = tiny_experiment(METHODS[name], cohort_size=5, local_steps=5, optimizer=KEPT["persist"])
    one, three = (run_rounds(Engine(experiment, Workers(experiment, count))) for count in (1, 3))
    assert_same(one, three)


@pytest.mark.parametrize(("lost_at", "round"), [((1,), 1), ((2,), 1), ((4,), 2), ((5, 6), 2)])
def test_a_lost_worker_changes_no_bit(lost_at: tuple[int, ...], round: int) -> None:
    experiment = tiny_experiment(METHODS["two speeds"], local_steps=6, optimizer=KEPT["persist"])
    fleet = Workers(experiment, 2, lost_at)
    notes: list[str] = []
    found = run_rounds(Engine(experiment, fleet, on_repair=notes.append))
    assert_same(found, run_rounds(Engine(experiment, Workers(experiment, 2))))
    assert fleet.repairs == len(notes) == len(lost_at)
    assert notes[0].startswith(f"round {round}: a worker of the test is gone")


def test_a_fleet_that_is_lost_every_time_ends_the_run() -> None:
    experiment = tiny_experiment(fedavg())
    fleet = Workers(experiment, lost_at=range(1, 100))
    with pytest.raises(
        RunError, match=r"round 1: begun 5 times .*, at last: a worker of the test is gone; .* os\._exit"
    ):
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


@dataclass(frozen=True, kw_only=True)
class Stumbles(Objective):
    """Cross-entropy that fails at one step, counted from 0, of a client; None: of every client while armed."""

    client: int | None
    position: int
    how: str = "raise"
    armed: ClassVar[bool] = False

    def loss(self, step: LocalStep) -> Tensor:
        loss = TaskLoss().loss(step)
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
