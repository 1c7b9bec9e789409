"""Pictures of runs and of partitions, as PNG, PDF or SVG.

Runs of the same name and method share a colour and a marker (Okabe and Ito's colours, which colour-blind readers can
tell apart); their seeds differ in the line's style. Nothing here touches matplotlib's global state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.results.texts import bytes_text
from fedsweep.results.view import RunView, load_runs, run_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from fedsweep.figures.style import COLOURS, INK, MARKERS, checked_path, figure_of, save_figure

_LINES = ("-", "--", "-.", ":")
_BESIDE = 6  # with more entries the legend goes beside the axes


@dataclass(frozen=True, kw_only=True)
class _Line:
    run: RunView
    label: str
    colour: str
    marker: str
    style: str
    member: int


def plot_accuracy_against_bytes(folders: Iterable[str | Path], path: str | Path) -> None:
    """Test accuracy against the bytes sent, one line per run.

    Args:
        folders: Run folders, or folders with runs below them.
        path: The picture; its suffix is one of :data:`SUFFIXES`.

    Raises:
        InputError: A folder holds no run, a run's file is damaged, or the picture can't be written.
    """
    target = checked_path(path)
    lines = _lines(load_runs(folders))
    figure = figure_of(width=8.0 + _legend_width(lines), height=5.0)
    axes = figure.subplots()
    _curves(axes, lines, "test_accuracy", against="total_bytes")
    axes.set_xscale("log")
    _bytes_axis(axes)
    axes.set_xlabel("bytes sent, both ways")
    axes.set_ylabel("test accuracy")
    _share_axis(axes)
    _legend(axes, lines)
    save_figure(figure, target)


def plot_learning_curves(folders: Iterable[str | Path], path: str | Path) -> None:
    """Test accuracy and test loss by round, and training loss where no test loss is known, one line per run.

    Args:
        folders: Run folders, or folders with runs below them.
        path: The picture; its suffix is one of :data:`SUFFIXES`.

    Raises:
        InputError: A folder holds no run, a run's file is damaged, or the picture can't be written.
    """
    target = checked_path(path)
    lines = _lines(load_runs(folders))
    figure = figure_of(width=11.0 + _legend_width(lines), height=4.5)
    left, right = figure.subplots(1, 2)
    _curves(left, lines, "test_accuracy", against="round")
    loss = "test_loss" if any(line.run.series("test_loss", against="round")[0] for line in lines) else "train_loss"
    _curves(right, lines, loss, against="round")
    for axes, name in ((left, "test accuracy"), (right, loss.replace("_", " "))):
        axes.set_xlabel("round")
        axes.set_ylabel(name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    _share_axis(left)
    _legend(right, lines)
    save_figure(figure, target)


def _lines(runs: Sequence[RunView]) -> list[_Line]:
    groups: dict[tuple[str, str], int] = {}
    lines = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        members = groups.get((run.name, run.method), 0)
        groups[run.name, run.method] = members + 1
        number = list(groups).index((run.name, run.method))
        details = "" if run.method in run.name else f", {run.method}"
        details += "" if run.status == "finished" else f", {run.status}"
        lines.append(
            _Line(
                run=run,
                label=label + details,
                colour=COLOURS[number % len(COLOURS)],
                marker=MARKERS[number % len(MARKERS)],
                style=_LINES[members % len(_LINES)],
                member=members,
            )
        )
    return lines


def _curves(axes: Axes, lines: Sequence[_Line], name: str, *, against: str) -> None:
    drawn = 0
    for line in lines:
        places, values = line.run.series(name, against=against)
        if against == "total_bytes":
            # A logarithmic axis has no place for rounds before anything was sent.
            places, values = places[sum(x <= 0 for x in places) :], values[sum(x <= 0 for x in places) :]
        look: dict[str, Any] = {"color": line.colour, "linestyle": line.style, "marker": line.marker}
        # Seeds of one method take turns with their markers, so that these do not lie on top of one another.
        every = max(1, len(places) // 8)
        markers = (line.member * 2 % every, every)
        axes.plot(places, values, label=line.label, markevery=markers, markersize=4.5, linewidth=1.5, **look)
        drawn += len(places)
    if not drawn:
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", color=INK)


def _legend_width(lines: Sequence[_Line]) -> float:
    if len(lines) <= _BESIDE:
        return 0.0
    return 0.075 * max(len(line.label) for line in lines) + 0.8


def _legend(axes: Axes, lines: Sequence[_Line]) -> None:
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
    place: dict[str, Any] = {"loc": "best"} if len(lines) <= _BESIDE else beside
    axes.legend(frameon=False, fontsize=8, handlelength=5.0, **place)


def _bytes_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: bytes_text(count)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _share_axis(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
