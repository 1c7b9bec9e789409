"""Parallel coordinates: what varies between settings, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsweep.figures.style import INK, Look
from fedsweep.reports.charts import HEIGHT, SYMBOLS, Chart, drawn, plain, wrapped
from fedsweep.results.config_table import ConfigTable, short_keys
from fedsweep.results.seed_statistics import number_in
from fedsweep.results.settings import Setting
from fedsweep.results.texts import bytes_text, seconds_text
from fedsweep.results.view import SPENT
from fedsweep.results.worlds import Study

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

_NONE = "(none)"
# Up to so many values stand at even distances.
_FEW_VALUES, _MOST_AXES, _LONGEST_TICK = 8, 12, 16


# An axis of parallel coordinates: a height 0..1 for each setting, the ticks, and each setting's value in words.
_Axis = tuple[list[float | None], list[tuple[float, str]], list[str]]


def parallel_chart(study: Study, looks: Sequence[Look], configs: ConfigTable) -> Chart | None:
    """Draw a line for each setting through varied keys and outcomes; None where nothing varies. Looks are of rows.

    Plotly's own parallel coordinates need WebGL and a page that may compile scripts; lines on one plane do not.
    """
    settings, row_of = study.settings, study.layout.row_of
    if len(settings) < 2 or not configs.differing:
        return None
    axes = _axes(settings, configs)
    last = len(axes) - 1
    return Chart(
        describe="What varies between settings, and what came of it; the table below has the same",
        **drawn(
            [
                _line(axes, place, setting, looks[row_of[place]], row=row_of[place])
                for place, setting in enumerate(settings)
            ],
            x={
                "tickvals": list(range(len(axes))),
                "ticktext": [plain(_cut(name)) for name in axes],
                "range": [-0.05 * last, 1.05 * last],
                "ticklabeloverflow": "allow",
                "gridcolor": INK,
            },
            y={"visible": False, "range": [-0.06, 1.1]},
            hovermode="closest",
            height=HEIGHT - 60,
            annotations=[
                _tick(place, height, text, is_last=place == last)
                for place, (_, ticks, _) in enumerate(axes.values())
                for height, text in ticks
            ],
        ),
    )


def _axes(settings: Sequence[Setting], configs: ConfigTable) -> dict[str, _Axis]:
    """By name: what varies, then what came of it, as far as it was measured."""
    columns = dict(zip(configs.differing, zip(*configs.cells, strict=True), strict=True))
    keys = configs.telling[:_MOST_AXES]
    ends = {
        "bytes": _range_axis([s.figure("total_bytes") for s in settings], bytes_text),
        "simulated time": _range_axis([s.figure("sim_time_s") for s in settings], seconds_text),
        **{
            title: _range_axis([s.figure(name) for s in settings], lambda value: f"{value:.4g}")
            for name, title in SPENT.items()
        },
        "test accuracy": _range_axis(
            [s.figure("test_accuracy") for s in settings], lambda share: f"{100 * share:.2f} %"
        ),
    }
    varying = {name: _values_axis(columns[key]) for key, name in short_keys(keys).items()}
    return varying | {name: axis for name, axis in ends.items() if axis[1]}


def _line(axes: Mapping[str, _Axis], place: int, setting: Setting, look: Look, *, row: int) -> Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        name=wrapped(setting.label),
        mode="lines+markers",
        x=list(range(len(axes))),
        y=[heights[place] for heights, _, _ in axes.values()],
        text=[wrapped(f"{name}: {texts[place]}") for name, (_, _, texts) in axes.items()],
        line={"color": look.colour, "width": 1.8},
        marker={"color": look.colour, "symbol": SYMBOLS[look.marker][0], "size": 8},
        hovertemplate="%{fullData.name}<br>%{text}<extra></extra>",
        meta={"label": setting.label, "setting": row, "kind": "both"},
    )


def _tick(place: int, height: float, text: str, *, is_last: bool) -> dict[str, Any]:
    return {
        "x": place,
        "y": height,
        "text": plain(_cut(text)),
        "showarrow": False,
        "font": {"size": 11},
        "bgcolor": "rgba(255,255,255,0.75)",
        "xanchor": "right" if is_last else "left",
        "xshift": -9 if is_last else 9,
        "yshift": 9,
    }


def _values_axis(texts: Sequence[str]) -> _Axis:
    """Few values stand at even distances, in their order; many numbers where they belong."""
    numbers = [number_in(text) for text in texts]
    distinct = sorted({*texts}, key=lambda text: (number_in(text) is None, number_in(text) or 0.0, text))
    if len(distinct) > _FEW_VALUES and None not in numbers:
        return _range_axis(numbers, lambda value: f"{value:.4g}")
    height = {text: place / max(1, len(distinct) - 1) for place, text in enumerate(distinct)}
    every = -(-len(distinct) // (2 * _FEW_VALUES))
    ticks = [(height[text], text or _NONE) for text in distinct[::every]]
    return [height[text] for text in texts], ticks, [text or _NONE for text in texts]


def _range_axis(values: Sequence[float | None], words: Callable[[float], str]) -> _Axis:
    present = [value for value in values if value is not None]
    low, high = (min(present), max(present)) if present else (0.0, 0.0)
    heights = [None if v is None else round((v - low) / (high - low), 4) if high > low else 0.5 for v in values]
    ends = {0.0: words(low), 1.0: words(high)} if high > low else {0.5: words(low)} if present else {}
    return heights, list(ends.items()), [words(value) if value is not None else "-" for value in values]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TICK else f"{text[: _LONGEST_TICK - 1]}…"
