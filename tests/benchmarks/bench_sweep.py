"""What Ray Tune costs: local trials on two cores against two plain processes over the same experiments.

    python tests/benchmarks/bench_sweep.py                                     16 trials of a few seconds
    python tests/benchmarks/bench_sweep.py --trials 1000 --rounds 5 --steps 5  1,000 of a tenth of a second

Start-up is left out on both sides, and printed apart: a sweep is timed from its first trial's start to its last trial's
end, the plain loop between the moments when both processes have imported everything and when the later one is done.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared_trial import make_entry
from fedsweep.sweeps.space import list_trials
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.tuner import run_sweep
from fedsweep.tracking.terminal.sweep_progress import SweepProgress

TARGET = 1.25


def configuration(given: argparse.Namespace, *, tracking: str) -> dict[str, Any]:
    """So many seeds of an MLP on digits."""
    return {
        "name": "bench",
        "scenario": {"clients": 10, "partition": {"kind": "iid"}},
        "training": {"rounds": given.rounds, "cohort_size": 5, "local_steps": given.steps},
        "tracking": {"uri": tracking},
        "sweep": {"space": {"seed": {"grid": list(range(given.trials))}}},
    }


class Clock(SweepProgress):
    """Notes when the first trial began and the last one ended."""

    first = last = 0.0

    def began(self, name: str) -> None:
        self.first = self.first or time.perf_counter()

    def ended(self, name: str, status: str, remark: str | None) -> None:
        self.last = time.perf_counter()


def plain(tree: dict[str, Any], folder: str, part: int, ready: Any, go: Any) -> None:
    """Half of the trials, one after the other."""
    config = load_config(tree)
    entries = [make_entry(config, trial, uri=None) for trial in list_trials(config)][part::2]
    plan_run(load_config(entries[0].config.tree()))
    ready.release()
    go.wait()
    for entry in entries:
        run_plan(plan_run(load_config(entry.config.tree())), Path(folder) / entry.trial.folder)


def plain_seconds(tree: dict[str, Any], folder: str) -> tuple[float, float]:
    """Two processes: seconds of work, and of start-up."""
    launched = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    workers = [context.Process(target=plain, args=(tree, folder, part, ready, go)) for part in range(2)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    began = time.perf_counter()
    go.set()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began, began - launched


def sweep_seconds(tree: dict[str, Any], folder: str) -> tuple[float, float]:
    """On Ray Tune: seconds of work, and of start-up (the checks, Ray itself, the first trial's process)."""
    clock = Clock()
    place = SweepFolder(Path(folder) / "sweep")
    launched = time.perf_counter()
    run_sweep(prepare(load_config(tree), place, resume=False), clock)
    return clock.last - clock.first, clock.first - launched


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone, waited = plain_seconds(configuration(given, tracking="none"), folder)
        print(f"two plain processes: {alone:.1f} s (start-up apart: {waited:.1f} s)", flush=True)
        bare, waited = sweep_seconds(configuration(given, tracking="none"), f"{folder}/a")
        print(f"sweep without MLflow: {bare:.1f} s, {bare / alone:.2f} x (start-up apart: {waited:.1f} s)", flush=True)
        logged, waited = sweep_seconds(configuration(given, tracking=f"sqlite:///{folder}/mlflow.db"), f"{folder}/b")
    print(f"sweep with MLflow: {logged:.1f} s, {logged / alone:.2f} x (start-up apart: {waited:.1f} s)")
    print(f"target: at most {TARGET} x")


if __name__ == "__main__":
    main()
