"""Charts of settings and runs: learning curves, accuracy against communication."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedsweep.figures.style import INK, Look
from fedsweep.reports.charts import FEW_TICKS, PERCENT, SENT, SYMBOLS, Chart, drawn, in_panels, shared_range, wrapped
from fedsweep.reports.world_parts import WorldPart, tested_accuracies
from fedsweep.results.curves import Curve, FigureTitle, figure_titles, short, thinned
from fedsweep.results.pareto import curve_front
from fedsweep.results.seed_statistics import Estimate, estimate
from fedsweep.results.settings import ReportRun
from fedsweep.results.texts import bytes_text
from fedsweep.results.view import SPENT, metrics_of, spent_of
from fedsweep.results.worlds import Study, World

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
    **{title: {"title": {"text": title}, "tickformat": "~g", "hoverformat": ".4~g"} for title in SPENT.values()},
}
_HINT = "Lines are means over the seeds, as far as all went; bands are one sample standard deviation each way."
_MEANS, _RUNS, _ALWAYS = "mean", "run", "both"
_SCALES = (
    {"label": "linear", "layout": {"xaxis.type": "linear"}},
    {"label": "logarithmic", "layout": {"xaxis.type": "log", "xaxis.dtick": None}},
)
# Worlds that a page draws; its tables have all of them.
MOST_PANELS = 12


def curve_charts(study: Study, looks: Sequence[Look]) -> dict[str, Chart]:
    """Return figures by round, bytes or time, a panel per world: means over seeds with bands, or each run.

    Args:
        study: Runs and settings.
        looks: Of each row.

    Returns:
        By name; none where nothing was measured.
    """
    runs, worlds = study.runs, study.layout.worlds[:MOST_PANELS]
    titles = figure_titles(metrics_of((run.view for run in runs), by_client=True))
    names = {name: how for name, how in titles.items() if any(name in run.curve.figures for run in runs)}
    if not names:
        return {}
    lines = [[line for row in world.cells for line in _lines(study, world, row, looks[row])] for world in worlds]
    points = max(_FEWEST, min(_MOST, _POINTS // max(1, len({id(curve) for own in lines for _, curve, _ in own}))))
    columns = _Columns(lines=lines, points=points)
    ranges = {name: shared_range(columns.values(name)) if len(worlds) > 1 else None for name in names}
    last = max((run.curve.rounds[-1] for run in runs if run.curve.rounds), default=0)
    dticks = {"round": 1 if last <= FEW_TICKS else None}
    timed = ["simulated time"] if any(value is not None for run in runs for value in run.curve.sim_time_s) else []
    against = ["round", "bytes", *timed, *spent_of(run.view for run in runs).values()]
    has_bands = any(end != "line" for own in lines for _, _, end in own)
    has_kinds = has_bands or len(runs) > len(study.settings)
    panels = [
        Chart(
            describe=f"Learning curves {world.label}; the figures stand in the tables".replace(" ;", ";"),
            **drawn([trace for trace, _, _ in own], x={}, y={}, hovermode="x unified", hoverdistance=60),
            choices={
                "figure": [
                    _of_figure(how, columns.of(own, "figure", name), columns.of(own, "ends", name), span=ranges[name])
                    for name, how in names.items()
                ],
                "against": [
                    {
                        "label": name,
                        "data": {"x": columns.of(own, "x", name)},
                        "layout": _axis("xaxis", _SPENT[name], dtick=dticks.get(name)),
                    }
                    for name in against
                ],
                "scale": _SCALES,
                **({"lines": _kinds(len(world.cells))} if has_kinds else {}),
            },
            hint=_HINT if has_bands and world is worlds[-1] else "",
        )
        for world, own in zip(worlds, lines, strict=True)
    ]
    return in_panels("curves", [(world.label, panel) for world, panel in zip(worlds, panels, strict=True)])


# A trace without figures, with the curve and its part that it shows: ``line``, ``low``, ``high``.
_Trace = tuple[Any, Curve, str]


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Figures of traces, of each curve at most so many points.

    Attributes:
        lines: Traces of all panels.
        points: See :func:`~fedsweep.results.curves.thinned`.
    """

    lines: Sequence[Sequence[_Trace]]
    points: int

    @cached_property
    def _kept(self) -> Mapping[int, list[int]]:
        return {id(curve): thinned(curve, points=self.points) for own in self.lines for _, curve, _ in own}

    def of(self, lines: Sequence[_Trace], part: str, name: str) -> list[list[Any]]:
        """Return the cells of each trace; see :func:`_column`."""
        columns = [(_column(curve, part, name, end=end), self._kept[id(curve)]) for _, curve, end in lines]
        return [[_short(cells[p]) for p in places] if cells else [] for cells, places in columns]

    def values(self, name: str) -> list[float | None]:
        """Return all values of a figure, in all panels."""
        return [value for own in self.lines for cells in self.of(own, "figure", name) for value in cells]


