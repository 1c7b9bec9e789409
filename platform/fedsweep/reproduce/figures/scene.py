"""The material of a table's picture: its entry of ``figures:``, the table, and the runs of its cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedsweep.errors import ConfigError
from fedsweep.figures.style import (
    PANEL_HEIGHT,
    Look,
    add_setting,
    axis_name,
    label_outer,
    looks,
    panels,
    paper_style,
    save_both,
)
from fedsweep.reproduce import kinds
from fedsweep.reproduce.cell_texts import label_of
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.definition.sections import FigureSpec, Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.given import NotKept
from fedsweep.reproduce.measured.grid import Grid, Measured, counted_runs, is_comparable, summed_up, value_of
from fedsweep.results.texts import is_accuracy
from fedsweep.results.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Shown = TypeVar("Shown")

_MOST_PANELS = 12


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The material of a picture.

    Attributes:
        spec: The entry of ``figures:``.
        grid: The table with its figures.
        runs: The runs of a row and a column that count, by seed; those of cells that were not run are not there.
    """

    spec: FigureSpec
    grid: Grid
    runs: Mapping[tuple[str, str], Sequence[RunView]]

    @property
    def table(self) -> TableFile:
        """The table."""
        return self.grid.table

    @cached_property
    def rows(self) -> list[str]:
        """The rows that are drawn, in the table's order."""
        shown, measured = self.spec.shown_rows or self.table.row_names, {row for row, _ in self.runs}
        return [name for name in self.spec.rows or self.table.row_names if name in shown and name in measured]

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Rows that are drawn together, by their group's name; without groups each row by itself."""
        groups = self.spec.groups or {row: [row] for row in self.rows}
        shown = {name: [row for row in self.rows if row in rows] for name, rows in groups.items()}
        return {name: rows for name, rows in shown.items() if rows}

    @cached_property
    def columns(self) -> list[str]:
        """The columns that are drawn, in the table's order."""
        names = self.spec.columns or self.table.column_names
        return [name for name in names if any(column == name and row in self.rows for row, column in self.runs)]

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The looks of rows and groups; the same in all pictures of the table."""
        ordered = self.spec.ordered
        names = [name for name in self.table.row_names if name in self.rows] if ordered else self.table.row_names
        return {**looks(names, ordered=ordered), **looks(list(self.spec.groups), ordered=ordered)}

    def name(self, row: str) -> str:
        """Return the label of a row, or a group of rows, at this scale."""
        return self.grid.row_label(row) if row in self.table.row_names else row

    @property
    def titles(self) -> list[str]:
        """The labels of the columns drawn, at this scale."""
        return [self.grid.column_label(column) for column in self.columns]

    @property
    def setting(self) -> str:
        """Under what it was measured, in a line; empty where all that it shows has the paper's setting."""
        cells = [self.grid.cell(row, column) for row in self.rows for column in self.columns if self.of(row, column)]
        if all(cell is not None and cell.standing == "paper" for cell in cells):
            return ""
        runs = [run for row in self.rows for column in self.columns for run in self.of(row, column)]
        return setting_of_runs(runs, scale=self.grid.scale, is_papers=self.table.is_papers)

    def printed(self, row: str, column: str, *, measure: Measure) -> float | None:
        """Return the paper's figure for a measure of the table, where the measured one may be compared with it."""
        cell = self.grid.cell(row, column)
        value = self.table.printed_value(row, column, measure=measure.name)
        comparable = cell is not None and is_comparable(cell, measure)
        return value if comparable and isinstance(value, int | float) and math.isfinite(value) else None

    def of(self, row: str, column: str) -> Sequence[RunView]:
        """Return the runs of a cell, by seed; none where it was not run."""
        return self.runs.get((row, column), ())

    def measured(self, row: str, column: str, *, measure: Measure) -> Measured:
        """Return a measure of a cell over its seeds."""
        return summed_up([value_of(run, measure) for run in self.of(row, column)], measure)

    def measure(self, axis: str, name: str) -> Measure:
        """Return the table's measure that the entry names for an axis, or of that figure; else the run's own figure.

        Raises:
            ConfigError: The entry names none.
        """
        if not name:
            raise ConfigError(f"figure {self.spec.name}: {self.spec.kind} needs `{axis}`, the name of a measure")
        named = [m for m in self.table.measures if m.name == name]
        plain = [m for m in (*named, *self.table.measures) if name in (m.name, m.of) and m.target is None]
        if plain or named:
            return (plain or named)[0]
        return Measure.model_validate({"name": name, "over": None, "percent": is_accuracy(name)})

    def label(self, axis: str, measure: Measure) -> str:
        """Return the label of an axis with a measure."""
        label = self.spec.x_label if axis == "x" else self.spec.y_label
        as_it_is = measure.per == 1 and measure.percent == is_accuracy(measure.of) and not measure.share_of
        plain = as_it_is and measure.target is None and measure.label in (measure.name, measure.of)
        return label or (axis_name(measure.of) if plain else label_of(measure))


