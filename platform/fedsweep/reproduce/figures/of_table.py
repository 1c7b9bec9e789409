"""Pictures of tables, as PNG and PDF: what a ``figures:`` entry of a table's file names.

``scatter``, ``bars`` and ``lines`` show a cell as a point, a bar or a point on a line; the kinds of
:mod:`fedsweep.reproduce.figures.of_runs` show rounds. A kind is a function of a :class:`Scene` that returns the figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ConfigError
from fedsweep.figures.style import (
    Look,
    axis_name,
    is_share,
    label_outer,
    legend_below,
    line_handle,
    look_of,
    looks,
    name_axes,
    panels,
    paper_style,
    patch_handles,
    save_both,
    scale_axes,
)
from fedsweep.reproduce.cell_texts import label_of
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.definition.sections import FigureSpec, Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Measured, counted_runs, summed_up, value_of
from fedsweep.results.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_ROOM = 0.8
_LONG_NAMES = 40
_FEW_TICKS = 8
# What the paper prints, over what was measured.
_PRINTED_MARK: Mapping[str, Any] = {
    "color": "#000000",
    "markerfacecolor": "#FFFFFF",
    "markersize": 4.0,
    "linestyle": "none",
    "marker": "D",
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a picture is drawn from.

    Attributes:
        spec: The entry of ``figures:``.
        table: The table.
        runs: The runs of a row and a column that count, by seed; those of cells that were not run are not there.
    """

    spec: FigureSpec
    table: TableFile
    runs: Mapping[tuple[str, str], Sequence[RunView]]

    @cached_property
    def rows(self) -> list[str]:
        """The rows that are drawn, in the table's order."""
        return [name for name in self.spec.rows or self.table.row_names if any(row == name for row, _ in self.runs)]

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Rows that are drawn together, by their group's name; without groups each row by itself."""
        given = self.spec.groups or {row: [row] for row in self.rows}
        found = {name: [row for row in self.rows if row in rows] for name, rows in given.items()}
        return {name: rows for name, rows in found.items() if rows}

    @cached_property
    def columns(self) -> list[str]:
        """The columns that are drawn, in the table's order."""
        names = self.spec.columns or self.table.column_names
        return [name for name in names if any(column == name and row in self.rows for row, column in self.runs)]

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How rows and groups look; the same in all pictures of the table."""
        return {**looks(self.table.row_names), **looks(list(self.spec.groups))}

    def of(self, row: str, column: str) -> Sequence[RunView]:
        """The runs of a cell, by seed; none where it was not run."""
        return self.runs.get((row, column), ())

    def measured(self, row: str, column: str, *, measure: Measure) -> Measured:
        """A measure of a cell over its seeds."""
        return summed_up([value_of(run, measure) for run in self.of(row, column)], measure)

    def measure(self, axis: str, name: str) -> Measure:
        """The table's measure that the entry names for an axis, or of that figure; otherwise the run's own figure.

        Raises:
            ConfigError: The entry names none.
        """
        if not name:
            raise ConfigError(f"figure {self.spec.name}: {self.spec.kind} needs `{axis}`, the name of a measure")
        named = [m for m in self.table.measures if m.name == name]
        plain = [m for m in (*named, *self.table.measures) if name in (m.name, m.of) and m.target is None]
        if plain or named:
            return (plain or named)[0]
        return Measure.model_validate({"name": name, "over": None, "percent": is_share(name)})

    def label(self, axis: str, measure: Measure) -> str:
        """What an axis with a measure is called."""
        given = self.spec.x_label if axis == "x" else self.spec.y_label
        plain = measure.target is None and measure.label in (measure.name, measure.of)
        return given or (axis_name(measure.of) if plain else label_of(measure))


def scene_of(figure: FigureSpec, table: TableFile, views: Mapping[Cell, RunView | str]) -> Scene:
    """What a picture is drawn from; arguments as :func:`draw`."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(views, key=lambda cell: cell.seed):
        groups.setdefault((cell.row, cell.column), []).append(cell)
    runs = {place: [*counted_runs(group, views).values()] for place, group in groups.items()}
    return Scene(spec=figure, table=table, runs={place: own for place, own in runs.items() if own})


