"""A table's costs before anything is run: steps, operations, bytes and hours, row by row; and what fits into a time.

Costs come from plans, hours from a calibration on this machine. Neither reads an image, so data sets that are not here
count as large as they were published.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.engine.cost import CostModel
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError, FedsweepError, InputError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.build_world import dataset_of
from fedsweep.guard import guarded
from fedsweep.reproduce.calibration import Speed, calibrate
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.given import taken_from_files
from fedsweep.reproduce.reproduction import Reproduction, TableRequest, reproduction
from fedsweep.results.texts import seconds_text
from fedsweep.submodel import FULL_MODEL
from fedsweep.sweeps.prepared_trial import dataset_key
from fedsweep.world.data.datasets import DATASETS, Dataset, is_present, stand_in

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.experiment.experiment import Experiment

# Rounds that are planned one by one where all are alike but for their draws; where the world changes, all of them.
_PLANNED, _MOST_PLANNED = 10, 1000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([mhd])")
_UNITS = {"m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs of runs together.

    Attributes:
        runs: How many they are.
        steps: Local steps of all clients.
        flops: Floating-point operations of their forward and backward passes.
        num_bytes: What travels, both ways, registration included.
        seconds: On one core of this machine, in CPU time; what components compute on the server is not in it.
    """

    runs: int = 0
    steps: int = 0
    flops: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            runs=self.runs + other.runs,
            steps=self.steps + other.steps,
            flops=self.flops + other.flops,
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=self.seconds + other.seconds,
        )


@dataclass(kw_only=True)
class Estimator:
    """Estimates runs; what several of them have in common is planned and timed once.

    Attributes:
        by_method: Time each method's own steps; otherwise FedAvg's, by the passes that the method's have.
        absent: Data sets whose files are not here.
    """

    by_method: bool = True
    absent: dict[str, None] = field(default_factory=dict)
    _datasets: dict[str, Dataset] = field(default_factory=dict)
    _costs: dict[str, Cost] = field(default_factory=dict)
    _speeds: dict[str, Speed] = field(default_factory=dict)
    _plain: dict[str, tuple[Speed, int]] = field(default_factory=dict)

    def of(self, config: Config) -> Cost:
        """Return a run's cost.

        Raises:
            InputError: The run can't be planned.
        """
        config = resolve(config)
        key = config.model_copy(update={"seed": 0}).hash()
        if key not in self._costs:
            with guarded(when="before the run", raises=ConfigError):
                experiment = build_experiment(config, self._dataset(config))
                self._costs[key] = self._estimated(config, experiment)
        return self._costs[key]

    def release(self) -> None:
        """Give memory back that earlier plans took: networks that hold themselves in cycles, and what malloc keeps."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc's alone
            ctypes.CDLL(None).malloc_trim(0)

    def _dataset(self, config: Config) -> Dataset:
        scenario = config.scenario
        key = dataset_key(config)
        if key not in self._datasets:
            self._datasets.clear()  # one at a time is enough, and some are large
            if scenario.dataset in DATASETS and not is_present(scenario.dataset, root=scenario.root):
                self.absent[scenario.dataset] = None
                self._datasets[key] = stand_in(scenario.dataset, image_size=scenario.image_size)
            else:
                self._datasets[key] = dataset_of(scenario)
        return self._datasets[key]

    def _estimated(self, config: Config, experiment: Experiment) -> Cost:
        cost = forecast(experiment, most_planned=_planned(experiment))
        speed = self._speed(config, experiment)
        world, every = experiment.world, experiment.evaluate_every
        tested = len(world.test_labels) + (0 if world.validation is None else len(world.validation[1]))
        seconds = cost.local_steps * speed.step + cost.turns * speed.turn
        seconds += -(-cost.rounds // every) * tested * speed.test
        return Cost(
            runs=1,
            steps=cost.local_steps,
            flops=cost.flops,
            num_bytes=cost.total_bytes,
            seconds=seconds,
        )

    def _speed(self, config: Config, experiment: Experiment) -> Speed:
        tree = config.tree()
        training, scenario = tree["training"], tree["scenario"]
        setting = [
            *(scenario[key] for key in ("dataset", "image_size", "transform")),
            tree["model"],
            *(training[key] for key in ("batch_size", "optimizer", "clip_norm")),
            [tree["runtime"][key] for key in ("executor", "lanes", "device", "tf32")],
        ]
        parts = tree["method"].get("merge", [tree["method"]])
        key = json.dumps([setting, [part["name"] for part in parts]], sort_keys=True)
        if self.by_method and key not in self._speeds:
            # The steps of some methods need what an exchange before round 1 brings.
            with contextlib.suppress(FedsweepError):
                self._speeds[key] = calibrate(experiment)
        return self._speeds.get(key) or self._as_fedavg(config, experiment, json.dumps(setting, sort_keys=True))

    def _as_fedavg(self, config: Config, experiment: Experiment, key: str) -> Speed:
        """FedAvg's speed with the same network and batches, longer as the method's step has more passes."""
        if key not in self._plain:
            tree = {section: values for section, values in config.tree().items() if section != "method"}
            plain = resolve(load_config(tree))  # without a method it is FedAvg
            other = build_experiment(plain, self._dataset(plain))
            self._plain[key] = calibrate(other), CostModel(other).flops(FULL_MODEL, 1)
            self.release()
        speed, flops = self._plain[key]
        return replace(speed, step=speed.step * CostModel(experiment).flops(FULL_MODEL, 1) / max(flops, 1))


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """The costs of a table's cells.

    Attributes:
        by_cell: Each cell's own cost, before anything is shared.
        shared: Cells whose run another cell before them has -> the first of these.
        absent: Data sets whose files are not here.
    """

    by_cell: Mapping[Cell, Cost]
    shared: Mapping[Cell, Cell]
    absent: tuple[str, ...]

    @property
    def total(self) -> Cost:
        """All of it; a run that several cells share counts once."""
        return sum((cost for cell, cost in self.by_cell.items() if cell not in self.shared), Cost())

    def by_label(self) -> dict[str, Cost]:
        """Row and column -> what all seeds come to, less what stands in a cell before."""
        labels: dict[str, Cost] = {}
        for cell, cost in self.by_cell.items():
            labels[cell.label] = labels.get(cell.label, Cost()) + (Cost() if cell in self.shared else cost)
        return labels

    def within(self, seconds: float) -> tuple[Cell, ...]:
        """Return the cells that fit into a time on this machine, in the table's order, without too long ones."""
        chosen, spent = [], 0.0
        begun: set[Cell] = set()
        for cell, cost in self.by_cell.items():
            run = self.shared.get(cell, cell)
            more = 0.0 if run in begun else cost.seconds / cores()
            if max(spent + more, cost.seconds) <= seconds:  # a run has one core, however many there are
                chosen.append(cell)
                begun.add(run)
                spent += more
        return tuple(chosen)


