"""Charts of settings and runs: learning curves, accuracy against communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsweep.figures.style import INK, Look
from fedsweep.reports.charts import FEW_TICKS, PERCENT, SENT, SYMBOLS, Chart, drawn, wrapped
from fedsweep.results.curves import FIGURES, Curve, short, thinned
from fedsweep.results.pareto import pareto_front, unsure_steps
from fedsweep.results.seed_statistics import Estimate
from fedsweep.results.settings import ReportRun, Setting
from fedsweep.results.texts import bytes_text

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

# Points of all curves on a page, and the bounds for a single one.
_POINTS, _FEWEST, _MOST = 30_000, 24, 400
_BANDS = 3  # more of them, on top of one another, are one brown
_MARKS = 10
_SPENT: Mapping[str, Mapping[str, Any]] = {
    "round": {"title": {"text": "round"}},
    "bytes": SENT,
    "simulated time": {"title": {"text": "simulated time (s)"}, "tickformat": "~g", "hoverformat": ".4~g"},
}
_HINT = "Lines are means over the seeds, as far as all went; bands are one sample standard deviation each way."
_MEANS, _RUNS, _ALWAYS = "mean", "run", "both"


def curve_chart(runs: Sequence[ReportRun], settings: Sequence[Setting], looks: Sequence[Look]) -> Chart | None:
    """Figures by round, bytes or time: means over seeds with bands, or each run; None where nothing was measured."""
    names = [name for name in FIGURES if any(name in run.curve.figures for run in runs)]
    if not names:
        return None
    lines = [line for place, setting in enumerate(settings) for line in _lines(runs, place, setting, looks[place])]
    points = max(_FEWEST, min(_MOST, _POINTS // max(1, len({id(curve) for _, curve, _ in lines}))))
    kept = {id(curve): thinned(curve, points=points) for _, curve, _ in lines}

    def columns(part: str, name: str) -> list[list[Any]]:
        found = [(_column(curve, part, name, end=end), kept[id(curve)]) for _, curve, end in lines]
        return [[_short(cells[p]) for p in places] if cells else [] for cells, places in found]

    last = max((run.curve.rounds[-1] for run in runs if run.curve.rounds), default=0)
    dticks = {"round": 1 if last <= FEW_TICKS else None}
    is_timed = any(value is not None for run in runs for value in run.curve.sim_time_s)
    against = ["round", "bytes", *(["simulated time"] if is_timed else [])]
    has_bands = any(end != "line" for _, _, end in lines)
    return Chart(
        describe="Learning curves; the figures stand in the tables",
        **drawn([trace for trace, _, _ in lines], x={}, y={}, hovermode="x unified", hoverdistance=60),
        choices={
            "figure": [_of_figure(name, columns("figure", name), columns("ends", name)) for name in names],
            "against": [
                {
                    "label": name,
                    "data": {"x": columns("x", name)},
                    "layout": _axis("xaxis", _SPENT[name], dtick=dticks.get(name)),
                }
                for name in against
            ],
            "scale": [
                {"label": "linear", "layout": {"xaxis.type": "linear"}},
                {"label": "logarithmic", "layout": {"xaxis.type": "log", "xaxis.dtick": None}},
            ],
            **({"lines": _kinds(len(settings))} if has_bands or len(runs) > len(settings) else {}),
        },
        hint=_HINT if has_bands else "",
    )


def _lines(runs: Sequence[ReportRun], place: int, setting: Setting, look: Look) -> Iterator[tuple[Scatter, Curve, str]]:
    """Traces without figures, with the curve and its part that they show: ``line``, ``low``, ``high``."""
    seeds = len(setting.counted)
    if setting.curve is not None and len(setting.runs) > 1:
        name = setting.label + (f", mean of {seeds} seeds" if seeds > 1 else "")
        for end, sign in (("low", "-"), ("high", "+")) if setting.curve.low else ():
            meta = _meta(f"{setting.label}, mean {sign} sd", place, "band")
            yield _edge(look, meta=meta, fill=end == "high"), setting.curve, end
        yield _line(setting.label, look, meta=_meta(name, place, _MEANS)), setting.curve, "line"
    for index in setting.runs:
        run = runs[index]
        kind = _RUNS if len(setting.runs) > 1 else _ALWAYS
        if run.curve.figures:
            name = run_name(run, is_one_of_many=kind == _RUNS)
            yield _line(name, look, meta=_meta(name, place, kind), thin=kind == _RUNS), run.curve, "line"


def run_name(run: ReportRun, *, is_one_of_many: bool) -> str:
    """What a run is called beside others; with its seed where it is one of many of its setting."""
    seed = f", seed {run.view.seed}" if is_one_of_many else ""
    return run.label + seed + ("" if run.status == "finished" else f" ({run.status})")


def _meta(label: str, setting: int, kind: str) -> dict[str, Any]:
    return {"label": label, "setting": setting, "kind": kind}


def _line(name: str, look: Look, *, meta: Mapping[str, Any], thin: bool = False) -> Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        name=wrapped(name),
        mode="lines+markers",
        line={"color": look.colour, "width": 1.2 if thin else 2},
        marker={
            "color": look.colour,
            "symbol": SYMBOLS[look.marker][0],
            "size": 5 if thin else 7,
            "maxdisplayed": _MARKS,
        },
        connectgaps=True,
        meta=dict(meta),
    )


def _edge(look: Look, *, meta: Mapping[str, Any], fill: bool = False) -> Scatter:
    import plotly.graph_objects as go

    red, green, blue = (int(look.colour[place : place + 2], 16) for place in (1, 3, 5))
    filled = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.15)"} if fill else {}
    return go.Scatter(
        mode="lines",
        line={"color": look.colour, "width": 0},
        connectgaps=True,
        hoverinfo="skip",
        showlegend=False,
        meta=dict(meta),
        **filled,
    )


def _column(curve: Curve, part: str, name: str, *, end: str) -> Sequence[Any] | None:
    """Of a curve, or of an end of its band: its places on an axis (``x``), a ``figure``, or both ``ends`` of a band."""
    if part == "x":
        return {"round": curve.rounds, "bytes": curve.total_bytes, "simulated time": curve.sim_time_s}[name]
    if part == "figure":
        return {"line": curve.figures, "low": curve.low, "high": curve.high}[end].get(name)
    return list(zip(curve.low[name], curve.high[name], strict=True)) if end == "line" and name in curve.low else None


def _short(cell: Any) -> Any:
    return [short(value) for value in cell] if isinstance(cell, tuple) else short(cell)


def _of_figure(name: str, values: Sequence[Any], ends: Sequence[Any]) -> dict[str, Any]:
    """What choosing a figure changes."""
    is_share = name.endswith("accuracy")
    form = ".2%" if is_share else ".4~g"
    band = f" (%{{customdata[0]:{form}}} to %{{customdata[1]:{form}}})"
    texts = [f"%{{y:{form}}}{band if both else ''}<extra>%{{fullData.name}}</extra>" for both in ends]
    style = PERCENT if is_share else {"tickformat": "~g", "hoverformat": ".4~g"}
    return {
        "label": FIGURES[name],
        "data": {"y": values, "customdata": ends, "hovertemplate": texts},
        "layout": _axis("yaxis", {"title": {"text": FIGURES[name]}, **style}),
    }


def _axis(axis: str, style: Mapping[str, Any], *, dtick: int | None = None) -> dict[str, Any]:
    """An axis' style by dotted key; what another choice left is overwritten."""
    whole = {"tickformat": "", "hoverformat": "", "dtick": dtick, **style}
    title = whole.pop("title")["text"]
    return {f"{axis}.title.text": title, f"{axis}.uirevision": title, **{f"{axis}.{k}": v for k, v in whole.items()}}


