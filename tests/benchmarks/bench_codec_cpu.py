"""DynamicSGD with 16 bits both ways beside none: CPU time of rounds, one after the other in one process.

``python tests/benchmarks/bench_codec_cpu.py [ROOT]``: the digits with an MLP; with CIFAR-10's folder LeNet, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from fedsweep.config import load_config
from fedsweep.experiment.build import build_experiment
from fedsweep.testing import local_engine, run_rounds

PAIRS, ROUNDS = 5, 15


def cpu_s(scenario: Mapping[str, Any], model: str, codec: Mapping[str, Any] | None) -> float:
    """Return CPU seconds of all rounds but the first."""
    config = load_config(
        {
            "scenario": {**scenario, "clients": 20},
            "model": {"name": model},
            "method": {"name": "dynamicsgd"},
            "training": {"rounds": ROUNDS + 1, "cohort_size": 10, "local_steps": 20, "batch_size": 20},
            "evaluation": {"every": ROUNDS + 1},
            "communication": {"up": codec, "down": codec},
        }
    )
    engine = local_engine(build_experiment(config))
    state = run_rounds(engine, rounds=1)
    began = time.process_time()
    run_rounds(engine, state, rounds=ROUNDS)
    return time.process_time() - began


def main(root: str | None) -> None:
    """Print the median ratio of pairs, and all of them."""
    torch.set_num_threads(1)
    worlds = {"mlp": {"dataset": "digits"}} | ({"lenet5": {"dataset": "cifar10", "root": root}} if root else {})
    for model, scenario in worlds.items():
        pairs = [(cpu_s(scenario, model, None), cpu_s(scenario, model, {"name": "fp16"})) for _ in range(PAIRS)]
        ratios = sorted(coded / plain for plain, coded in pairs)
        print(model, round(median(ratios), 3), [round(ratio, 3) for ratio in ratios])


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
