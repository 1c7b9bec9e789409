"""A run's drift and participation: which classes clients had, and who was there, trained and was aggregated.

They are arrays, from what the run's folder keeps: ``scenario.json`` (who was there, with which classes),
``clients.parquet`` (what each client holds) and ``rounds.parquet`` (who trained, whose model was aggregated). Of their
pictures, the functions that begin with ``draw`` fill axes that somebody else made, so that a table's figure can put
several runs side by side; those that begin with ``plot`` write a file.

Shape letters: N clients, R rounds, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.errors import OutputError
from fedsweep.figures.groups import counts_of
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
from fedsweep.runs.run_folder import CLIENTS, SCENARIO, RunFolder
from fedsweep.world.replay import ScenarioTrace
from fedsweep.world.spec_checks import read_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES_PICTURE, PARTICIPATION_PICTURE = "classes.png", "participation.png"
# Rows of cells that a picture has room for: a client takes one for each class.
_MOST_ROWS = 320


class Part(IntEnum):
    """A client's part in a round; the later, the more of it reached the server."""

    ABSENT = 0
    """Not there."""
    THERE = 1
    """There, but not in the cohort, or without samples of its classes."""
    TRAINED = 2
    """Trained; its model was not aggregated in this round."""
    AGGREGATED = 3
    """Trained, and its model is in the round's last aggregation."""
    DELIVERED = 4
    """Did not train, but what it had trained in earlier rounds was aggregated."""


PART_LOOKS = {
    Part.ABSENT: ("absent", "#FFFFFF"),
    Part.THERE: ("there, did not train", "#DDE3EA"),
    Part.TRAINED: ("trained, not aggregated", "#9CC7E4"),
    Part.AGGREGATED: ("trained and aggregated", "#0072B2"),
    Part.DELIVERED: ("absent, earlier work aggregated", "#E69F00"),
}
_AGGREGATED, _SKIPPED = "#0072B2", "#D55E00"


@dataclass(frozen=True, kw_only=True)
class Participation:
    """The clients that took part, by round.

    Attributes:
        rounds: The rounds' numbers [R].
        parts_NR: A :class:`Part` for each client and round [N, R], int8.
        aggregated_R: Whether something was aggregated in the round [R].
        bytes_R: Sent in the round, both ways [R], int64.
    """

    rounds: tuple[int, ...]
    parts_NR: np.ndarray
    aggregated_R: np.ndarray
    bytes_R: np.ndarray

    @property
    def num_aggregated(self) -> int:
        """Rounds in which something was aggregated."""
        return int(self.aggregated_R.sum())

    @property
    def num_saved(self) -> int:
        """Rounds in which clients trained and nothing was aggregated."""
        trained_R = np.isin(self.parts_NR, (Part.TRAINED, Part.AGGREGATED)).any(axis=0)
        return int((trained_R & ~self.aggregated_R).sum())


def participation_of(run: RunView) -> Participation | None:
    """Read which clients of a run were there, trained and were aggregated; None where no round was played.

    None too of a drawn population, which has too many rows for a picture, and of a run without its lists. Without
    ``scenario.availability`` everybody is there in every round.

    Raises:
        OutputError: A row names a client that the run does not have.
    """
    rounds = tuple(run.column("round"))
    if not rounds or not run.column("attendees") or run.lists_participants_alone():
        return None
    cohorts, attendees, present = (run.column(name) for name in ("cohort", "attendees", "present"))
    num_clients = _num_clients(run)
    for place, number in enumerate(rounds):
        named = {client for column in (cohorts, attendees, present) if column for client in column[place] or ()}
        if named and not 0 <= min(named) <= max(named) < num_clients:
            raise OutputError(
                f"{run.folder}: round {number} names client {max(named)}, but there are {num_clients} clients"
            )
    return Participation(
        rounds=rounds,
        parts_NR=parts_of(cohorts, attendees, present, num_clients=num_clients),
        aggregated_R=np.array([bool(clients) for clients in attendees]),
        bytes_R=np.array(run.column("bytes_up"), dtype=np.int64) + np.array(run.column("bytes_down"), dtype=np.int64),
    )


def parts_of(
    cohorts: Sequence[Sequence[int] | None],
    attendees: Sequence[Sequence[int] | None],
    present: Sequence[Sequence[int] | None],
    *,
    num_clients: int,
) -> np.ndarray:
    """Return a :class:`Part` for each client and round [N, R], int8; clients that cannot be are passed over.

    Args:
        cohorts: Who was asked to train, by round.
        attendees: Whose models were aggregated.
        present: Who was there; None in a round, or no rounds at all: everybody.
        num_clients: N.
    """
    parts_NR = np.full((num_clients, len(cohorts)), Part.ABSENT, dtype=np.int8)
    everybody = range(num_clients)
    for place, cohort in enumerate(cohorts):
        there = present[place] if present else None
        trained = {client for client in cohort or () if client in everybody}
        aggregated = {client for client in attendees[place] or () if client in everybody}
        parts_NR[list(everybody if there is None else filter(everybody.__contains__, there)), place] = Part.THERE
        parts_NR[sorted(trained - aggregated), place] = Part.TRAINED
        parts_NR[sorted(trained & aggregated), place] = Part.AGGREGATED
        parts_NR[sorted(aggregated - trained), place] = Part.DELIVERED
    return parts_NR


