"""Pictures of drift and participation: which classes clients had, and who was there, trained and was aggregated.

The functions that begin with ``draw`` fill axes that somebody else made, so that a table's figure can put several runs
side by side; those that begin with ``plot`` write a file.

Shape letters: N clients, R rounds, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.figures.scenario_arrays import Part, Participation, class_shares_of, participation_of
from fedsweep.figures.style import (
    TEXT_WIDTH,
    checked_path,
    figure_of,
    legend_below,
    paper_style,
    patch_handles,
    save_figure,
)
from fedsweep.results.texts import bytes_text
from fedsweep.results.view import RunView, load_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES_PICTURE, PARTICIPATION_PICTURE = "classes.png", "participation.png"
# Rows of cells that a picture has room for: a client takes one for each class.
_MOST_ROWS = 320
PART_LOOKS = {
    Part.ABSENT: ("absent", "#FFFFFF"),
    Part.THERE: ("there, did not train", "#DDE3EA"),
    Part.TRAINED: ("trained, not aggregated", "#9CC7E4"),
    Part.AGGREGATED: ("trained and aggregated", "#0072B2"),
    Part.DELIVERED: ("absent, earlier work aggregated", "#E69F00"),
}
_AGGREGATED, _SKIPPED = "#0072B2", "#D55E00"


def plot_scenario(folder: Path, into: Path) -> list[Path]:
    """The pictures of a run with drift or availability: ``classes.png`` and ``participation.png``.

    Args:
        folder: A run folder.
        into: Where the pictures go.

    Returns:
        The pictures; none where the world of the run stays as it is.

    Raises:
        InputError: A file of the run is damaged, or a picture can't be written.
    """
    run = load_run(folder)
    drawn = []
    shares_NRC = class_shares_of(run)
    if shares_NRC is not None and shares_NRC.size:
        drawn.append(into / CLASSES_PICTURE)
        plot_classes(shares_NRC, drawn[-1])
    participation = participation_of(run) if has_availability(run) else None
    if participation is not None:
        drawn.append(into / PARTICIPATION_PICTURE)
        plot_participation(participation, drawn[-1])
    return drawn


def has_availability(run: RunView) -> bool:
    """Whether a run has drift or availability, so that who took part is worth a picture."""
    scenario = run.config.get("scenario")
    return isinstance(scenario, dict) and (scenario.get("drift") or scenario.get("availability")) is not None


@paper_style()
def plot_classes(shares_NRC: np.ndarray, path: str | Path) -> None:
    """Class shares by client and round, as a file.

    Args:
        shares_NRC: See :func:`draw_classes`.
        path: The picture; its suffix is one of :data:`~fedsweep.figures.style.SUFFIXES`.

    Raises:
        InputError: The picture can't be written.
    """
    target = checked_path(path)
    num_shown = len(shown_clients(len(shares_NRC), shares_NRC.shape[2]))
    rows = num_shown * (shares_NRC.shape[2] + 1)
    figure = figure_of(width=TEXT_WIDTH, height=float(np.clip(0.03 * rows, 2.5, 8.0)))
    draw_classes(figure.subplots(), shares_NRC)
    save_figure(figure, target)


@paper_style()
def plot_participation(participation: Participation, path: str | Path) -> None:
    """Who took part, as a file; on top the bytes of each round, coloured by whether it aggregated.

    Args:
        participation: See :func:`~fedsweep.figures.scenario_arrays.participation_of`.
        path: The picture; its suffix is one of :data:`~fedsweep.figures.style.SUFFIXES`.

    Raises:
        InputError: The picture can't be written.
    """
    target = checked_path(path)
    num_clients = len(participation.parts_NR)
    figure = figure_of(width=TEXT_WIDTH, height=float(np.clip(2.0 + 0.1 * num_clients, 3.0, 8.0)))
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    draw_schedule(top, participation)
    draw_participation(main, participation)
    top.set_xlabel("")
    rounds, _ = top.get_legend_handles_labels()
    legend_below(figure, [*participation_handles([participation]), *rounds])
    save_figure(figure, target)


def shown_clients(num_clients: int, num_classes: int) -> list[int]:
    """The clients that a picture of classes has room for, spread evenly over all."""
    most = max(2, _MOST_ROWS // (num_classes + 1))
    if num_clients <= most:
        return list(range(num_clients))
    return [int(client) for client in np.unique(np.linspace(0, num_clients - 1, most).round())]


def draw_classes(axes: Axes, shares_NRC: np.ndarray, *, first_round: int = 1, legend: bool = True) -> None:
    """A band for each client, in it a row for each class: the darker, the larger the class's share in the round.

    Where there are too many clients for a picture, some are shown, spread evenly; the axis says which.

    Args:
        axes: Empty axes.
        shares_NRC: Each class's share of the client's samples, 0..1 [N, R, C].
        first_round: The number of the first round.
        legend: Draw a colour bar.
    """
    num_clients, num_rounds, num_classes = shares_NRC.shape
    shown = shown_clients(num_clients, num_classes)
    bands = np.full((len(shown), num_classes + 1, num_rounds), np.nan)
    bands[:, :num_classes] = shares_NRC[shown].transpose(0, 2, 1)
    rows = np.ma.masked_invalid(bands.reshape(-1, num_rounds))
    extent = (first_round - 0.5, first_round + num_rounds - 0.5, len(rows) - 0.5, -0.5)
    picture = axes.imshow(
        rows, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=_largest(rows), extent=extent
    )
    step = max(1, -(-len(shown) // 25))
    places = range(0, len(shown), step)
    axes.set_yticks(
        [place * (num_classes + 1) + (num_classes - 1) / 2 for place in places], [str(shown[p]) for p in places]
    )
    axes.set_ylim(len(rows) - 1.5, -0.5)
    part = "" if len(shown) == num_clients else f" ({len(shown)} of {num_clients})"
    axes.set_ylabel(f"client{part}\nin each band class 0 to {num_classes - 1}, from the top")
    _round_axis(axes)
    if legend:
        figure = axes.get_figure(root=True)
        assert figure is not None  # axes made by subplots have one
        figure.colorbar(picture, ax=axes, label="share of the client's samples", pad=0.01)


def draw_participation(axes: Axes, participation: Participation) -> None:
    """Clients by rounds, a cell coloured by what the client did in the round.

    Args:
        axes: Empty axes.
        participation: Who took part.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    parts_NR = participation.parts_NR
    extent = (participation.rounds[0] - 0.5, participation.rounds[-1] + 0.5, len(parts_NR) - 0.5, -0.5)
    colours = ListedColormap([colour for _, colour in PART_LOOKS.values()])
    look: dict[str, Any] = {"cmap": colours, "vmin": -0.5, "vmax": len(PART_LOOKS) - 0.5}
    axes.imshow(parts_NR, aspect="auto", interpolation="nearest", extent=extent, **look)
    axes.set_ylabel("client")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _round_axis(axes)
    axes.set_xlabel(f"round; {participation.num_aggregated} of {len(participation.rounds)} aggregated")


