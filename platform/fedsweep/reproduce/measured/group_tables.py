"""Tables of kind ``groups``: how good and how fast the choosers of a high-frequency group are, by its size.

Nothing is trained. Random cohorts are drawn from the scenario's clients, and each method chooses a group of each size
from the same cohorts. A table's ``groups:`` section says::

    active: [10, 30]                    clients of a cohort
    sizes: [1, 2, 3]                    of the group
    methods: [dynacomm, exhaustive]     names of rows that are methods, or row -> method (default: the rows' names)
    instances: 20                       cohorts
    orders: 10                          random orders that dynacomm and genetic try
    mutation: 0.001                     probability that genetic flips a variable
    seconds: 60                         of a choice: after one that took longer no larger size is tried; null: no limit

A cell shows the means over the sizes that all methods came to: of the divergences, and of the medians of the seconds
over cohorts; a measure with ``size`` or ``active`` those of groups of that size or of cohorts of so many clients.
Everything by size goes into ``groups.csv`` and, by :mod:`~fedsweep.reproduce.figures.of_groups`, the pictures.

Source: Le et al. 2024 (DynamicFL), Figures 5 to 19.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from fedsweep.config.base import Count, Section
from fedsweep.errors import ConfigError, OutputError, ResourceError, unknown_name
from fedsweep.experiment.build import build_world
from fedsweep.reproduce.cells import Cell, standing_of
from fedsweep.reproduce.definition.sections import Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.costs import label_data
from fedsweep.reproduce.measured.grid import Grid, GridCell, grid_of, summed_up
from fedsweep.results.seed_statistics import mean
from fedsweep.runs.files import atomic_write
from fedsweep.streams import Stream, stream
from fedsweep.world.label_stats import population

CSV = "groups.csv"
_FIGURES_OF = ("kl_divergence", "seconds")
# Smaller scales look at fewer cohorts and do not wait for all sizes: cohorts, and seconds for a method and a column.
_SCALES: Mapping[str, tuple[int, float]] = {"smoke": (1, 20.0), "small": (5, 180.0)}
# Nobody waits for a round here, so the searches may take longer than in one.
_SEARCH = {"max_pairs": 1 << 32, "max_subsets": 40_000_000}

Counts = Annotated[list[Count], Field(min_length=1)]


class GroupOptions(Section):
    """The section ``groups:``; see the module's docstring."""

    active: Counts | Count
    sizes: Counts
    methods: list[str] | dict[str, str] = Field(default_factory=list)
    instances: Count = 20
    orders: Count = 10
    mutation: Annotated[float, Field(ge=0, le=1)] = 0.001
    seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def cohort_sizes(self) -> list[int]:
        """Clients of a cohort."""
        return self.active if isinstance(self.active, list) else [self.active]

    def method_of(self, row: str) -> str:
        """The method that a row is."""
        return self.methods.get(row, row) if isinstance(self.methods, dict) else row


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A method's groups of one size from all cohorts.

    Attributes:
        row: The method's row.
        column: The clients' column.
        seed: The seed.
        active: Clients of a cohort.
        size: Of the groups.
        kl_divergence: Of each cohort's group, in nats.
        seconds: That each choice took.
    """

    row: str
    column: str
    seed: int
    active: int
    size: int
    kl_divergence: tuple[float, ...]
    seconds: tuple[float, ...]

    def value(self, name: str) -> float:
        """The mean divergence, or the median of the seconds."""
        if name == "seconds":
            return statistics.median(self.seconds)
        return mean(self.kl_divergence)


def measured_groups(
    table: TableFile, *, scale: str, cells: Sequence[Cell], out: Path, quiet: bool
) -> tuple[Grid, list[Choices]]:
    """Chooses all groups, and writes ``groups.csv``; gives what the cells come to, and what was chosen.

    Args:
        table: The table.
        scale: ``smoke``, ``small`` or ``full``.
        cells: What is to be measured.
        out: The folder, which exists.
        quiet: Without a line for each cell on standard error.

    Raises:
        ConfigError: The section ``groups:``, a method's name, a measure or a figure is wrong.
        InputError: A scenario is wrong, or its data set is not there.
    """
    options = _options(table)
    _check(table, options, cells)
    most, total_s = _SCALES.get(scale, (options.instances, None))
    cohorts = min(most, options.instances)
    notes = ["a cell is the mean over those sizes that all methods came to; seconds are medians over cohorts"]
    if cohorts < options.instances:
        notes.insert(0, f"{cohorts} cohort{'' if cohorts == 1 else 's'} at this scale in place of {options.instances}")
    found: list[Choices] = []
    counts: dict[str, np.ndarray] = {}
    for cell in cells:
        key = json.dumps([cell.config.tree()["scenario"], cell.config.training.rounds, cell.seed])
        if key not in counts:
            counts[key] = _label_counts(cell)
        began = time.perf_counter()
        for active in options.cohort_sizes:
            problems = list(_cohorts(counts[key], active=active, cell=cell, instances=cohorts))
            chosen, why = _choices(cell, problems, active=active, options=options, total_s=total_s)
            found += chosen
            notes += [f"{cell.row}, {cell.column}, {active} active: {why}"] if why else []
        if not quiet:
            print(f"{cell.label}, seed {cell.seed}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    _write_csv(found, out / CSV)
    grid = grid_of(table, cells, lambda group: _grid_cell(table, group, found), scale=scale)
    return replace(grid, notes=tuple(dict.fromkeys(notes))), found


def _options(table: TableFile) -> GroupOptions:
    try:
        return GroupOptions.model_validate(dict(table.groups))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["table.groups", *map(str, first["loc"])])
        raise ConfigError(f"{table.name}: {where}: {first['msg']}, but got {first['input']!r}") from None


def _check(table: TableFile, options: GroupOptions, cells: Sequence[Cell]) -> None:
    """Everything that is wrong input, before anything is computed."""
    registry = _dynamicfl("names")
    for row in dict.fromkeys(cell.row for cell in cells):
        if options.method_of(row) not in registry.GROUP_CHOOSERS:
            raise ConfigError(
                f"{table.name}: {unknown_name('group chooser', options.method_of(row), registry.GROUP_CHOOSERS)}"
            )
        if registry.group_chooser(options.method_of(row)).setup(Stream(("groups",))):
            raise ConfigError(
                f"{table.name}: the method {options.method_of(row)!r} needs what clients measure on a model; a table of"
                " kind groups has label counts alone; leave it out"
            )
    for measure in table.measures:
        if measure.of not in _FIGURES_OF:
            raise ConfigError(f"{table.name}: {unknown_name('measure of groups', measure.of, _FIGURES_OF)}")
        for key, known in (("size", options.sizes), ("active", options.cohort_sizes)):
            asked = getattr(measure, key)
            if asked is not None and asked not in known:
                raise ConfigError(
                    f"{table.name}: measure {measure.name}: {key}={asked} is none of {', '.join(map(str, known))}"
                )
    for figure in table.figures:
        if figure.kind != "lines" or figure.x != "size" or figure.y not in _FIGURES_OF:
            raise ConfigError(
                f"{table.name}: figure {figure.name}: groups are drawn as kind lines with x: size and y:"
                f" {' or '.join(_FIGURES_OF)}, but this is {figure.kind} with x: {figure.x!r}, y: {figure.y!r}"
            )
    if max(options.sizes) > min(options.cohort_sizes):
        raise ConfigError(
            f"{table.name}: groups.sizes must not exceed groups.active, but has {max(options.sizes)} of"
            f" {min(options.cohort_sizes)}; lower it"
        )
    for cell in cells:
        if max(options.cohort_sizes) > cell.config.scenario.clients:
            raise ConfigError(
                f"{table.name}, {cell.label}: groups.active={max(options.cohort_sizes)} clients can't be drawn from"
                f" scenario.clients={cell.config.scenario.clients}; lower the one or raise the other"
            )


def _dynamicfl(module: str) -> Any:
    """A module of the method's, which is looked up since nothing here imports an algorithm."""
    return importlib.import_module(f"fedsweep.algorithms.dynamicfl.{module}")