def class_shares(
    counts_NC: np.ndarray,
    class_sets: Sequence[Mapping[int, Sequence[int]]],
    *,
    clients: Sequence[int] | None = None,
) -> np.ndarray:
    """Return each class's share of a client's samples in a round [N, R, C], float32; zeros where a client has none.

    Args:
        counts_NC: Samples per client and class [N, C], before the drift filters them.
        class_sets: For each round, each client's classes; a client that is not named has all of them.
        clients: Only these clients, in this order; None: all.
    """
    chosen = range(len(counts_NC)) if clients is None else clients
    num_classes = counts_NC.shape[1]
    shares_NRC = np.zeros((len(chosen), len(class_sets), num_classes), dtype=np.float32)
    for place, sets in enumerate(class_sets):
        kept_NC = np.array(counts_NC[list(chosen)], dtype=np.float64)
        for row, client in enumerate(chosen):
            if client in sets:
                kept_NC[row, np.setdiff1d(np.arange(num_classes), np.asarray(sets[client], dtype=np.int64))] = 0
        shares_NRC[:, place] = kept_NC / np.maximum(kept_NC.sum(axis=1, keepdims=True), 1)
    return shares_NRC


def class_shares_of(run: RunView, *, clients: Sequence[int] | None = None) -> np.ndarray | None:
    """:func:`class_shares` of a run [N, R, C]; None where it has no drift or no table of clients yet.

    Raises:
        InputError: A file of the run is damaged, or two of them contradict each other.
    """
    path = run.folder / SCENARIO
    trace = ScenarioTrace.from_json(read_text(SCENARIO, path), source=str(path)) if path.is_file() else None
    counts_NC = counts_of(run) if trace is not None and any(trace.class_sets) else None
    if trace is None or counts_NC is None:
        return None
    if counts_NC.shape != (trace.num_clients, trace.num_classes):
        raise OutputError(
            f"{run.folder}: {SCENARIO} has {trace.num_clients} clients and {trace.num_classes} classes, but {CLIENTS}"
            f" has {list(counts_NC.shape)}"
        )
    return class_shares(counts_NC, trace.class_sets, clients=clients)


def _num_clients(run: RunView) -> int:
    if (run.folder / CLIENTS).is_file():
        return int(RunFolder(run.folder).read_clients().num_rows)
    lists = (cell for name in ("cohort", "attendees", "present") for cell in run.column(name))
    return max((client for cell in lists for client in cell or ()), default=-1) + 1


def plot_scenario(folder: Path, into: Path) -> list[Path]:
    """Draw the pictures of a run with drift or availability: ``classes.png`` and ``participation.png``.

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
    scenario = run.config.get("scenario")
    changes = isinstance(scenario, dict) and (scenario.get("drift") or scenario.get("availability")) is not None
    participation = participation_of(run) if changes else None
    if participation is not None:
        drawn.append(into / PARTICIPATION_PICTURE)
        _plot_participation(participation, drawn[-1])
    return drawn


@paper_style()
def plot_classes(shares_NRC: np.ndarray, path: str | Path) -> None:
    """Class shares by client and round as :func:`draw_classes` has them, as a file of one of the known suffixes.

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
def _plot_participation(participation: Participation, target: Path) -> None:
    """Plot participation as a file; on top the bytes of each round, coloured by whether it aggregated."""
    num_clients = len(participation.parts_NR)
    figure = figure_of(width=TEXT_WIDTH, height=float(np.clip(2.0 + 0.1 * num_clients, 3.0, 8.0)))
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    _draw_schedule(top, participation)
    draw_participation(main, participation)
    top.set_xlabel("")
    rounds, _ = top.get_legend_handles_labels()
    legend_below(figure, [*participation_handles([participation]), *rounds])
    save_figure(figure, target)


def shown_clients(num_clients: int, num_classes: int) -> list[int]:
    """Return the clients that a picture of classes has room for, spread evenly over all."""
    most = max(2, _MOST_ROWS // (num_classes + 1))
    if num_clients <= most:
        return list(range(num_clients))
    return [int(client) for client in np.unique(np.linspace(0, num_clients - 1, most).round())]


def draw_classes(axes: Axes, shares_NRC: np.ndarray, *, first_round: int = 1, legend: bool = True) -> None:
    """Draw a band for each client, in it a row for each class: the darker, the larger the class's share in the round.

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
    look: dict[str, Any] = {"cmap": "Blues", "vmin": 0, "vmax": rows.max() if rows.count() and rows.max() > 0 else 1.0}
    picture = axes.imshow(rows, aspect="auto", interpolation="nearest", extent=extent, **look)
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
        axes.figure.colorbar(picture, ax=axes, label="share of the client's samples", pad=0.01)


def draw_participation(axes: Axes, participation: Participation) -> None:
    """Draw clients by rounds, a cell coloured by the client's part in the round, on empty axes."""
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
    """Make the legend's handles of :func:`draw_participation`'s colours, as far as they were drawn."""
    met = set().union(*(np.unique(one.parts_NR).tolist() for one in shown))
    return patch_handles(look for part, look in PART_LOOKS.items() if part in met)


def _draw_schedule(axes: Axes, participation: Participation) -> None:
    """Draw the bytes of each round as bars, in one colour where something was aggregated and in another where not."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    aggregated_R, bytes_R = participation.aggregated_R, participation.bytes_R
    rounds = np.array(participation.rounds)
    for chosen_R, colour, label in (
        (aggregated_R, _AGGREGATED, f"aggregated: {participation.num_aggregated} rounds"),
        (~aggregated_R, _SKIPPED, f"not aggregated: {len(rounds) - participation.num_aggregated}"),
    ):
        if not chosen_R.any():
            continue  # without a point, the marks' box is nowhere, and no room is left for the panels
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


def _round_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