def _kinds(num_settings: int) -> list[dict[str, Any]]:
    options = [
        {"label": "means, bands of ± 1 sd", "show": [_ALWAYS, _MEANS, "band"]},
        {"label": "means over seeds", "show": [_ALWAYS, _MEANS]},
        {"label": "each run", "show": [_ALWAYS, _RUNS]},
    ]
    return options if num_settings <= _BANDS else [options[1], options[0], options[2]]


def front_chart(
    runs: Sequence[ReportRun],
    settings: Sequence[Setting],
    looks: Sequence[Look],
    accuracies: Sequence[Estimate],
) -> Chart | None:
    """Test accuracy against bytes with the Pareto front, by setting or by run; None where nothing was measured.

    Points off the front are hollow, and so are means on it that the cheaper neighbour's seeds don't tell apart; faint
    are those that did not finish. Runs that failed have no point.
    """
    has_seeds = len(runs) > len(settings)
    means = [
        end
        for place, s in enumerate(settings)
        for end in _end(s.label, place, _MEANS, s.figure, faint=all(runs[i].status != "finished" for i in s.counted))
    ]
    ends = [
        end
        for place, setting in enumerate(settings)
        for run in (runs[i] for i in setting.runs)
        if has_seeds and run.status != "failed"
        for end in _end(
            run_name(run, is_one_of_many=True), place, _RUNS, run.view.figure, faint=run.status != "finished"
        )
    ]
    shown = means, ends
    traces = [trace for group in shown for trace in _with_front(group, looks, accuracies)]
    sent = [end.cost for group in shown for end in group]
    if not sent:
        return None
    is_wide = max(sent) > 4 * min(sent)
    # A short axis: Plotly would write 2 and 5 for 20 and 50 million.
    scale = {"type": "log", "dtick": "D2" if max(sent) < 50 * min(sent) else 1} if is_wide else {}
    y = {"title": {"text": "test accuracy"}, **PERCENT}
    options = [("means over seeds, 95 % intervals", _MEANS), ("each run", _RUNS)]
    return Chart(
        describe="Test accuracy against bytes sent, with the Pareto front; the front stands in the table below",
        **drawn(traces, x={**SENT, **scale}, y=y, hovermode="closest"),
        choices={"points": [{"label": label, "show": [kind]} for label, kind in options]} if has_seeds else {},
    )


