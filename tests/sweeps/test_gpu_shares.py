"""Shares of counted GPUs on nodes of two kinds, one GPU of which somebody else has taken."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.errors import ResourceError
from fedsweep.runs.find import find_runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]
TinySweep = Callable[..., dict[str, Any]]
WATCH = """
import json, ray
from fedsweep.driver.observers import Observer

class Watch(Observer):
    def __init__(self, folder):
        self._folder = folder

    def started(self, info):
        place = [ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()]
        (self._folder / "place.json").write_text(json.dumps(place))

def make(config, folder):
    return Watch(folder)

class Holder:
    def gpus(self):
        return ray.get_gpu_ids()
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without GPU, and a node with two, one of which is taken; the cluster, that node, the taken GPU."""
    (tmp_path / "gpu_watch.py").write_text(WATCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=4, num_gpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace="fedsweep", logging_level="ERROR", log_to_driver=False)
    try:
        taken = ray.remote(num_cpus=0, num_gpus=1)(importlib.import_module("gpu_watch").Holder).remote()
        yield cluster, second, ray.get(taken.gpus.remote())
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_shares_go_to_the_free_gpu_and_what_fits_nowhere_is_refused_first(
    nodes: Any, tmp_path: Path, tiny: TinySweep
) -> None:
    cluster, second, taken = nodes
    runtime = {"address": cluster.address, "device": "cpu", "gpus_per_client": 0.25}
    tracking = {"uri": "none", "also": ["gpu_watch:make"]}
    # Five quarters do not fit on one GPU at a time.
    grid = fedsweep.sweep(
        tiny({"seed": {"grid": list(range(5))}}, more={"runtime": runtime, "tracking": tracking}), out=tmp_path / "s"
    )
    places = [json.loads((run / "place.json").read_text()) for run in find_runs(tmp_path / "s")]
    (free,) = {0, 1} - set(taken)
    assert grid.num_errors == 0 and places == [[second.node_id, [free]]] * 5
    halves = runtime | {"gpus_per_client": 0.5, "client_actors": 2, "cpus_per_client": 0.5}
    run = fedsweep.run(
        {key: value for key, value in tiny({}, more={"runtime": halves}).items() if key != "sweep"}, out=tmp_path / "r"
    )
    assert run.summary["backend"] == "ray" and run.summary["client_actors"] == 2
    # More GPUs than a node has, CPUs that only the other kind of node could add, more shares than GPUs.
    for number, wish in enumerate(({"gpus_per_client": 3}, {"cpus_per_client": 5}, {"client_actors": 9})):
        config = tiny({"seed": {"grid": [0, 1]}}, more={"runtime": runtime | wish})
        with pytest.raises(ResourceError, match="no room for"):
            fedsweep.sweep(config, out=tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()
