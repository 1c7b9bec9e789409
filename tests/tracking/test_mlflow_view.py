"""The command that serves a store's pages."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedsweep.errors import ConfigError, ResourceError
from fedsweep.tracking.mlflow_run import MlflowRun
from fedsweep.tracking.mlflow_store import sqlite_uri
from fedsweep.tracking.mlflow_view import SETTING, pages_address, ui_command


def test_the_pages_are_for_this_machine_alone(store: Path) -> None:
    command, environment = ui_command(sqlite_uri(store), 5123)
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert command[1:4] == ["-m", "mlflow", "server"]
    assert options == {
        "--host": "127.0.0.1",
        "--port": "5123",
        "--backend-store-uri": f"sqlite:///{store}",
        "--artifacts-destination": str(store.parent / "mlartifacts"),
        "--workers": "1",
        "--allowed-hosts": "localhost:5123,127.0.0.1:5123",
        "--uvicorn-opts": "--log-level warning --no-access-log",
    }
    assert environment.pop("PYTHONSAFEPATH") == "1"
    assert environment == {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }


def test_the_address_opens_on_the_runs_written_last(store: Path, tmp_path: Path) -> None:
    """The pages' own start shows none of them."""
    assert pages_address(5123, store) == "http://127.0.0.1:5123"
    for number, name in enumerate(("one", "two")):
        folder = tmp_path / name
        folder.mkdir()
        run = MlflowRun.begin(sqlite_uri(store), experiment=name, name=name, tags={}, folder=folder)
        run.client.update_run(run.run_id, status="FINISHED")
        with sqlite3.connect(store) as base:
            base.execute("UPDATE runs SET start_time = ? WHERE run_uuid = ?", (number, run.run_id))
        found = run.client.get_experiment_by_name(name)
        assert found is not None and SETTING in found.tags["mlflow.sharedViewState.fedsweep"]
    runs = f"http://127.0.0.1:5123/#/experiments/{found.experiment_id}/runs?workflowType=machine_learning"
    assert pages_address(5123, store) == f"{runs}&viewStateShareKey=fedsweep"
    store.write_bytes(b"no database")
    assert pages_address(5123, store) == "http://127.0.0.1:5123"


def test_only_a_store_that_is_there_has_pages(store: Path) -> None:
    with pytest.raises(ResourceError, match="there is no such store yet"):
        ui_command(sqlite_uri(store.with_name("other.db")), 5123)
    with pytest.raises(ConfigError, match="open its own server's pages"):
        ui_command("http://me:secret@host:5000", 5123)
    with pytest.raises(ConfigError, match="a port must be from 1 to 65535, but got 0"):
        ui_command(sqlite_uri(store), 0)


@pytest.mark.slow
def test_the_pages_come_up(store: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command, environment = ui_command(sqlite_uri(store), port)
    server = subprocess.Popen(
        command,
        env=os.environ | environment,
        cwd=store.parent,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert _answer(f"http://127.0.0.1:{port}/health", server) == 200
        strange = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": "192.168.0.1"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(strange, timeout=10)
        refused.value.close()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=20)


def _answer(url: str, server: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return int(response.status)
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"no answer; the server's exit status is {server.poll()}")


def test_a_store_in_a_folder_with_a_number_sign_is_the_one_that_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "exp#1").mkdir()
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as db:
        db.execute("CREATE TABLE runs (experiment_id, lifecycle_stage, start_time)")
        db.execute("CREATE TABLE experiment_tags (experiment_id, key)")
        db.execute("INSERT INTO runs VALUES (7, 'active', 1)")
        db.commit()
    assert "/#/experiments/7/runs" in pages_address(5123, folder / "mlflow.db")
    assert [path.name for path in tmp_path.iterdir()] == ["exp#1"]