def costs_of(table: Reproduction, estimator: Estimator | None = None) -> TableCosts:
    """Return the costs of a table's cells; nothing is written.

    Args:
        table: With its cells, which must be runs.
        estimator: One that is shared with other tables.

    Raises:
        InputError: A cell can't be planned.
    """
    estimator = estimator or Estimator()
    by_cell = {}
    for cell in table.cells:
        try:
            by_cell[cell] = estimator.of(cell.config)
        except InputError as error:
            raise type(error)(f"cell {cell.label}: {error}") from None
    return TableCosts(
        by_cell=by_cell,
        shared={cell: first for cell, key in table.keys.items() if (first := table.firsts[key]) != cell},
        absent=tuple(estimator.absent),
    )


def hours_here(cost: Cost) -> float:
    """Return hours that runs take here, where each has a core to itself, and no core is idle while runs are left."""
    return cost.seconds / 3600 / min(cores(), max(cost.runs, 1))


def cores() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_duration(text: str) -> float:
    """Return seconds of ``90m``, ``10h`` or ``1.5d``.

    Raises:
        ConfigError: It is no such text.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--within takes a time such as 90m, 10h or 1.5d, but got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def fitting(request: TableRequest, seconds: float) -> TableRequest:
    """Return the same table with those of its cells that fit into a time on this machine, in the table's order.

    Cells whose runs are given take no time.

    Raises:
        ConfigError: None fits, or nothing is run for the table.
        InputError: A cell can't be planned.
    """
    table = reproduction(request)
    if table.table.kind != "runs":
        raise ConfigError(f"--within chooses runs, and {table.table.name} has none")
    given_runs = taken_from_files(request.runs_from, table.sources, allow_changed_code=True)
    free = {cell for cell, key in table.keys.items() if key in given_runs}
    costs = costs_of(replace(table, cells=tuple(cell for cell in table.cells if cell not in free)))
    fit = free | {*costs.within(seconds)}
    cells = [cell for cell in table.cells if cell in fit]
    if not cells:
        least = min(hours_here(cost) for cost in costs.by_cell.values())
        raise ConfigError(
            f"--within: no run of {table.table.name} fits, the shortest takes about {seconds_text(3600 * least)} here"
        )
    return replace(request, chosen=tuple((cell.row, cell.column, cell.seed) for cell in cells))


def _planned(experiment: Experiment) -> int:
    world, rounds = experiment.world, experiment.training.rounds
    return min(rounds, _PLANNED if world.availability is None and world.drift is None else _MOST_PLANNED)
