"""Pictures of the high-frequency group by round: who is in it, and what labels its members hold together.

The functions that begin with ``draw`` fill axes that somebody else made.

Shape letters: N clients, R rounds, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.figures.groups import (
    COHORT,
    GROUP_LOOKS,
    HIGH,
    GroupLabels,
    counts_of,
    group_labels_of,
    has_group,
    membership_of,
)
from fedsweep.figures.style import Look, legend_below, line_handle, patch_handles
from fedsweep.reproduce.figures.scene import Scene, first_round, panels_of
from fedsweep.results.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POPULATION = "#000000"
# Of a round's labels: half of the rounds lie within the thick bar, eight in ten within the thin one.
_THICK, _THIN = (25, 75), (10, 90)


def membership(scene: Scene) -> Figure:
    """Return clients by rounds, coloured by group."""
    figure, shown = panels_of(
        scene,
        lambda run: membership_of(run) if has_group(run) else None,
        "a high-frequency group",
        height=lambda _: 2.8,
    )
    for axes, run, cells_NR in shown:
        draw_membership(axes, cells_NR, first_round=first_round(run))
    legend_below(figure, patch_handles(GROUP_LOOKS[level] for level in (COHORT, HIGH)))
    return figure


def group_labels(scene: Scene) -> Figure:
    """Draw for each class the groups' shares over the rounds, and the population's."""

    def shares(run: RunView) -> GroupLabels | None:
        counts_NC = counts_of(run) if has_group(run) else None
        return None if counts_NC is None else group_labels_of(run, counts_NC)

    figure, shown = panels_of(scene, shares, "a high-frequency group and a table of clients")
    for axes, _, labels in shown:
        draw_group_labels(axes, labels)
    groups = [(f"{GROUP_LOOKS[level][0]} group", GROUP_LOOKS[level][1]) for level in (COHORT, HIGH)]
    population = line_handle("population", Look(colour=_POPULATION, marker=""), linewidth=1.0)
    own = [line_handle(label, Look(colour=colour, marker="o"), markersize=3.0) for label, colour in groups]
    legend_below(figure, [population, *own])
    return figure


def draw_membership(axes: Axes, cells_NR: np.ndarray, *, first_round: int = 1) -> None:
    """Clients by rounds on empty axes, a cell coloured by the group of :func:`membership_of` that the client was in."""
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    num_clients, num_rounds = cells_NR.shape
    extent = (first_round - 0.5, first_round + num_rounds - 0.5, num_clients - 0.5, -0.5)
    look: dict[str, Any] = {
        "cmap": ListedColormap([colour for _, colour in GROUP_LOOKS.values()]),
        "vmin": 0,
        "vmax": 2,
    }
    axes.imshow(cells_NR, aspect="auto", interpolation="nearest", extent=extent, **look)
    axes.set_xlabel("round")
    axes.set_ylabel("client")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))


def draw_group_labels(axes: Axes, labels: GroupLabels) -> None:
    """Draw for each class the groups' shares over the rounds, beside the population's, on empty axes.

    A dot is the mean, the thick bar holds half of the rounds, the thin one eight in ten.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    classes_C = np.arange(len(labels.population_C))
    axes.hlines(labels.population_C, classes_C - 0.45, classes_C + 0.45, color=_POPULATION, linewidth=1.0, zorder=3)
    for shares_RC, level, shift in ((labels.low_RC, COHORT, -0.18), (labels.high_RC, HIGH, 0.18)):
        if not len(shares_RC):
            continue
        colour = GROUP_LOOKS[level][1]
        for (low, high), width in ((_THIN, 1.0), (_THICK, 3.0)):
            ends_2C = np.percentile(shares_RC, (low, high), axis=0)
            axes.vlines(classes_C + shift, *ends_2C, color=colour, linewidth=width, zorder=1)
        axes.plot(classes_C + shift, shares_RC.mean(axis=0), "o", color=colour, markersize=3.0, zorder=2)
    axes.set_xlabel("class")
    axes.set_ylabel("share of the group's samples")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
