"""Sweeps on a small Ray cluster that the module shares."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, OutputError, ResourceError
from fedsweep.runtime.run_folder import RunFolder, find_runs
from fedsweep.sweeps import sweep
from fedsweep.sweeps.sweep_folder import SweepFolder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]
TinySweep = Callable[..., dict[str, Any]]
LONG = {"rounds": 40, "cohort_size": 2, "local_steps": 60}
METHODS = {"grid": [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}]}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {run.name: RunFolder(run).read_result() for run in find_runs(folder)}


def test_a_grid_of_local_trials_gives_run_folders_with_the_models_of_runs(tmp_path: Path, tiny: TinySweep) -> None:
    grid = sweep(tiny({"method": METHODS, "seed": {"grid": [0, 1]}}), out=tmp_path / "s")
    assert len(grid) == 4 and grid.num_errors == 0
    assert {(grid[k].metrics or {})["round"] for k in range(4)} == {3}
    found = results(tmp_path / "s")
    assert list(found) == [
        "0001-method=fedavg_seed=0",
        "0002-method=fedavg_seed=1",
        "0003-method=fedprox,mu=0.1_seed=0",
        "0004-method=fedprox,mu=0.1_seed=1",
    ]
    name = "0003-method=fedprox,mu=0.1_seed=0"
    alone = fedsweep.run(tmp_path / "s" / name / "config.yaml", out=tmp_path / "alone")
    assert alone.summary["model_sha256"] == found[name]["model_sha256"]
    assert (tmp_path / "s" / "summary.json").is_file()


def test_a_folder_that_holds_a_sweep_is_refused_and_so_is_another_plan(tmp_path: Path, tiny: TinySweep) -> None:
    folder, config = SweepFolder(tmp_path / "s"), load_config(tiny({"seed": {"grid": [0]}}))
    from fedsweep.sweeps.preparing import prepare

    prepared = prepare(config, folder, resume=False)
    folder.create(prepared.plan, config_yaml=config.to_yaml(), overwrite=False)
    with pytest.raises(OutputError, match="--resume"):
        sweep(config, out=tmp_path / "s")
    with pytest.raises(ConfigError, match="another configuration"):
        sweep(tiny({"seed": {"grid": [0, 1]}}), out=tmp_path / "s", resume=True)


def test_resume_runs_what_is_unfinished_and_nothing_else(tmp_path: Path, tiny: TinySweep) -> None:
    config = tiny({"seed": {"grid": [0, 1, 2]}})
    sweep(config, out=tmp_path / "s")
    runs = {run.name: run for run in find_runs(tmp_path / "s")}
    before = results(tmp_path / "s")
    broken = runs["0002-seed=1"]
    (broken / "result.json").unlink()
    (broken / "model.safetensors").unlink()
    (broken / "checkpoints" / "round-000003.json").unlink()
    times = {name: (run / "result.json").stat().st_mtime_ns for name, run in runs.items() if run != broken}
    grid = sweep(config, out=tmp_path / "s", resume=True)
    assert len(grid) == 3
    assert {name: (runs[name] / "result.json").stat().st_mtime_ns for name in times} == times
    after = results(tmp_path / "s")
    assert {n: r["model_sha256"] for n, r in after.items()} == {n: r["model_sha256"] for n, r in before.items()}


def test_a_trial_that_fails_says_why_and_the_others_go_on(tmp_path: Path, tiny: TinySweep) -> None:
    rates = {"training.optimizer.lr": {"grid": [0.05, 1e30]}}
    grid = sweep(tiny(rates), out=tmp_path / "s")
    assert grid.num_errors == 1
    found = {r["status"]: r for r in results(tmp_path / "s").values()}
    assert set(found) == {"finished", "failed"}
    assert "client" in found["failed"]["reason"]


def test_a_trial_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path, tiny: TinySweep) -> None:
    config = tiny({"seed": {"grid": [5]}}, rounds=40, more={"training": LONG})
    killed: list[int] = []

    def kill_once() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if list((tmp_path / "s").glob("*/checkpoints/round-00*.json")):
                if pids := processes("SweepTrial"):
                    os.kill(pids[0], signal.SIGKILL)
                    killed.append(pids[0])
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=kill_once)
    thread.start()
    grid = sweep(config, out=tmp_path / "s")
    thread.join()
    assert killed and grid.num_errors == 0
    [result] = results(tmp_path / "s").values()
    [folder] = find_runs(tmp_path / "s")
    alone = fedsweep.run(folder / "config.yaml", out=tmp_path / "alone")
    assert result["model_sha256"] == alone.summary["model_sha256"]
    assert [r.round for r in RunFolder(folder).read_rounds()] == list(range(1, 41))


def processes(name: str) -> list[int]:
    import psutil

    below = psutil.Process().children(recursive=True)
    return [p.pid for p in below if any(name in word for word in cmdline(p))]


def cmdline(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_a_trial_with_client_actors_holds_a_bundle_each_and_gives_the_same_model(
    tmp_path: Path, tiny: TinySweep
) -> None:
    space = {"seed": {"grid": [0, 1]}}
    sweep(tiny(space, more={"runtime": {"client_actors": 2, "cpus_per_client": 0.5}}), out=tmp_path / "ray")
    sweep(tiny(space), out=tmp_path / "local")
    found, local = results(tmp_path / "ray"), results(tmp_path / "local")
    assert {r["backend"] for r in found.values()} == {"ray"} and {r["backend"] for r in local.values()} == {"local"}
    assert {r["client_actors"] for r in found.values()} == {2}
    assert {n: r["model_sha256"] for n, r in found.items()} == {n: r["model_sha256"] for n, r in local.items()}


def test_a_client_actor_that_is_killed_in_a_trial_changes_nothing(tmp_path: Path, tiny: TinySweep) -> None:
    more = {"training": LONG, "runtime": {"client_actors": 2, "cpus_per_client": 0.5}}
    killed: list[int] = []

    def kill_once() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not killed:
            if list((tmp_path / "s").glob("*/checkpoints/round-00*.json")):
                for pid in processes("ClientActor")[:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.01)

    thread = threading.Thread(target=kill_once)
    thread.start()
    grid = sweep(tiny({"seed": {"grid": [5]}}, more=more), out=tmp_path / "s")
    thread.join()
    assert killed and grid.num_errors == 0
    [result] = results(tmp_path / "s").values()
    [folder] = find_runs(tmp_path / "s")
    alone = fedsweep.run(folder / "config.yaml", overrides=["runtime={backend: local}"], out=tmp_path / "alone")
    assert result["model_sha256"] == alone.summary["model_sha256"]


def test_a_trial_that_no_node_can_hold_is_refused_before_anything_is_written(tmp_path: Path, tiny: TinySweep) -> None:
    config = tiny({"seed": {"grid": [0]}}, more={"runtime": {"backend": "ray", "cpus_per_client": 500.0}})
    with pytest.raises(ResourceError, match="no room for client actor"):
        sweep(config, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("scheduler", "resource"), [("asha", "round"), ("asha", "total_bytes"), ("median", "flops")])
def test_a_scheduler_ends_the_poor_early_and_they_count_as_finished(
    tmp_path: Path, tiny: TinySweep, scheduler: str, resource: str
) -> None:
    # The good ones come first, so that the poor have something to fall short of.
    rates = {"training.optimizer.lr": {"grid": [0.1, 0.11, 0.12, 0.13, 1e-6, 1e-7]}}
    config = tiny(rates, rounds=9, scheduler=scheduler, resource=resource, max_concurrent=1)
    grid = sweep(config, out=tmp_path / "s")
    assert grid.num_errors == 0
    found = list(results(tmp_path / "s").values())
    assert {r["status"] for r in found} == {"finished"}
    early = [r for r in found if r["stopped_by"] == "scheduler"]
    assert early and all(r["rounds"] < 9 and r["model_sha256"] for r in early)
    assert found[0]["rounds"] == 9 and found[0]["stopped_by"] == "rounds"


def test_pbt_moves_values_and_checkpoints_between_trials(tmp_path: Path, tiny: TinySweep) -> None:
    space = {"training.optimizer.lr": {"loguniform": [1e-5, 0.2]}}
    grid = sweep(tiny(space, rounds=20, samples=4, scheduler="pbt"), out=tmp_path / "s")
    assert grid.num_errors == 0
    found = results(tmp_path / "s")
    assert {r["status"] for r in found.values()} == {"finished"} and {r["rounds"] for r in found.values()} == {20}
    rates = [{row.lr for row in RunFolder(run).read_rounds()} for run in find_runs(tmp_path / "s")]
    assert max(map(len, rates)) > 1


def test_optuna_proposes_trials_and_a_resumed_search_does_not_begin_anew(tmp_path: Path, tiny: TinySweep) -> None:
    pytest.importorskip("optuna")
    space = {"training.optimizer.lr": {"loguniform": [1e-3, 0.3]}, "method": {"choice": METHODS["grid"]}}
    config = tiny(space, samples=4, search="optuna", metric=["test_accuracy", "total_bytes"], mode=["max", "min"])
    sweep(config, out=tmp_path / "s")
    found = results(tmp_path / "s")
    assert len(found) == 4 and {r["status"] for r in found.values()} == {"finished"}
    (tmp_path / "s" / sorted(found)[1] / "result.json").unlink()
    sweep(config, out=tmp_path / "s", resume=True)
    assert {n: r["model_sha256"] for n, r in results(tmp_path / "s").items()} == {
        n: r["model_sha256"] for n, r in found.items()
    }


def test_optuna_without_the_extra_is_refused(tmp_path: Path, tiny: TinySweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    config = tiny({"training.optimizer.lr": {"uniform": [0.1, 0.3]}}, samples=2, search="optuna")
    with pytest.raises(ResourceError, match=r"fedsweep\[optuna\]"):
        sweep(config, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()
