"""Pictures of runs: learning curves, groups, classes and participation by round, what models and synthetic sets show.

A panel is a cell. Of cells with several seeds the curves show mean and deviation, the other pictures the lowest seed
that has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

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
from fedsweep.figures.scenario import (
    class_shares_of,
    draw_classes,
    draw_participation,
    participation_handles,
    participation_of,
)
from fedsweep.figures.style import (
    PANEL_HEIGHT,
    Look,
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
from fedsweep.runs.run_folder import PICTURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsweep.reproduce.figures.of_table import Scene

Shown = TypeVar("Shown")

_MOST_PANELS = 12
_STAGES = 4


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
    figure, shown = _panels_of(
        scene,
        lambda run: membership_of(run) if has_group(run) else None,
        "a high-frequency group",
        height=lambda _: 2.8,
    )
    for axes, run, cells_NR in shown:
        draw_membership(axes, cells_NR, first_round=_first_round(run))
    legend_below(figure, membership_handles())
    return figure


def _group_labels(scene: Scene) -> Figure:
    """For each class the groups' shares over the rounds, and the population's."""

    def shares(run: RunView) -> GroupLabels | None:
        counts_NC = counts_of(run) if has_group(run) else None
        return None if counts_NC is None else group_labels_of(run, counts_NC)

    figure, shown = _panels_of(scene, shares, "a high-frequency group and a table of clients")
    for axes, _, labels in shown:
        draw_group_labels(axes, labels)
    legend_below(figure, group_label_handles())
    return figure


def _classes(scene: Scene) -> Figure:
    """The classes that clients hold in each round, under drift."""
    figure, shown = _panels_of(scene, class_shares_of, "drift (scenario.drift)", height=_tall)
    for axes, run, shares_NRC in shown:
        draw_classes(axes, shares_NRC, first_round=_first_round(run), legend=axes is shown[-1][0])
    return figure


def _participation(scene: Scene) -> Figure:
    """What each client did in each round."""
    figure, shown = _panels_of(scene, participation_of, "any rounds", height=_tall)
    for axes, _, part in shown:
        draw_participation(axes, part)
    legend_below(figure, participation_handles(part for _, _, part in shown))
    return figure


def _loss_gap(scene: Scene) -> Figure:
    """A point for each client: how far its labels are from the population's, and its loss from that at its optimum."""
    from fedsweep.reproduce.measured.loss_gap import gaps_of

    figure, shown = _panels_of(scene, lambda run: gaps_of(run.folder), "clients")
    for axes, _, gaps in shown:
        axes.scatter(gaps.divergence, gaps.gap, s=10)
        pearson = gaps.figures()["gap_pearson"]
        if pearson is not None:
            axes.set_title(f"{axes.get_title()} (Pearson {pearson:.3f})".strip())
        name_axes(axes, x="JS divergence (nats)", y="Non-IID degree (nats)")
    return figure


def _client_losses(scene: Scene) -> Figure:
    """Clients' losses on their own samples: their own models in local training, then the global one in fine-tuning."""
    from fedsweep.reproduce.measured.synthetic_set import client_losses

    figure, shown = _panels_of(scene, lambda run: client_losses(run.folder), "clients")
    for axes, _, losses in shown:
        own = looks([str(client) for client in losses.clients])
        for client in losses.clients:
            colour = own[str(client)].colour
            axes.plot(*losses.local[client].T, color=colour)
            axes.plot(*losses.tuned[client].T, color=colour, linestyle="--")
        last = max(float(points[-1, 0]) for points in losses.tuned.values())
        axes.plot(last, losses.mean, color="#000000", marker="*", markersize=9, linestyle="none")
        name_axes(axes, x="steps", y="loss on own samples (nats)")
    line, star = Look(colour="#000000", marker=""), Look(colour="#000000", marker="*")
    handles = [
        line_handle("own model, local training", line),
        line_handle("global model, fine-tuning", line, linestyle="--"),
        line_handle("global model, mean of all clients", star, linestyle="none"),
    ]
    legend_below(figure, handles)
    return figure


def _pictures(scene: Scene) -> Figure:
    """A run's own pictures, from the first to the last in up to four stages."""
    from matplotlib.image import imread

    stages = _first_runs(scene, lambda run: sorted((run.folder / PICTURES).glob("*.png")) or None, "pictures")
    if len(stages) > 1:
        raise ConfigError(f"figure {scene.spec.name}: pictures shows one run; name a row and a column")
    ((_, files),) = stages.values()
    chosen = sorted({round(k * (len(files) - 1) / (_STAGES - 1)) for k in range(_STAGES)})
    figure, every = panels([files[k].stem.replace("_", " ") for k in chosen], title=scene.spec.title, height=3.2)
    for axes, k in zip(every, chosen, strict=True):
        axes.imshow(imread(files[k]), cmap="gray", interpolation="nearest")
        axes.set_axis_off()
    return figure


def _panels_of(
    scene: Scene,
    read: Callable[[RunView], Shown | None],
    lacking: str,
    *,
    height: Callable[[int], float] = lambda count: PANEL_HEIGHT,
) -> tuple[Figure, list[tuple[Axes, RunView, Shown]]]:
    """A figure with a panel for each run, and what it is to show; arguments and errors as :func:`_first_runs`.

    The height of a panel, in inches, goes by how many there are.
    """
    found = _first_runs(scene, read, lacking)
    figure, every = panels(list(found), title=scene.spec.title, height=height(len(found)))
    return figure, [(axes, run, shown) for axes, (run, shown) in zip(every, found.values(), strict=True)]


def _first_runs(
    scene: Scene, read: Callable[[RunView], Shown | None], lacking: str
) -> dict[str, tuple[RunView, Shown]]:
    """By title, the lowest seed's finished run of each cell that has what is read to be shown.

    Messages call that ``lacking``.

    Raises:
        ConfigError: No run has it, or too many.
    """
    found = {}
    for row, column in ((row, column) for column in scene.columns for row in scene.rows):
        # The model of a run under way may not be there yet.
        run = next((run for run in scene.of(row, column) if run.status == "finished"), None)
        if run is not None and (shown := read(run)) is not None:
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


def _tall(count: int) -> float:
    """Height of a panel whose rows are clients."""
    return PANEL_HEIGHT + (1.2 if count <= 2 else 0.6)


def _first_round(run: RunView) -> int:
    return int(run.column("round")[0]) if run.column("round") else 1


KINDS: Mapping[str, Callable[[Scene], Figure]] = {
    "curves": _curves,
    "membership": _membership,
    "group_labels": _group_labels,
    "classes": _classes,
    "participation": _participation,
    "loss_gap": _loss_gap,
    "client_losses": _client_losses,
    "pictures": _pictures,
}
