"""Tables of kind ``groups``: how good and how fast the choosers of a high-frequency group are, by its size.

Nothing is trained. Random cohorts are drawn from the scenario's clients, and each method chooses a group of each size
from the same cohorts. A cell shows the means over the sizes that all methods came to: of the divergences, and of the
medians of the seconds over cohorts; a measure with ``where: {size, active}`` those of groups of that size, or of
cohorts of so many clients, alone. Everything by size goes into ``groups.csv`` and the pictures.

Source: Le et al. 2024 (DynamicFL), Figures 5 to 19.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedsweep.algorithms.dynamicfl import chooser, names, scores
from fedsweep.errors import ConfigError, ResourceError, unknown_name
from fedsweep.experiment.build_world import build_world
from fedsweep.papers.dynamicfl.choices import FIGURES_OF, Choices, draw_choices
from fedsweep.parameters.ranges import Count
from fedsweep.reproduce.cells import Cell, stand_in_of, standing_of
from fedsweep.reproduce.definition.sections import Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.costs import label_data
from fedsweep.reproduce.measured.grid import Grid, GridCell, grid_of, summed_up
from fedsweep.reproduce.measured.table_kind import TableKind
from fedsweep.reproduce.outputs import FIGURES
from fedsweep.results.seed_statistics import mean
from fedsweep.runs.files import write_file
from fedsweep.streams import Stream, stream
from fedsweep.world.label_stats import population

CSV = "groups.csv"
# Smaller scales look at fewer cohorts and do not wait for all sizes: cohorts, and seconds for a method and a column.
_SCALES: Mapping[str, tuple[int, float]] = {"smoke": (1, 20.0), "small": (5, 180.0)}
# Nobody waits for a round here, so the searches may take longer than in one.
_SEARCH = {"max_pairs": 1 << 32, "max_subsets": 40_000_000}

Counts = Annotated[list[Count], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class GroupTable(TableKind):
    """Chooses groups from random cohorts, and times that; a row is a method of choosing.

    Attributes:
        active: Clients of a cohort, or several such numbers.
        sizes: Of the groups.
        methods: Names of rows that are methods, or row -> method; by default the rows' names.
        instances: Cohorts.
        orders: Random orders that ``dynacomm`` and ``genetic`` try.
        mutation: Probability 0..1 that ``genetic`` flips a variable.
        seconds: After a choice that took longer no larger size is tried; None: no limit.
    """

    active: Counts | Count
    sizes: Counts
    methods: list[str] | dict[str, str] = field(default_factory=list)
    instances: Count = 20
    orders: Count = 10
    mutation: Annotated[float, Field(ge=0, le=1)] = 0.001
    seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def cohort_sizes(self) -> list[int]:
        """Clients of a cohort."""
        return self.active if isinstance(self.active, list) else [self.active]

    def method_of(self, row: str) -> str:
        """Return the method that a row is."""
        return self.methods.get(row, row) if isinstance(self.methods, dict) else row

    def measure(
        self, table: TableFile, cells: Sequence[Cell], *, scale: str, folder: Path, notify: Callable[[str], None]
    ) -> Grid:
        self._check(table, cells)
        most, total_s = _SCALES.get(scale, (self.instances, None))
        cohorts = min(most, self.instances)
        notes = ["a cell is the mean over those sizes that all methods came to; seconds are medians over cohorts"]
        if cohorts < self.instances:
            notes.insert(0, f"{cohorts} cohort{'' if cohorts == 1 else 's'} at this scale in place of {self.instances}")
        choices: list[Choices] = []
        counts: dict[str, np.ndarray] = {}
        for cell in cells:
            key = json.dumps([cell.config.tree()["scenario"], cell.config.training.rounds, cell.seed])
            if key not in counts:
                counts[key] = _label_counts(cell)
            began = time.perf_counter()
            for active in self.cohort_sizes:
                problems = list(_cohorts(counts[key], active=active, cell=cell, instances=cohorts))
                chosen, why = self._choices(cell, problems, active=active, total_s=total_s)
                choices += chosen
                notes += [f"{cell.row}, {cell.column}, {active} active: {why}"] if why else []
            notify(f"{cell.label}, seed {cell.seed}: {time.perf_counter() - began:.1f} s")
        _write_csv(choices, folder / CSV)
        grid = grid_of(table, cells, lambda group: _grid_cell(table, group, choices), scale=scale)
        draw_choices(grid, choices, folder / FIGURES)
        return replace(grid, notes=tuple(dict.fromkeys(notes)))

    def _check(self, table: TableFile, cells: Sequence[Cell]) -> None:
        """Refuse wrong input, before anything is computed."""
        for row in dict.fromkeys(cell.row for cell in cells):
            method = self.method_of(row)
            if method not in names.GROUP_CHOOSERS:
                raise ConfigError(f"{table.name}: {unknown_name('group chooser', method, names.GROUP_CHOOSERS)}")
            if names.group_chooser(method).setup(Stream(("groups",))):
                raise ConfigError(
                    f"{table.name}: the method {method!r} needs what clients measure on a model; a table of kind groups"
                    " has label counts alone; leave it out"
                )
        self._check_shown(table)
        if max(self.sizes) > min(self.cohort_sizes):
            raise ConfigError(
                f"{table.name}: options.sizes must not exceed options.active, but has {max(self.sizes)} of"
                f" {min(self.cohort_sizes)}; lower it"
            )
        for cell in cells:
            if max(self.cohort_sizes) > cell.config.scenario.clients:
                raise ConfigError(
                    f"{table.name}, {cell.label}: options.active={max(self.cohort_sizes)} clients can't be drawn from"
                    f" scenario.clients={cell.config.scenario.clients}; lower the one or raise the other"
                )

    def _check_shown(self, table: TableFile) -> None:
        places = {"size": self.sizes, "active": self.cohort_sizes}
        for measure in table.measures:
            if measure.of not in FIGURES_OF:
                raise ConfigError(f"{table.name}: {unknown_name('measure of groups', measure.of, FIGURES_OF)}")
            for key, value in measure.where.items():
                if key not in places or value not in places[key]:
                    choices = ", ".join(map(str, places.get(key, places)))
                    raise ConfigError(
                        f"{table.name}: measure {measure.name}: where: {key}={value} is none of {choices}"
                    )
        for figure in table.figures:
            if figure.kind != "lines" or figure.x != "size" or figure.y not in FIGURES_OF:
                raise ConfigError(
                    f"{table.name}: figure {figure.name}: groups are drawn as kind lines with x: size and y:"
                    f" {' or '.join(FIGURES_OF)}, but this is {figure.kind} with x: {figure.x!r}, y: {figure.y!r}"
                )

    def _choices(
        self, cell: Cell, problems: Sequence[Any], *, active: int, total_s: float | None
    ) -> tuple[list[Choices], str | None]:
        """Return a method's groups of all sizes, and why there are no more of them."""
        search = {"orders": self.orders, "mutation": self.mutation, **_SEARCH}
        method = names.group_chooser(self.method_of(cell.row), **search)
        place: dict[str, Any] = {"row": cell.row, "column": cell.column, "seed": cell.seed, "active": active}
        deadline = None if total_s is None else time.perf_counter() + total_s
        choices: list[Choices] = []
        sizes = sorted(self.sizes)
        for size in sizes:
            try:
                chosen = _of_size(method, problems, size, deadline=deadline)
            except ResourceError as error:
                return choices, str(error)
            except ConfigError as error:
                return choices, f"nothing from size {size} on: {error}"
            if chosen is None:
                return choices, f"over time from size {size} on ({total_s:g} s for all sizes at this scale)"
            divergences, seconds = chosen
            choices.append(Choices(kl_divergence=divergences, seconds=seconds, size=size, **place))
            if self.seconds is not None and max(seconds) > self.seconds and size != sizes[-1]:
                slow = f"a choice took {max(seconds):.3g} s, of {self.seconds:g} s"
                return choices, f"over time after size {size} ({slow})"
        return choices, None