def draw(figure: FigureSpec, table: TableFile, views: Mapping[Cell, RunView | str], *, path_stem: Path) -> list[Path]:
    """Draws one entry of a table's ``figures:``.

    Args:
        figure: The entry.
        table: Its table.
        views: The runs of the table's cells; see :func:`~fedsweep.results.settings.counted`.
        path_stem: The files without their endings.

    Returns:
        The files: a PNG and a PDF.

    Raises:
        ConfigError: The entry asks for what its kind does not have, or no run has what it shows.
        InputError: A run's file is damaged, or a file can't be written.
    """
    from fedsweep.reproduce.figures import of_runs

    kinds: Mapping[str, Callable[[Scene], Figure]] = {
        "scatter": _scatter,
        "bars": _bars,
        "lines": _lines,
        **of_runs.KINDS,
    }
    scene = scene_of(figure, table, views)
    if not scene.columns:
        raise ConfigError(f"figure {figure.name}: none of the runs that it shows has rounds, or they failed")
    with paper_style():
        drawn = kinds[figure.kind](scene)
        label_outer(drawn)
        return save_both(drawn, path_stem)


def _scatter(scene: Scene) -> Figure:
    """A panel for each column; a point for each row, with bars of one standard deviation over seeds.

    The rows of a group have one look and are joined by a line, in the table's order.
    """
    spec = scene.spec
    x, y = scene.measure("x", spec.x), scene.measure("y", spec.y)
    figure, every = panels(scene.columns, title=spec.title)
    for axes, column in zip(every, scene.columns, strict=True):
        for name, rows in scene.groups.items():
            found = [(scene.measured(row, column, measure=x), scene.measured(row, column, measure=y)) for row in rows]
            points = [(a.mean, b.mean, a.sd, b.sd) for a, b in found if a.mean is not None and b.mean is not None]
            look = scene.looks[name]
            if len(points) > 1:
                axes.plot([p[0] for p in points], [p[1] for p in points], color=look.colour, linewidth=0.8)
            for across, up, x_sd, y_sd in points:
                style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "label": name}
                axes.errorbar(across, up, xerr=x_sd, yerr=y_sd, **style)
        _finish(axes, scene, x=x, y=y)
    legend_below(figure, _handles(scene, list(scene.groups), line=any(len(r) > 1 for r in scene.groups.values())))
    return figure


def _lines(scene: Scene) -> Figure:
    """A line for each row over the columns' ``x``; hollow marks are what the paper prints."""
    spec = scene.spec
    y = scene.measure("y", spec.y)
    places, names = _places(scene)
    figure, (axes,) = panels([""], title=spec.title)
    for row in scene.rows:
        points = [(places[c], scene.measured(row, c, measure=y)) for c in scene.columns]
        known = sorted((x, found.mean, found.sd or 0.0) for x, found in points if found.mean is not None)
        look = scene.looks[row]
        xs, ys, sds = zip(*known, strict=True) if known else ((), (), ())
        spread = sds if any(sds) else None
        axes.errorbar(xs, ys, yerr=spread, color=look.colour, marker=look.marker, label=row)
        printed = [(places[c], p) for c in scene.columns if (p := _printed(scene, row, c, measure=y)) is not None]
        hollow = {**_PRINTED_MARK, "marker": look.marker, "color": look.colour}
        axes.plot([x for x, _ in printed], [p for _, p in printed], **hollow, label="_printed")
    if names:
        axes.set_xticks(list(places.values()), list(places))
    elif len(places) <= _FEW_TICKS and not spec.log_x:
        axes.set_xticks(list(places.values()))
    _finish(axes, scene, x=None, y=y)
    axes.set_xlabel(spec.x_label or (axis_name(spec.x) if spec.x else ""))
    legend_below(figure, [*_handles(scene, scene.rows, line=True), *_printed_handle(scene, y)])
    return figure


