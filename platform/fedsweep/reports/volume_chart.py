"""Charts of what studies' fronts cover for what the studies sent, from the sweeps' summaries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsweep.bounded import MOST_DOCUMENT_BYTES, parse_json, read_regular
from fedsweep.errors import InputError
from fedsweep.figures.style import INK
from fedsweep.reports.charts import PERCENT, SENT, Chart, drawn, in_panels
from fedsweep.reports.sweep_table import is_outdated
from fedsweep.results.texts import clean, some_of
from fedsweep.sweeps.sweep_folder import SUMMARY

_MOST_PANELS, _MOST_PLACES, _NAMED = 12, 1000, 3
_HINT = (
    "What the trials' fronts cover of the box that their points span, once the study has sent so much at each seed: the"
    " line is the mean over seeds, the band its 95 % interval. Where it is flat, further trials told nothing."
)


def volume_charts(sweeps: Sequence[Path]) -> dict[str, Chart]:
    """Return a chart for each front of the sweeps: hypervolume over bytes sent by the study, with its interval.

    A summary without fronts, one that is older than its sweep's trials, or that can't be read, gives none.
    """
    charts = [(folder.name, *front) for folder in sweeps for front in _read_fronts(folder)][:_MOST_PANELS]
    many = len(charts) > 1
    panels = [
        (clean(f"{name}: {who}" if many else who), _chart(places, who=clean(who), hint="" if n else _HINT))
        for n, (name, who, places) in enumerate(charts)
    ]
    return in_panels("volume", panels) if panels else {}


def _read_fronts(folder: Path) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Yield which settings each front of a sweep is of, and its places: bytes, mean and, over seeds, both ends."""
    try:
        tree = parse_json(read_regular(folder / SUMMARY, max_bytes=MOST_DOCUMENT_BYTES))
        if is_outdated(folder, tree.get("trials")):
            return
        for front in tree.get("fronts", ()):
            names = some_of([str(name) for name in front["among"]], _NAMED)
            places = [_place(row) for row in front["by_bytes"][:_MOST_PLACES]]
            if len(places) > 1:
                yield names, places
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return


def _place(row: Mapping[str, Any]) -> dict[str, float]:
    place = {name: float(row[name]) for name in ("bytes", "mean", "low", "high") if row[name] is not None}
    if not all(map(math.isfinite, place.values())) or not {"bytes", "mean"} <= place.keys():
        raise ValueError("a front's places are numbers")
    return place


def _chart(places: Sequence[Mapping[str, float]], *, who: str, hint: str) -> Chart:
    import plotly.graph_objects as go

    def trace(figure: str, label: str, **how: Any) -> go.Scatter:
        own = [place for place in places if figure in place]
        return go.Scatter(
            x=[0.0, *(place["bytes"] for place in own)],
            y=[0.0, *(place[figure] for place in own)],
            mode="lines",
            meta={"label": label, "setting": None, "kind": "both"},
            **how,
        )

    is_over_seeds = all("low" in place for place in places)
    # The volume grows where a trial ends.
    edge: dict[str, Any] = {"line": {"color": INK, "width": 0, "shape": "hv"}, "hoverinfo": "skip"}
    band = [
        trace("low", "lower end", **edge),
        trace("high", "upper end", fill="tonexty", fillcolor="rgba(120,120,120,0.2)", **edge),
    ]
    line = trace("mean", "hypervolume", name="hypervolume", line={"color": INK, "width": 2, "shape": "hv"})
    return Chart(
        describe=f"Hypervolume of the front over the bytes that the study sent, of {who}",
        hint=hint,
        **drawn(
            [*(band if is_over_seeds else []), line],
            x={**SENT, "title": {"text": "bytes sent by the study at each seed"}},
            y={**PERCENT, "title": {"text": "hypervolume"}, "rangemode": "tozero"},
            hovermode="x unified",
        ),
    )
