"""Client actors that die while they start are replaced, as later."""

from __future__ import annotations

import functools
import gc
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.errors import ResourceError, RunError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet import ray_fleet
from fedsweep.fleet.ray_leftovers import dead_sessions, remove_session
from fedsweep.runs.sources import check_same, shared_sources
from fedsweep.testing import tiny_experiment

pytestmark = pytest.mark.ray


def made(ray: Any, experiment: Experiment, name: str, warnings: list[str], **settings_of_fleet: Any) -> Any:
    from fedsweep.fleet.fleet import Vectors
    from fedsweep.fleet.ray_fleet import FleetSettings, RayFleet

    vectors = Vectors.of(experiment)
    settings = FleetSettings(num_actors=2, name=name, options={"num_cpus": 1}, vectors=vectors, **settings_of_fleet)
    return RayFleet(ray.put(experiment), settings, warnings.append)


def test_every_port_of_the_cluster_is_on_loopback(shared_ray: Any) -> None:
    fleet = made(shared_ray, tiny_experiment(fedavg()), "ports", [])
    fleet.ready()
    ours = psutil.Process()
    found = {
        socket.laddr.ip.removeprefix("::ffff:")
        for process in (ours, *ours.children(recursive=True))
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert found == {"127.0.0.1"}
    fleet.close()


def test_a_worker_of_our_own_cluster_has_its_settings_and_works_where_the_driver_does(shared_ray: Any) -> None:
    @shared_ray.remote(num_cpus=0)
    def settings() -> tuple[Any, ...]:
        threads = [os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
        is_last = sys.path.index(os.getcwd()) == len(sys.path) - 1
        return *threads, gc.get_threshold()[0], os.getcwd(), is_last, platform.__file__

    # In a checkout the standard library's platform stands before the folder of that name.
    assert shared_ray.get(settings.remote()) == ("1", "1", 50_000, os.getcwd(), True, platform.__file__)


def test_one_that_dies_at_once_is_replaced(shared_ray: Any) -> None:
    warnings: list[str] = []
    fleet = made(shared_ray, tiny_experiment(fedavg()), "once", warnings)
    shared_ray.kill(fleet._actors[1])
    fleet.ready()
    assert warnings == ["client actors [1] died while they started, and are replaced"]
    assert fleet.folds and fleet.num_workers == 2
    fleet.close()


@pytest.mark.parametrize("when", ["at the start", "in place of one that broke"])
def test_actors_that_live_but_set_up_no_exchange_in_time_go_through_the_server(
    shared_ray: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    warnings: list[str] = []
    fleet = made(shared_ray, tiny_experiment(fedavg()), "slow", warnings)

    def join(*arguments: Any) -> None:
        raise shared_ray.exceptions.GetTimeoutError

    if when != "at the start":
        fleet.ready()
        assert fleet.folds
    monkeypatch.setattr(fleet._group, "_share_files", join)
    (fleet.ready if when == "at the start" else fleet.repair)()
    (text,) = warnings
    assert text.startswith("client actors did not set up their exchange within 120 s: every sync point goes through")
    assert (fleet.exchange.name, fleet.exchange.notes) == ("server", (text,)) and not fleet.folds
    fleet.close()


def test_one_of_other_sources_ends_the_start_with_its_own_sentence(shared_ray: Any) -> None:
    check = functools.partial(check_same, {**shared_sources({}), "fedsweep/engine": "0"}, {})
    fleet = made(shared_ray, tiny_experiment(fedavg()), "others", [], check=check)
    with pytest.raises(
        ResourceError, match=r"^a client actor on '.*' would train with other sources .* fedsweep/engine"
    ):
        fleet.ready()
    fleet.close()


def test_one_whose_own_code_fails_is_not_tried_again(shared_ray: Any) -> None:
    experiment = tiny_experiment(fedavg())
    fleet = made(shared_ray, experiment, "broken", [])
    fleet._actors, fleet._starting = {}, {}
    fleet._experiment = shared_ray.put("no experiment")
    fleet._grow([0])
    with pytest.raises(RunError, match=r"^a client actor could not start: AttributeError: 'str' object has no"):
        fleet.ready()
    fleet.close()


def test_one_that_dies_again_and_again_ends_the_run(shared_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = made(shared_ray, tiny_experiment(fedavg()), "again", [])
    grow = fleet._grow

    def grow_and_kill(indices: Any) -> None:
        grow(indices)
        for index in indices:
            shared_ray.kill(fleet._actors[index])

    monkeypatch.setattr(fleet, "_grow", grow_and_kill)
    monkeypatch.setattr(ray_fleet, "_MOST_STARTS", 2)
    shared_ray.kill(fleet._actors[0])
    with pytest.raises(RunError, match="died in 2 starts running"):
        fleet.ready()
    fleet.close()


def test_session_folder_goes_after_a_clean_end_and_stays_after_a_failure() -> None:
    code = """
        import sys
        from pathlib import Path
        from fedsweep.errors import ResourceError, RunError
        from fedsweep.fleet.ray_cluster import ClusterNeeds, ray_cluster
        from fedsweep.fleet.ray_leftovers import dead_sessions, own_sessions
        seen = []
        for fails in (False, True):
            try:
                with ray_cluster(None, ClusterNeeds(actors=1, store_bytes=2**28)):
                    seen += own_sessions() - {*seen}
                    if fails:
                        raise RunError("x")
            except RunError:
                pass
        print(*[folder.is_dir() for folder in seen], seen[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    first, second, folder = done.stdout.split()
    assert (first, second) == ("False", "True")
    assert Path(folder) in dead_sessions()
    remove_session(Path(folder))
    assert Path(folder) not in dead_sessions()
