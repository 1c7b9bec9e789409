"""The exchange before round 1 happens once in a run's life, whoever goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.client.messages import Handle, Question
from fedsweep.driver.session import RunSession, SessionSettings
from fedsweep.errors import MemoryLost
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.records import Payload
from fedsweep.testing import tiny_experiment


class Counting(LocalFleet):
    """Counts the clients that were asked before round 1."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.asked = 0

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        self.asked += len(question.clients)
        return super().measure(question, vector, memories)


def session(folder: Path) -> tuple[RunSession, Counting]:
    group: dict[str, Any] = {"high_interval": 1, "low_interval": 2, "group": "similarity", "sketch_values": 3}
    experiment = tiny_experiment(dynamicfl(**group), rounds=4, local_steps=2)
    fleet = Counting(experiment)
    settings = SessionSettings(folder=folder, checkpoint_every=1, checkpoint_keep=2, facts={})
    return RunSession(experiment, lambda warn: fleet, settings), fleet


def finished(run: RunSession) -> dict[str, Any]:
    while run.step().stopped_by is None:
        pass
    return run.finish("finished")


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run of four rounds, left after two."""
    folder = tmp_path / "run"
    folder.mkdir()
    run, fleet = session(folder)
    run.open(resume=False)
    assert fleet.asked == 6
    run.step(), run.step()
    return folder


def test_a_resumed_run_asks_no_client_again(begun: Path, tmp_path: Path) -> None:
    whole, _ = session(tmp_path)
    whole.open(resume=False)
    expected = finished(whole)
    again, fleet = session(begun)
    assert again.open(resume=True).records[-1].round == 2
    found = finished(again)
    assert fleet.asked == 0
    assert found["model_sha256"] == expected["model_sha256"]
    assert found["registration_bytes"] == expected["registration_bytes"] > 4 * 6 * (28 + 3)


def test_a_resumed_runs_result_has_what_workers_had_said_before(begun: Path) -> None:
    run, _ = session(begun)
    run.open(resume=True)
    run._engine.tools.note(["one by one, as lanes were refused"])
    run.step()
    again, _ = session(begun)
    assert again.open(resume=True).records[-1].round == 3
    assert finished(again)["executor"]["notes"] == ["one by one, as lanes were refused"]


def test_without_a_checkpoint_the_clients_are_asked(tmp_path: Path) -> None:
    run, fleet = session(tmp_path)
    assert run.open(resume=True).records == ()
    assert fleet.asked == 6


def test_a_damaged_checkpoint_that_a_run_went_back_behind_is_written_anew(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = session(begun)
    run.open(resume=True)
    newest = max((begun / "checkpoints").glob("*2*"))
    newest.write_bytes(newest.read_bytes()[:-1])

    def lose(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryLost("a node is gone")

    monkeypatch.setattr(run._engine, "advance", lose)
    assert "going back to the checkpoint of round 1" in " ".join(run.step().messages)
    run.step()
    assert session(begun)[0].open(resume=True).records[-1].round == 2


def test_a_run_whose_checkpoint_finds_a_memory_lost_goes_back_to_the_one_before(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = session(tmp_path)
    whole.open(resume=False)
    run, _ = session(begun)
    run.open(resume=True)

    def lose(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise MemoryLost("a node is gone")

    monkeypatch.setattr(run._store, "save", lose)
    lost = run.step()
    assert lost.record is None and "going back to the checkpoint of round 2" in " ".join(lost.messages)
    record = run.step().record
    assert record is not None and record.round == 3, "of which nobody had heard"
    assert finished(run)["model_sha256"] == finished(whole)["model_sha256"]
