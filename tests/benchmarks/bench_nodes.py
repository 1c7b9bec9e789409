"""Sync points across nodes: over the network against through the server, as a ratio in the same run.

    python tests/benchmarks/bench_nodes.py [lenet] [linear]

Two Ray nodes on this machine, one client actor on each; DynamicSGD: 50 steps a round, batch 10, a sync point at every
step; with five clients on each actor, and with one.

lenet   LeNet-5 on 3x32x32 images
linear  a linear model of the tests' tiny world

Timings alternate; the median ratio is printed with the least and the greatest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import bench_rounds
import plain

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment
from fedsweep.testing import tiny_experiment

STEPS = 50


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """Ray on two nodes of two counted CPUs, which listen on 127.0.0.1."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # or others' work on the machine would hold up the actors alone
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"node0": 2}})
    cluster.add_node(num_cpus=2, resources={"node1": 2})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace="fedsweep", logging_level="ERROR", log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()
        cluster.shutdown()


def engine_on(ray: Any, work: Experiment, exchange: Any) -> Engine:
    """An engine with a client actor on each node, whose sync points go this way."""
    from fedsweep.driver.ray_session import FleetSettings, make_ray_fleet

    settings = FleetSettings(num_actors=2, name=f"nodes-{time.time()}", options={"num_cpus": 1}, exchange=exchange)
    fleet = make_ray_fleet(
        work, ray.put(work), settings, print, lambda index: {"num_cpus": 1, "resources": {f"node{index}": 1}}
    )
    fleet.ready()
    assert fleet.exchange.name == ("server" if exchange == "server" else "network"), fleet.exchange
    return Engine(work, fleet)


def bench(title: str, work: Experiment) -> None:
    """At least 5 is asked for."""
    with two_nodes() as ray:
        engines = [engine_on(ray, work, kind) for kind in ("server", "auto")]
        server, network = (bench_rounds.play(engine) for engine in engines)
        pairs = [(server(), network()) for _ in range(bench_rounds.REPEATS)]
        for engine in engines:
            engine.fleet.close()
    ratios = [slow / fast for slow, fast in pairs]
    slow, fast = (statistics.median(side) / STEPS * 1e3 for side in zip(*pairs, strict=True))
    print(
        f"{title}: {statistics.median(ratios):.2f} times as fast as through the server (min {min(ratios):.2f},"
        f" max {max(ratios):.2f}); {fast:.2f} ms a step and sync point instead of {slow:.2f}",
        flush=True,
    )


def lenet() -> Experiment:
    """The work of bench_rounds.py dynamicsgd."""
    images, labels = plain.images_and_labels()
    return bench_rounds.experiment(dynamicsgd(sync_rule="paper"), images, labels, num_clients=100)


def linear() -> Experiment:
    """Little work a step, so that sync points are most of it."""
    return tiny_experiment(
        dynamicsgd(sync_rule="paper"),
        num_clients=10,
        cohort_size=plain.COHORT,
        rounds=1000,
        batch_size=plain.BATCH,
        local_steps=STEPS,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in sys.argv[1:] or ["lenet", "linear"]:
        work = {"lenet": lenet, "linear": linear}[name]()
        for cohort in (plain.COHORT, 2):
            training = dataclasses.replace(work.training, cohort_size=cohort, local_steps=STEPS)
            bench(f"{name}, {cohort} clients", dataclasses.replace(work, training=training))
