"""Sweeps over a cluster of several nodes, joined by its address; nodes come and go."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedsweep
from fedsweep import sweep
from fedsweep.errors import ResourceError
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]
TinySweep = Callable[..., dict[str, Any]]
LONG = {"rounds": 20, "cohort_size": 2, "local_steps": 100}
# Two client actors with a quarter of a (counted) GPU each; a node has room for two such trials.
QUARTERS = {"client_actors": 2, "cpus_per_client": 0.5, "gpus_per_client": 0.25, "device": "cpu"}


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A head with two CPUs and a GPU that is only counted."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def processes_on(node: Any, name: str) -> list[psutil.Process]:
    """Ray's workers of a node, by what they hold."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    found = []
    for process in raylet.children(recursive=True):
        try:
            if any(name in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextlib.contextmanager
def once(is_time: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Does something beside what the block does, once it is time for it."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(0.02):
            if is_time():
                return act()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def undisturbed(folder: Path, alone: Path) -> dict[str, str]:
    """The models that the trials' configurations give without a sweep and without Ray."""
    here = ["runtime.backend=local", "runtime.address=null", "runtime.gpus_per_client=0", "tracking.uri=none"]
    return {
        run.name: fedsweep.run(run / "config.yaml", overrides=here, out=alone / run.name).summary["model_sha256"]
        for run in find_runs(folder)
    }


def models(folder: Path) -> dict[str, str]:
    return {run.name: RunFolder(run).read_result().get("model_sha256", "") for run in find_runs(folder)}


def logged(store: Path) -> list[tuple[str, int]]:
    with sqlite3.connect(store) as base:
        return base.execute("SELECT run_uuid, step FROM metrics WHERE key = 'train_loss'").fetchall()


def hidden_from(node_maker: Callable[[], Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a node for whose processes a folder is another, empty one."""
    from ray._private import services

    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(folder)], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    wrapper = tmp_path / "raylet"
    wrapper.write_text(
        f'#!/bin/sh\nexec unshare -rm sh -c \'mount -t tmpfs none {folder} && cd / && exec "$0" "$@"\''
        f' {services.RAYLET_EXECUTABLE} "$@"\n'
    )
    wrapper.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(services, "RAYLET_EXECUTABLE", str(wrapper))
        return node_maker()


OWN = "from fedsweep.algorithms.fedprox import fedprox\n\n\ndef mine():\n    return fedprox(mu=0.25)\n"


@pytest.fixture
def head_alone() -> Iterator[Any]:
    """A head without a CPU, so that trials are played elsewhere."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_trials_on_a_node_without_the_folder_come_back_whole(
    head_alone: Any, tmp_path: Path, tiny: TinySweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "study").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "lone_method.py").write_text(OWN)
    node = hidden_from(lambda: head_alone.add_node(num_cpus=1), folder, tmp_path, monkeypatch)
    head_alone.wait_for_nodes()
    runtime, method = {"address": head_alone.address}, {"name": "lone_method:mine"}
    more = {"training": {**LONG, "rounds": 30}, "runtime": runtime, "method": method}
    config, killed = tiny({"seed": {"grid": [0, 1]}}, more=more), []

    def kill() -> None:
        for process in processes_on(node, "SweepTrial"):
            killed.append(process)
            process.kill()

    with once(lambda: bool([*folder.glob("s/0001*/checkpoints/round-*.json")]), kill):
        grid = sweep(config, out=folder / "s")
    assert killed and grid.num_errors == 0
    assert {name: RunFolder(folder / "s" / name).read_result()["status"] for name in models(folder / "s")} == {
        "0001-seed=0": "finished",
        "0002-seed=1": "finished",
    }
    assert models(folder / "s") == undisturbed(folder / "s", tmp_path / "alone")


def test_what_a_node_lacks_is_said_before_anything_is_written(
    head_alone: Any, tmp_path: Path, tiny: TinySweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files := tmp_path / "files").mkdir()
    fedsweep.run(tiny({}, rounds=1), out=files / "first")
    more = {"runtime": {"address": head_alone.address}, "model": {"init_from": str(files / "first")}}
    config = tiny({"seed": {"grid": [0, 1]}}, more=more)

    def refused(hidden: Path) -> str:
        node = hidden_from(lambda: head_alone.add_node(num_cpus=1), hidden, tmp_path, monkeypatch)
        head_alone.wait_for_nodes()
        with pytest.raises(ResourceError, match="1 of the cluster's 2 nodes can't take part") as caught:
            sweep(config, out=tmp_path / "s")
        head_alone.remove_node(node)
        return str(caught.value)

    assert "it needs fedsweep 0" in refused(Path(fedsweep.__file__).parent)
    assert "trial 1: model.init_from: " in (said := refused(files)) and "is neither a folder nor a file" in said
    assert {path.name for path in (tmp_path / "s").glob("*")} <= {"ray.log"}


def test_a_node_that_is_killed_in_a_sweep_changes_no_model(
    nodes: Any, store: Path, tmp_path: Path, tiny: TinySweep
) -> None:
    second = nodes.add_node(num_cpus=2, num_gpus=1)
    nodes.wait_for_nodes()
    runtime = {**QUARTERS, "address": nodes.address}
    tracking = {"uri": f"sqlite:///{store}"}
    config = tiny({"seed": {"grid": [0, 1, 2, 3]}}, more={"training": LONG, "runtime": runtime, "tracking": tracking})
    folder, killed = tmp_path / "s", []

    def is_time() -> bool:
        written = {path.parent.parent for path in folder.glob("0*/checkpoints/round-*.json")}
        # Each node has room for two, so one of three is there.
        return len(written) >= 3 and bool(processes_on(second, "SweepTrial"))

    def kill() -> None:
        killed.extend(processes_on(second, "SweepTrial") + processes_on(second, "ClientActor"))
        nodes.remove_node(second, allow_graceful=False)

    with once(is_time, kill):
        grid = sweep(config, out=folder)
    assert len(killed) > 2 and grid.num_errors == 0
    assert {result["backend"] for result in (RunFolder(run).read_result() for run in find_runs(folder))} == {"ray"}
    assert models(folder) == undisturbed(folder, tmp_path / "alone")
    points = logged(tmp_path / "mlflow.db")
    assert len(points) == len(set(points)) == 4 * LONG["rounds"]
