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
from collections.abc import Callable, Iterator
from typing import Any

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.bench.data import noise
from fedsweep.bench.rounds import plan_of
from fedsweep.bench.setup import in_turns
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment
from fedsweep.testing import tiny_experiment

STEPS, BATCH, COHORT, REPEATS = 50, 10, 10, 5


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
    from fedsweep.fleet.fleet import Vectors
    from fedsweep.fleet.ray_fleet import FleetSettings, RayFleet

    settings = FleetSettings(
        num_actors=2,
        name=f"nodes-{time.time()}",
        options={"num_cpus": 1},
        placed=lambda index: {"resources": {f"node{index}": 1}},
        vectors=Vectors.of(work),
        exchange=exchange,
    )
    fleet = RayFleet(ray.put(work), settings, print)
    fleet.ready()
    assert fleet.exchange.name == ("server" if exchange == "server" else "network"), fleet.exchange
    return Engine(work, fleet)


def playing(engine: Engine) -> Callable[[], float]:
    """A function that plays the next round and returns its seconds, evaluation apart."""
    state, _ = engine.advance(engine.start())  # the first one warms up

    def one() -> float:
        nonlocal state
        state, _ = engine.advance(state)
        return state.records[-1].wall_time_s

    return one


def bench(title: str, work: Experiment) -> None:
    """At least 5 is asked for."""
    with two_nodes() as ray:
        engines = [engine_on(ray, work, kind) for kind in ("server", "auto")]
        through_server, across = (playing(engine) for engine in engines)
        found = in_turns(across, through_server, REPEATS, what="")
        for engine in engines:
            engine.fleet.close()
    ratios = found.ratios
    slow, fast = (statistics.median(side) / STEPS * 1e3 for side in (found.reference_s, found.ours_s))
    print(
        f"{title}: {statistics.median(ratios):.2f} times as fast as through the server (min {min(ratios):.2f},"
        f" max {max(ratios):.2f}); {fast:.2f} ms a step and sync point instead of {slow:.2f}",
        flush=True,
    )


def lenet() -> Experiment:
    """LeNet-5 on noise of CIFAR-10's shape."""
    given = {
        "scenario": {"clients": 100},
        "model": {"name": "lenet5"},
        "method": {"name": "dynamicsgd", "sync_rule": "paper"},
        "training": {"cohort_size": COHORT, "local_steps": STEPS, "batch_size": BATCH},
        "runtime": {"backend": "local"},
    }
    return plan_of(given, noise("cifar10", samples=100 * 500)).experiment


def linear() -> Experiment:
    """Little work a step, so that sync points are most of it."""
    method = dynamicsgd(sync_rule="paper")
    return tiny_experiment(method, num_clients=10, rounds=1000, batch_size=BATCH, local_steps=STEPS)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in sys.argv[1:] or ["lenet", "linear"]:
        work = {"lenet": lenet, "linear": linear}[name]()
        for cohort in (COHORT, 2):
            training = dataclasses.replace(work.training, cohort_size=cohort)
            bench(f"{name}, {cohort} clients", dataclasses.replace(work, training=training))
