"""DynamicSGD with 16 bits both ways beside none: CPU time of single rounds, in turn in one process.

``python tests/benchmarks/bench_codec_cpu.py [ROOT]``: the digits with an MLP; with CIFAR-10's folder LeNet, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch

from fedsweep.config import load_config
from fedsweep.experiment.build import build_experiment
from fedsweep.testing import local_engine, run_rounds


def rounds_cpu_s(
    scenario: Mapping[str, Any], model: str, codec: Mapping[str, Any] | None, rounds: int
) -> Iterator[float]:
    """Play a round each time; yield its CPU seconds, without the first's."""
    config = load_config(
        {
            "scenario": {**scenario, "clients": 20},
            "model": {"name": model},
            "method": {"name": "dynamicsgd"},
            "training": {"rounds": rounds + 2, "cohort_size": 10, "local_steps": 20, "batch_size": 20},
            "evaluation": {"every": rounds + 2},
            "communication": {"up": codec, "down": codec},
        }
    )
    engine = local_engine(build_experiment(config))
    state = run_rounds(engine, rounds=1)
    for _ in range(rounds):
        began = time.process_time()
        state = run_rounds(engine, state, rounds=1)
        yield time.process_time() - began


def main(root: str | None) -> None:
    """Print medians in milliseconds and their ratio, three times."""
    torch.set_num_threads(1)
    worlds: dict[str, tuple[Mapping[str, Any], int]] = {"mlp": ({"dataset": "digits"}, 60)}
    if root:
        worlds["lenet5"] = ({"dataset": "cifar10", "root": root}, 15)
    for model, (scenario, rounds) in worlds.items():
        for _ in range(3):
            plain, coded = (rounds_cpu_s(scenario, model, codec, rounds) for codec in (None, {"name": "fp16"}))
            turns = list(zip(plain, coded, strict=True))
            medians = [1000 * median(side) for side in zip(*turns, strict=True)]
            print(model, *(round(each, 1) for each in medians), f"{medians[1] / medians[0]:.3f}")


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