def _label_counts(cell: Cell) -> np.ndarray:
    """Return the label counts [N, C] of the clients of a cell's scenario."""
    world = build_world(cell.config, label_data(cell.config.scenario))
    return np.stack([profile.label_counts for profile in world.profiles])


def _of_size(
    method: Any, problems: Sequence[Any], size: int, *, deadline: float | None
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return divergences and seconds of a method's groups of a size; None where the deadline came first."""
    divergences, seconds = [], []
    for problem in problems:
        start = time.perf_counter()
        if deadline is not None and start > deadline:
            return None
        group = method.choose(problem, size=size)
        seconds.append(time.perf_counter() - start)
        divergences.append(float(scores.group_divergence(problem, group)))
    return tuple(divergences), tuple(seconds)


def _cohorts(counts_NC: np.ndarray, *, active: int, cell: Cell, instances: int) -> Iterator[Any]:
    """Yield the same random cohorts for every method."""
    shares_C = population(counts_NC)
    for number in range(1, instances + 1):
        drawn = stream(cell.seed, "groups", number, active)
        rows = np.sort(drawn.child("cohort").numpy().choice(len(counts_NC), size=active, replace=False))
        yield chooser.GroupProblem(
            counts_AC=counts_NC[rows],
            population_C=shares_C,
            eligible_A=np.ones(active, dtype=bool),
            max_size=active,
            stream=drawn.child("choice"),
        )


# -- what comes out ----------------------------------------------------------------------------------------------------


def _grid_cell(table: TableFile, group: Sequence[Cell], choices: Sequence[Choices]) -> GridCell:
    return GridCell(
        row=group[0].row,
        column=group[0].column,
        measured={m.name: summed_up([_value(choices, cell, m) for cell in group], m) for m in table.measures},
        standing=standing_of(table, group[0]),
        stand_in=stand_in_of(table, group[0]),
    )


def _value(choices: Sequence[Choices], cell: Cell, measure: Measure) -> float | None:
    """Compute a measure of a cell: the mean over cohort sizes and over those group sizes that all methods came to."""
    here = [c for c in choices if c.column == cell.column and c.seed == cell.seed]
    done = {row: {(c.active, c.size) for c in here if c.row == row} for row in {c.row for c in here}}
    shared = set.intersection(*done.values()) if done else set()
    own = [
        c.value(measure.of)
        for c in here
        if c.row == cell.row and (c.active, c.size) in shared and measure.where.items() <= vars(c).items()
    ]
    return mean(own) if own else None


def _write_csv(choices: Sequence[Choices], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "active", "size", "cohorts", "kl_divergence", "seconds"])
    for c in choices:
        figures = [repr(c.value(name)) for name in FIGURES_OF]
        writer.writerow([c.row, c.column, c.seed, c.active, c.size, len(c.seconds), *figures])
    write_file(path, text.getvalue().encode())
