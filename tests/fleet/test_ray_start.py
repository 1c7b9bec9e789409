"""A cluster that starts beside the driver's own imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ResourceError
from fedsweep.fleet import ray_cluster, ray_start
from fedsweep.fleet.ray_leftovers import own_sessions
from fedsweep.fleet.ray_start import ClusterNeeds, ClusterStart, early_cluster, early_needs


@pytest.mark.parametrize(
    ("runtime", "actors"),
    [
        ({"backend": "ray", "client_actors": 3}, 3),
        ({"client_actors": 2}, 2),
        ({"backend": "ray", "cpus_per_client": 1000.0}, 1),
        ({}, None),
        ({"client_actors": 1}, None),
        ({"backend": "local"}, None),
        ({"backend": "ray", "address": "auto"}, None),
        ({"backend": "ray", "gpus_per_client": 0.5}, None),
    ],
)
def test_ray_starts_early_where_the_configuration_says_that_it_is_needed(
    runtime: dict[str, object], actors: int | None
) -> None:
    needs = early_needs(load_config({"runtime": runtime}))
    assert (None if needs is None else needs.actors) == actors


@pytest.mark.parametrize(
    ("gpus", "client", "server", "actors"),
    [(2, 0.5, 0.0, 4), (1, 0.5, 0.5, 1), (8, 1.0, 1.0, 7), (2, 1 / 3, 0.5, 4), (3, 0.2, 0.2, 14), (1, 1 / 93, 0.0, 93)],
)
def test_as_many_actors_as_have_room_beside_the_servers_share_of_a_gpu(
    gpus: int, client: float, server: float, actors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ray_start, ray_cluster):
        monkeypatch.setattr(module, "num_gpus_here", lambda: gpus)
    runtime = load_config({"runtime": {"gpus_per_client": client, "gpus_per_server": server}}).runtime
    assert ray_start.room_here(runtime) == actors
    needs = ClusterNeeds(actors=actors, cpus_per_client=0.0, gpus_per_client=client, gpus_per_server=server)
    ray_cluster.check_gpus(needs)
    ray_cluster.check_fits([{"GPU": float(gpus)}], needs)
    with pytest.raises(ResourceError, match=f"this machine has {gpus};"):
        ray_cluster.check_gpus(replace(needs, actors=actors + 1))


def test_a_cluster_that_does_not_come_up_is_said_with_what_may_be_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Ray lost its raylet")

    monkeypatch.setattr(ray_start, "_start_ray", lost)
    with pytest.raises(
        ResourceError, match=r"\(Ray lost its raylet\); on a machine that other work keeps busy .* again"
    ):
        ClusterStart(ClusterNeeds(actors=1, store_bytes=1)).wait()


@pytest.mark.ray
def test_an_early_cluster_that_nobody_takes_leaves_nothing() -> None:
    import ray

    mask = os.umask(0o022)
    before = own_sessions()
    try:
        with early_cluster(ClusterNeeds(actors=2, store_bytes=2**28)) as begun:
            assert isinstance(begun, ClusterStart)
            begun.wait()
            assert os.umask(0o022) == 0o022  # Ray's files are its user's alone, those of the run are not
            assert ray.is_initialized()
            others = " ".join(argument for child in psutil.Process().children() for argument in child.cmdline()[:3])
            assert "gcs_server" in others and "raylet" in others
            assert begun.fits(ClusterNeeds(actors=2, store_bytes=2**28))
            assert not begun.fits(ClusterNeeds(actors=2, store_bytes=2**29))
            assert not begun.fits(ClusterNeeds(actors=1, gpus_per_client=1.0, store_bytes=2**28))
        assert not ray.is_initialized() and own_sessions() == before
    finally:
        os.umask(mask)


def test_ctrl_c_while_ray_starts_leaves_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process goes on, and its next run would take the cluster for the user's own."""
    ended: list[object] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_start, "shut_down", lambda lost: ended.append("shut down"))
    monkeypatch.setattr(ray_start, "remove_session", ended.append)
    cluster = object.__new__(ClusterStart)
    cluster._starting, cluster._mask = SimpleNamespace(result=interrupted), None  # type: ignore[assignment]
    cluster._vital = SimpleNamespace(lost=None, kill_all_started=lambda: ended.append("killed"))  # type: ignore[assignment]
    monkeypatch.setattr(cluster, "mark_sessions", lambda: {Path("session")})
    with pytest.raises(KeyboardInterrupt):
        cluster.take()
    assert ended == ["shut down", "killed", Path("session")]


@pytest.mark.ray
def test_an_end_asked_for_while_everything_starts_writes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "fedsweep", "run", "quickstart/fedavg", "--set", "runtime.client_actors=2"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        children = psutil.Process(process.pid).children
        while process.poll() is None and "gcs_server" not in {child.name() for child in children(recursive=True)}:
            time.sleep(0.02)
        process.terminate()
        assert "nothing was written" in process.stderr.read()
        assert process.wait(60) == 130
    assert [path.name for path in tmp_path.iterdir()] == []
    assert not list(Path("/tmp/ray").glob(f"session_*_{process.pid}"))