def _label_counts(cell: Cell) -> np.ndarray:
    """What the clients of a cell's scenario hold [N, C]."""
    world = build_world(cell.config, label_data(cell.config.scenario))
    return np.stack([profile.label_counts for profile in world.profiles])


def _choices(
    cell: Cell, problems: Sequence[Any], *, active: int, options: GroupOptions, total_s: float | None
) -> tuple[list[Choices], str | None]:
    """A method's groups of all sizes, and why there are no more of them."""
    search = {"orders": options.orders, "mutation": options.mutation, **_SEARCH}
    chooser = _dynamicfl("names").group_chooser(options.method_of(cell.row), **search)
    place: dict[str, Any] = {"row": cell.row, "column": cell.column, "seed": cell.seed, "active": active}
    deadline = None if total_s is None else time.perf_counter() + total_s
    found: list[Choices] = []
    for size in options.sizes:
        try:
            chosen = _of_size(chooser, problems, size, deadline=deadline)
        except ResourceError as error:
            return found, str(error)
        except ConfigError as error:
            return found, f"nothing from size {size} on: {error}"
        if chosen is None:
            return found, f"over time from size {size} on ({total_s:g} s for all sizes at this scale)"
        divergences, seconds = chosen
        found.append(Choices(kl_divergence=divergences, seconds=seconds, size=size, **place))
        if options.seconds is not None and max(seconds) > options.seconds and size != options.sizes[-1]:
            return found, f"over time after size {size} (a choice took {max(seconds):.3g} s, of {options.seconds:g} s)"
    return found, None


