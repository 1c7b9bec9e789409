"""Sweeps on a small Ray cluster that the module shares."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep import sweep
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, OutputError, ResourceError
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.sweep_folder import SweepFolder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]
TinySweep = Callable[..., dict[str, Any]]
LONG = {"rounds": 40, "cohort_size": 2, "local_steps": 60}
METHODS = {"grid": [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}]}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {run.name: RunFolder(run).read_result() for run in find_runs(folder)}


@pytest.fixture(scope="module")
def grid(
    cluster: Any, empty_store: Path, tmp_path_factory: pytest.TempPathFactory, tiny: TinySweep
) -> tuple[Path, Any]:
    """Two methods and two seeds, with an MLflow store: the folder above it, and what Tune says; not to be changed."""
    above = tmp_path_factory.mktemp("grid")
    shutil.copy(empty_store, above / "mlflow.db")
    tracking = {"tracking": {"uri": f"sqlite:///{above}/mlflow.db"}}
    return above, sweep(tiny({"method": METHODS, "seed": {"grid": [0, 1]}}, more=tracking), out=above / "s")


def test_a_grid_of_local_trials_gives_run_folders_with_the_models_of_runs(
    grid: tuple[Path, Any], tmp_path: Path
) -> None:
    above, told = grid
    assert len(told) == 4 and told.num_errors == 0
    assert {(told[k].metrics or {})["round"] for k in range(4)} == {3}
    found = results(above / "s")
    assert list(found) == [
        "0001-FedAvg_seed=0",
        "0002-FedAvg_seed=1",
        "0003-FedProx_seed=0",
        "0004-FedProx_seed=1",
    ]
    name = "0003-FedProx_seed=0"
    alone = fedsweep.run(above / "s" / name / "config.yaml", overrides=["tracking.uri=none"], out=tmp_path / "alone")
    assert alone.summary["model_sha256"] == found[name]["model_sha256"]
    assert {result["git_commit"] for result in found.values()} == {alone.summary["git_commit"]}
    assert (above / "s" / "summary.json").is_file()


def test_mlflow_has_a_child_for_each_trial_that_can_be_compared_as_in_the_papers_tables(
    grid: tuple[Path, Any],
) -> None:
    above, _ = grid
    with sqlite3.connect(above / "mlflow.db") as base:

        def of_runs(question: str) -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            for name, key, value in base.execute(question):
                found.setdefault(name, {})[key] = value
            return found

        named = "FROM runs r JOIN {} x ON x.run_uuid = r.run_uuid"
        tags = of_runs(f"SELECT r.name, x.key, x.value {named.format('tags')}")
        params = of_runs(f"SELECT r.name, x.key, x.value {named.format('params')}")
        points = base.execute(f"SELECT r.name, x.key, x.step {named.format('metrics')}").fetchall()
    methods = ("FedAvg", "FedProx")
    children = [f"tiny {method} seed={seed}" for method in methods for seed in (0, 1)]
    assert set(tags) == {"tiny", *children}
    assert len({tags[name]["mlflow.parentRunId"] for name in children}) == 1
    assert [params[name]["method.name"] for name in children] == ["fedavg", "fedavg", "fedprox", "fedprox"]
    assert [params[name]["seed"] for name in children] == ["0", "1", "0", "1"]
    assert params[children[-1]]["method.mu"] == "0.1" and params[children[-1]]["scenario.dataset"] == "digits"
    compared = ("test_accuracy", "best_test_accuracy", "total_bytes", "comm_ratio")
    for name, run in zip(children, find_runs(above / "s"), strict=True):
        rows = RunFolder(run).read_rounds()
        sent = [sum(row.bytes_up + row.bytes_down for row in rows[: k + 1]) // 1000 for k in range(3)]
        for key in compared:
            assert sorted(step for n, k, step in points if (n, k) == (name, key)) == [1, 2, 3]
            assert sorted(step for n, k, step in points if (n, k) == (name, f"by_bytes/{key}")) == sent


def test_a_folder_that_holds_a_sweep_is_refused_and_so_is_another_plan(tmp_path: Path, tiny: TinySweep) -> None:
    folder, config = SweepFolder(tmp_path / "s"), load_config(tiny({"seed": {"grid": [0]}}))
    from fedsweep.sweeps.prepare import prepare

    prepared = prepare(config, folder, resume=False)
    folder.create(prepared.plan, config_yaml=config.to_yaml(), overwrite=False)
    with pytest.raises(OutputError, match="--resume"):
        sweep(config, out=tmp_path / "s")
    with pytest.raises(ConfigError, match="another configuration"):
        sweep(tiny({"seed": {"grid": [0, 1]}}), out=tmp_path / "s", resume=True)


def test_resume_runs_what_is_unfinished_and_nothing_else(tmp_path: Path, tiny: TinySweep) -> None:
    config = tiny({"seed": {"grid": [0, 1]}}, max_concurrent=1)
    sweep(config, out=tmp_path / "s")
    runs = {run.name: run for run in find_runs(tmp_path / "s")}
    before = results(tmp_path / "s")
    broken = runs["0002-seed=1"]
    (broken / "result.json").unlink()
    (broken / "model.safetensors").unlink()
    (broken / "checkpoints" / "round-000003.json").unlink()
    written = (tmp_path / "s" / "config.yaml").read_text()
    (tmp_path / "s" / "config.yaml").unlink()  # as a kill right after the plan leaves it
    times = {name: (run / "result.json").stat().st_mtime_ns for name, run in runs.items() if run != broken}
    grid = sweep(config, out=tmp_path / "s", resume=True)
    assert len(grid) == 2
    assert (tmp_path / "s" / "config.yaml").read_text() == written
    assert {name: (runs[name] / "result.json").stat().st_mtime_ns for name in times} == times
    after = results(tmp_path / "s")
    assert {n: r["model_sha256"] for n, r in after.items()} == {n: r["model_sha256"] for n, r in before.items()}


def test_seeds_side_by_side_are_runs_of_their_own(tmp_path: Path, tiny: TinySweep) -> None:
    lanes = {"runtime": {"executor": "lanes", "lanes": 5}}
    grid = sweep(tiny({"seed": {"grid": [0, 1, 2]}}, more=lanes, together=2), out=tmp_path / "s")
    assert [len((grid[k].metrics or {}).get("together", ())) for k in range(len(grid))] == [2, 0]
    found = results(tmp_path / "s")
    assert [(r["status"], r["rounds"]) for r in found.values()] == [("finished", 3)] * 3
    assert len(json.loads((tmp_path / "s" / "summary.json").read_text())["trials"]) == 3
    alone = fedsweep.run(tmp_path / "s" / "0002-seed=1" / "config.yaml", out=tmp_path / "alone")
    assert alone.summary["model_sha256"] == found["0002-seed=1"]["model_sha256"]


def test_a_trial_that_fails_says_why_and_the_others_go_on(tmp_path: Path, tiny: TinySweep) -> None:
    rates = {"training.optimizer.lr": {"grid": [0.05, 1e30]}}
    grid = sweep(tiny(rates, max_concurrent=1), out=tmp_path / "s")
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


@pytest.mark.exhaustive
def test_a_trial_whose_process_always_dies_fails_with_its_cause_while_the_others_go_on(
    tmp_path: Path, tiny: TinySweep, capfd: pytest.CaptureFixture[str]
) -> None:
    from fedsweep.sweeps.tuner import RETRIES

    config = tiny({"seed": {"grid": [5, 6]}}, rounds=40, more={"training": LONG}, max_concurrent=1)
    first, killed, is_over = tmp_path / "s" / "0001-seed=5", set(), threading.Event()

    def kill_all() -> None:
        while not is_over.wait(0.02):
            if (first / "config.yaml").is_file() and not (first / "result.json").is_file():
                for pid in set(processes("SweepTrial")) - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)

    thread = threading.Thread(target=kill_all)
    thread.start()
    grid = sweep(config, out=tmp_path / "s")
    is_over.set()
    thread.join()
    found = results(tmp_path / "s")
    assert len(killed) == RETRIES + 1 and grid.num_errors == 1
    failed, finished = found["0001-seed=5"], found["0002-seed=6"]
    assert (failed["status"], failed["reason"]) == ("failed", "the trial's process died")
    assert (finished["status"], finished["rounds"]) == ("finished", 40)
    assert capfd.readouterr().err.count("seed=5: the trial's process died; it goes on") == RETRIES
    said = json.loads((tmp_path / "s" / "summary.json").read_text())["trials"]
    assert [(trial["status"], trial["reason"]) for trial in said] == [
        ("failed", "the trial's process died"),
        ("finished", None),
    ]


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
    grid: tuple[Path, Any], tmp_path: Path, tiny: TinySweep
) -> None:
    more = {"runtime": {"client_actors": 2, "cpus_per_client": 0.5}}
    sweep(tiny({"seed": {"grid": [1]}}, more=more), out=tmp_path / "ray")
    [found], local = results(tmp_path / "ray").values(), results(grid[0] / "s")["0002-FedAvg_seed=1"]
    assert (found["backend"], local["backend"], found["client_actors"]) == ("ray", "local", 2)
    assert found["model_sha256"] == local["model_sha256"]


@pytest.mark.exhaustive
def test_a_client_actor_that_is_killed_in_a_trial_changes_nothing(
    tmp_path: Path, tiny: TinySweep, capfd: pytest.CaptureFixture[str]
) -> None:
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
    assert re.search(r"seed=5: round \d+: client actor \d died .*; replacing it", capfd.readouterr().err)
    [result] = results(tmp_path / "s").values()
    [folder] = find_runs(tmp_path / "s")
    alone = fedsweep.run(folder / "config.yaml", overrides=["runtime={backend: local}"], out=tmp_path / "alone")
    assert result["model_sha256"] == alone.summary["model_sha256"]


def test_a_trial_that_no_node_can_hold_is_refused_before_anything_is_written(tmp_path: Path, tiny: TinySweep) -> None:
    config = tiny({"seed": {"grid": [0]}}, more={"runtime": {"backend": "ray", "cpus_per_client": 500.0}})
    with pytest.raises(ResourceError, match="no room for client actor"):
        sweep(config, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("scheduler", "resource", "good"),
    [
        ("asha", "total_bytes", [0.1]),
        pytest.param("median", "flops", [0.1, 0.11, 0.12, 0.13], marks=pytest.mark.exhaustive),
    ],
)
def test_a_scheduler_ends_the_poor_early_and_they_count_as_finished(
    tmp_path: Path, tiny: TinySweep, scheduler: str, resource: str, good: list[float]
) -> None:
    # The good ones come first, so that the poor have something to fall short of.
    rates = {"training.optimizer.lr": {"grid": [*good, 1e-6, 1e-7]}}
    config = tiny(rates, rounds=9, scheduler=scheduler, resource=resource, max_concurrent=1)
    grid = sweep(config, out=tmp_path / "s")
    assert grid.num_errors == 0
    found = list(results(tmp_path / "s").values())
    assert {r["status"] for r in found} == {"finished"}
    early = [r for r in found if r["stopped_by"] == "scheduler"]
    assert early and all(r["rounds"] < 9 and r["model_sha256"] for r in early)
    assert found[0]["rounds"] == 9 and found[0]["stopped_by"] == "rounds"


def test_the_front_ends_what_it_dominates_and_a_resumed_sweep_knows_it(tmp_path: Path, tiny: TinySweep) -> None:
    rates = {"training.optimizer.lr": {"grid": [0.1, 1e-6]}}
    goal = {"metric": ["test_accuracy", "total_bytes"], "mode": ["max", "min"]}
    config = tiny(rates, rounds=12, scheduler="front", max_concurrent=1, **goal)
    assert sweep(config, out=tmp_path / "s").num_errors == 0
    found = results(tmp_path / "s")
    ends = [(r["rounds"], r["stopped_by"]) for r in found.values()]
    assert ends[0] == (12, "rounds") and ends[1][0] < 12 and ends[1][1] == "scheduler"
    last = find_runs(tmp_path / "s")[1]
    shutil.rmtree(last)
    assert sweep(config, out=tmp_path / "s", resume=True).num_errors == 0
    assert results(tmp_path / "s") == found | {last.name: results(tmp_path / "s")[last.name]}
    assert results(tmp_path / "s")[last.name]["rounds"] == ends[1][0]


def test_pbt_moves_values_and_checkpoints_and_goes_on_with_the_values_that_trials_had_last(
    tmp_path: Path, tiny: TinySweep
) -> None:
    from fedsweep.sweeps.prepare import prepare

    key = "training.optimizer.lr"
    config = tiny({key: {"loguniform": [1e-5, 0.2]}}, rounds=10, samples=3, scheduler="pbt")
    assert sweep(config, out=tmp_path / "s").num_errors == 0
    found = results(tmp_path / "s")
    assert {r["status"] for r in found.values()} == {"finished"} and {r["rounds"] for r in found.values()} == {10}
    runs = find_runs(tmp_path / "s")
    assert max(len({row.lr for row in RunFolder(run).read_rounds()}) for run in runs) > 1
    last = {run.name: load_config(run / "config.yaml").training.optimizer.lr for run in runs}
    folder = SweepFolder(tmp_path / "s")
    begun = {trial.folder: trial.values[key] for trial in folder.read_plan().trials}
    moved = next(run for run in runs if last[run.name] != begun[run.name])
    others = {run: (run / "result.json").read_bytes() for run in runs if run != moved}
    for name in ("result.json", "model.safetensors", "checkpoints/round-000010.json"):
        (moved / name).unlink()
    prepared = prepare(load_config(config), folder, resume=True)
    assert {e.trial.folder: prepared.describe(e)["values"][key] for e in prepared.entries} == last
    grid = sweep(config, out=tmp_path / "s", resume=True)
    assert grid.num_errors == 0 and len(grid) == 3
    assert results(tmp_path / "s")[moved.name]["status"] == "finished"
    assert [row.round for row in RunFolder(moved).read_rounds()] == list(range(1, 11))
    assert {run: (run / "result.json").read_bytes() for run in others} == others


def check_study(folder: Path, directions: list[str], names: list[str]) -> None:
    """Optuna's log has what the trials reached."""
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log"))
    study = optuna.load_study(study_name="fedsweep", storage=optuna.storages.JournalStorage(backend))
    assert [direction.name for direction in study.directions] == directions
    done = [trial.values for trial in study.trials if trial.state.is_finished()]
    assert sorted(done) == sorted([result[name] for name in names] for result in results(folder).values())


