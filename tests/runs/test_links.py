"""Nothing is written through links out of a folder, and a folder that vanishes in the middle of a run is a failure."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep import api
from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.driver.observers import Observer
from fedsweep.errors import OutputError, RunError
from fedsweep.records import RoundRecord
from fedsweep.runs.files import atomic_write
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.space import list_trials
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan

TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 2}
checkpoint: {every: 1}
runtime: {backend: local}
tracking: {uri: none}
sweep: {space: {seed: {grid: [0, 1]}}}
"""


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that must stay so; the working folder has a configuration beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("tiny.yaml").write_text(TINY)
    (tmp_path / "outside").mkdir()
    return tmp_path / "outside"


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and "link" in line
    return line


@pytest.mark.parametrize("name", ["pictures", "checkpoints", "checkpoints/objects", "figures"])
def test_resume_into_a_linked_folder_is_refused(name: str, outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("run") / name
    path.parent.mkdir(parents=True)
    Path("run/config.yaml").write_text(load_config("tiny.yaml").to_yaml())
    path.symlink_to(outside)
    assert str(path) in refused(["run", "--resume", "run"], capsys)
    assert list(outside.iterdir()) == []


def test_sweep_does_not_run_a_trial_into_a_link(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("tiny.yaml")
    trials = tuple(list_trials(config))
    SweepFolder(Path("swept")).create(
        SweepPlan(config_tree=config.given, trials=trials), config_yaml=None, overwrite=False
    )
    (Path("swept") / trials[1].folder).symlink_to(outside)
    assert trials[1].folder in refused(["sweep", "--resume", "--out", "swept"], capsys)
    assert list(outside.iterdir()) == []


def test_file_that_is_a_link_is_replaced_not_followed(outside: Path) -> None:
    from fedsweep.figures.partition import plot_partition

    (outside / "mine.png").write_bytes(b"mine")
    for name in ("a.png", f".a.json.{os.getpid()}.tmp"):
        Path(name).symlink_to(outside / "mine.png")
    atomic_write(Path("a.json"), b"{}")
    plot_partition(np.array([[3, 1], [2, 2]]), Path("a.png"))
    assert (outside / "mine.png").read_bytes() == b"mine"
    assert not Path("a.png").is_symlink() and Path("a.png").read_bytes().startswith(b"\x89PNG")


class Remover(Observer):
    """Removes the run's folder after the first round, and puts another in its place or not."""

    def __init__(self, *, replace: bool) -> None:
        self._replace = replace
        self.status = ""

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        self.status = status

    def round_done(self, record: RoundRecord) -> None:
        if record.round == 1:
            shutil.move("run", "away")
            if self._replace:
                Path("run").mkdir()


@pytest.mark.parametrize("replace", [False, True])
def test_folder_that_vanishes_is_a_failure(replace: bool) -> None:
    vanishing(replace=replace, backend="local")


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_folder_that_vanishes_is_a_failure_on_ray() -> None:
    vanishing(replace=True, backend="ray")


def vanishing(*, replace: bool, backend: str) -> None:
    watcher = Remover(replace=replace)
    runtime = [f"runtime={{backend: {backend}, client_actors: 2}}"]
    with pytest.raises(RunError, match=r"run is gone, or another folder is in its place"):
        api.run("tiny.yaml", overrides=runtime, out="run", observers=[watcher])
    assert watcher.status == "failed"
    assert not Path("run").exists() or list(Path("run").iterdir()) == []


def test_a_result_that_is_a_link_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text('{"status": "finished"}')
    (tmp_path / "result.json").symlink_to("elsewhere.json")
    with pytest.raises(OutputError, match=r"^\S+result\.json: cannot be read: it is a link$"):
        RunFolder(tmp_path).read_result()
