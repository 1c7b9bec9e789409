"""The picture of who talked with whom in a run: clients on a circle, edge servers and the server inside it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.figures.style import figure_of, paper_style, save_figure
from fedsweep.runs.run_folder import TRAFFIC, RunFolder
from fedsweep.world.topology import SERVER, hub_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINKS_PICTURE = "links.png"
# Of more hubs and links neither names nor lines could be told apart.
_MOST_NAMES, _MOST_LINKS = 40, 20_000


def bytes_by_link(folder: Path) -> Counter[tuple[int, int]]:
    """Sum the bytes that a run sent between two hubs, both ways, by the pair, the lower number first.

    Empty where all talked with the server alone.
    """
    total: Counter[tuple[int, int]] = Counter()
    table = RunFolder(folder).client_table(TRAFFIC)
    if table is None or "peer" not in table.column_names:
        return total
    columns = (table.column(name).to_pylist() for name in ("round", "client", "peer", "bytes"))
    for round, client, peer, size in zip(*columns, strict=True):
        if round and size:  # registration is with whoever sets the run up
            total[min(client, peer), max(client, peer)] += size
    return total


@paper_style()
def plot_links(folder: Path, target: Path) -> bool:
    """Draw a run's links, each as wide as its share of the bytes; returns whether there was anything to draw."""
    total = bytes_by_link(folder)
    if not total or len(total) > _MOST_LINKS:
        return False
    figure = figure_of(width=3.4, height=3.4)
    _draw_links(figure.subplots(), total)
    save_figure(figure, target)
    return True


def _draw_links(axes: Axes, total: Counter[tuple[int, int]]) -> None:
    places = _places(sorted({hub for pair in total for hub in pair}))
    most = max(total.values())
    for (first, second), size in total.items():
        (x, y), (u, v) = places[first], places[second]
        axes.plot([x, u], [y, v], color="0.45", linewidth=0.2 + 1.3 * size / most, zorder=1)
    for hub, (x, y) in places.items():
        axes.plot([x], [y], marker="o" if hub >= 0 else "s", color="C0" if hub >= 0 else "C1", markersize=4, zorder=2)
        if len(places) <= _MOST_NAMES:
            name = str(hub) if hub >= 0 else hub_name(hub)
            axes.annotate(name, (1.1 * x, 1.1 * y), ha="center", va="center", fontsize=6, zorder=3)
    axes.set_aspect("equal")
    axes.margins(0.12)
    axes.set_axis_off()


def _places(hubs: list[int]) -> dict[int, tuple[float, float]]:
    """Return hubs' places: clients on the unit circle, edge servers on one of half its radius, the server amid."""
    places = {SERVER: (0.0, 0.0)} if SERVER in hubs else {}
    for radius, ring in ((1.0, [hub for hub in hubs if hub >= 0]), (0.5, [hub for hub in hubs if hub < SERVER][::-1])):
        for number, hub in enumerate(ring):
            angle = math.pi / 2 - 2 * math.pi * number / len(ring)
            places[hub] = (radius * math.cos(angle), radius * math.sin(angle))
    return places
