"""Whatever a run could not log, the next command that touches its folder does: each point exactly once."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedsweep import api
from fedsweep.cli import main
from fedsweep.driver.observers import Observer
from fedsweep.errors import ResourceError
from fedsweep.records import RoundRecord
from fedsweep.runs import background
from fedsweep.runs.background import BackgroundCall, NoAnswer
from fedsweep.tracking import mlflow_observer, mlflow_run, mlflow_sync, mlflow_view
from fedsweep.tracking.mlflow_run import MlflowRun
from fedsweep.tracking.mlflow_store import sqlite_uri
from fedsweep.tracking.mlflow_sync import FolderSync
from fedsweep.tracking.rows import Point

TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 5, cohort_size: 2, local_steps: 2}
runtime: {backend: local}
"""
NO_TRACKING = ("--set", "tracking.uri=none")
Keys = Counter[tuple[str, int]]


@pytest.fixture(autouse=True)
def _impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("tiny.yaml").write_text(TINY)
    monkeypatch.setattr(FolderSync.send, "__kwdefaults__", {"patience_s": 0.01})
    monkeypatch.setattr(mlflow_observer, "_EVERY_S", 0.01)
    monkeypatch.setattr(mlflow_observer, "_PATIENCE_S", 0.01)


def points(store: Path) -> Keys:
    """How often each metric has each step."""
    with contextlib.closing(sqlite3.connect(store)) as base:
        return Counter(base.execute("SELECT key, step FROM metrics").fetchall())


def runs(store: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(store)) as base:
        return [status for (status,) in base.execute("SELECT status FROM runs")]


def tags(store: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(store)) as base:
        return {key for (key,) in base.execute("SELECT key FROM tags")}