def participation_handles(shown: Iterable[Participation]) -> list[Any]:
    """What the colours of :func:`draw_participation` mean, as far as they are there, for a legend.

    Args:
        shown: What was drawn.
    """
    met = set().union(*(np.unique(one.parts_NR).tolist() for one in shown))
    return patch_handles(look for part, look in PART_LOOKS.items() if part in met)


def draw_schedule(axes: Axes, participation: Participation) -> None:
    """The bytes of each round as bars, in one colour where something was aggregated and in another where not.

    Args:
        axes: Empty axes.
        participation: Who took part.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    aggregated_R, bytes_R = participation.aggregated_R, participation.bytes_R
    rounds = np.array(participation.rounds)
    for chosen_R, colour, label in (
        (aggregated_R, _AGGREGATED, f"aggregated: {participation.num_aggregated} rounds"),
        (~aggregated_R, _SKIPPED, f"not aggregated: {len(rounds) - participation.num_aggregated}"),
    ):
        axes.bar(rounds[chosen_R], bytes_R[chosen_R], width=0.9, color=colour, label=label)
        # A mark below the axis also where a round sent nothing.
        axes.plot(rounds[chosen_R], np.zeros(int(chosen_R.sum())), "|", color=colour, markersize=7, clip_on=False)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: bytes_text(count)))
    axes.set_ylabel("sent")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{participation.num_aggregated} of {len(rounds)} rounds aggregated, {participation.num_saved} trained without",
        loc="left",
    )
    _round_axis(axes)


def _largest(rows: np.ma.MaskedArray) -> float:
    return float(rows.max()) if rows.count() and rows.max() > 0 else 1.0


def _round_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
