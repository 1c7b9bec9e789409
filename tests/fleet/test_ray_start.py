"""A cluster that starts beside the driver's own imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from fedsweep.config.load import load_config
from fedsweep.fleet import ray_idle_agent, ray_start
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


def agents_here() -> list[str]:
    """What this process's raylet runs as its two agents, once they are there."""
    until = time.monotonic() + 20
    found: list[str] = []
    while len(found) < 2 and time.monotonic() < until:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                found += [word for word in child.cmdline()[:8] if word.endswith(("agent.py", "agent/main.py"))]
    return found


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
            assert not any(name in others for name in ("monitor.py", "dashboard.py"))  # seconds of two cores
            assert agents_here() == [ray_idle_agent.__file__] * 2
            assert begun.holds(ClusterNeeds(actors=2, store_bytes=2**28))
            assert not begun.holds(ClusterNeeds(actors=2, store_bytes=2**29))
            assert not begun.holds(ClusterNeeds(actors=1, gpus_per_client=1.0, store_bytes=2**28))
        assert not ray.is_initialized() and own_sessions() == before
    finally:
        os.umask(mask)


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


def test_a_process_that_ray_ends_while_it_starts_has_a_last_word(tmp_path: Path) -> None:
    program = (
        "import os; from pathlib import Path; from fedsweep.fleet import ray_start\n"
        "ray_start.ClusterStart = lambda needs, is_early: os._exit(1)  # as Ray does, from within C++\n"
        "needs = ray_start.ClusterNeeds(actors=1, store_bytes=1)\n"
        f"with ray_start.early_cluster(needs, Path({str(tmp_path)!r})): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "try again" in done.stderr


def test_somebody_speaks_for_a_run_before_its_cluster_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    class Begun:
        is_taken = True

        def __init__(self, needs: ClusterNeeds, *, is_early: bool) -> None:
            order.append("begun")

    monkeypatch.setattr(ray_start, "last_word", lambda folder: order.append(folder) or nullcontext())
    monkeypatch.setattr(ray_start, "ClusterStart", Begun)
    with early_cluster(ClusterNeeds(actors=1, store_bytes=1), tmp_path):
        assert order == [tmp_path, "begun"]


def test_ray_has_its_agents_where_they_serve_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import _raylet

    monkeypatch.setattr(ray_start, "_lacks_for_dashboard", ImportError)
    assert ray_start._needs_agents(dashboard=True) and not ray_start._needs_agents(dashboard=False)
    monkeypatch.setattr(ray_start, "_lacks_for_dashboard", lambda: None)
    assert ray_start._needs_agents(dashboard=False)
    monkeypatch.setattr(ray_start, "_lacks_for_dashboard", ImportError)
    monkeypatch.delattr(_raylet, "persist_port")  # an older Ray, which reads no files
    assert ray_start._needs_agents(dashboard=False)


def test_what_takes_an_agents_place_ends_with_its_parent() -> None:
    program = (
        "import os, subprocess, sys\n"
        "environment = {**os.environ, 'RAY_RAYLET_PID': str(os.getpid())}\n"
        f"waiting = subprocess.Popen([sys.executable, '-I', '-S', {ray_idle_agent.__file__!r}], env=environment)\n"
        "print(waiting.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        waiting = psutil.Process(int(parent.stdout.readline()))
        assert waiting.is_running()
        parent.stdin.close()
    try:
        waiting.wait(10)
    finally:
        with suppress(psutil.NoSuchProcess):
            waiting.kill()


def test_what_takes_an_agents_place_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parents, pauses = iter([7, 7, 1]), []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(time, "sleep", pauses.append)
    ray_idle_agent.wait_for_parent(7)
    assert pauses == [1.0, 1.0]


@pytest.mark.parametrize("dashboard", [False, True])
def test_what_serves_a_dashboard_is_started_with_it_alone(
    dashboard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray._private import services
    from ray._private.node import Node

    names = ("start_monitor", "start_log_monitor", "start_api_server")
    before = [vars(Node)[name] for name in names]
    agents = ["--dashboard_agent_command=python one.py", "--runtime_env_agent_command=python two.py"]
    command = ["raylet", f"--session_dir={tmp_path}", f"--node_id={'ab' * 28}", *agents]
    seen: list[list[object]] = []
    started: dict[str, tuple[list[str], dict[str, str]]] = {}

    def start(command: list[str], kind: str, fate_share: bool, env_updates: dict[str, str] | None = None) -> None:
        started[kind] = (command, env_updates or {})

    def init(**settings: object) -> None:
        seen.append([vars(Node)[name] for name in names])
        services.start_ray_process(["gcs_server"], "gcs_server", True)
        services.start_ray_process(command, "raylet", True, env_updates={"OWN": "1"})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(services, "start_ray_process", start)
    monkeypatch.setattr(ray_start, "_lacks_for_dashboard", ImportError)
    ray_start._begin(ClusterNeeds(actors=1, store_bytes=1), num_cpus=1, dashboard=dashboard, is_early=True)
    (then,) = seen
    assert [now is old for now, old in zip(then, before, strict=True)] == [dashboard] * 3
    assert [vars(Node)[name] for name in names] == before and services.start_ray_process is start
    assert started["gcs_server"] == (["gcs_server"], {})
    words, variables = started["raylet"]
    assert words[:3] == command[:3]
    assert words[3:] == agents if dashboard else all(word.endswith("ray_idle_agent.py") for word in words[3:])
    assert len(words) == 5 and len(list(tmp_path.iterdir())) == (0 if dashboard else 4)  # the agents' ports
    hook = {value for name, value in variables.items() if "SETUP_HOOK" in name}
    assert hook == {"fedsweep.processes.begin_worker"} and {"OWN", "FEDSWEEP_USER_FOLDERS"} < variables.keys()
    assert variables["OMP_NUM_THREADS"] == "1"


def test_a_ray_that_starts_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda **settings: None)
    with pytest.raises(RuntimeError, match=rf"Ray {ray.__version__} starts in a way"):
        ray_start._begin(ClusterNeeds(actors=1, store_bytes=1), num_cpus=1, dashboard=False, is_early=True)