@pytest.fixture(scope="module")
def whole(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """The points of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(empty_store, folder / "mlflow.db")
    (folder / "tiny.yaml").write_text(TINY)
    assert main(["run", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "-q"]) == 0
    return points(folder / "mlflow.db")


class Trouble(Observer):
    """Spoils the store before a round (0: before the run begins in it), as it would be in the field."""

    def __init__(self, store: Path, kind: str, *, before: int) -> None:
        self._store, self._kind, self._before = store, kind, before
        self.stack = contextlib.ExitStack()

    def check(self) -> None:
        if self._before == 0:
            self._spoil()

    def round_done(self, record: RoundRecord) -> None:
        if record.round == self._before - 1:
            self._spoil()

    def _spoil(self) -> None:
        if self._kind == "locked":
            other = self.stack.enter_context(contextlib.closing(sqlite3.connect(self._store, isolation_level=None)))
            other.execute("BEGIN EXCLUSIVE")
            self.stack.callback(other.execute, "ROLLBACK")
        elif self._kind == "damaged":
            self._store.write_bytes(b"no database any more, " * 100)
        else:
            while not runs(self._store):  # the run is begun there, and MLflow keeps its connection to the file
                time.sleep(0.01)
            self._store.unlink()


def play(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(list(command))
    out, err = capsys.readouterr()
    sys.stderr.write(err)  # where pytest shows it if the test fails
    return code, out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "before", "command"),
    [
        ("locked", 0, ("run", "--resume", "run")),
        ("locked", 3, ("sync", "run")),
        ("damaged", 3, ("run", "--resume", "run")),
    ],
)
def test_a_store_that_comes_back_gets_all(
    kind: str,
    before: int,
    command: tuple[str, ...],
    store: Path,
    empty_store: Path,
    whole: Keys,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trouble = Trouble(store, kind, before=before)
    with trouble.stack:
        api.run("tiny.yaml", out="run", observers=[trouble])
        assert main(list(command)) == 2  # it is not back yet
    if kind == "damaged":
        shutil.copy(empty_store, store)
    assert points(store) != whole
    capsys.readouterr()
    code, out = play(command, capsys)
    assert code == 0 and "MLflow has everything of it now" in out
    assert points(store) == whole and runs(store) == ["FINISHED"]
    code, out = play(command, capsys)
    assert code == 0 and out.endswith("MLflow has everything of it\n")
    assert points(store) == whole


class Backup(Observer):
    """Copies the store while the run goes on."""

    def __init__(self, store: Path, to: Path) -> None:
        self._store, self._to = store, to

    def round_done(self, record: RoundRecord) -> None:
        if record.round == 3:
            while not runs(self._store):  # the run is begun there
                time.sleep(0.01)
            with (
                contextlib.closing(sqlite3.connect(self._store)) as base,
                contextlib.closing(sqlite3.connect(self._to)) as to,
            ):
                base.backup(to)


def test_a_store_that_is_put_back_from_a_copy_gets_what_came_later(
    store: Path, tmp_path: Path, whole: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    api.run("tiny.yaml", out="run", observers=[Backup(store, tmp_path / "copy.db")])
    assert points(store) == whole
    shutil.copy(tmp_path / "copy.db", store)
    assert points(store) != whole and runs(store) == ["RUNNING"]
    code, out = play(("sync", "run"), capsys)
    assert code == 0 and out.endswith("MLflow has everything of it now\n")
    assert points(store) == whole and runs(store) == ["FINISHED"]


def test_a_store_that_is_put_back_from_a_copy_of_the_shorter_run_gets_the_rest(
    store: Path, tmp_path: Path, whole: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny.yaml", "--out", "run", "-q", "--set", "training.rounds=3"]) == 0
    shutil.copy(store, tmp_path / "copy.db")
    assert main(["run", "--resume", "run", "--rounds", "5", "-q"]) == 0 and points(store) == whole
    shutil.copy(tmp_path / "copy.db", store)
    for now in (" now", ""):
        code, out = play(("sync", "run"), capsys)
        assert code == 0 and out.endswith(f"MLflow has everything of it{now}\n")
    assert points(store) == whole and runs(store) == ["FINISHED"]


@pytest.mark.slow
def test_a_store_that_was_deleted_is_made_again(store: Path, whole: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    api.run("tiny.yaml", out="run", observers=[Trouble(store, "deleted", before=3)])
    assert points(store) == whole and runs(store) == ["FINISHED"]
    store.unlink()  # once more, when it has everything
    assert play(("sync", "run"), capsys) == (0, f"{Path('run').absolute()}: MLflow has everything of it now\n")
    assert points(store) == whole and runs(store) == ["FINISHED"]


def test_a_second_writer_takes_over_and_nothing_is_there_twice(store: Path, tmp_path: Path) -> None:
    def begun() -> MlflowRun:
        return MlflowRun.begin(sqlite_uri(store), experiment="fedsweep", name="x", tags={}, folder=tmp_path)

    first = begun()
    first.log_points([Point("loss", 1.0, 1000, 1)], {})
    second = begun()
    with pytest.raises(ResourceError, match="another process writes the MLflow run"):
        first.log_points([Point("loss", 0.5, 2000, 2)], {})
    with pytest.raises(ResourceError, match="another process writes"):
        first.end("finished")
    second.log_points([Point("loss", 0.5, 2001, 2)], {})
    second.end("finished")
    assert points(store) == {("loss", 1): 1, ("loss", 2): 1}


def test_a_machine_on_which_nobody_gets_to_look_costs_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between two looks, as where the process is stopped and goes on."""
    hours = itertools.count(0.0, 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(background.time, "monotonic", lambda: next(hours))
        assert BackgroundCall(lambda: (time.sleep(0.6), "answer")[1]).wait() == "answer"
    with pytest.raises(NoAnswer):
        BackgroundCall(lambda: time.sleep(5)).wait(silent_s=0.1)


@pytest.mark.slow
def test_a_call_that_was_given_up_begins_no_run_beside_the_next_ones(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's store answers again after the run has stopped waiting for it, while ``sync`` sends the folder."""
    asked, answers, view = threading.Event(), threading.Event(), mlflow_view.save_view
    earlier = {*threading.enumerate()}

    def silent(*arguments: Any) -> None:
        monkeypatch.setattr(mlflow_run, "save_view", view)
        asked.set()
        answers.wait()

    class Impatient(Observer):
        def round_done(self, record: RoundRecord) -> None:
            monkeypatch.setattr(BackgroundCall.wait, "__kwdefaults__", {"silent_s": 0.1, "at_most_s": 60.0})

    monkeypatch.setattr(mlflow_run, "save_view", silent)
    api.run("tiny.yaml", out="run", observers=[Impatient()])
    (call,) = {*threading.enumerate()} - earlier
    asked.wait()
    monkeypatch.setattr(BackgroundCall.wait, "__kwdefaults__", {"silent_s": 60.0, "at_most_s": 60.0})
    assert main(["sync", "run"]) == 0
    answers.set()
    call.join()
    assert set(points(store).values()) == {1} and runs(store) == ["FINISHED"]


def test_two_stores_of_a_run_know_each_their_own(
    tmp_path: Path, store: Path, empty_store: Path, whole: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.db"
    shutil.copy(empty_store, other)
    assert main(["run", "tiny.yaml", "--out", "run", "-q"]) == 0
    for now in (" now", ""):
        assert main(["sync", "run"]) == 0 and capsys.readouterr().out.endswith("MLflow has everything of it\n")
        assert main(["sync", "run", "--uri", sqlite_uri(other)]) == 0
        assert capsys.readouterr().out.endswith(f"MLflow has everything of it{now}\n")
    assert runs(store) == runs(other) == ["FINISHED"] and points(store) == points(other) == whole


def test_what_a_store_has_lost_or_never_got_is_sent(store: Path, whole: Keys) -> None:
    """It had everything before, as the folder notes."""
    assert main(["run", "tiny.yaml", "--out", "run", "-q", *NO_TRACKING, "--set", "training.rounds=3"]) == 0
    assert main(["sync", "run", "--uri", sqlite_uri(store)]) == 0
    assert main(["run", "--resume", "run", "--rounds", "5", "-q"]) == 0
    assert main(["sync", "run", "--uri", sqlite_uri(store)]) == 0
    assert points(store) == whole
    with contextlib.closing(sqlite3.connect(store)) as base:
        base.execute("UPDATE runs SET lifecycle_stage = 'deleted'")
        base.commit()
    assert main(["sync", "run", "--uri", sqlite_uri(store)]) == 0
    assert set(points(store).values()) == {2} and runs(store) == ["FINISHED"] * 2


def test_a_copy_of_a_run_gets_a_run_of_its_own(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", "--out", "run", "-q"]) == 0
    shutil.copytree("run", "copy")
    for now in (" now", ""):
        assert main(["sync", "copy"]) == 0
        assert capsys.readouterr().out.endswith(f"MLflow has everything of it{now}\n")
    assert set(points(store).values()) == {2} and runs(store) == ["FINISHED"] * 2


def test_sweeps_are_completed_by_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    assert main(["sync", "swept"]) == 2
    assert "sweep --resume --out" in capsys.readouterr().err
    (tmp_path / "swept" / "0001").mkdir()
    (tmp_path / "swept" / "0001" / "config.yaml").write_text("name: a\n")
    assert main(["sync", "swept/0001", "--uri", f"sqlite:///{tmp_path}/other.db"]) == 2
    assert "logged in the sweep's own store alone" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_is_sent_and_ended_and_goes_on_with_each_point_once(store: Path, whole: Keys) -> None:
    """A process that is killed when round 3 is on disk; what the store then had is of no matter."""
    code = """
import os, signal, sys
from fedsweep import api, Observer

class Killer(Observer):
    def round_done(self, record):
        if record.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)

api.run("tiny.yaml", out="run", overrides=["checkpoint.every=1"], observers=[Killer()])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    for _ in range(2):
        assert main(["sync", "run"]) == 0
        assert runs(store) == ["KILLED"] and {step for key, step in points(store) if key == "lr"} == {1, 2, 3}
        assert "fedsweep.git_commit" not in tags(store)  # the killed run did not say, and that of now may be another
    assert main(["run", "--resume", "run", "-q"]) == 0
    assert points(store) == whole and runs(store) == ["FINISHED"]
    assert main(["run", "--resume", "run", "--rounds", "7", "-q"]) == 0
    assert {step for key, step in points(store) if key == "lr"} == set(range(1, 8)) and runs(store) == ["FINISHED"]
    assert set(points(store).values()) == {1}


@pytest.mark.slow
def test_another_process_follows_a_run_that_does_not_log(
    tmp_path: Path, empty_store: Path, whole: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_sync, "_FOLLOWED_EVERY_S", 0.1)
    other = tmp_path / "other.db"
    shutil.copy(empty_store, other)
    code = """
import time
from fedsweep import api, Observer

class Slow(Observer):
    def round_done(self, record):
        time.sleep(0.3)

api.run("tiny.yaml", out="run", overrides=["tracking.uri=none", "checkpoint.every=1"], observers=[Slow()])
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not Path("run/rounds.parquet").exists():
            assert process.poll() is None
            time.sleep(0.02)
        assert main(["sync", "--follow", "run", "--uri", sqlite_uri(other)]) == 0
        assert process.wait() == 0
    assert capsys.readouterr().out.endswith("MLflow has everything of it now\n")
    assert points(other) == whole and runs(other) == ["FINISHED"]
    assert not (tmp_path / "mlflow.db").exists()


def test_a_run_that_logs_itself_is_not_followed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", "--out", "run", "-q"]) == 0
    assert main(["sync", "run", "--follow"]) == 2
    assert "tracking.uri=none" in capsys.readouterr().err