def test_the_best_go_on_to_the_next_rung_from_their_checkpoints_and_a_resumed_sweep_ends_with_the_same_trials(
    tmp_path: Path, tiny: TinySweep
) -> None:
    space = {"training.optimizer.lr": {"grid": [0.01, 0.1, 0.3]}, "training.rounds": {"rungs": [1, 2]}}
    folder, config = SweepFolder(tmp_path / "s"), tiny(space, max_concurrent=1)
    sweep(config, out=folder.path)
    plan, whole = folder.read_plan(), results(folder.path)
    *below, above = plan.trials
    assert len(below) == 3 and above.values["training.rounds"] == 2
    lower = next(t for t in below if t.values["training.optimizer.lr"] == above.values["training.optimizer.lr"])
    rows = [RunFolder(folder.trial_path(trial)).read_rounds() for trial in (lower, above)]
    assert rows[1][0] == rows[0][0] and len(rows[1]) == 2
    alone = fedsweep.run(folder.trial_path(above) / "config.yaml", overrides=["tracking.uri=none"], out=tmp_path / "a")
    assert alone.summary["model_sha256"] == whole[above.folder]["model_sha256"]
    # As a kill between the rungs leaves it.
    shutil.rmtree(folder.trial_path(above))
    folder.write_plan(replace(plan, trials=tuple(below)))
    sweep(config, out=folder.path, resume=True)
    assert {name: r["model_sha256"] for name, r in results(folder.path).items()} == {
        name: r["model_sha256"] for name, r in whole.items()
    }


