"""fedsweep, Flower and pfl-research on the same set-up, on CPUs, in turns; run by hand, never by CI.

    .venv/bin/python tests/benchmarks/peers/compare.py P1-cpu [--rounds 20] [--peers flower pfl]
    .venv/bin/python tests/benchmarks/peers/compare.py W2 --rounds 200 --peers pfl

P1-cpu  pfl-research's speed test, two processes at once
W2      LeNet-5, 100 clients of 500, cohorts of 10, one step of ten a round, one process

Each peer gets an environment of its own below --envs, made with pip the first time: their Ray is not ours. The same
arrays go to all (CIFAR-10 below --root, otherwise noise of its shape), with the same torch, one thread a process, SGD
without momentum and no evaluation. All sides are started, and then play their rounds in turns: one round each, then the
next. Printed are medians of the rounds but the first, which has everybody's start-up, and of the ratios round by round;
of seconds, and of CPU seconds, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import work

from fedsweep.bench import speed_test, workloads
from fedsweep.bench.data import data_for
from fedsweep.bench.machine import load_of_others, machine_facts
from fedsweep.bench.plain import PlainLoop, plain_processes, work_of
from fedsweep.bench.rounds import playing
from fedsweep.bench.setup import Request
from fedsweep.driver.plan import Plan
from fedsweep.world.data.datasets import Dataset

HERE = Path(__file__).resolve().parent
Round = Callable[[], float]  # plays one; its seconds


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


@contextlib.contextmanager
def peer_side(python: Path, peer: str, folder: Path, asked: work.Work) -> Iterator[Round]:
    """A set-up in a peer's environment, where each round waits for its turn."""
    own = folder / peer
    own.mkdir()
    command = [str(python), str(HERE / f"run_{peer}.py"), str(own)]
    if peer == "pfl" and asked.processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.processes}"]
    # Ray's workers would otherwise give way to other processes, as the other peers' do not.
    surroundings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "RAY_worker_niceness": "0"}
    with (own / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **surroundings}, stdout=log, stderr=log)
    numbers = itertools.count(1)

    def play() -> float:
        number = next(numbers)
        (own / f"go-{number}").touch()
        done = own / f"done-{number}"
        while not done.exists():
            if process.poll() is not None and not done.exists():
                raise SystemExit(f"{peer} ended with {process.returncode}:\n{(own / 'log').read_text()[-3000:]}")
            time.sleep(0.01)
        return float(done.read_text())

    try:
        yield play
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def own_side(plan: Plan) -> Iterator[Round]:
    """fedsweep's rounds, as ``fedsweep bench`` plays them."""
    with playing(plan) as player:
        yield lambda: player.play(1)


@contextlib.contextmanager
def plain_side(plan: Plan, dataset: Dataset) -> Iterator[Round]:
    """Plain PyTorch, in as many processes."""
    plain = work_of(plan, dataset)
    if not plan.num_actors:
        loop = PlainLoop(plain)
        yield lambda: loop.play(1)
        return
    with plain_processes(plain, plan.num_actors) as play:
        yield lambda: play(1)


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
    parser.add_argument("--peers", nargs="*", choices=["flower", "pfl"], default=["flower", "pfl"])
    parser.add_argument("--root")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "fedsweep-peers")
    given = parser.parse_args()
    load = load_of_others()
    dataset, called = data_for("cifar10", Request(root=given.root))
    plan, asked = set_up(given.name, dataset)
    # One to warm up, and one that nobody plays: a process that has ended takes its CPU seconds with it.
    asked = replace(asked, rounds=given.rounds + 2)
    pythons = {peer: environment(given.envs.absolute(), peer) for peer in given.peers}
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fedsweep-peers-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        asked.write(folder)
        write_data(folder, plan, dataset)
        sides = {"fedsweep": stack.enter_context(own_side(plan))}
        sides["plain"] = stack.enter_context(plain_side(plan, dataset))
        for peer, python in pythons.items():
            sides[peer] = stack.enter_context(peer_side(python, peer, folder, asked))
        for number in range(given.rounds + 1):
            took = {name: with_cpu(play) for name, play in sides.items()}
            print(", ".join(f"{name} {wall:.3f} s ({cpu:.2f} CPU)" for name, (wall, cpu) in took.items()), flush=True)
            if number:  # the first one has everybody's start-up
                for name, pair in took.items():
                    seconds.setdefault(name, []).append(pair)
    facts = machine_facts("cpu")
    print(f"{given.name}, {given.rounds} rounds in turns, {called}; before, others used {load:.2f} CPUs")
    print(f"{facts['cpu']}, {facts['cpus']} CPUs, torch {facts['versions']['torch']}")
    for name, own in seconds.items():
        said = []
        for unit, place in (("s", 0), ("CPU s", 1)):
            ratios = [theirs[place] / ours[place] for theirs, ours in zip(own, seconds["fedsweep"], strict=True)]
            middle = statistics.median(pair[place] for pair in own)
            said.append(
                f"{middle:.3f} {unit}, {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(f"{name:9} a round: {'; '.join(said)} times fedsweep's")


def with_cpu(play: Round) -> tuple[float, float]:
    """Seconds of a round, and CPU seconds of all processes meanwhile: the other sides' only wait."""
    before = cpu_seconds()
    wall = play()
    return wall, cpu_seconds() - before


def cpu_seconds() -> float:
    """Of this process and all that it started."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
