"""A method's groups of one size, and their pictures: a line per method over the group's size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.figures.style import (
    add_setting,
    axis_name,
    label_outer,
    legend_below,
    looks,
    name_axes,
    panels,
    paper_style,
    save_both,
    scale_axes,
    share_axes,
)
from fedsweep.reproduce.cell_texts import setting_line
from fedsweep.reproduce.definition.sections import FigureSpec
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.seed_statistics import mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES_OF = ("kl_divergence", "seconds")
_DEFAULT_FIGURES = (
    FigureSpec(name="kl-by-size", kind="lines", x="size", y="kl_divergence"),
    FigureSpec(name="seconds-by-size", kind="lines", x="size", y="seconds", log_y=True),
)
_LINES = ("-", "--", ":", "-.")


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
        """Return the mean divergence, or the median of the seconds."""
        if name == "seconds":
            return statistics.median(self.seconds)
        return mean(self.kl_divergence)


def draw_choices(grid: Grid, choices: Sequence[Choices], folder: Path) -> list[Path]:
    """Draw the table's figures, or one of divergences and one of seconds: a panel per column, a line per method.

    Raises:
        InputError: A picture can't be written.
    """
    if not choices:
        return []
    drawn = []
    for spec in grid.table.figures or _DEFAULT_FIGURES:
        with paper_style():
            figure = _lines_by_size(grid, choices, spec)
            label_outer(figure)
            if any(cell.standing != "paper" for cell in grid.cells):
                add_setting(figure, f"{setting_line(grid)}; not the paper's setting")
            drawn += save_both(figure, folder / spec.name)
    return drawn


def _lines_by_size(grid: Grid, choices: Sequence[Choices], spec: FigureSpec) -> Figure:
    table = grid.table
    rows, columns = spec.rows or table.row_names, spec.columns or table.column_names
    shown = [c for c in choices if c.column in columns and c.row in rows]
    places = list(dict.fromkeys((c.column, c.active) for c in shown))
    many = len({active for _, active in places}) > 1
    heads = [(grid.column_label(column), active) for column, active in places]
    titles = [f"{head}, {active} active" if many else head for head, active in heads]
    figure, every = panels(titles, title=spec.title)
    styles, handles = _nested_looks(table), {}
    for axes, place in zip(every, places, strict=True):
        for row in dict.fromkeys(c.row for c in shown):
            by_size: dict[int, list[float]] = {}
            for c in shown:
                if c.row == row and (c.column, c.active) == place:
                    by_size.setdefault(c.size, []).append(c.value(spec.y))
            sizes = sorted(by_size)
            if not sizes:
                continue
            values = [mean(by_size[size]) for size in sizes]
            (handles[row],) = axes.plot(sizes, values, label=grid.row_label(row), **styles[row])
            if sizes[-1] < max(c.size for c in shown):
                style: dict[str, Any] = {"color": styles[row]["color"], "markersize": 7.0, "linestyle": "none"}
                (ends,) = axes.plot(sizes[-1:], values[-1:], marker="x", label="no larger size in time", **style)
                handles[""] = ends
        scale_axes(axes, log_x=spec.log_x, log_y=spec.log_y)
        name_axes(axes, x=spec.x_label or axis_name("size"), y=spec.y_label or axis_name(spec.y))
    share_axes(every)
    legend_below(figure, sorted(handles.values(), key=lambda line: line.get_marker() == "x"))
    return figure


def _nested_looks(table: TableFile) -> dict[str, dict[str, Any]]:
    """Methods often find the same group: later lines are broken and their marks smaller, so that all can be seen."""
    return {
        row: {
            "color": look.colour,
            "marker": look.marker,
            "markersize": max(2.5, 6.5 - 1.5 * number),
            "linestyle": _LINES[number % len(_LINES)],
        }
        for number, (row, look) in enumerate(looks(table.row_names).items())
    }