@pytest.mark.exhaustive
def test_optuna_searches_for_one_metric(tmp_path: Path, tiny: TinySweep) -> None:
    space = {"method.high_interval": {"choice": [1, 2]}, "method.low_interval": {"choice": [4, 8]}}
    budgets = {"kind": "dynamic", "budget_fraction": 0.5}
    more = {
        "method": {"name": "dynamicfl", "group": "random"},
        "scenario": {"clients": 6, "partition": {"kind": "iid"}, "budgets": budgets},
    }
    sweep(tiny(space, more=more, samples=3, search="optuna"), out=tmp_path / "s")
    check_study(tmp_path / "s", ["MAXIMIZE"], ["test_accuracy"])


def test_optuna_searches_for_a_pareto_front_and_a_resumed_search_does_not_begin_anew(
    tmp_path: Path, tiny: TinySweep
) -> None:
    space = {"training.optimizer.lr": {"loguniform": [1e-3, 0.3]}, "method": {"choice": METHODS["grid"]}}
    config = tiny(space, samples=3, search="optuna", metric=["test_accuracy", "total_bytes"], mode=["max", "min"])
    sweep(config, out=tmp_path / "s")
    check_study(tmp_path / "s", ["MAXIMIZE", "MINIMIZE"], ["test_accuracy", "total_bytes"])
    found = results(tmp_path / "s")
    assert len(found) == 3 and {r["status"] for r in found.values()} == {"finished"}
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


def test_a_study_keeps_to_its_budget_and_goes_on_with_more(tmp_path: Path, tiny: TinySweep) -> None:
    tree = tiny({"seed": {"grid": [0, 1, 2, 3]}}, budget={"trials": 2}, max_concurrent=1)
    sweep(tree, out=tmp_path / "s")
    assert len(find_runs(tmp_path / "s")) == 2
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert any("2 trials of 2 trials; 2 of 4 trials left out" in note for note in summary["notes"])
    shutil.rmtree(find_runs(tmp_path / "s")[1])
    tree["sweep"]["budget"] = {"trials": 3}
    sweep(tree, out=tmp_path / "s", resume=True)
    assert [RunFolder(run).read_result()["seed"] for run in find_runs(tmp_path / "s")] == [0, 1, 2]
