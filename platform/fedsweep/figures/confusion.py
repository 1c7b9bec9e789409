"""A model's confusion matrix as a picture.

Shape letters: C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsweep.figures.style import (
    INK,
    PANEL_WIDTH,
    TEXT_WIDTH,
    checked_path,
    escape_dollars,
    figure_of,
    paper_style,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMN_CLASSES = 12  # more of them take the width of a text
_MOST_NUMBERS = 25  # more classes have no room for numbers
_MOST_NAMES = 30
_DARK = 0.6  # shares above which the numbers are white


@paper_style()
def plot_confusion(confusion: np.ndarray, path: str | Path, *, class_names: Sequence[str] = ()) -> None:
    """Plot a confusion matrix: of each true class, a row, the shares that are told to be of each class.

    Args:
        confusion: Samples [C, C]; rows are true, columns predicted.
        path: The picture; its suffix is one of :data:`~fedsweep.figures.style.SUFFIXES`.
        class_names: One per class, or empty.

    Raises:
        InputError: The picture can't be written.
    """
    target = checked_path(path)
    width = PANEL_WIDTH if len(confusion) <= _COLUMN_CLASSES else TEXT_WIDTH
    figure = figure_of(width=width, height=0.85 * width)
    draw_confusion(figure.subplots(), confusion, class_names=class_names)
    save_figure(figure, target)


def draw_confusion(axes: Axes, confusion: np.ndarray, *, class_names: Sequence[str] = ()) -> None:
    """Draw the same on given axes; see :func:`plot_confusion`."""
    from matplotlib.ticker import MaxNLocator

    shares_CC = 100 * confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    shown = np.ma.masked_where(np.broadcast_to(confusion.sum(axis=1, keepdims=True) == 0, confusion.shape), shares_CC)
    picture = axes.imshow(shown, cmap="YlGnBu", vmin=0, vmax=100, interpolation="nearest")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if class_names and len(class_names) <= _MOST_NAMES:
        names = list(map(escape_dollars, class_names))
        axes.set_yticks(range(len(names)), names)
        lean = max(map(len, class_names)) > 2
        axes.set_xticks(range(len(names)), names, rotation=90 if lean else 0)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    if len(confusion) <= _MOST_NUMBERS:
        _write_numbers(axes, confusion, shares_CC)
    axes.figure.colorbar(picture, ax=axes, label="share of the true class (%)", pad=0.02)


def _write_numbers(axes: Axes, confusion: np.ndarray, shares_CC: np.ndarray) -> None:
    size = min(6.0, 60 / len(confusion))
    for true, predicted in np.argwhere(confusion):
        colour = "white" if shares_CC[true, predicted] > 100 * _DARK else INK
        text = str(confusion[true, predicted])
        axes.text(predicted, true, text, ha="center", va="center", fontsize=size, color=colour)
