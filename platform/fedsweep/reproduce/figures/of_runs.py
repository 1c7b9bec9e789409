"""Pictures of runs: learning curves, who was in which group, with which classes, and took part.

A panel is a cell. Of cells with several seeds the curves show mean and deviation, the other pictures the lowest seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fedsweep.errors import ConfigError
from fedsweep.figures.curves import ACROSS, draw_curve
from fedsweep.figures.groups import (
    GroupLabels,
    counts_of,
    draw_group_labels,
    draw_membership,
    group_label_handles,
    group_labels_of,
    has_group,
    membership_handles,
    membership_of,
)
from fedsweep.figures.scenario import draw_classes, draw_participation, participation_handles
from fedsweep.figures.scenario_arrays import class_shares_of, participation_of
from fedsweep.figures.style import (
    PANEL_HEIGHT,
    axis_name,
    band_handles,
    legend_below,
    line_handle,
    looks,
    name_axes,
    panels,
    scale_axes,
)
from fedsweep.results.curves import curve_of, mean_curve
from fedsweep.results.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsweep.reproduce.figures.scene import Scene

Shown = TypeVar("Shown")

_MOST_PANELS = 12


def _curves(scene: Scene) -> Figure:
    """A panel for each column and group, a line for each row: the mean over seeds, with a band of one deviation.

    Without groups all rows share a panel; with groups each panel has a legend of its own.
    """
    spec = scene.spec
    x, y = spec.x or "round", spec.y or "test_accuracy"
    if x not in ACROSS:
        raise ConfigError(f"figure {spec.name}: x of curves must be one of {', '.join(ACROSS)}, but is {x!r}")
    shown = scene.groups if spec.groups else {"": scene.rows}
    places = [(column, rows) for column in scene.columns for rows in shown.values()]
    titles = [" ".join(filter(None, (column, name))) for column in scene.columns for name in shown]
    figure, every = panels(titles, title=spec.title)
    drawn = set()
    for axes, (column, rows) in zip(every, places, strict=True):
        own = looks(rows) if spec.groups else scene.looks
        for row in rows:
            curves = [curve_of(run, [y]) for run in scene.of(row, column)]
            if curves and draw_curve(axes, mean_curve(curves), y, x=x, look=own[row], label=row):
                drawn.add(row)
        scale_axes(axes, log_x=spec.log_x, log_y=spec.log_y)
        name_axes(axes, x=spec.x_label or axis_name(x), y=spec.y_label or axis_name(y))
        if spec.groups and axes.lines:
            handles = [*axes.get_legend_handles_labels()[0], *band_handles([axes])]
            axes.legend(handles=handles, fontsize=6, ncols=2, frameon=False)
    if not drawn:
        raise ConfigError(f"figure {spec.name}: no run has the column {y}")
    if not spec.groups:
        rows = [line_handle(row, scene.looks[row]) for row in scene.rows if row in drawn]
        legend_below(figure, [*rows, *band_handles(every)])
    return figure


def _membership(scene: Scene) -> Figure:
    """Clients by rounds, coloured by group."""
    found = first_runs(scene, lambda run: membership_of(run) if has_group(run) else None, "a high-frequency group")
    figure, every = panels(list(found), title=scene.spec.title, height=2.8)
    for axes, (run, cells_NR) in zip(every, found.values(), strict=True):
        draw_membership(axes, cells_NR, first_round=_first_round(run))
    legend_below(figure, membership_handles())
    return figure


def _group_labels(scene: Scene) -> Figure:
    """For each class the groups' shares over the rounds, and the population's."""

    def shares(run: RunView) -> GroupLabels | None:
        counts_NC = counts_of(run) if has_group(run) else None
        return None if counts_NC is None else group_labels_of(run, counts_NC)

    found = first_runs(scene, shares, "a high-frequency group and a table of clients")
    figure, every = panels(list(found), title=scene.spec.title)
    for axes, (_, labels) in zip(every, found.values(), strict=True):
        draw_group_labels(axes, labels)
    legend_below(figure, group_label_handles())
    return figure


def _classes(scene: Scene) -> Figure:
    """The classes that clients hold in each round, under drift."""
    found = first_runs(scene, class_shares_of, "drift (scenario.drift)")
    figure, every = panels(list(found), title=scene.spec.title, height=_tall(found))
    for axes, (run, shares_NRC) in zip(every, found.values(), strict=True):
        draw_classes(axes, shares_NRC, first_round=_first_round(run), legend=axes is every[-1])
    return figure


def _participation(scene: Scene) -> Figure:
    """What each client did in each round."""
    found = first_runs(scene, participation_of, "any rounds")
    figure, every = panels(list(found), title=scene.spec.title, height=_tall(found))
    for axes, (_, part) in zip(every, found.values(), strict=True):
        draw_participation(axes, part)
    legend_below(figure, participation_handles(part for _, part in found.values()))
    return figure


def first_runs(scene: Scene, read: Callable[[RunView], Shown | None], lacking: str) -> dict[str, tuple[RunView, Shown]]:
    """The lowest seed's run of each cell that has what is shown, by its panel's title.

    Args:
        scene: The picture's.
        read: What is shown of a run; None where it has no such thing.
        lacking: What that is, for messages.

    Raises:
        ConfigError: No run has it, or too many.
    """
    names = [(row, column) for column in scene.columns for row in scene.rows if scene.of(row, column)]
    found = {}
    for row, column in names:
        run = scene.of(row, column)[0]
        shown = read(run)
        if shown is not None:
            title = row if len(scene.columns) == 1 else column if len(scene.rows) == 1 else f"{row}, {column}"
            found[title] = (run, shown)
    if not found:
        raise ConfigError(f"figure {scene.spec.name}: no run that it shows has {lacking}")
    if len(found) > _MOST_PANELS:
        raise ConfigError(
            f"figure {scene.spec.name}: {scene.spec.kind} has room for {_MOST_PANELS} runs, but there are {len(found)};"
            " name rows or columns"
        )
    return found


def _tall(found: Mapping[str, Any]) -> float:
    """Height of a panel whose rows are clients, in inches."""
    return PANEL_HEIGHT + (1.2 if len(found) <= 2 else 0.6)


def _first_round(run: RunView) -> int:
    return int(run.column("round")[0]) if run.column("round") else 1


KINDS: Mapping[str, Callable[[Scene], Figure]] = {
    "curves": _curves,
    "membership": _membership,
    "group_labels": _group_labels,
    "classes": _classes,
    "participation": _participation,
}
