"""The costs of a run's rounds, and the divergence of its high-frequency groups, without training.

Both follow from the label counts, the budgets and the random streams alone. The rounds are planned by the very code
that plans a run's, with the method's own components, so the figures are those of the run, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fedsweep.config.scenario import Scenario
from fedsweep.config.schema import Config
from fedsweep.engine.cost import CostModel, registration_bytes
from fedsweep.engine.forecast import planned_rounds
from fedsweep.engine.plan import Planner
from fedsweep.engine.row import RowMaker
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.checks import check_world
from fedsweep.experiment.experiment import Experiment
from fedsweep.experiment.unforeseen import why_unknown
from fedsweep.reproduce.cells import Cell, stand_in_of, standing_of
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Grid, GridCell, grid_of, summed_up, value_of
from fedsweep.results.view import RunView
from fedsweep.world.data.datasets import Dataset, load_dataset

# What is known of a round without training, as columns of rounds.parquet are called.
_COLUMNS = ("round", "cohort", "high_frequency", "sim_time_s", "kl_divergence", "comm_cost", "comm_ratio")
# Classes and training samples per class, all alike (Krizhevsky 2009).
_EVEN_SETS = {"cifar10": (10, 5000), "cifar100": (100, 500)}
# Partitions that see of the labels only how many samples a class has, as far as counts are concerned.
_BY_CLASS_SIZE = ("classes", "dirichlet", "dirichlet_balanced")


def planned_view(config: Config) -> RunView | str:
    """Return a run as far as it is known without training, as tables and pictures read runs.

    Its columns are those that are known, its folder does not exist. Where the costs depend on the training, the reason
    is given in its place; see
    :func:`~fedsweep.experiment.unforeseen.why_unknown`.

    Raises:
        InputError: As :func:`~fedsweep.experiment.build.build_experiment`; data files are needed only where the labels'
            numbers are not known without them.
    """
    experiment = build_experiment(config, label_data(config.scenario))
    reason = why_unknown(experiment)
    if reason is not None:
        name = experiment.method.name
        return f"the costs of method {name} can't be told without training: {reason}; run it instead"
    check_world(experiment)
    return RunView(folder=Path(config.name), config=config.tree(), result={}, columns=_columns(experiment))


def costs_grid(
    table: TableFile, cells: Sequence[Cell], *, scale: str, done: Callable[[str], None] = lambda text: None
) -> Grid:
    """Measure the table's costs, without training.

    A cell whose costs depend on the training has none, and says why.

    Args:
        table: The table.
        cells: Its cells.
        scale: What they belong to.
        done: Told of each row and column that is done.

    Raises:
        InputError: A cell's configuration is wrong, or its data set is needed and not there.
    """
    numbers = count(1)

    def measure(group: Sequence[Cell]) -> GridCell:
        cell = _costs_cell(table, group)
        done(f"{next(numbers)}: {group[0].label}")
        return cell

    return replace(grid_of(table, cells, measure, scale=scale), costs_only=True)


def _costs_cell(table: TableFile, group: Sequence[Cell]) -> GridCell:
    views = [planned_view(cell.config) for cell in group]
    runs = [view for view in views if isinstance(view, RunView)]
    measures = [measure for measure in table.measures if measure.cost]
    return GridCell(
        row=group[0].row,
        column=group[0].column,
        measured={m.name: summed_up([value_of(run, m) for run in runs], m, of=len(group)) for m in measures},
        standing=standing_of(table, group[0]),
        stand_in=stand_in_of(table, group[0]),
        untold=tuple(dict.fromkeys(view for view in views if isinstance(view, str))),
    )


def _columns(experiment: Experiment) -> dict[str, list[Any]]:
    costs = CostModel(experiment)
    planner, rows = Planner(experiment, costs), RowMaker(experiment, costs)
    stop = experiment.training.stop
    rounds: list[dict[str, Any]] = []
    total_bytes = registration_bytes(experiment)
    for plan in planned_rounds(experiment, planner):
        total_bytes += plan.num_bytes
        if stop.passed_by(total_bytes, plan.clock) is not None:
            break
        figures = rows.group_figures(plan, plan.components, cost=plan.values)
        group = figures["high_frequency"]
        row = figures | {
            "round": plan.context.round,
            "cohort": list(plan.context.cohort),
            "high_frequency": None if group is None else list(group),
            "sim_time_s": plan.clock,
        }
        rounds.append(row)
    return {name: [row[name] for row in rounds] for name in _COLUMNS}


def label_data(scenario: Scenario) -> Dataset:
    """Return the scenario's data set, or one of labels alone where their numbers are known and all that matters.

    A partition by class sizes deals CIFAR's labels alike in whatever order they stand, so its files are not needed; of
    a part of CIFAR it matters which.

    Raises:
        InputError: The data set is needed and can't be loaded.
    """
    is_whole = scenario.subset is None
    if is_whole and scenario.dataset in _EVEN_SETS and scenario.partition.kind in _BY_CLASS_SIZE:
        return _even_labels(scenario.dataset, scenario.image_size)
    return _loaded(scenario.dataset, scenario.root, scenario.download, scenario.image_size)


@lru_cache(maxsize=2)
def _even_labels(name: str, image_size: int | None) -> Dataset:
    num_classes, per_class = _EVEN_SETS[name]
    size = image_size or 32
    return Dataset.images(
        name=name,
        # Pages of zeros that nobody touches take no memory.
        train_images=np.zeros((num_classes * per_class, 3, size, size), np.uint8),
        train_labels=np.repeat(np.arange(num_classes), per_class),
        test_images=np.zeros((1, 3, size, size), np.uint8),
        test_labels=np.zeros(1, np.int64),
        num_classes=num_classes,
        scale=255.0,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )


@lru_cache(maxsize=1)
def _loaded(name: str, root: str | None, download: bool, image_size: int | None) -> Dataset:
    return load_dataset(name, root=root, download=download, image_size=image_size)
