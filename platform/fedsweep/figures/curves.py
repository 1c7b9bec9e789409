"""Pictures of runs and of partitions, as PNG, PDF or SVG.

Runs of the same name and method share a colour and a marker (Okabe and Ito's colours, which colour-blind readers can
tell apart); their seeds differ in the line's style. Nothing here touches matplotlib's global state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedsweep.errors import InputError, InvariantError
from fedsweep.reports.compare import bytes_text
from fedsweep.results.view import RunView, load_runs, run_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf", ".svg")
# Source: Okabe and Ito 2008, without the yellow, which is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
_LINES = ("-", "--", "-.", ":")
INK, _GRID = "#333333", "#DDDDDD"
_UNDATED: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
_BESIDE = 6  # with more entries the legend goes beside the axes
_BUBBLES = 60  # clients; more of them are drawn as a map of cells
_BUBBLE_CLASSES = 30
_BUBBLE_POINTS = 15.0  # across, of the largest; a cell is a little wider


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


def plot_partition(counts: ArrayLike, path: str | Path) -> None:
    """How many samples of each class each client holds, with each client's total on top.

    Up to some sixty clients every cell is a bubble whose area is the number of samples; beyond, a map of shaded cells.

    Args:
        counts: Samples per client and class [N, C].
        path: The picture; its suffix is one of :data:`SUFFIXES`.

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
        width=float(np.clip(2.5 + 0.24 * num_clients, 7.0, 17.0)),
        height=float(np.clip(2.6 + 0.28 * num_classes, 4.5, 10.0)),
    )
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    _totals(top, counts_NC.sum(axis=1))
    (_bubbles if bubbles else _cells)(main, counts_NC)
    main.set_xlabel("client")
    main.set_ylabel("class")
    main.set_xlim(-0.6, num_clients - 0.4)
    main.set_ylim(num_classes - 0.4, -0.6)
    save_figure(figure, target)


def plot_run(folder: Path, into: Path) -> list[Path]:
    """The pictures of a single run: ``learning_curves.png``, ``accuracy_against_bytes.png``, ``partition.png``.

    With drift or availability also those of :func:`~fedsweep.figures.scenario.plot_scenario`.

    Args:
        folder: A run folder.
        into: Where the pictures go.

    Returns:
        The pictures; those that the run has nothing for are left out.
    """
    from fedsweep.figures.scenario import plot_scenario
    from fedsweep.runs.run_folder import CLIENTS, ROUNDS, RunFolder

    drawn = []
    if (folder / ROUNDS).is_file():
        drawn += [into / "learning_curves.png", into / "accuracy_against_bytes.png"]
        plot_learning_curves([folder], drawn[0])
        plot_accuracy_against_bytes([folder], drawn[1])
    if (folder / CLIENTS).is_file():
        drawn.append(into / "partition.png")
        plot_partition(RunFolder(folder).read_clients().column("label_counts").to_pylist(), drawn[-1])
    return drawn + plot_scenario(folder, into)


def checked_path(path: str | Path) -> Path:
    """The picture's path, if its ending is one of :data:`SUFFIXES`; otherwise an InputError."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(f"{target}: a picture's name must end in one of {', '.join(SUFFIXES)}")
    return target


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


def figure_of(*, width: float, height: float) -> Figure:
    """An empty figure outside matplotlib's global state.

    Args:
        width: In inches.
        height: In inches.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


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


def _totals(axes: Axes, totals_N: np.ndarray) -> None:
    axes.bar(np.arange(len(totals_N)), totals_N, width=0.8 if len(totals_N) <= 200 else 1.0, color=COLOURS[0])
    axes.set_ylabel("samples")
    axes.tick_params(bottom=False, labelbottom=False)


def _bubbles(axes: Axes, counts_NC: np.ndarray) -> None:
    from matplotlib.ticker import MultipleLocator

    clients, classes = np.nonzero(counts_NC)
    largest = max(1, int(counts_NC.max()))
    look: dict[str, Any] = {"color": COLOURS[0], "linewidths": 0, "zorder": 2}
    axes.scatter(clients, classes, s=_BUBBLE_POINTS**2 * counts_NC[clients, classes] / largest, **look)
    axes.grid(color=_GRID, linewidth=0.5, zorder=0)
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
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes made by subplots have one
    figure.colorbar(picture, ax=axes, label="samples", pad=0.01, ticks=MaxNLocator(4, integer=True))


def save_figure(figure: Figure, target: Path) -> None:
    """Writes a figure, and makes the folder above it.

    Args:
        figure: The figure.
        target: The file; its suffix says the format.

    Raises:
        InputError: It can't be written.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.grid(color=_GRID, linewidth=0.6)
            axes.set_axisbelow(True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Without the time of day, the same figures are the same file.
        figure.savefig(target, metadata=_UNDATED.get(target.suffix.lower()))
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {(error.strerror or str(error)).lower()}") from error
