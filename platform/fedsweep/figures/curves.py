"""Learning curves: a line per setting, the mean over its seeds, with a band of one deviation each way.

A study's picture has a panel for each world and a colour for each row; see :mod:`fedsweep.results.worlds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.figures.style import (
    INK,
    Look,
    axis_name,
    band_handles,
    checked_path,
    legend_below,
    line_handle,
    name_axes,
    panels,
    paper_style,
    save_figure,
    scale_axes,
    setting_looks,
)
from fedsweep.results.curves import Curve, mean_curve
from fedsweep.results.settings import ReportRun, Setting, group_settings, report_runs
from fedsweep.results.view import SPENT, is_share, load_runs
from fedsweep.results.worlds import Study, World, study_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What can be under a curve.
ACROSS = ("round", "total_bytes", "sim_time_s", "wall_time_s", "flops", *SPENT)
_MARKERS = 8


def plot_accuracy_against_bytes(folders: Iterable[str | Path], path: str | Path) -> None:
    """Test accuracy against the bytes sent, a line per setting, as wide as a paper's column.

    Args:
        folders: Run folders, or folders with runs below them.
        path: The picture; its suffix is one of :data:`~fedsweep.figures.style.SUFFIXES`.

    Raises:
        InputError: A folder holds no run, a run's file is damaged, or the picture can't be written.
    """
    target = checked_path(path)
    runs, _ = report_runs(load_runs(folders))
    _plot(runs, ["test_accuracy"], target, x="total_bytes", log_x=True)


def plot_learning_curves(folders: Iterable[str | Path], path: str | Path) -> None:
    """Test accuracy and test loss by round, and training loss where no test loss is known, a line per setting.

    Arguments and errors are those of :func:`plot_accuracy_against_bytes`.
    """
    target = checked_path(path)
    runs, _ = report_runs(load_runs(folders))
    loss = "test_loss" if any("test_loss" in run.curve.figures for run in runs) else "train_loss"
    _plot(runs, ["test_accuracy", loss], target, x="round")


def row_handles(study: Study, called: Callable[[str], str] = str) -> list[Any]:
    """Make the legend's handles of the rows' lines."""
    layout = study.layout
    if len(layout.worlds) == 1:
        labels = [_label(study.settings[layout.places_of(row)[0]], study.runs) for row in range(len(layout.rows))]
    else:
        labels = [called(label) for label in layout.rows]
    return [line_handle(label, look) for label, look in zip(labels, setting_looks(study.methods), strict=True)]


def draw_world(axes: Axes, study: Study, world: World, name: str, *, x: str, log_x: bool = False) -> None:
    """Draw the curves of a world's settings in their rows' looks; arguments are as in :func:`draw_settings`."""
    looks = setting_looks(study.methods)
    drawn = [
        draw_curve(
            axes, _curve(study.settings[place], study.runs), name, x=x, look=looks[row], label=study.layout.rows[row]
        )
        for row, place in world.cells.items()
    ]
    if not any(drawn):
        look: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "color": INK}
        axes.text(0.5, 0.5, "nothing measured yet", **look)
    scale_axes(axes, log_x=log_x, log_y=False)
    is_percent = is_share(name, (run.view for run in study.runs))
    name_axes(axes, x=axis_name(x), y=axis_name(name, is_percent=is_percent))


def draw_curve(axes: Axes, curve: Curve, name: str, *, x: str, look: Look, label: str) -> bool:
    """Draw a curve with its band over seeds, if it has one; says whether there was anything to draw.

    Args:
        axes: The panel.
        curve: Of a run, or over seeds.
        name: Which of its figures; shares are drawn in percent.
        x: One of :data:`ACROSS`.
        look: Its colour and marker.
        label: Whose curve it is.
    """
    points = np.array(curve.points(name, against=x)).T
    if not points.size:
        return False
    if name in curve.shares:
        points[1:] *= 100
    every = max(1, points.shape[1] // _MARKERS)
    axes.plot(*points[:2], color=look.colour, marker=look.marker, markersize=3.5, markevery=every, label=label)
    if curve.low:
        axes.fill_between(*points[[0, 2, 3]], color=look.colour, alpha=0.2, linewidth=0)
    return True


@paper_style()
def _plot(runs: Sequence[ReportRun], names: Sequence[str], target: Path, *, x: str, log_x: bool = False) -> None:
    labels = [_label(setting, runs) for setting in group_settings(runs)]
    figure, every = panels([""] * len(names), title=labels[0] if len(labels) == 1 else "")
    handles = [draw_settings(axes, runs, name, x=x, log_x=log_x) for axes, name in zip(every, names, strict=True)]
    legend_below(figure, [*handles[0], *band_handles(every)])
    save_figure(figure, target)


def draw_settings(axes: Axes, runs: Sequence[ReportRun], name: str, *, x: str, log_x: bool = False) -> list[Any]:
    """Draw the curves of all settings, each with its own look; returns what they are called, for a legend.

    Args:
        axes: The panel.
        runs: All runs, of whatever worlds.
        name: Of a figure, as :meth:`Curve.points` knows it.
        x: One of :data:`ACROSS`.
        log_x: Whether the x axis is logarithmic.
    """
    study = study_of(runs, columns=())
    (world,) = study.layout.worlds
    draw_world(axes, study, world, name, x=x, log_x=log_x)
    return row_handles(study)


def _curve(setting: Setting, runs: Sequence[ReportRun]) -> Curve:
    """Over the runs that count; where none does, over those that failed on their way."""
    return setting.curve or mean_curve([runs[index].curve for index in setting.runs])


def _label(setting: Setting, runs: Sequence[ReportRun]) -> str:
    """Return the setting's name, with its method and how it stands where these tell more."""
    first = runs[(setting.counted or setting.runs)[0]]
    details = "" if first.method.casefold() in setting.label.casefold() else f", {first.method}"
    return setting.label + details + ("" if first.status == "finished" else f", {first.status}")
