"""What many clients and further actors cost.

    python tests/benchmarks/bench_actors.py [clients] [memory]

clients     10,000 clients against 100 with equal cohort and client size: seconds per round, in turns; at most 1.1 times
memory      what each further client actor adds (PSS), and that nobody copies the data

The speed of rounds beside plain PyTorch is measured by ``fedsweep bench``.
"""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from fedsweep.bench.data import noise
from fedsweep.bench.rounds import plan_of, playing
from fedsweep.bench.setup import in_turns
from fedsweep.driver.plan import Plan

ROUNDS, REPEATS = 20, 5


def plan(*, clients: int, samples: int, steps: int, **runtime: Any) -> tuple[Plan, int]:
    """LeNet-5 on noise, cohorts of ten; with the bytes of its images."""
    dataset = noise("cifar10", samples=clients * samples)
    training = {"cohort_size": 10, "local_steps": steps, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.01}}
    given = {
        "scenario": {"clients": clients},
        "model": {"name": "lenet5"},
        "method": {"name": "fedavg"},
        "training": training,
        "runtime": runtime,
    }
    return plan_of(given, dataset), dataset.train_images.nbytes


def bench_clients() -> None:
    """10,000 clients against 100."""
    with ExitStack() as stack:
        few, many = (
            stack.enter_context(playing(plan(clients=n, samples=5, steps=10, backend="local")[0]))
            for n in (100, 10_000)
        )
        found = in_turns(lambda: few.play(ROUNDS), lambda: many.play(ROUNDS), REPEATS, what="")
    slower = statistics.median(found.ratios)
    print(f"10,000 clients / 100 clients, seconds per round: {slower:.3f} (at most 1.1)", flush=True)


def bench_memory() -> None:
    """PSS of 1, 2 and 3 client actors; at most 350 MB each is asked for."""
    for actors in (1, 2, 3):
        asked, num_bytes = plan(clients=100, samples=500, steps=10, backend="ray", client_actors=actors)
        with playing(asked) as player:
            player.play(2)
            ids = [p.pid for p in psutil.Process().children(recursive=True) if is_client(p)]
            sizes, data = [pss_mb(pid) for pid in ids], [pss_mb(pid, only="/dev/shm") for pid in ids]
        print(
            f"{actors} client actors: PSS {[round(s) for s in sizes]} MB each, of which shared memory"
            f" {[round(d) for d in data]} MB (data set: {num_bytes / 2**20:.0f} MB once)",
            flush=True,
        )


def is_client(process: psutil.Process) -> bool:
    """Whether this is a client actor, by the name that Ray gives it."""
    line = process.cmdline()
    return bool(line) and line[0].startswith("ray::") and "Client" in line[0]


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


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known = {"clients": bench_clients, "memory": bench_memory}
    for name in sys.argv[1:] or known:
        known[name]()