def test_a_process_that_ray_ends_while_it_starts_leaves_a_notice(tmp_path: Path) -> None:
    program = (
        "import os; from pathlib import Path; from fedsweep.fleet import ray_start\n"
        "ray_start.ClusterStart = lambda needs, is_early: os._exit(1)  # as Ray does, from within C++\n"
        "needs = ray_start.ClusterNeeds(actors=1, store_bytes=1)\n"
        f"with ray_start.early_cluster(needs, Path({str(tmp_path)!r})): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "try again" in done.stderr


def test_a_run_has_its_notice_before_its_cluster_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    class Begun:
        is_taken = True

        def __init__(self, needs: ClusterNeeds, *, is_early: bool) -> None:
            order.append("begun")

    monkeypatch.setattr(ray_start, "exit_notice", lambda folder: order.append(folder) or nullcontext())
    monkeypatch.setattr(ray_start, "ClusterStart", Begun)
    with early_cluster(ClusterNeeds(actors=1, store_bytes=1), tmp_path):
        assert order == [tmp_path, "begun"]


@pytest.mark.parametrize("missing", [None, "ray-needs-this"])
def test_a_dashboard_needs_all_of_rays_extra(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["pytest", f"{missing or 'pytest'}; extra == 'default'", "nowhere; extra == 'tune'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    if missing is None:
        ray_start._check_dashboard()
        return
    with pytest.raises(ResourceError, match=rf"needs an extra: pip install 'fedsweep\[dashboard\]' .*{missing}"):
        ray_start._check_dashboard()


@pytest.mark.parametrize("dashboard", [False, True])
def test_ray_is_told_what_workers_do_first(dashboard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

    calls: list[dict[str, Any]] = []

    def init(**settings: Any) -> SimpleNamespace:
        if dashboard:
            assert list(Path(settings["runtime_env"]["working_dir"]).iterdir()) == []
        calls.append({**settings, "inherited": dict(os.environ)})
        return SimpleNamespace(address_info={"node_ip_address": "127.0.0.1"})

    monkeypatch.setattr(ray, "init", init)
    needs = ClusterNeeds(actors=1, store_bytes=1)
    ray_start._start_ray(needs, num_cpus=1, dashboard=dashboard, is_early=True)
    (settings,) = calls
    assert (settings["address"], settings["include_dashboard"]) == ("local", dashboard)
    told = settings["inherited"]
    if dashboard:  # in public, by all that belongs to a dashboard
        environment = settings["runtime_env"]
        assert environment["env_vars"]["OMP_NUM_THREADS"] == "1"
        assert not Path(environment["working_dir"]).exists()
        told = {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: environment["worker_process_setup_hook"], **environment["env_vars"]}
    assert told[WORKER_PROCESS_SETUP_HOOK_ENV_VAR] == "fedsweep.processes.begin_worker"
    assert told["FEDSWEEP_USER_FOLDERS"].endswith(os.getcwd())


def test_the_object_store_leaves_half_of_what_the_control_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    calls: list[dict[str, Any]] = []
    context = SimpleNamespace(address_info={"node_ip_address": "127.0.0.1"})
    monkeypatch.setattr(ray, "init", lambda **settings: calls.append(settings) or context)
    monkeypatch.setattr(ray_start, "memory_here", lambda: 4 * 10**8)
    ray_start._start_ray(ClusterNeeds(actors=1, store_bytes=2**33), num_cpus=1, dashboard=False, is_early=True)
    assert calls[0]["object_store_memory"] == 2 * 10**8


def test_a_cluster_that_others_could_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(address_info={"node_ip_address": "10.0.0.1"}))
    with pytest.raises(RuntimeError, match="start Python with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"):
        ray_start._start_ray(ClusterNeeds(actors=1, store_bytes=1), num_cpus=1, dashboard=False, is_early=True)


def test_a_job_that_was_submitted_with_a_working_folder_keeps_it() -> None:
    calls: list[dict[str, Any]] = []

    class Ray:
        @staticmethod
        def init(**settings: Any) -> None:
            calls.append(settings)
            if "working_dir" in settings["runtime_env"]:
                raise ValueError("Failed to merge the Job's runtime env")

    settings = {"runtime_env": {"worker_process_setup_hook": "x", "env_vars": {"A": "1"}, "working_dir": "/empty"}}
    ray_cluster._connect(Ray, "auto", settings)
    assert [call["address"] for call in calls] == ["auto", "auto"]
    assert calls[1]["runtime_env"] == {"worker_process_setup_hook": "x", "env_vars": {"A": "1"}}