def _bars(scene: Scene) -> Figure:
    """For each column a bar for each row, or for each of the figure's measures of its one row.

    Thin bars are one standard deviation, marks what the paper prints.
    """
    spec = scene.spec
    bars = _bars_shown(scene)
    y = bars[0][2]
    alone = len(scene.columns) == 1
    width = _BAR_ROOM / (1 if alone else len(bars))
    count = len(scene.columns) * (1 + len(bars))
    figure, (axes,) = panels([""], title=spec.title, width=min(7.0, max(3.4, 1.2 + 0.2 * count)))
    for number, (_, row, measure, look) in enumerate(bars):
        shift = 0.0 if alone else (number - (len(bars) - 1) / 2) * width
        for place, column in enumerate(scene.columns):
            found = scene.measured(row, column, measure=measure)
            at = number if alone else place + shift
            spread: dict[str, Any] = {} if found.sd is None else {"yerr": found.sd, "error_kw": {"elinewidth": 0.8}}
            axes.bar(at, found.mean or 0.0, width=0.9 * width, color=look.colour, **spread)
            printed = _printed(scene, row, column, measure=measure)
            if printed is not None:
                axes.plot(at, printed, **_PRINTED_MARK, label="_printed")
    names = [name for name, *_ in bars] if alone else scene.columns
    steep = sum(map(len, names)) > _LONG_NAMES
    axes.set_xticks(range(len(names)), names, rotation=30 if steep else 0, ha="right" if steep else "center")
    _finish(axes, scene, x=None, y=y)
    axes.tick_params(axis="x", length=0)
    own = [] if alone else patch_handles((name, look.colour) for name, _, _, look in bars)
    legend_below(figure, [*own, *_printed_handle(scene, y)])
    return figure


def _bars_shown(scene: Scene) -> list[tuple[str, str, Measure, Look]]:
    """Name, row, measure and look of the bars of a column."""
    if scene.spec.measures:
        shown = [scene.measure("measures", name) for name in scene.spec.measures]
        own = looks([label_of(measure) for measure in shown])
        return [(label_of(m), scene.rows[0], m, own[label_of(m)]) for m in shown]
    y = scene.measure("y", scene.spec.y)
    return [(row, row, y, scene.looks[row]) for row in scene.rows]


def _finish(axes: Axes, scene: Scene, *, x: Measure | None, y: Measure) -> None:
    scale_axes(axes, log_x=scene.spec.log_x, log_y=scene.spec.log_y)
    name_axes(axes, x="" if x is None else scene.label("x", x), y=scene.label("y", y))


def _places(scene: Scene) -> tuple[dict[str, float], bool]:
    """Where each column stands on the x axis, and whether the ticks are the columns' names."""
    given = {name: scene.table.column(name).x for name in scene.columns}
    known = {name: x for name, x in given.items() if x is not None}
    if len(known) == len(given):
        return known, False
    if known:
        lacking = next(name for name in given if name not in known)
        raise ConfigError(
            f"figure {scene.spec.name}: the column {lacking!r} has no x, but others do; give all of them one, or none"
        )
    return {name: float(place) for place, name in enumerate(given)}, True


def _printed(scene: Scene, row: str, column: str, *, measure: Measure) -> float | None:
    """What the paper prints for a measure of the table."""
    value = scene.table.printed_value(row, column, measure=measure.name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _handles(scene: Scene, names: Sequence[str], *, line: bool) -> list[Any]:
    return [line_handle(name, scene.looks[name], linestyle="-" if line else "none") for name in names]


def _printed_handle(scene: Scene, measure: Measure) -> list[Any]:
    every = [_printed(scene, row, column, measure=measure) for row in scene.rows for column in scene.columns]
    if all(value is None for value in every):
        return []
    return [line_handle("printed", look_of(0), **_PRINTED_MARK)]
