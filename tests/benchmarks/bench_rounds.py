"""Speed of whole rounds as a ratio to plain PyTorch in the same run.

    python tests/benchmarks/bench_rounds.py [long] [dynamicsgd] [scale] [memory]

long        LeNet-5, cohort 10 of 100 clients, 250 steps each, 2 client actors, against two plain processes
dynamicsgd  the same work with a sync point at every step, on 1 process and 2 actors, against one plain process
scale       10,000 clients against 100 with equal cohort and client size: seconds per round
memory      what each further client actor adds (PSS), and that nobody copies the data

Timings alternate between the two sides; the median ratio is printed with all values.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import plain

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.ray_cluster import ClusterNeeds, ray_cluster
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, tiny_experiment
from fedsweep.world.transforms import Normalize

REPEATS = 5


def experiment(method: FederatedMethod, images: np.ndarray, labels: np.ndarray, *, num_clients: int) -> Experiment:
    """The benchmark's experiment: 250 steps a round, SGD, uint8 images that are normalised on the client."""
    import dataclasses

    base = tiny_experiment(
        method,
        num_clients=num_clients,
        cohort_size=plain.COHORT,
        rounds=1000,
        learning_rate=0.01,
        batch_size=plain.BATCH,
        local_steps=plain.STEPS,
        build=plain.lenet,
        sizes=[plain.SAMPLES] * num_clients if len(labels) >= num_clients * plain.SAMPLES else None,
        images=images,
        labels=labels,
    )
    transform = Normalize(scale=255.0, mean=(0.5,) * 3, std=(0.25,) * 3)
    data = dataclasses.replace(base.world.data, transform=transform)
    world = dataclasses.replace(base.world, data=data, test_images=images[:100], test_labels=labels[:100])
    return dataclasses.replace(base, world=world)


def play(engine: Engine) -> Callable[[], float]:
    """A function that plays the next round and returns its seconds, evaluation apart."""
    state = engine.start()
    state, _ = engine.advance(state)  # warm

    def one() -> float:
        nonlocal state
        state, _ = engine.advance(state)
        return state.records[-1].wall_time_s

    return one


def ray_engine(ray: object, work: Experiment, actors: int) -> Engine:
    """An engine in this process, as the server actor has it, with clients on actors."""
    from fedsweep.driver.ray_session import FleetSettings, make_ray_fleet

    settings = FleetSettings(num_actors=actors, name=f"bench-{actors}-{time.time()}", options={"num_cpus": 1})
    return Engine(work, make_ray_fleet(work, ray.put(work), settings, print))  # type: ignore[attr-defined]


def _plain_worker(pipe, images, labels):  # type: ignore[no-untyped-def]
    while (clients := pipe.recv()) is not None:
        pipe.send(plain.long_rounds(images, labels, clients=clients, rounds=1))


def bench_long() -> None:
    """Long rounds against two independent plain processes; at least 0.93 is asked for."""
    images, labels = plain.images_and_labels()
    context = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=_plain_worker, args=(theirs, images, labels), daemon=True).start()
        pipes.append(ours)

    def two_plain() -> float:
        began = time.perf_counter()
        for number, pipe in enumerate(pipes):
            pipe.send(list(range(number * 5, number * 5 + 5)))
        for pipe in pipes:
            pipe.recv()
        return time.perf_counter() - began

    two_plain()
    with ray_cluster(None, ClusterNeeds(actors=2, store_bytes=2**30)) as ray:
        engine = ray_engine(ray, experiment(fedavg(), images, labels, num_clients=100), 2)
        report("long rounds, 2 actors / 2 plain processes", two_plain, play(engine))
        engine.fleet.close()


def bench_dynamicsgd() -> None:
    """A sync point at every step against one plain process; 1.0 is asked for, 1.5 with two actors."""
    images, labels = plain.images_and_labels()
    work = experiment(dynamicsgd(sync_rule="paper"), images, labels, num_clients=100)

    def one_plain() -> float:
        return plain.synchronous_round(images, labels, steps=plain.STEPS)

    report("DynamicSGD, in process / one plain process", one_plain, play(local_engine(work)))
    with ray_cluster(None, ClusterNeeds(actors=2, store_bytes=2**30)) as ray:
        engine = ray_engine(ray, work, 2)
        report("DynamicSGD, 2 actors / one plain process", one_plain, play(engine))
        engine.fleet.close()


def bench_scale() -> None:
    """10,000 clients against 100; at most 1.1 times is asked for."""
    few, many = ([*plain.images_and_labels(num_clients=n, samples=5)] for n in (100, 10_000))
    fast = play(local_engine(experiment(fedavg(), *few, num_clients=100)))
    slow = play(local_engine(experiment(fedavg(), *many, num_clients=10_000)))
    report("100 clients / 10,000 clients, seconds per round", fast, slow)


def bench_memory() -> None:
    """PSS of 1, 2 and 3 client actors; at most 350 MB each is asked for."""
    images, labels = plain.images_and_labels()
    work = experiment(fedavg(), images, labels, num_clients=100)
    with ray_cluster(None, ClusterNeeds(actors=3, store_bytes=2**30)) as ray:
        for actors in (1, 2, 3):
            engine = ray_engine(ray, work, actors)
            play(engine)()
            ids = [ray.get(a.ping.remote()) for a in engine.fleet._actors.values()]  # type: ignore[attr-defined]
            sizes = [pss_mb(pid) for pid in ids]
            data = [pss_mb(pid, only="/dev/shm") for pid in ids]
            print(
                f"{actors} client actors: PSS {[round(s) for s in sizes]} MB each, of which shared memory"
                f" {[round(d) for d in data]} MB (data set: {images.nbytes / 2**20:.0f} MB once)"
            )
            engine.fleet.close()


def pss_mb(pid: int, only: str = "") -> float:
    """Proportional set size of a process in MB; of the mappings whose path has ``only`` in it."""
    total, matches = 0, not only
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and len(fields) > 4 and not fields[0].endswith(":"):
            matches = only in line
        elif fields[0] == "Pss:" and matches:
            total += int(fields[1])
    return total / 1024


def report(title: str, reference: Callable[[], float], ours: Callable[[], float]) -> None:
    """Alternate the two sides and print the ratio of their speeds."""
    pairs = [(reference(), ours()) for _ in range(REPEATS)]
    ratios = [theirs / mine for theirs, mine in pairs]
    print(
        f"{title}: speed ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f});"
        f" reference {statistics.median(p[0] for p in pairs):.3f} s, fedsweep"
        f" {statistics.median(p[1] for p in pairs):.3f} s",
        flush=True,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = sys.argv[1:] or ["long", "dynamicsgd", "scale", "memory"]
    known = {"long": bench_long, "dynamicsgd": bench_dynamicsgd, "scale": bench_scale, "memory": bench_memory}
    for name in chosen:
        known[name]()
