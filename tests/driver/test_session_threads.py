"""A run's folder is written by the thread that plays and by the one that is asked to save: never by both at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.driver import session as session_module
from fedsweep.driver.session import RunSession, SessionSettings
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_experiment

ROUNDS = 80


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunSession]:
    """A session that writes its rounds at each step, in an interpreter that changes threads all the time."""
    monkeypatch.setattr(session_module, "_WRITE_EVERY_S", 0.0)
    one = tiny_experiment(fedavg(), rounds=ROUNDS)
    settings = SessionSettings(folder=tmp_path, checkpoint_every=7, checkpoint_keep=2, facts={})
    session = RunSession(one, lambda warn: LocalFleet(one), settings)
    session.open(resume=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield session
    sys.setswitchinterval(before)


def play(
    session: RunSession, until: threading.Event, failures: list[BaseException], steps: list[int] | None = None
) -> None:
    try:
        while not until.is_set() and session.step().stopped_by is None:
            if steps is not None:
                steps.append(len(steps))
    except BaseException as error:
        failures.append(error)
    finally:
        until.set()


@pytest.mark.slow
def test_saving_while_rounds_are_played(opened: RunSession, tmp_path: Path) -> None:
    over, failures = threading.Event(), list[BaseException]()
    thread = threading.Thread(target=play, args=(opened, over, failures))
    thread.start()
    saved = [0]
    while not over.is_set():
        saved.append(opened.save())
    thread.join()
    assert failures == []
    assert saved == sorted(saved) and len(set(saved)) > 3
    assert opened.finish("finished")["rounds"] == ROUNDS
    assert [record.round for record in RunFolder(tmp_path).read_rounds()] == list(range(1, ROUNDS + 1))


def test_what_is_played_after_the_end_is_not_written(opened: RunSession, tmp_path: Path) -> None:
    over, failures = threading.Event(), list[BaseException]()
    steps: list[int] = []
    thread = threading.Thread(target=play, args=(opened, over, failures, steps))
    thread.start()
    while opened.save() < 20 and not over.is_set():
        pass
    result = opened.finish("killed", "interrupted")
    written = (tmp_path / "rounds.parquet").read_bytes()
    then = len(steps)
    while len(steps) < then + 20 and not over.is_set():
        pass
    over.set()
    thread.join()
    assert failures == []
    assert (tmp_path / "rounds.parquet").read_bytes() == written
    assert len(RunFolder(tmp_path).read_rounds()) == result["rounds"]