def _lines(study: Study, world: World, row: int, look: Look) -> Iterator[_Trace]:
    """Yield traces of a row in a world."""
    setting = study.settings[world.cells[row]]
    seeds = len(setting.counted)
    if setting.curve is not None and len(setting.runs) > 1:
        name = setting.label + (f", mean of {seeds} seeds" if seeds > 1 else "")
        for end, sign in (("low", "-"), ("high", "+")) if setting.curve.low else ():
            meta = _meta(f"{setting.label}, mean {sign} sd", row, "band")
            yield _edge(look, meta=meta, fill=end == "high"), setting.curve, end
        yield _line(setting.label, look, meta=_meta(name, row, _MEANS)), setting.curve, "line"
    for run in (study.runs[index] for index in setting.runs):
        kind = _RUNS if len(setting.runs) > 1 else _ALWAYS
        if run.curve.figures:
            name = run_name(run, is_one_of_many=kind == _RUNS)
            yield _line(name, look, meta=_meta(name, row, kind), thin=kind == _RUNS), run.curve, "line"


def run_name(run: ReportRun, *, is_one_of_many: bool) -> str:
    """Name a run beside others; with its seed where it is one of many of its setting."""
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
        spent = {title: curve.spent.get(figure) for figure, title in SPENT.items()}
        return {"round": curve.rounds, "bytes": curve.total_bytes, "simulated time": curve.sim_time_s, **spent}[name]
    if part == "figure":
        return {"line": curve.figures, "low": curve.low, "high": curve.high}[end].get(name)
    return list(zip(curve.low[name], curve.high[name], strict=True)) if end == "line" and name in curve.low else None


def _short(cell: Any) -> Any:
    return [short(value) for value in cell] if isinstance(cell, tuple) else short(cell)


def _of_figure(
    figure: FigureTitle, values: Sequence[Any], ends: Sequence[Any], *, span: Sequence[float] | None
) -> dict[str, Any]:
    """Return the change that choosing a figure makes; ``span`` are the ends of the axis, None: as the values are."""
    form = ".2%" if figure.is_share else ".4~g"
    band = f" (%{{customdata[0]:{form}}} to %{{customdata[1]:{form}}})"
    texts = [f"%{{y:{form}}}{band if both else ''}<extra>%{{fullData.name}}</extra>" for both in ends]
    style = PERCENT if figure.is_share else {"tickformat": "~g", "hoverformat": ".4~g"}
    return {
        "label": figure.text,
        "data": {"y": values, "customdata": ends, "hovertemplate": texts},
        "layout": _axis("yaxis", {"title": {"text": figure.text}, **style, **({"range": span} if span else {})}),
    }


def _axis(axis: str, style: Mapping[str, Any], *, dtick: int | None = None) -> dict[str, Any]:
    """Return an axis' style by dotted key; what another choice left is overwritten."""
    whole = {"tickformat": "", "hoverformat": "", "ticksuffix": "", "dtick": dtick, **style}
    title = whole.pop("title")["text"]
    return {f"{axis}.title.text": title, f"{axis}.uirevision": title, **{f"{axis}.{k}": v for k, v in whole.items()}}


def _kinds(num_settings: int) -> list[dict[str, Any]]:
    options = [
        {"label": "means, bands of ± 1 sd", "show": [_ALWAYS, _MEANS, "band"]},
        {"label": "means over seeds", "show": [_ALWAYS, _MEANS]},
        {"label": "each run", "show": [_ALWAYS, _RUNS]},
    ]
    return options if num_settings <= _BANDS else [options[1], options[0], options[2]]


def front_charts(study: Study, looks: Sequence[Look], parts: Sequence[WorldPart]) -> dict[str, Chart]:
    """Test accuracy against bytes with the Pareto front of all tested rounds, a panel per world, by setting or by run.

    Ends off the front are hollow, and so are means on it that the cheaper neighbour's seeds don't tell apart; faint are
    those that did not finish. Runs that failed have no point.

    Args:
        study: Runs and settings.
        looks: Of each row.
        parts: The worlds.

    Returns:
        By name; none where nothing was measured.
    """
    has_seeds = len(study.runs) > len(study.settings)
    shown = [
        (part, groups)
        for part in parts[:MOST_PANELS]
        if any(groups := [_means(study, part.world), _each_run(study, part.world) if has_seeds else []])
    ]
    span = shared_range(a for _, groups in shown for group in groups for end in group for _, a in end.curve)
    y = {"title": {"text": "test accuracy"}, **PERCENT, **({"range": span} if span and len(shown) > 1 else {})}
    options = [("means over seeds, 95 % intervals", _MEANS), ("each run", _RUNS)]
    panels = [
        Chart(
            describe=f"Test accuracy against bytes sent, with the Pareto front {part.world.label}".strip(),
            **drawn(
                [t for group in groups for t in _with_front(group, looks, doubtful=part.unsure)],
                x={**SENT, **_bytes_scale([end.cost for group in groups for end in group])},
                y=y,
                hovermode="closest",
            ),
            choices={"points": [{"label": label, "show": [kind]} for label, kind in options]} if has_seeds else {},
        )
        for part, groups in shown
    ]
    return in_panels("front", [(p.world.label, c) for (p, _), c in zip(shown, panels, strict=True)]) if panels else {}


