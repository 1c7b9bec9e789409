"""Pictures of runs: learning curves, who was in which group, with which classes, took part, and clients' gaps in loss.

A panel is a cell. Of cells with several seeds the curves show the mean and the range; the others show the lowest seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedsweep.errors import ConfigError
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
    is_share,
    legend_below,
    name_axes,
    panels,
    scale_axes,
)
from fedsweep.results.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsweep.reproduce.scene import Scene

Shown = TypeVar("Shown")

_MOST_PANELS = 12
_X_OF_CURVES = ("round", "total_bytes", "sim_time_s", "wall_time_s")


def _curves(scene: Scene) -> Figure:
    """A panel for each column, a line for each row: the mean over seeds, with a band from the lowest to the highest."""
    spec = scene.spec
    x, y = spec.x or "round", spec.y or "test_accuracy"
    if x not in _X_OF_CURVES:
        raise ConfigError(f"figure {spec.name}: x of curves must be one of {', '.join(_X_OF_CURVES)}, but is {x!r}")
    figure, every = panels(scene.columns, title=spec.title)
    drawn = {}
    for axes, column in zip(every, scene.columns, strict=True):
        for row in scene.rows:
            points = curve_over_seeds(scene.of(row, column), x=x, y=y)
            if spec.log_x:
                points = points[:, points[0] > 0]
            if not points.size:
                continue
            (drawn[row],) = axes.plot(points[0], points[1], color=scene.looks[row].colour, label=row)
            drawn[row].set(marker=scene.looks[row].marker, markersize=3.5)
            drawn[row].set_markevery(max(1, points.shape[1] // 8))
            if len(scene.of(row, column)) > 1:
                axes.fill_between(*points[[0, 2, 3]], color=scene.looks[row].colour, alpha=0.2, linewidth=0)
        scale_axes(axes, log_x=spec.log_x, log_y=spec.log_y)
        name_axes(axes, x=spec.x_label or axis_name(x), y=spec.y_label or axis_name(y))
    if not drawn:
        raise ConfigError(f"figure {spec.name}: no run has the column {y}")
    legend_below(figure, [drawn[row] for row in scene.rows if row in drawn])
    return figure


def curve_over_seeds(runs: Sequence[RunView], *, x: str, y: str) -> np.ndarray:
    """Mean x, mean y, lowest and highest y [4, P] over the rounds that all runs have figures of; shares in percent.

    Args:
        runs: One per seed.
        x: ``round``, ``total_bytes`` or a column.
        y: A column.
    """
    by_round: list[dict[int, tuple[float, float]]] = []
    for run in runs:
        across = run.total_bytes if x == "total_bytes" else run.column(x)
        if x == "wall_time_s":
            across = np.cumsum(np.array(across, dtype=np.float64)).tolist()
        cells = zip(run.column("round"), across, run.column(y), strict=False)
        by_round.append({r: (float(a), float(b)) for r, a, b in cells if _finite(a) and _finite(b)})
    shared = sorted(set.intersection(*(set(found) for found in by_round))) if by_round else []
    if not shared:
        return np.zeros((4, 0))
    points = np.array([[found[r] for r in shared] for found in by_round], dtype=np.float64)
    xs, ys = points[..., 0], points[..., 1] * (100 if is_share(y) else 1)
    return np.stack([xs.mean(axis=0), ys.mean(axis=0), ys.min(axis=0), ys.max(axis=0)])


def _membership(scene: Scene) -> Figure:
    """Clients by rounds, coloured by group."""
    found = _first_runs(scene, lambda run: membership_of(run) if has_group(run) else None, "a high-frequency group")
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

    found = _first_runs(scene, shares, "a high-frequency group and a table of clients")
    figure, every = panels(list(found), title=scene.spec.title)
    for axes, (_, labels) in zip(every, found.values(), strict=True):
        draw_group_labels(axes, labels)
    legend_below(figure, group_label_handles())
    return figure


def _classes(scene: Scene) -> Figure:
    """The classes that clients hold in each round, under drift."""
    found = _first_runs(scene, class_shares_of, "drift (scenario.drift)")
    figure, every = panels(list(found), title=scene.spec.title, height=_tall(found))
    for axes, (run, shares_NRC) in zip(every, found.values(), strict=True):
        draw_classes(axes, shares_NRC, first_round=_first_round(run), legend=axes is every[-1])
    return figure


def _participation(scene: Scene) -> Figure:
    """What each client did in each round."""
    found = _first_runs(scene, participation_of, "any rounds")
    figure, every = panels(list(found), title=scene.spec.title, height=_tall(found))
    for axes, (_, part) in zip(every, found.values(), strict=True):
        draw_participation(axes, part, legend=False)
    legend_below(figure, participation_handles(part for _, part in found.values()))
    return figure


def _loss_gap(scene: Scene) -> Figure:
    """A point for each client: how far its labels are from the population's, and its loss from the global one."""
    from fedsweep.reproduce.loss_gap import gaps_of

    found = _first_runs(scene, lambda run: gaps_of(run.folder), "clients")
    figure, every = panels(list(found), title=scene.spec.title)
    for axes, (_, gaps) in zip(every, found.values(), strict=True):
        axes.scatter(gaps.divergence, gaps.gap, s=10)
        pearson = gaps.figures()["gap_pearson"]
        if pearson is not None:
            axes.set_title(f"{axes.get_title()} (Pearson {pearson:.3f})".strip())
        name_axes(axes, x="JS divergence (nats)", y="Gap in loss (nats)")
    return figure


def _first_runs(
    scene: Scene, read: Callable[[RunView], Shown | None], lacking: str
) -> dict[str, tuple[RunView, Shown]]:
    """The lowest seed's run of each cell that has what is shown, by its panel's title.

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


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


KINDS: Mapping[str, Callable[[Scene], Figure]] = {
    "curves": _curves,
    "membership": _membership,
    "group_labels": _group_labels,
    "classes": _classes,
    "participation": _participation,
    "loss_gap": _loss_gap,
}
