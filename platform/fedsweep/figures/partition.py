"""The clients' shares of the data, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedsweep.errors import InvariantError
from fedsweep.figures.style import (
    COLOURS,
    GRID,
    PANEL_WIDTH,
    TEXT_WIDTH,
    checked_path,
    figure_of,
    paper_style,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_BUBBLES = 60  # clients; more of them are drawn as a map of cells
_BUBBLE_CLASSES = 30
_BARS = 200  # clients; more of them are one outline, not each an object: 100,000 took a minute and a gigabyte
_COLUMN_CLIENTS = 20  # more of them take the width of a text
_BUBBLE_POINTS = 6.5  # across, of the largest; a cell is a little wider


@paper_style()
def plot_partition(counts: ArrayLike, path: str | Path, *, stratum: str = "class") -> None:
    """Plot each client's number of samples of each class, with each client's total on top.

    Up to some sixty clients every cell is a bubble whose area is the number of samples; beyond, a map of shaded cells.

    Args:
        counts: Samples per client and class [N, C].
        path: The picture; its suffix is one of :data:`SUFFIXES`.
        stratum: What classes are called here.

    Raises:
        InputError: The picture can't be written.
        InvariantError: ``counts`` is no table of counts.
    """
    target = checked_path(path)
    counts_NC = np.asarray(counts)
    if counts_NC.ndim != 2 or not counts_NC.size or (counts_NC < 0).any():
        raise InvariantError(f"counts must be a table [N, C] of numbers >= 0, but got shape {counts_NC.shape}")
    num_clients, num_classes = counts_NC.shape
    bubbles = num_clients <= _BUBBLES and num_classes <= _BUBBLE_CLASSES
    figure = figure_of(
        width=PANEL_WIDTH if num_clients <= _COLUMN_CLIENTS else TEXT_WIDTH,
        height=float(np.clip(1.2 + 0.14 * num_classes, 2.6, 6.0)),
    )
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    _totals(top, counts_NC.sum(axis=1))
    (_bubbles if bubbles else _cells)(main, counts_NC)
    main.set_xlabel("client")
    main.set_ylabel(stratum)
    main.set_xlim(-0.6, num_clients - 0.4)
    main.set_ylim(num_classes - 0.4, -0.6)
    save_figure(figure, target)


def _totals(axes: Axes, totals_N: np.ndarray) -> None:
    if len(totals_N) <= _BARS:
        axes.bar(np.arange(len(totals_N)), totals_N, width=0.8, color=COLOURS[0])
    else:
        axes.stairs(totals_N, np.arange(len(totals_N) + 1) - 0.5, fill=True, color=COLOURS[0])
    axes.set_ylabel("samples")
    axes.tick_params(bottom=False, labelbottom=False)


def _bubbles(axes: Axes, counts_NC: np.ndarray) -> None:
    from matplotlib.ticker import MultipleLocator

    clients, classes = np.nonzero(counts_NC)
    largest = max(1, int(counts_NC.max()))
    look: dict[str, Any] = {"color": COLOURS[0], "linewidths": 0, "zorder": 2}
    axes.scatter(clients, classes, s=_BUBBLE_POINTS**2 * counts_NC[clients, classes] / largest, **look)
    axes.grid(color=GRID, linewidth=0.5, zorder=0)
    axes.yaxis.set_major_locator(MultipleLocator(1))
    axes.xaxis.set_major_locator(MultipleLocator(1 if len(counts_NC) <= 30 else 5))
    for count in sorted({largest, max(1, largest // 4), max(1, largest // 20)}, reverse=True):
        axes.scatter([], [], s=_BUBBLE_POINTS**2 * count / largest, label=str(count), **look)
    axes.legend(title="samples", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelspacing=1.2)


def _cells(axes: Axes, counts_NC: np.ndarray) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    # The square root of the count: clients with few samples stay visible beside those with many.
    picture = axes.imshow(
        np.ma.masked_equal(counts_NC.T, 0),
        aspect="auto",
        interpolation="nearest",
        cmap="YlGnBu",
        norm=PowerNorm(0.5, vmin=0, vmax=max(1, counts_NC.max())),
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(picture, ax=axes, label="samples", pad=0.01, ticks=MaxNLocator(4, integer=True))