def _bytes_scale(sent: Sequence[float]) -> dict[str, Any]:
    if max(sent) <= 4 * min(sent):
        # Around equal ends Plotly would write the same figure at each tick.
        return {"rangemode": "tozero"} if max(sent) <= 1.01 * min(sent) else {}
    # A short axis: Plotly would write 2 and 5 for 20 and 50 million.
    return {"type": "log", "dtick": "D2" if max(sent) < 50 * min(sent) else 1}


@dataclass(frozen=True, kw_only=True)
class _End:
    """The last test of a run, or of the mean of a setting, and all before it.

    Attributes:
        label: Its name.
        row: Its row.
        setting: Its setting's place.
        kind: ``mean`` or ``run``.
        curve: Bytes and accuracy of all tests.
        faint: Whether it did not finish.
        over_seeds: Of a mean, the accuracy of its last test over the seeds.
    """

    label: str
    row: int
    setting: int
    kind: str
    curve: Sequence[tuple[float, float]]
    faint: bool
    over_seeds: Estimate | None = None

    @property
    def cost(self) -> float:
        """Bytes both ways."""
        return self.curve[-1][0]

    @property
    def accuracy(self) -> float:
        """0..1."""
        return self.curve[-1][1]


def _means(study: Study, world: World) -> list[_End]:
    """Return means over seeds; none of what sent nothing or was not tested."""
    ends = []
    for row, place in world.cells.items():
        setting = study.settings[place]
        faint = all(study.runs[index].status != "finished" for index in setting.counted)
        curve = setting.curve.accuracy_by_bytes() if setting.curve else []
        # Seeds may have ended at other rounds: not their last accuracies, but those that the mean's end is of.
        last = estimate([*tested_accuracies(setting).values()][-1] if curve else ())
        ends.append(
            _End(label=setting.label, row=row, setting=place, kind=_MEANS, curve=curve, faint=faint, over_seeds=last)
        )
    return [end for end in ends if end.curve and end.cost]


def _each_run(study: Study, world: World) -> list[_End]:
    ends = []
    for row, place in world.cells.items():
        for run in (study.runs[index] for index in study.settings[place].runs):
            name, faint = run_name(run, is_one_of_many=True), run.status != "finished"
            curve = run.curve.accuracy_by_bytes() if run.status != "failed" else []
            ends.append(_End(label=name, row=row, setting=place, kind=_RUNS, curve=curve, faint=faint))
    return [end for end in ends if end.curve and end.cost]


def _with_front(ends: Sequence[_End], looks: Sequence[Look], *, doubtful: Collection[int]) -> Iterator[Scatter]:
    steps = curve_front([end.curve for end in ends])
    if not steps:
        return
    points = [ends[step.curve].curve[place] for step in steps for place in step.places]
    yield _front_line(points, kind=ends[0].kind)
    front = {*points}  # also the ends of others that came to the same
    for end in ends:
        hollow = end.curve[-1] not in front or (end.kind == _MEANS and end.setting in doubtful)
        yield _point(end, looks[end.row], hollow=hollow)


def _point(end: _End, look: Look, *, hollow: bool) -> Scatter:
    import plotly.graph_objects as go

    error = end.over_seeds
    has_interval = error is not None and not math.isnan(error.low)
    text = f"{100 * end.accuracy:.2f} %, {bytes_text(end.cost)}"
    if error is not None and has_interval:
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
        if error is not None and has_interval
        else None,
        text=text,
        hovertemplate="%{fullData.name}<br>%{text}<extra></extra>",
        meta=_meta(end.label, end.row, end.kind),
    )


def _front_line(points: Sequence[tuple[float, float]], *, kind: str) -> Scatter:
    import plotly.graph_objects as go

    return go.Scatter(
        name="Pareto front",
        mode="lines+markers",
        x=[short(sent) for sent, _ in points],
        y=[short(accuracy) for _, accuracy in points],
        line={"color": INK, "width": 1, "dash": "dot", "shape": "hv"},
        marker={"color": INK, "size": 3},
        hoverinfo="skip",
        meta={"label": "Pareto front", "setting": None, "kind": kind},
    )
