"""Times and divergences of the group choosers, on CIFAR-like label counts.

    python tests/benchmarks/bench_dynacomm.py [SECONDS]

100 clients, Dirichlet 0.3, cohorts of several sizes without budgets and with a cap of a third. SECONDS (1) limits the
exact method, whose column `bound` is a proven lower bound. Medians over three cohorts; `-` where a method does not
apply or is not installed.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from fedsweep.algorithms.dynamicfl.chooser import GroupChooser, GroupProblem
from fedsweep.algorithms.dynamicfl.dynacomm import DynaComm
from fedsweep.algorithms.dynamicfl.exact import ExactGroup
from fedsweep.algorithms.dynamicfl.scores import group_divergence
from fedsweep.algorithms.dynamicfl.search import ExhaustiveGroup, GeneticGroup
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.streams import stream
from fedsweep.world.label_stats import label_counts, population
from fedsweep.world.partitions.registry import Dirichlet

SIZES = ((10, 10), (20, 10), (30, 10), (20, 100), (30, 100), (100, 10), (100, 100))
COHORTS = 3


def cohorts(num_active: int, num_classes: int, *, capped: bool) -> list[GroupProblem]:
    labels = np.repeat(np.arange(num_classes), 50_000 // num_classes)
    split = Dirichlet(dirichlet_alpha=0.3, min_samples=10).split(
        labels, 100, stream(0, "partition"), num_classes=num_classes
    )
    counts = label_counts(labels, split, num_classes)
    return [
        GroupProblem(
            counts_AC=counts[np.random.default_rng(seed).choice(100, num_active, replace=False)],
            population_C=population(counts),
            eligible_A=np.ones(num_active, dtype=bool),
            max_size=num_active // 3 if capped else num_active,
            stream=stream(seed, "benchmark"),
        )
        for seed in range(COHORTS)
    ]


def timed(chooser: GroupChooser, problems: list[GroupProblem]) -> str:
    seconds, divergences = [], []
    for problem in problems:
        start = time.perf_counter()
        try:
            group = chooser.choose(problem)
        except (ConfigError, ResourceError):
            return f"{'-':>22}"
        seconds.append(time.perf_counter() - start)
        divergences.append(group_divergence(problem, group))
    return f"{1e3 * statistics.median(seconds):9.1f} ms {statistics.median(divergences):9.2e}"


def solved(problems: list[GroupProblem], seconds: float) -> str:
    solutions = [ExactGroup(max_pairs=None).solve(problem, seconds=seconds) for problem in problems]
    taken, kl, bound = (
        statistics.median(getattr(found, name) for found in solutions) for name in ("seconds", "kl", "lower_bound")
    )
    return f"{1e3 * taken:9.1f} ms {kl:9.2e} {bound:9.2e} {sum(found.certified for found in solutions)}/{COHORTS}"


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    print(f"{'active x classes, cap':22} {'dynacomm':>22} {'exact: time, KL, bound, proven':>37}", end="")
    print(f" {'exhaustive':>22} {'genetic':>22}")
    for num_active, num_classes in SIZES:
        for capped in (False, True):
            problems = cohorts(num_active, num_classes, capped=capped)
            name = f"{num_active} x {num_classes}, {problems[0].max_size}"
            columns = [timed(DynaComm(), problems), solved(problems, seconds)]
            columns += [timed(ExhaustiveGroup(), problems), timed(GeneticGroup(), problems)]
            print(f"{name:22} {' '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