def _of_size(
    chooser: Any, problems: Sequence[Any], size: int, *, deadline: float | None
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Divergences and seconds of a method's groups of a size; None where the deadline came first."""
    scores = _dynamicfl("scores")
    divergences, seconds = [], []
    for problem in problems:
        start = time.perf_counter()
        if deadline is not None and start > deadline:
            return None
        group = chooser.choose(problem, size=size)
        seconds.append(time.perf_counter() - start)
        divergences.append(float(scores.group_divergence(problem, group)))
    return tuple(divergences), tuple(seconds)


def _cohorts(counts_NC: np.ndarray, *, active: int, cell: Cell, instances: int) -> Iterator[Any]:
    """The same random cohorts for every method."""
    shares_C = population(counts_NC)
    for number in range(1, instances + 1):
        drawn = stream(cell.seed, "groups", number, active)
        rows = np.sort(drawn.child("cohort").numpy().choice(len(counts_NC), size=active, replace=False))
        yield _dynamicfl("chooser").GroupProblem(
            counts_AC=counts_NC[rows],
            population_C=shares_C,
            eligible_A=np.ones(active, dtype=bool),
            max_size=active,
            stream=drawn.child("choice"),
        )


# -- what comes out ----------------------------------------------------------------------------------------------------


def _grid_cell(table: TableFile, group: Sequence[Cell], found: Sequence[Choices]) -> GridCell:
    return GridCell(
        row=group[0].row,
        column=group[0].column,
        measured={m.name: summed_up([_value(found, cell, m) for cell in group], m) for m in table.measures},
        standing=standing_of(table, group[0]),
    )


def _value(found: Sequence[Choices], cell: Cell, measure: Measure) -> float | None:
    """A measure of a cell: the mean over cohort sizes and over those group sizes that all methods came to."""
    here = [c for c in found if c.column == cell.column and c.seed == cell.seed]
    done = {row: {(c.active, c.size) for c in here if c.row == row} for row in {c.row for c in here}}
    asked = (measure.active, measure.size)
    shared = {
        place
        for place in (set.intersection(*done.values()) if done else set())
        if all(wanted in (None, own) for wanted, own in zip(asked, place, strict=True))
    }
    own = [c.value(measure.of) for c in here if c.row == cell.row and (c.active, c.size) in shared]
    return mean(own) if own else None


def _write_csv(found: Sequence[Choices], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "active", "size", "cohorts", "kl_divergence", "seconds"])
    for c in found:
        figures = [repr(c.value(name)) for name in _FIGURES_OF]
        writer.writerow([c.row, c.column, c.seed, c.active, c.size, len(c.seconds), *figures])
    try:
        atomic_write(path, text.getvalue().encode())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
