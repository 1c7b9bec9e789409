"""A planned budget beside the best fixed interval of a sweep, at equal bytes in ten worlds.

``python tests/benchmarks/bench_planned_budget.py``: a few minutes on one core. Worlds are the digits, split by
Dirichlet draws of ten seeds; the interval is that of DynamicFL's fast group.
"""

from __future__ import annotations

from typing import Any

from fedsweep.config import load_config
from fedsweep.experiment.build import build_experiment
from fedsweep.testing import local_engine, run_rounds

INTERVALS = (10, 5, 2, 1)
BUDGET = "20 MB"


def played(seed: int, **planned: Any) -> tuple[float, int]:
    """Return the last test accuracy of a run, and its bytes."""
    interval = planned.pop("interval", INTERVALS[0])
    config = load_config(
        {
            "seed": seed,
            "scenario": {
                "dataset": "digits",
                "clients": 20,
                "partition": {"kind": "dirichlet", "dirichlet_alpha": 0.3, "min_samples": 5},
                "budgets": {"total_bytes": BUDGET},
            },
            "method": {"name": "dynamicfl", "group_size": 3, "high_interval": interval, "low_interval": 10},
            "training": {
                "rounds": 400,
                "cohort_size": 6,
                "local_steps": 10,
                "batch_size": 10,
                "optimizer": {"name": "sgd", "lr": 0.05},
            },
            "evaluation": {"every": 1},
            **planned,
        }
    )
    state = run_rounds(local_engine(build_experiment(config)))
    # Of the last three rounds, since one cohort moves the accuracy by more than intervals do.
    tested = [record.test_accuracy for record in state.records[-3:] if record.test_accuracy is not None]
    return sum(tested) / len(tested), state.total_bytes


def main() -> None:
    """Print a row for each world."""
    choices = {"method.high_interval": list(INTERVALS), "training.cohort_size": [3, 4, 5, 6]}
    planner = {"name": "gain", "choices": choices}
    print("| seed |", " | ".join(f"interval {interval}" for interval in INTERVALS), "| planned | of the budget |")
    won = 0
    for seed in range(10):
        fixed = [played(seed, interval=interval)[0] for interval in INTERVALS]
        accuracy, sent = played(seed, planner=planner)
        won += accuracy > max(fixed)
        cells = [f"{100 * value:.1f}" for value in (*fixed, accuracy)]
        print(f"| {seed} |", " | ".join(cells), f"| {100 * sent / 20e6:.2f} % |", flush=True)
    print(f"planned above the best fixed interval in {won} of 10 worlds")


if __name__ == "__main__":
    main()
