"""Common parts of a report's charts: how Plotly is told to draw them, and how they stand on the page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsweep.figures.style import GRID, INK

# Plotly's symbol and the character for it in text, by the marker's name in matplotlib.
SYMBOLS: Mapping[str, tuple[str, str]] = {
    "o": ("circle", "●"),
    "s": ("square", "■"),
    "^": ("triangle-up", "▲"),
    "D": ("diamond", "◆"),
    "v": ("triangle-down", "▼"),
    "P": ("cross", "✚"),
    "X": ("x", "✖"),
    "*": ("star", "★"),
    "<": ("triangle-left", "◀"),
    ">": ("triangle-right", "▶"),
    "h": ("hexagon", "⬢"),
}
HEIGHT = 420
_LINE = 34
# Of so many whole numbers each has its tick; Plotly would put halves between them.
FEW_TICKS = 12
SENT = {"title": {"text": "bytes sent, both ways"}, "tickformat": "~s", "hoverformat": ".4~s", "ticksuffix": "B"}
PERCENT = {"tickformat": ".4~p", "hoverformat": ".2%"}
_TITLE = {"standoff": 8}
_AXIS = {"gridcolor": GRID, "linecolor": GRID, "zeroline": False, "automargin": True, "title": _TITLE}
_LAYOUT: Mapping[str, Any] = {
    "margin": {"l": 8, "r": 12, "t": 28, "b": 8},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
    "hoverlabel": {"namelength": -1, "bgcolor": "#FFFFFF", "font": {"size": 12}},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#999999", "activecolor": INK},
    "showlegend": False,
    "legend": {"traceorder": "normal"},
    "uirevision": "kept",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of the page.

    Attributes:
        title: Its heading; empty where the section's says it all.
        describe: What it shows, for those who don't see it.
        data: Plotly's traces. A trace's ``meta`` has its ``label`` as it was given, its ``setting``, with which it is
            hidden, and its ``kind``, by which choices show it.
        layout: Plotly's layout.
        choices: By name, what a reader may choose: each option has a ``label`` and what it changes: ``data``, a value
            for each trace by key, ``layout``, values by dotted key, ``show``, the kinds of traces that are drawn.
        key: Colours and what they mean, where the chart itself does not say it.
        hint: What a reader must know.
        group: The name under which panels share their choices; empty for a chart of its own.
    """

    title: str = ""
    describe: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    choices: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    key: Sequence[tuple[str, str]] = ()
    hint: str = ""
    group: str = ""

    def tree(self) -> dict[str, Any]:
        """As the page's script reads it."""
        return {"data": self.data, "layout": self.layout, "choices": self.choices, "group": self.group}


def drawn(
    traces: Sequence[Any], *, x: Mapping[str, Any], y: Mapping[str, Any], height: int = HEIGHT, **layout: Any
) -> dict[str, Any]:
    """Plotly's traces and their layout, ``height`` in pixels, as the page reads them: ``data`` and ``layout``."""
    import plotly.graph_objects as go

    figure = go.Figure(data=list(traces), layout={"height": height, **_LAYOUT, **layout})
    figure.update_xaxes(**_AXIS).update_xaxes(**x)
    figure.update_yaxes(**_AXIS).update_yaxes(**y)
    tree: dict[str, Any] = figure.to_plotly_json()
    tree["layout"].pop("template", None)  # thousands of characters that nothing here refers to
    return {"data": tree["data"], "layout": tree["layout"]}


def in_panels(group: str, panels: Sequence[tuple[str, Chart]]) -> dict[str, Chart]:
    """Charts by name: a single one has the group's; of several each has its title, and they share their choices."""
    if len(panels) == 1:
        return {group: replace(panels[0][1], group=group)}
    return {f"{group}-{n}": replace(chart, title=title, group=group) for n, (title, chart) in enumerate(panels, 1)}


def shared_range(values: Iterable[float | None]) -> list[float] | None:
    """Return the ends of an axis for panels that are compared; None without two different values."""
    present = [value for value in values if value is not None]
    low, high = min(present, default=0.0), max(present, default=0.0)
    margin = 0.04 * (high - low)
    return [low - margin, high + margin] if high > low else None


def plain(text: str) -> str:
    """Return foreign text as Plotly's labels show it letter by letter: in them it reads tags, entities and ``%{}``."""
    return html.escape(text, quote=False).replace("%{", "&#37;{")


def wrapped(text: str) -> str:
    """:func:`plain`, in lines that leave room for figures and may end after commas: Plotly breaks none itself."""
    lines = [""]
    for word in re.findall(r"[^\s,]*[\s,]*", text):
        if lines[-1] and word and len(lines[-1]) + len(word) > _LINE:
            lines.append("")
        lines[-1] += word
    pieces = [line[place : place + _LINE] for line in lines for place in range(0, max(1, len(line)), _LINE)]
    return "<br>".join(map(plain, pieces))


def map_chart(
    z: Sequence[Sequence[int | None]],
    heat: Mapping[str, Any],
    *,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    words: Sequence[str] = (),
    **texts: Any,
) -> Chart:
    """Make a map of cells.

    Args:
        z: A number for each cell, row by row from the top; None where there is nothing to say of it.
        heat: What Plotly's heatmap is told of colours, of the numbers with the last and (if not 0) with the first of
            them, and of what is said of a cell.
        x: The axis below, as :func:`ids` gives it.
        y: The axis beside; it may have ticks of its own.
        words: A word for each number from 0 on; the page's script puts them where Plotly looks for a cell's text.
        texts: ``title``, ``describe``, ``hint`` and ``key`` of the chart.
    """
    tall = max(3, min(18, 340 // max(1, len(z)), int(max(1100 / max(1, len(x["ids"])), 5))))
    # By hand: a page of a large study has hundreds of maps, and Plotly's own check of each takes most of the time.
    cells = {
        "type": "heatmap",
        "z": z,
        "x": x["ids"],
        "y": y["ids"],
        "showscale": False,
        "xgap": 1 if len(x["ids"]) <= 60 else 0,
        "ygap": 1 if tall > 6 else 0,
        "hoverongaps": False,
        "meta": {"label": texts["title"], "words": list(words)},
        "zmin": 0,
        **heat,
    }
    layout = {
        "height": tall * len(z) + 80,
        **_LAYOUT,
        "hovermode": "closest",
        "xaxis": _map_axis(x),
        "yaxis": {**_map_axis(y), "autorange": "reversed"},
    }
    return Chart(data=[cells], layout=layout, **texts)


def _map_axis(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an axis of :func:`ids` as Plotly reads it."""
    settings = {name: value for name, value in own.items() if name not in ("ids", "title") and value is not None}
    return {**_AXIS, **settings, "title": {**_TITLE, **own.get("title", {})}, "showgrid": False}


def ids(name: str, count: int, each: int, *, first: int = 0) -> dict[str, Any]:
    """Make an axis of ``count`` whole numbers, of which ``each`` share a cell: Plotly's settings, and ``ids``."""
    shared = f" ({each} to a cell, by the first)" if each > 1 else ""
    return {
        "title": {"text": name + shared},
        "ids": list(range(first, first + count, each)),
        "dtick": 1 if count <= FEW_TICKS else None,
    }


def span(place: int, each: int, count: int) -> str:
    """Those of ``count`` numbers that the cell at a place holds: ``7``, or ``14 to 15`` where several share one."""
    return str(place) if each == 1 else f"{place * each} to {min(count, (place + 1) * each) - 1}"


def tint(colour: str, share: float) -> str:
    """Return a colour ``#RRGGBB`` thinned out with white, so that a share of it is left, 0..1."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * share):02X}" for part in parts)