def setting_of_runs(runs: Sequence[RunView], *, scale: str, is_papers: bool) -> str:
    """Scale, data set, network, rounds and seeds of runs, in a line for a picture.

    Args:
        runs: The runs.
        scale: ``smoke``, ``small`` or ``full``.
        is_papers: Whether there are figures of a paper whose setting this is not.
    """

    def listed(section: str, key: str) -> list[Any]:
        values = [(run.config.get(section) or {}).get(key) for run in runs]
        return [value for value in dict.fromkeys(values) if value is not None]

    rounds, seeds = sorted(listed("training", "rounds")), sorted({run.seed for run in runs if run.seed is not None})
    parts = [", ".join(map(str, listed("scenario", "dataset"))), ", ".join(map(str, listed("model", "name")))]
    parts += [f"{' to '.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))} rounds"] if rounds else []
    parts += [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"] if seeds else []
    other = "the paper's setting" if is_papers else "the setting of scale full"
    return f"scale {scale}: {'; '.join(filter(None, parts))}; not {other}"


def scene_of(figure: FigureSpec, grid: Grid, views: Mapping[Cell, RunView | str]) -> Scene:
    """Collect the material of a picture; arguments as :func:`draw`."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(views, key=lambda cell: cell.seed):
        groups.setdefault((cell.row, cell.column), []).append(cell)
    runs = {place: [*counted_runs(group, views).values()] for place, group in groups.items()}
    return Scene(spec=figure, grid=grid, runs={place: own for place, own in runs.items() if own})


def draw(figure: FigureSpec, grid: Grid, views: Mapping[Cell, RunView | str], *, path_stem: Path) -> list[Path]:
    """Draw one entry of a table's ``figures:``.

    Args:
        figure: The entry.
        grid: Its table, measured.
        views: The runs of the table's cells; see :func:`~fedsweep.results.settings.counted`.
        path_stem: The files without their endings.

    Returns:
        The files: a PNG and a PDF.

    Raises:
        ConfigError: The entry asks for what its kind does not have, or no run has what it shows.
        InputError: A run's file is damaged, or a file can't be written.
    """
    scene = scene_of(figure, grid, views)
    if not scene.columns:
        raise ConfigError(f"figure {figure.name}: none of the runs that it shows has rounds, or they failed")
    from matplotlib.figure import Figure

    with paper_style():
        drawn = kinds.call("figure", figure.kind, kinds.FIGURE_KINDS.builder(figure.kind), scene, gives=(Figure,))
        label_outer(drawn)
        if scene.setting:
            add_setting(drawn, scene.setting)
        return save_both(drawn, path_stem)


def panels_of(
    scene: Scene,
    read: Callable[[RunView], Shown | None],
    lacking: str,
    *,
    height: Callable[[int], float] = lambda count: PANEL_HEIGHT,
) -> tuple[Figure, list[tuple[Axes, RunView, Shown]]]:
    """Make a figure with a panel for each run, beside the material to show; arguments and errors as :func:`first_runs`.

    The height of a panel, in inches, goes by how many there are.
    """
    shown_runs = first_runs(scene, read, lacking)
    figure, every = panels(list(shown_runs), title=scene.spec.title, height=height(len(shown_runs)))
    return figure, [(axes, run, shown) for axes, (run, shown) in zip(every, shown_runs.values(), strict=True)]


def first_runs(scene: Scene, read: Callable[[RunView], Shown | None], lacking: str) -> dict[str, tuple[RunView, Shown]]:
    """Return, by title, the lowest seed's finished run of each cell where ``read`` gives material to show.

    Messages call that ``lacking``.

    Raises:
        ConfigError: No run has it, or too many.
        NotKept: No run has it, and there are given ones.
    """
    runs, have_folders = {}, True
    for row, column in ((row, column) for column in scene.columns for row in scene.rows):
        # The model of a run under way may not be there yet.
        run = next((run for run in scene.of(row, column) if run.status == "finished"), None)
        have_folders = have_folders and (run is None or run.folder.is_dir())
        if run is not None and (shown := read(run)) is not None:
            name, title = scene.name(row), scene.grid.column_label(column)
            both = title if len(scene.rows) == 1 else f"{name}, {title}"
            runs[name if len(scene.columns) == 1 else both] = (run, shown)
    if not runs:
        lacks = f"no run that it shows has {lacking}"
        if not have_folders:
            raise NotKept(f"{lacks}, or they were given by --from, which has no lists and files of runs")
        raise ConfigError(f"figure {scene.spec.name}: {lacks}")
    if len(runs) > _MOST_PANELS:
        raise ConfigError(
            f"figure {scene.spec.name}: {scene.spec.kind} has room for {_MOST_PANELS} runs, but there are {len(runs)};"
            " name rows or columns"
        )
    return runs


def first_round(run: RunView) -> int:
    """Return the number of the first round in a run's table."""
    return int(run.column("round")[0]) if run.column("round") else 1
