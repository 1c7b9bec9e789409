"""Runs that are killed go on to the bits of an unbroken run, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsweep.runs.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.ray]

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


def command(*words: str, backend: str, method: str = "fedavg", rounds: int = 12) -> list[str]:
    settings = [*SMALL, f"training.rounds={rounds}", f"runtime.backend={backend}", f"method={METHODS[method]}"]
    return [sys.executable, "-m", "fedsweep", "run", *words, *[part for s in settings for part in ("--set", s)]]


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text("name: small\n")
    return path


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240)


def resume(folder: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "fedsweep", "run", "--resume", str(folder)], folder.parent)


def sha(folder: Path) -> str:
    text: str = json.loads((folder / "result.json").read_text())["model_sha256"]
    return text


@pytest.fixture(scope="module")
def unbroken(configuration: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished local run of each method."""
    folders = {}
    for method in METHODS:
        folders[method] = tmp_path_factory.mktemp(method) / "run"
        done = run(
            command(str(configuration), "--out", str(folders[method]), backend="local", method=method),
            folders[method].parent,
        )
        assert done.returncode == 0, done.stderr
    return folders


def start_and_signal(words: list[str], folder: Path, *, after_round: int, how: signal.Signals) -> int:
    """Start a run, wait until a round is on its output, then signal its process; its exit code."""
    with subprocess.Popen(
        words, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if f"{after_round}/" in line and "round" in line:
                break
        os.kill(process.pid, how)
        process.stdout.read()
        return process.wait(60)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_killed_driver_resumes_to_the_same_bits(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path, method: str, backend: str
) -> None:
    folder = tmp_path / "run"
    # Many rounds, so that it is sure to be under way; the resumed run then has the configuration of the short one.
    code = start_and_signal(
        command(str(configuration), "--out", str(folder), backend=backend, method=method),
        folder,
        after_round=5,
        how=signal.SIGKILL,
    )
    if code == 0:
        pytest.fail("the run ended before it could be killed")
    done = resume(folder)
    assert done.returncode == 0, done.stderr
    assert sha(folder) == sha(unbroken[method])
    rounds = RunFolder(folder).read_rounds()
    assert [r.round for r in rounds] == list(range(1, 13))
    expected = RunFolder(unbroken[method]).read_rounds()
    assert [r.test_accuracy for r in rounds] == [r.test_accuracy for r in expected]
    assert [r.bytes_up for r in rounds] == [r.bytes_up for r in expected]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_an_interrupted_run_exits_130_and_resumes(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path, backend: str, how: signal.Signals
) -> None:
    folder = tmp_path / "run"
    code = start_and_signal(
        command(str(configuration), "--out", str(folder), backend=backend), folder, after_round=5, how=how
    )
    assert code == 130
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "killed"
    assert (folder / "checkpoints" / f"round-{result['rounds']:06d}.json").exists()
    assert resume(folder).returncode == 0
    assert sha(folder) == sha(unbroken["fedavg"])


def test_resuming_a_finished_run_says_so(unbroken: dict[str, Path]) -> None:
    before = (unbroken["fedavg"] / "result.json").read_bytes()
    done = resume(unbroken["fedavg"])
    assert done.returncode == 0
    assert "finished" in done.stdout + done.stderr
    assert (unbroken["fedavg"] / "result.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["newest", "all", "none there"])
def test_a_damaged_checkpoint_is_passed_over_and_said(unbroken: dict[str, Path], tmp_path: Path, damage: str) -> None:
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
    done = resume(folder)
    assert done.returncode == 0, done.stderr
    assert sha(folder) == sha(unbroken["fedavg"])
    said = done.stdout + done.stderr
    if damage == "newest":
        assert manifests[-1].stem in said and "going on after round" in said
    else:
        assert "starting anew" in said


def test_verify_repeats_a_run_and_notices_a_changed_model(unbroken: dict[str, Path], tmp_path: Path) -> None:
    verify = [sys.executable, "-m", "fedsweep", "verify"]
    good = run([*verify, str(unbroken["dynamicfl"])], tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    changed = tmp_path / "changed"
    shutil.copytree(unbroken["dynamicfl"], changed)
    config = (changed / "config.yaml").read_text()
    (changed / "config.yaml").write_text(config.replace("\nseed: 0\n", "\nseed: 1\n"))
    bad = run([*verify, str(changed)], tmp_path)
    assert bad.returncode == 1
    assert "model_sha256" in bad.stdout + bad.stderr


def test_different_methods_and_seeds_give_different_bits_and_they_train(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "seed"
    words = command(str(configuration), "--out", str(other), backend="local")
    assert run([*words, "--set", "seed=1"], tmp_path).returncode == 0
    assert len({sha(other), *(sha(folder) for folder in unbroken.values())}) == 3
    for folder in (other, *unbroken.values()):
        assert json.loads((folder / "result.json").read_text())["best_test_accuracy"] > 0.6


def test_a_folder_killed_before_its_first_checkpoint_starts_anew(
    configuration: Path, unbroken: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(str(configuration), "--out", str(folder), backend="local"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (folder / "config.yaml").exists() and time.monotonic() < deadline:
        pass
    process.kill()
    process.wait(30)
    done = resume(folder)
    assert done.returncode == 0, done.stderr
    assert sha(folder) == sha(unbroken["fedavg"])