@dataclass(frozen=True, kw_only=True)
class _End:
    """Where a run or the mean of a setting ended."""

    label: str
    setting: int
    kind: str
    cost: float
    accuracy: float
    faint: bool


def _end(label: str, setting: int, kind: str, figure: Callable[[str], float | None], *, faint: bool) -> Iterator[_End]:
    """Nothing where it sent nothing or was not tested."""
    cost, accuracy = figure("total_bytes"), figure("test_accuracy")
    if cost and accuracy is not None:
        yield _End(label=label, setting=setting, kind=kind, cost=cost, accuracy=accuracy, faint=faint)


def _with_front(ends: Sequence[_End], looks: Sequence[Look], accuracies: Sequence[Estimate]) -> Iterator[Scatter]:
    front = [ends[place] for place in pareto_front([(end.cost, end.accuracy) for end in ends])]
    if not front:
        return
    yield _front_line(front)
    has_intervals = front[0].kind == _MEANS
    steps = unsure_steps([end.setting for end in front], accuracies) if has_intervals else []
    doubtful = {dearer for _, dearer in steps}
    for end in ends:
        hollow = end not in front or end.setting in doubtful
        yield _point(end, looks[end.setting], hollow=hollow, error=accuracies[end.setting] if has_intervals else None)


def _point(end: _End, look: Look, *, hollow: bool, error: Estimate | None) -> Scatter:
    import plotly.graph_objects as go

    known = error is not None and not math.isnan(error.low)
    text = f"{100 * end.accuracy:.2f} %, {bytes_text(end.cost)}"
    if error is not None and known:
        text += f"<br>95 % interval {100 * error.low:.2f} to {100 * error.high:.2f} %, {error.count} seeds"
    symbol = SYMBOLS[look.marker][0] + ("-open" if hollow else "")
    edge = {"width": 1.5, "color": look.colour if hollow else "#FFFFFF"}
    return go.Scatter(
        name=wrapped(end.label),
        mode="markers",
        opacity=0.4 if end.faint else 1.0,
        x=[short(end.cost)],
        y=[short(end.accuracy)],
        marker={"color": look.colour, "size": 11, "symbol": symbol, "line": edge},
        error_y={
            "array": [error.high - error.mean],
            "arrayminus": [error.mean - error.low],
            "color": look.colour,
            "thickness": 1.2,
        }
        if error is not None and known
        else None,
        text=text,
        hovertemplate="%{fullData.name}<br>%{text}<extra></extra>",
        meta=_meta(end.label, end.setting, end.kind),
    )


def _front_line(front: Sequence[_End]) -> Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        name="Pareto front",
        mode="lines",
        x=[short(end.cost) for end in front],
        y=[short(end.accuracy) for end in front],
        line={"color": INK, "width": 1, "dash": "dot", "shape": "hv"},
        hoverinfo="skip",
        meta={"label": "Pareto front", "setting": None, "kind": front[0].kind},
    )
