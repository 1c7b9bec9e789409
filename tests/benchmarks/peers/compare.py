"""fedsweep, Flower and pfl-research on the same set-up, on CPUs, in turns; run by hand, never by CI.

    .venv/bin/python tests/benchmarks/peers/compare.py P1-cpu [--rounds 20] [--repeat 1] [--peers flower pfl]
    .venv/bin/python tests/benchmarks/peers/compare.py W2 --rounds 200 --peers pfl

P1-cpu  pfl-research's speed test, two processes at once
W2      LeNet-5, 100 clients of 500, cohorts of 10, one step of ten a round, one process

Each peer gets an environment of its own below --envs, made with pip the first time: their Ray is not ours. The same
arrays go to all (CIFAR-10 below --root, otherwise noise of its shape), with the same torch, one thread a process, SGD
without momentum and no evaluation. Printed is the median of the rounds but the first, so no side's start-up counts, and
how many times as long as fedsweep's it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import work

from fedsweep.bench import speed_test, workloads
from fedsweep.bench.data import data_for
from fedsweep.bench.machine import load_of_others, machine_facts
from fedsweep.bench.plain import PlainLoop, plain_processes, work_of
from fedsweep.bench.rounds import playing
from fedsweep.bench.setup import Request
from fedsweep.driver.run import Plan
from fedsweep.world.data.datasets import Dataset

HERE = Path(__file__).resolve().parent
Side = Callable[[Path, work.Work], list[float]]


def environment(envs: Path, peer: str) -> Path:
    """The peer's Python; its packages are installed the first time."""
    python = envs / peer / "bin" / "python"
    made = envs / peer / ".made"
    wanted = (HERE / f"requirements-{peer}.txt").read_text()
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(envs / peer)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(HERE / f"requirements-{peer}.txt")]
        subprocess.run(install, check=True)
        made.write_text(wanted)
    return python


def peer_side(python: Path, peer: str) -> Side:
    """Runs a set-up in a peer's environment; the seconds of its rounds."""

    def run(folder: Path, asked: work.Work) -> list[float]:
        script = [str(HERE / f"run_{peer}.py"), str(folder)]
        command = [str(python), *script]
        if peer == "pfl" and asked.processes > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.processes}"]
            command = [str(python), *launch, *script]
        surroundings = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HERE),
            "FEDSWEEP_PEER_FOLDER": str(folder),
        }
        found = folder / "seconds.json"
        found.unlink(missing_ok=True)
        with (folder / f"{peer}.log").open("w") as log:
            done = subprocess.run(command, env=surroundings, stdout=log, stderr=log, check=False)
        if done.returncode or not found.exists():
            tail = (folder / f"{peer}.log").read_text()[-3000:]
            raise SystemExit(f"{peer} ended with {done.returncode}:\n{tail}")
        return list(json.loads(found.read_text())["rounds"])

    return run


def own_side(plan: Plan) -> Side:
    """fedsweep's rounds, as ``fedsweep bench`` plays them."""

    def run(folder: Path, asked: work.Work) -> list[float]:
        with playing(plan) as player:
            return [player.play(1) for _ in range(asked.rounds)]

    return run


def plain_side(plan: Plan, dataset: Dataset) -> Side:
    """Plain PyTorch, in as many processes."""

    def run(folder: Path, asked: work.Work) -> list[float]:
        if asked.processes == 1:
            loop = PlainLoop(work_of(plan, dataset))
            return [loop.play(1) for _ in range(asked.rounds)]
        with plain_processes(work_of(plan, dataset), asked.processes) as play:
            return [play(1) for _ in range(asked.rounds)]

    return run


def set_up(name: str, dataset: Dataset) -> tuple[Plan, work.Work]:
    """fedsweep's plan and what peers are told."""
    if name == "P1-cpu":
        plan = speed_test.planned(dataset, {"backend": "ray", "client_actors": 2, "device": "cpu"})
    else:
        local = {"backend": "local", "device": "cpu"}
        plan = workloads.planned(dataset, method={"name": "fedavg"}, steps=1, runtime=local)
    plain = work_of(plan, dataset)
    return plan, work.Work(
        network="speed_cnn" if name == "P1-cpu" else "lenet5",
        cohort=plain.cohort,
        rounds=0,
        steps=plain.steps,
        batch_size=plain.batch_size,
        learning_rate=plain.learning_rate,
        processes=plan.num_actors or 1,
    )


def write_data(folder: Path, plan: Plan, dataset: Dataset) -> None:
    """The clients' samples, normalised."""
    indices = np.stack(plan.experiment.world.indices)
    mean, std = (np.array(value, dtype=np.float32).reshape(-1, 1, 1) for value in (dataset.mean, dataset.std))
    images = np.lib.format.open_memmap(
        folder / "images.npy", mode="w+", dtype=np.float32, shape=(*indices.shape, *dataset.image_shape)
    )
    for client, own in enumerate(indices):
        images[client] = (dataset.train_images[own].astype(np.float32) / np.float32(dataset.scale) - mean) / std
    images.flush()
    np.save(folder / "labels.npy", dataset.train_labels[indices])


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["P1-cpu", "W2"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--peers", nargs="*", choices=["flower", "pfl"], default=["flower", "pfl"])
    parser.add_argument("--root")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "fedsweep-peers")
    given = parser.parse_args()
    load = load_of_others()
    dataset, called = data_for("cifar10", Request(root=given.root))
    plan, asked = set_up(given.name, dataset)
    asked = replace(asked, rounds=given.rounds)
    sides: dict[str, Side] = {"fedsweep": own_side(plan), "plain": plain_side(plan, dataset)}
    for peer in given.peers:
        sides[peer] = peer_side(environment(given.envs.absolute(), peer), peer)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="fedsweep-peers-") as scratch:
        folder = Path(scratch)
        asked.write(folder)
        write_data(folder, plan, dataset)
        for _ in range(given.repeat):
            for name, side in sides.items():
                rounds = side(folder, asked)
                seconds[name].append(statistics.median(rounds[1:]))
                print(f"{name}: {1e3 * seconds[name][-1]:.1f} ms a round, the first {rounds[0]:.2f} s", flush=True)
    print(f"{given.name}, {asked.rounds} rounds, {called}; others used {load:.2f} CPUs before")
    print(f"{machine_facts('cpu')['cpu']}, torch {machine_facts('cpu')['versions']['torch']}")
    for name, own in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(own, seconds["fedsweep"], strict=True)]
        print(f"{name:9} {1e3 * statistics.median(own):9.1f} ms a round, {statistics.median(ratios):.2f} x fedsweep's")


if __name__ == "__main__":
    main()
