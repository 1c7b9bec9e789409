"""MLflow written by a process beside the run: the same points, each once, whatever becomes of either."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.driver.observers import RunInfo
from fedsweep.errors import ResourceError
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record
from fedsweep.tracking.mlflow_keeper import MlflowKeeper
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_store import open_store, sqlite_uri


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    run = RunFolder.create(tmp_path / "run", overwrite=False)
    with sole_writer(run.path):
        run.write_config("name: run\n")
        yield run.path


def info(folder: Path) -> RunInfo:
    return RunInfo(name="run", folder=folder, config={"seed": 0}, tags={}, planned_rounds=9)


def steps(store: Path, run_id: str | None) -> list[int]:
    assert run_id is not None
    history = open_store(sqlite_uri(store)).get_metric_history(run_id, "test_accuracy")
    return [metric.step for metric in history]


@pytest.mark.slow
def test_rounds_wait_for_the_store_and_come_in_their_order_each_once(store: Path, folder: Path) -> None:
    warnings: list[str] = []
    with MlflowKeeper() as keeper:
        observer = MlflowObserver(
            sqlite_uri(store), experiment="fedsweep", keeper=keeper, flush_s=0.0, warn=warnings.append
        )
        observer.started(info(folder))
        began = time.monotonic()
        for number in (1, 2, 3):
            observer.round_done(tiny_record(number, test_accuracy=0.5))
        assert observer.run_id is None and time.monotonic() - began < 0.5  # nobody waited for MLflow's import
        process = keeper._process.pid
        assert "libtorch" not in Path(f"/proc/{process}/maps").read_text()
        observer.finished("finished", {})
        assert steps(store, observer.run_id) == [1, 2, 3]
        assert observer.is_complete and warnings == []
        assert open_store(sqlite_uri(store)).get_run(str(observer.run_id)).info.status == "FINISHED"
        assert not Path(f"/proc/{process}").exists()


@pytest.mark.slow
def test_a_keeper_that_dies_is_replaced_by_the_run_itself(store: Path, folder: Path) -> None:
    with MlflowKeeper() as keeper:
        observer = MlflowObserver(sqlite_uri(store), experiment="fedsweep", keeper=keeper, flush_s=0.0)
        observer.started(info(folder))
        observer.round_done(tiny_record(1, test_accuracy=0.5))
        assert observer._flush(patience_s=1.0)
        os.kill(keeper._process.pid, signal.SIGKILL)
        keeper._process.wait()
        observer.round_done(tiny_record(2, test_accuracy=0.5))
        observer.finished("finished", {})
    assert steps(store, observer.run_id) == [1, 2]
    assert observer.is_complete


@pytest.mark.slow
def test_what_is_wrong_with_a_store_is_one_line(store: Path) -> None:
    store.write_bytes(b"SQLite format 3\x00" + b"nothing of the kind" * 300)
    with MlflowKeeper() as keeper, pytest.raises(ResourceError, match="cannot be used: file is not a database"):
        MlflowObserver(sqlite_uri(store), experiment="fedsweep", keeper=keeper).check()


def test_a_keeper_ends_with_its_run_however_that_ends() -> None:
    code = """
import os, signal
from fedsweep.tracking.mlflow_keeper import MlflowKeeper
print(MlflowKeeper()._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    process = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(process)


def is_alive(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_an_interrupted_question_does_not_answer_the_next_one(store: Path, folder: Path) -> None:
    with MlflowKeeper() as keeper:
        keeper.ask("begin", sqlite_uri(store), experiment="fedsweep", name="run", tags={}, folder=folder)
        keeper.answer()
        keeper.ask("log_params", {"a": "1"})  # as if Ctrl-C had come before its answer
        assert keeper.call("check_store", sqlite_uri(store), "fedsweep") is None
        with pytest.raises(ResourceError, match="is deleted"):
            client = open_store(sqlite_uri(store))
            experiment = client.get_experiment_by_name("fedsweep")
            assert experiment is not None
            client.delete_experiment(experiment.experiment_id)
            keeper.call("check_store", sqlite_uri(store), "fedsweep")
