"""Pictures of a table's cells: a cell is a point (``scatter``), a bar (``bars``) or a point on a line (``lines``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ConfigError
from fedsweep.figures.style import (
    Look,
    axis_name,
    legend_below,
    line_handle,
    look_of,
    looks,
    name_axes,
    panels,
    patch_handles,
    scale_axes,
    share_axes,
)
from fedsweep.reproduce.cell_texts import label_of
from fedsweep.reproduce.definition.sections import Measure
from fedsweep.reproduce.figures.scene import Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_ROOM = 0.8
_LONG_NAMES = 40
_FEW_TICKS = 8
# What the paper prints, over what was measured.
_PRINTED_MARK: Mapping[str, Any] = {
    "color": "#000000",
    "markerfacecolor": "#FFFFFF",
    "markersize": 4.0,
    "linestyle": "none",
    "marker": "D",
}


def scatter(scene: Scene) -> Figure:
    """Draw a panel for each column; a point for each row, with bars of one standard deviation over seeds.

    The rows of a group have one look and are joined by a line, in the table's order.
    """
    spec = scene.spec
    x, y = scene.measure("x", spec.x), scene.measure("y", spec.y)
    figure, every = panels(scene.titles, title=spec.title)
    for axes, column in zip(every, scene.columns, strict=True):
        for name, rows in scene.groups.items():
            figures = [(scene.measured(row, column, measure=x), scene.measured(row, column, measure=y)) for row in rows]
            points = [(a.mean, b.mean, a.sd, b.sd) for a, b in figures if a.mean is not None and b.mean is not None]
            look = scene.looks[name]
            if len(points) > 1:
                axes.plot([p[0] for p in points], [p[1] for p in points], color=look.colour, linewidth=0.8)
            for across, up, x_sd, y_sd in points:
                style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "label": name}
                axes.errorbar(across, up, xerr=x_sd, yerr=y_sd, **style)
        _finish(axes, scene, x=x, y=y)
    share_axes(every)
    legend_below(figure, _handles(scene, list(scene.groups), line=any(len(r) > 1 for r in scene.groups.values())))
    return figure


def lines(scene: Scene) -> Figure:
    """Draw a line for each row over the columns' ``x``; hollow marks are what the paper prints."""
    spec = scene.spec
    y = scene.measure("y", spec.y)
    places, names = _places(scene)
    figure, (axes,) = panels([""], title=spec.title)
    for row in scene.rows:
        points = [(places[c], scene.measured(row, c, measure=y)) for c in scene.columns]
        drawn = sorted((x, point.mean, point.sd or 0.0) for x, point in points if point.mean is not None)
        look = scene.looks[row]
        xs, ys, sds = zip(*drawn, strict=True) if drawn else ((), (), ())
        spread = sds if any(sds) else None
        axes.errorbar(xs, ys, yerr=spread, color=look.colour, marker=look.marker, label=row)
        printed = [(places[c], p) for c in scene.columns if (p := scene.printed(row, c, measure=y)) is not None]
        hollow = {**_PRINTED_MARK, "marker": look.marker, "color": look.colour}
        axes.plot([x for x, _ in printed], [p for _, p in printed], **hollow, label="_printed")
    if names:
        axes.set_xticks(list(places.values()), scene.titles)
    elif len(places) <= _FEW_TICKS and not spec.log_x:
        axes.set_xticks(list(places.values()))
    _finish(axes, scene, x=None, y=y)
    axes.set_xlabel(spec.x_label or (axis_name(spec.x) if spec.x else ""))
    legend_below(figure, [*_handles(scene, scene.rows, line=True), *_printed_handle(scene, y)])
    return figure


def bars(scene: Scene) -> Figure:
    """Draw for each column a bar for each row, or for each of the figure's measures of its one row.

    Thin bars are one standard deviation, marks what the paper prints.
    """
    spec = scene.spec
    bars = _bars_shown(scene)
    y = bars[0][2]
    alone = len(scene.columns) == 1
    width = _BAR_ROOM / (1 if alone else len(bars))
    count = len(scene.columns) * (1 + len(bars))
    figure, (axes,) = panels([""], title=spec.title, width=min(7.0, max(3.4, 1.2 + 0.2 * count)))
    for number, (_, row, measure, look) in enumerate(bars):
        shift = 0.0 if alone else (number - (len(bars) - 1) / 2) * width
        for place, column in enumerate(scene.columns):
            measured = scene.measured(row, column, measure=measure)
            at = number if alone else place + shift
            spread: dict[str, Any] = (
                {} if measured.sd is None else {"yerr": measured.sd, "error_kw": {"elinewidth": 0.8}}
            )
            axes.bar(at, measured.mean or 0.0, width=0.9 * width, color=look.colour, **spread)
            printed = scene.printed(row, column, measure=measure)
            if printed is not None:
                axes.plot(at, printed, **_PRINTED_MARK, label="_printed")
    names = [name for name, *_ in bars] if alone else scene.titles
    steep = sum(map(len, names)) > _LONG_NAMES
    axes.set_xticks(range(len(names)), names, rotation=30 if steep else 0, ha="right" if steep else "center")
    _finish(axes, scene, x=None, y=y)
    axes.tick_params(axis="x", length=0)
    own = [] if alone else patch_handles((name, look.colour) for name, _, _, look in bars)
    legend_below(figure, [*own, *_printed_handle(scene, y)])
    return figure


def _bars_shown(scene: Scene) -> list[tuple[str, str, Measure, Look]]:
    """Name, row, measure and look of the bars of a column."""
    if scene.spec.measures:
        shown = [scene.measure("measures", name) for name in scene.spec.measures]
        own = looks([label_of(measure) for measure in shown])
        return [(label_of(m), scene.rows[0], m, own[label_of(m)]) for m in shown]
    y = scene.measure("y", scene.spec.y)
    return [(scene.name(row), row, y, scene.looks[row]) for row in scene.rows]


def _finish(axes: Axes, scene: Scene, *, x: Measure | None, y: Measure) -> None:
    scale_axes(axes, log_x=scene.spec.log_x, log_y=scene.spec.log_y)
    name_axes(axes, x="" if x is None else scene.label("x", x), y=scene.label("y", y))


def _places(scene: Scene) -> tuple[dict[str, float], bool]:
    """Return each column's place on the x axis, and true where the ticks are the columns' names."""
    xs = {name: scene.table.column(name).x for name in scene.columns}
    set_xs = {name: x for name, x in xs.items() if x is not None}
    if len(set_xs) == len(xs):
        return set_xs, False
    if set_xs:
        lacking = next(name for name in xs if name not in set_xs)
        raise ConfigError(
            f"figure {scene.spec.name}: the column {lacking!r} has no x, but others do; give all of them one, or none"
        )
    return {name: float(place) for place, name in enumerate(xs)}, True


def _handles(scene: Scene, names: Sequence[str], *, line: bool) -> list[Any]:
    return [line_handle(scene.name(name), scene.looks[name], linestyle="-" if line else "none") for name in names]


def _printed_handle(scene: Scene, measure: Measure) -> list[Any]:
    every = [scene.printed(row, column, measure=measure) for row in scene.rows for column in scene.columns]
    if all(value is None for value in every):
        return []
    return [line_handle("printed", look_of(0), **_PRINTED_MARK)]
