"""What many clients cost: the start, a round, and the checkpoints of what clients remember.

    python tests/benchmarks/bench_scale.py [CLIENTS ...]

Digits repeated, 5 images a client, MLP, cohorts of 1,000 (at most a tenth), in this process. Each row in a process of
its own: seconds of CPU until the first round can begin, a round's, the greatest resident memory, and what each of three
checkpoints wrote, clients keeping their momentum.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

IMAGES = 5


def repeated(clients: int) -> object:
    """Digits with enough images for so many clients."""
    from fedsweep.world.data.datasets import load_dataset

    digits = load_dataset("digits", root=None, download=False)
    times = -(-clients * IMAGES // len(digits.train_labels))
    images = np.tile(digits.train.inputs, (times, 1, 1, 1))[: clients * IMAGES]
    labels = np.tile(digits.train.targets, times)[: clients * IMAGES]
    return replace(digits, train=replace(digits.train, inputs=images, targets=labels))


def measure(clients: int) -> None:
    """One row."""
    from fedsweep.config.load import load_config
    from fedsweep.driver.run import plan_run
    from fedsweep.driver.session import RunSession, SessionSettings
    from fedsweep.fleet.fleet import LocalFleet
    from fedsweep.runs.facts import peak_memory_mb

    training = {"rounds": 3, "cohort_size": min(1000, clients // 10), "local_steps": 1, "optimizer_state": "persist"}
    training["optimizer"] = {"momentum": 0.9}
    scenario = {"clients": clients, "partition": {"kind": "iid"}}
    given = {"name": "scale", "scenario": scenario, "training": training, "runtime": {"backend": "local"}}
    dataset = repeated(clients)
    began = time.process_time()
    plan = plan_run(load_config(given), dataset)
    with tempfile.TemporaryDirectory() as scratch:
        settings = SessionSettings(folder=Path(scratch), checkpoint_every=1, checkpoint_keep=2, facts={})
        session = RunSession(plan.experiment, lambda warn: LocalFleet(plan.experiment), settings)
        session.open(resume=False)
        start, start_mb, before = time.process_time() - began, peak_memory_mb(), 0
        rounds, saved = [], []
        for _ in range(3):
            began = time.process_time()
            session.step()
            rounds.append(time.process_time() - began)
            session.save()
            files = [path.stat() for path in Path(scratch, "checkpoints").rglob("*") if path.is_file()]
            new = [file for file in files if file.st_mtime_ns > before]
            before = max(file.st_mtime_ns for file in files)
            saved.append(f"{sum(file.st_size for file in new) / 1e6:.1f} MB in {len(new)}")
    print(
        f"{clients:>8,} {start:>9.1f} s {start_mb:>8.0f} MB {min(rounds):>9.2f} s {peak_memory_mb():>8.0f} MB"
        f"   {', '.join(saved)} files",
        flush=True,
    )


def main() -> None:
    """All rows."""
    print(f"{'clients':>8} {'start':>11} {'memory':>11} {'round':>11} {'memory':>11}   checkpoints", flush=True)
    for clients in sys.argv[1:] or ["1000", "10000", "100000"]:
        subprocess.run([sys.executable, __file__, "--row", clients], check=True)


if __name__ == "__main__":
    measure(int(sys.argv[2])) if sys.argv[1:2] == ["--row"] else main()
