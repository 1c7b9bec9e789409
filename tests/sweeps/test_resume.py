"""A driver that dies, in a process of its own; one that is interrupted is in ``test_terminal.py``."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsweep.config import yaml12
from fedsweep.fleet.ray_leftovers import dead_sessions, remove_session
from fedsweep.runs.find import find_runs
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(store: Path, tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Path:
    more = {"training": {"rounds": 10, "cohort_size": 2, "local_steps": 100}, "checkpoint": {"every": 2}}
    tree = tiny({"seed": {"grid": [0, 1, 2]}}, more={**more, "tracking": {"uri": f"sqlite:///{store}"}})
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml12.dump(tree))
    return path


def start(*words: str | Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "platform")}
    command = [sys.executable, "-m", "fedsweep", "sweep", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str], *, count: int = 1) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def points(tmp_path: Path) -> list[tuple[str, int]]:
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        return base.execute("SELECT run_uuid, step FROM metrics WHERE key = 'train_loss'").fetchall()


def statuses(tmp_path: Path) -> list[str]:
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        return [status for (status,) in base.execute("SELECT status FROM runs")]


def kept_sessions(process: subprocess.Popen[str]) -> list[Path]:
    """Ray's folders of a command that is over, as doctor finds them."""
    return [folder for folder in dead_sessions() if folder.name.endswith(f"_{process.pid}")]


def test_a_sweep_whose_driver_is_killed_ends_as_if_it_had_not(tmp_path: Path, config: Path) -> None:
    folder = tmp_path / "s"
    process = start(config, "--out", folder)
    wait_for(folder, "0*/result.json", process)  # one trial has finished, others have not
    process.kill()
    assert f"go on with --resume (in {folder})" in process.communicate()[0].splitlines()[-1]
    (left,) = kept_sessions(process)
    remove_session(left)
    for run in find_runs(folder):
        with sole_writer(run, patience_s=60):
            pass  # a trial's process may outlive the driver by the end of its trial
    done = {path: path.stat().st_mtime_ns for path in folder.glob("0*/result.json")}
    process = start("--resume", "--out", folder)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert not kept_sessions(process)
    lines = re.findall(r"^\d/3 finished, .*seed=\d: finished, 10 rounds, .* MB sent$", said, re.MULTILINE)
    assert len(lines) == 3 - len(done) and "\x1b" not in said
    assert {path: path.stat().st_mtime_ns for path in done} == done
    runs = find_runs(folder)
    assert [[r.round for r in RunFolder(run).read_rounds()] for run in runs] == [list(range(1, 11))] * 3
    found = points(tmp_path)
    assert len(found) == len(set(found)) == 30
    assert statuses(tmp_path) == ["FINISHED"] * 4


@pytest.mark.exhaustive
def test_a_search_whose_driver_is_killed_proposes_only_what_is_left(
    store: Path, tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    tree = tiny(
        {"training.optimizer.lr": {"loguniform": [1e-3, 0.3]}},
        more={
            "training": {"rounds": 10, "cohort_size": 2, "local_steps": 100},
            "tracking": {"uri": f"sqlite:///{store}"},
        },
        samples=4,
        search="optuna",
        metric=["test_accuracy", "total_bytes"],
        mode=["max", "min"],
    )
    (tmp_path / "search.yaml").write_text(yaml12.dump(tree))
    folder = tmp_path / "s"
    process = start(tmp_path / "search.yaml", "--out", folder)
    wait_for(folder, "0*/result.json", process)
    process.kill()
    process.communicate()
    before = {run.name for run in find_runs(folder)}
    process = start("--resume", "--out", folder)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    runs = find_runs(folder)
    assert len(runs) == 4 and before <= {run.name for run in runs}
    assert {RunFolder(run).read_result()["status"] for run in runs} == {"finished"}
    found = points(tmp_path)
    assert len(found) == len(set(found)) == 40
    process = start(tmp_path / "search.yaml", "--out", tmp_path / "unbroken", "--set", "tracking.uri=none")
    said = process.communicate()[0]
    assert process.returncode == 0, said
    hashes = [
        {run.name: RunFolder(run).read_result()["model_sha256"] for run in find_runs(at)}
        for at in (folder, tmp_path / "unbroken")
    ]
    assert hashes[0] == hashes[1]
