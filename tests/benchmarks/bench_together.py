"""What playing seeds side by side gains, their clients in the same lanes, on one core.

    python tests/benchmarks/bench_together.py [--rounds N] [--repeats N] [NAME ...]

Whole rounds with their tests, of several seeds: in turn by the loop, in turn in lanes of the same width, and side by
side (``sweep.together``). CPU seconds of the process, the three one after the other in each repeat; the median ratios
are printed with the least and the greatest, above 1 where side by side is less work. Names choose set-ups.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fedsweep.client.lanes.grouping import Lanes
from fedsweep.client.lanes.together import MakeLanes, Together
from fedsweep.client.messages import LaneSettings
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.models.cost import fwd_macs_per_sample

MLP: dict[str, Any] = {"name": "mlp"}
EPOCH: dict[str, Any] = {}
EQUAL = {"local_steps": 20}


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Network, pixels a side of the digits, clients a round, how much each does, seeds, width."""

    model: dict[str, Any]
    size: int | None = None
    cohort: int = 10
    work: dict[str, Any] = dataclasses.field(default_factory=lambda: EQUAL)
    seeds: int = 4
    lanes: int = 40


SETUPS = {
    "mlp-10": SetUp(MLP),
    "mlp-10-of-8": SetUp(MLP, lanes=8),
    "mlp-4": SetUp(MLP, cohort=4, lanes=16),
    "mlp-2": SetUp(MLP, cohort=2, seeds=8, lanes=16),
    "mlp-10-epoch": SetUp(MLP, work=EPOCH, lanes=16),
    "mlp-3-epoch": SetUp(MLP, cohort=3, work=EPOCH, seeds=8, lanes=16),
    "wide-mlp": SetUp({"name": "mlp", "hidden_width": 512}, lanes=8),
    "lenet5": SetUp({"name": "lenet5"}, size=16, lanes=8),
    # Where sweep.together=auto draws the line.
    **{f"mlp-of-{width}": SetUp({"name": "mlp", "hidden_width": width}) for width in (16, 64, 192, 256, 384)},
    **{
        f"{name}-of-{size}": SetUp({"name": name}, size=size)
        for name, size in (("lenet5", 16), ("lenet5", 28), ("cnn", 28), ("feddhad_cnn", 18), ("fedstg_cnn", 16))
    },
}


class Run:
    """A seed's run, round by round."""

    def __init__(self, experiment: Experiment, make_lanes: MakeLanes = Lanes) -> None:
        self._engine = Engine(experiment, LocalFleet(experiment, make_lanes))
        self.state = self._engine.start()

    def play(self, rounds: int) -> None:
        """Play so many rounds more."""
        for _ in range(rounds):
            self.state, _ = self._engine.advance(self.state)


def experiments(name: str) -> list[Experiment]:
    """The seeds of a set-up, as a configuration makes them."""
    chosen = SETUPS[name]
    tree = {
        "model": chosen.model,
        "scenario": {"image_size": chosen.size},
        "training": {"rounds": 10_000, "cohort_size": chosen.cohort, **chosen.work},
        "runtime": {"executor": "lanes", "lanes": chosen.lanes},
    }
    return [plan_run(load_config({**tree, "seed": seed})).experiment for seed in range(chosen.seeds)]


def measure(name: str, *, rounds: int, repeats: int) -> None:
    """Print a set-up's ratios."""
    made = experiments(name)
    loop = [Run(dataclasses.replace(one, lanes=None)) for one in made]
    lanes, together = [Run(one) for one in made], Together()
    shared = [Run(one, together.lanes(name)) for one in made]
    ways: dict[str, Callable[[], object]] = {
        "loop": lambda: [run.play(rounds) for run in loop],
        "lanes": lambda: [run.play(rounds) for run in lanes],
        "together": lambda: together.play([lambda run=run: run.play(rounds) for run in shared]),  # type: ignore[misc]
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, play in ways.items():
            began = time.process_time()
            play()
            taken[way].append(time.process_time() - began)
    if not all(torch.equal(a.state.vector, b.state.vector) for a, b in zip(lanes, shared, strict=True)):
        raise SystemExit(f"{name}: side by side has other bits than alone")
    texts = []
    for way in ("loop", "lanes"):
        ratios = [alone / joint for alone, joint in zip(taken[way][1:], taken["together"][1:], strict=True)]
        texts.append(f"{way} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    seeds, settings = len(made), made[0].lanes or LaneSettings(width=1)
    each_ms = 1000 * statistics.median(taken["together"][1:]) / rounds / seeds
    size = made[0].layout.num_params, fwd_macs_per_sample(made[0].template, made[0].world.data.images.shape[1:])
    told = f"{name} ({size[0]:,} values, {size[1]:,} MACs a sample), {seeds} seeds, {settings.width} lanes"
    print(f"{told}: {', '.join(texts)}; {each_ms:.0f} ms a round", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*SETUPS, []], default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for chosen in given.names or SETUPS:
        measure(chosen, rounds=given.rounds, repeats=given.repeats)
