"""Runs that are killed go on to the bits of an unbroken run, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting_run import waiting

from fedsweep.cli import main
from fedsweep.runs.run_folder import RunFolder

pytestmark = pytest.mark.slow

SMALL = [
    "scenario.clients=8",
    "training.cohort_size=4",
    "training.rounds=12",
    "training.local_epochs=2",
    "training.optimizer={name: sgd, lr: 0.05, momentum: 0.9}",
    "training.optimizer_state=persist",
    "checkpoint={every: 2, keep: 3}",
    "tracking.uri=none",
]
METHODS = {"fedavg": "{name: fedavg}", "dynamicfl": "{name: dynamicfl, low_interval: 8, group: random}"}
Said = Callable[..., tuple[int, str]]


def words(configuration: Path, out: Path, *, backend: str = "local", method: str = "fedavg") -> list[str]:
    settings = [*SMALL, f"runtime.backend={backend}", f"method={METHODS[method]}"]
    return ["run", str(configuration), "--out", str(out), *[part for s in settings for part in ("--set", s)]]


def start(*given: str, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "fedsweep", *given], cwd=cwd, text=True, **more)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text("name: small\n")
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Calls the command in this process; gives its exit code and what it said."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def called(*given: str | Path) -> tuple[int, str]:
        code = main([str(word) for word in given])
        return code, "".join(capsys.readouterr())

    return called


def sha(folder: Path) -> str:
    text: str = json.loads((folder / "result.json").read_text())["model_sha256"]
    return text


@pytest.fixture(scope="module")
def unbroken(configuration: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished local run of each method."""
    folders = {}
    for method in METHODS:
        folders[method] = tmp_path_factory.mktemp(method) / "run"
        assert main([*words(configuration, folders[method], method=method), "--quiet"]) == 0
    return folders


def start_and_signal(given: list[str], folder: Path, *, after_round: int, how: signal.Signals) -> int:
    """Start a run that waits after a round, and signal its process once that is on its output; its exit code."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    environment = waiting(folder.parent, after_round=after_round)
    with start(*given, cwd=folder.parent, env=environment, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"round  {after_round}/"):
                break
        os.kill(process.pid, how)
        process.stdout.read()
        return process.wait(60)


@pytest.mark.parametrize(
    ("backend", "method"), [("local", "fedavg"), pytest.param("ray", "dynamicfl", marks=pytest.mark.ray)]
)
def test_a_killed_driver_resumes_to_the_same_bits(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path, call: Said, method: str, backend: str
) -> None:
    folder = tmp_path / "run"
    given = words(configuration, folder, backend=backend, method=method)
    assert start_and_signal(given, folder, after_round=5, how=signal.SIGKILL) == -signal.SIGKILL
    code, said = call("run", "--resume", folder)
    assert code == 0, said
    assert sha(folder) == sha(unbroken[method])
    rounds = RunFolder(folder).read_rounds()
    assert [r.round for r in rounds] == list(range(1, 13))
    expected = RunFolder(unbroken[method]).read_rounds()
    assert [r.test_accuracy for r in rounds] == [r.test_accuracy for r in expected]
    assert [r.bytes_up for r in rounds] == [r.bytes_up for r in expected]


# On Ray a signal ends a run in commands/test_run.py, and a resumed one ends with the same bits above.
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.exhaustive])])
def test_an_interrupted_run_exits_130_and_resumes(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path, call: Said, backend: str
) -> None:
    """By Ctrl-C; by other signals in ``commands/test_run.py``."""
    folder = tmp_path / "run"
    given = words(configuration, folder, backend=backend)
    assert start_and_signal(given, folder, after_round=5, how=signal.SIGINT) == 130
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "killed"
    assert (folder / "checkpoints" / f"round-{result['rounds']:06d}.json").exists()
    assert call("run", "--resume", folder)[0] == 0
    assert sha(folder) == sha(unbroken["fedavg"])


def test_resuming_a_finished_run_says_so(unbroken: dict[str, Path], call: Said) -> None:
    before = (unbroken["fedavg"] / "result.json").read_bytes()
    code, said = call("run", "--resume", unbroken["fedavg"])
    assert code == 0 and "finished" in said
    assert (unbroken["fedavg"] / "result.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["newest", "all", "none there"])
def test_a_damaged_checkpoint_is_passed_over_and_said(
    unbroken: dict[str, Path], tmp_path: Path, call: Said, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken["fedavg"], folder)
    (folder / "result.json").unlink()
    (folder / "model.safetensors").unlink()
    manifests = sorted((folder / "checkpoints").glob("round-*.json"))
    assert len(manifests) == 3
    if damage == "none there":
        shutil.rmtree(folder / "checkpoints")
    for manifest in manifests[-1:] if damage == "newest" else manifests if damage == "all" else []:
        data = bytearray(manifest.read_bytes())
        data[len(data) // 2] ^= 1
        manifest.write_bytes(data)
    code, said = call("run", "--resume", folder)
    assert code == 0, said
    assert sha(folder) == sha(unbroken["fedavg"])
    if damage == "newest":
        assert manifests[-1].stem in said and "going on after round" in said
    else:
        assert "starting anew" in said


def test_verify_repeats_a_run_and_notices_a_changed_model(
    unbroken: dict[str, Path], tmp_path: Path, call: Said
) -> None:
    code, said = call("verify", unbroken["dynamicfl"])
    assert code == 0, said
    changed = tmp_path / "changed"
    shutil.copytree(unbroken["dynamicfl"], changed)
    config = (changed / "config.yaml").read_text()
    (changed / "config.yaml").write_text(config.replace("\nseed: 0\n", "\nseed: 1\n"))
    code, said = call("verify", changed)
    assert code == 1 and "model_sha256" in said


def test_different_methods_and_seeds_give_different_bits_and_they_train(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "seed"
    assert main([*words(configuration, other), "--set", "seed=1", "--quiet"]) == 0
    assert len({sha(other), *(sha(folder) for folder in unbroken.values())}) == 3
    for folder in (other, *unbroken.values()):
        assert json.loads((folder / "result.json").read_text())["best_test_accuracy"] > 0.6


def test_a_folder_killed_before_its_first_checkpoint_starts_anew(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path, call: Said
) -> None:
    folder = tmp_path / "run"
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = start(*words(configuration, folder), cwd=tmp_path, **nowhere)
    deadline = time.monotonic() + 60
    while not (folder / "config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait(30)
    code, said = call("run", "--resume", folder)
    assert code == 0, said
    assert sha(folder) == sha(unbroken["fedavg"])
