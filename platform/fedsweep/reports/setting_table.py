"""Settings over their seeds as a table that goes into a text: Markdown, LaTeX, CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedsweep.parameters.ranges import Count, check_value
from fedsweep.results.keys import listed
from fedsweep.results.seed_statistics import FEWEST_SEEDS, Estimate, finite, mean
from fedsweep.results.selection import figure_in, figure_name, is_less_better, leading_figure, order_of
from fedsweep.results.settings import ReportRun, Setting, cut_short, remarks
from fedsweep.results.texts import MISSING, clean, is_accuracy
from fedsweep.results.typeset import csv_table, latex_tabular, latex_text, markdown_table, markdown_text
from fedsweep.results.view import SPENT, metrics_of, spent_of
from fedsweep.results.worlds import Layout, Study, World, study_of
from fedsweep.tasks.declaration import SHARE, Declaration

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "md", "latex", "csv")
_SPREAD = "mean ± sample standard deviation over seeds"
_INTERVAL = "[ ]: 95% interval of the mean (Student's t)"
# What keys of a configuration are called in a paper, by their last part.
KEY_LABELS: Mapping[str, str] = {
    "dirichlet_alpha": "\N{GREEK SMALL LETTER ALPHA}",
    "mu": "μ",
    "local_epochs": "local epochs",
    "local_steps": "local steps",
    "batch_size": "batch",
    "cohort_size": "cohort",
    "cohort_fraction": "share of clients",
    "group_size": "group",
    "budget_fraction": "budget",
    "classes_per_client": "classes",
    "lr": "rate",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of figures.

    Attributes:
        name: As :meth:`~fedsweep.results.view.RunView.figure` knows it.
        heading: In a text.
        times: A value is multiplied by it to be shown.
        digits: After the point, as shown, or two digits of what is smaller than that; None: four digits in all.
        has_spread: Whether deviation and interval are shown.
    """

    name: str
    heading: str
    times: float = 1.0
    digits: int | None = 2
    has_spread: bool = False


FIGURES = (
    Figure(name="test_accuracy", heading="Accuracy (%)", times=100, has_spread=True),
    Figure(name="best_test_accuracy", heading="Best (%)", times=100),
    Figure(name="total_bytes", heading="MB sent", times=1e-6, digits=1),
    Figure(name="comm_ratio", heading="Ratio", digits=3),
    Figure(name="sim_time_s", heading="Simulated (s)", digits=0),
)
OF_REPLAYS = tuple(
    Figure(name=name, heading=title[0].upper() + title[1:], digits=None) for name, title in SPENT.items()
)


@dataclass(frozen=True, kw_only=True)
class TableStyle:
    """Layout and wording of a table.

    Attributes:
        rows: Short names of the keys that make rows; None: all that differs beside the columns.
        columns: Likewise of those that make columns; None: what makes worlds.
        figures: Names of figures in the cells; None: the usual ones.
        sort: What rows go by, see :func:`~fedsweep.results.selection.order_of`; None: as they come.
        top: How many rows are shown, of each world where these stand apart; None: all.
        interval: Whether cells have the 95 % interval; None: as is usual.
        labels: What keys are called, by their last part, beside or in place of :data:`KEY_LABELS`.
    """

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    figures: Sequence[str] | None = None
    sort: str | None = None
    top: int | None = None
    interval: bool | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_value("--top", self.top, Count | None)

    @property
    def is_laid_out(self) -> bool:
        """True where rows, columns or figures were chosen."""
        return (self.rows, self.columns, self.figures) != (None, None, None)

    def called(self, words: str) -> str:
        """Return a label whose ``key=value`` have the names that a paper gives the keys."""
        labels = {**KEY_LABELS, **self.labels}
        parts = [word.partition("=") for word in words.split(" ")]
        return " ".join(f"{labels.get(key, key)}{sign}{value}" if sign else key for key, sign, value in parts)


def shown_figure(name: str, metrics: Mapping[str, Declaration] = MappingProxyType({})) -> Figure:
    """Choose units and digits of a figure: shares in percent, bytes in MB, metrics as they are declared."""
    for figure in (*FIGURES, *OF_REPLAYS):
        if figure.name == name:
            return figure
    words = name.replace("_", " ").capitalize()
    if name in metrics:
        unit, is_share = metrics[name].unit, metrics[name].unit == SHARE
        heading = f"{name} ({'%' if is_share else clean(unit)})" if unit else name
        digits, times = (2, 100.0) if is_share else (None, 1.0)
        return Figure(name=name, heading=heading, times=times, digits=digits, has_spread=True)
    if is_accuracy(name):
        return Figure(name=name, heading=f"{words} (%)", times=100, has_spread=True)
    return Figure(name=name, heading=words, digits=None, has_spread=True)


@dataclass(frozen=True, kw_only=True)
class SettingTable:
    """Settings laid out for a text.

    Attributes:
        frame: Texts, by row and column.
        bold: Row and column of the cells that are the best of their world.
        notes: What a reader must know.
    """

    frame: pd.DataFrame
    bold: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def settings_as(runs: Sequence[ReportRun], form: str, style: TableStyle | None = None) -> str:
    """Return the table of all runs' settings in one of :data:`FORMATS`, but not as ``text``.

    Columns of which no setting has anything are left out, but in CSV, where figures are in SI units and unrounded. The
    best of each world is bold.

    Raises:
        ConfigError: No run has a figure or key that the style names, or two settings would stand in one cell.
    """
    style = style or TableStyle()
    if form == "csv":
        return _as_csv(runs, style)
    table = setting_table(runs, style, form=form)
    if form == "md":
        strong = table.bold if table.frame.columns.nlevels > 1 else ()
        return "\n".join([*markdown_table(table.frame, strong=strong), "", *map(markdown_text, table.notes)])
    cells = table.frame.map(latex_text)
    for row, column in table.bold:
        cells.iat[row, column] = rf"\textbf{{{cells.iat[row, column]!s}}}"
    return "\n".join([*(f"% {note}" for note in table.notes), *latex_tabular(cells)])


def setting_table(runs: Sequence[ReportRun], style: TableStyle, *, form: str) -> SettingTable:
    """Return rows of the layout, and columns of figures; with several worlds a group of columns for each.

    Args:
        runs: All runs.
        style: How it is laid out.
        form: One of :data:`FORMATS`; as text, keys keep their names, and Markdown of one world has intervals.
    """
    import pandas as pd

    study = study_of(runs, rows=style.rows, columns=style.columns)
    settings, layout = study.settings, study.layout
    is_single = len(layout.worlds) == 1
    figures = {world.label: _figures(study, style, world) for world in layout.worlds}
    order = row_order(study, style)
    interval = form == "md" and is_single if style.interval is None else style.interval
    called = style.called if form != "text" else str
    columns = [(world, figure) for world in _side_by_side(layout, figures) for figure in figures[world.label]]
    cells = [[_cell(settings, world, row, figure, interval=interval) for world, figure in columns] for row in order]
    bold = [
        (order.index(row), place)
        for place, (world, figure) in enumerate(columns)
        if style.figures is not None or figure.has_spread
        for row in best_rows(settings, world, figure.name)
        if row in order
    ]
    if style.rows is None and is_single:
        corner = "Setting"
    else:
        corner = "Method" if any(key.startswith("method") for key in layout.row_keys) else ""
    frame = pd.DataFrame(
        cells,
        index=[called(layout.rows[row]) for row in order],
        columns=_headings(columns, called, corner=corner),
    )
    has_bold = bool(bold) and (form == "latex" or not is_single)
    notes = _notes(study, interval=interval, has_bold=has_bold)
    if any(settings[place].seeds_with(figure.name) for world, figure in columns for place in world.settings):
        notes[0] += "; [k/n]: of the k of n seeds that have the figure, and not compared"
    return SettingTable(frame=frame, bold=tuple(bold), notes=tuple(notes))


def _figures(study: Study, style: TableStyle, world: World) -> list[Figure]:
    """Return the figures of a world's cells: what is compared there may be another than in the other worlds."""
    settings = [study.settings[place] for place in world.settings]
    views = [study.runs[index].view for setting in settings for index in setting.runs]
    metrics = metrics_of((run.view for run in study.runs), by_client=True)
    if style.figures is not None:
        names = [(name, figure_name(name, study.runs, what="--y")) for name in listed(style.figures)]
        return [shown_figure(figure_in(views, *pair), metrics) for pair in names]
    leading = shown_figure(leading_figure(views), metrics)
    usual = (leading, *FIGURES[1:], *OF_REPLAYS) if len(study.layout.worlds) == 1 else (leading,)
    return [f for f in usual if any(s.figure(f.name) is not None for s in settings)] or [leading]


def _side_by_side(layout: Layout, figures: Mapping[str, Sequence[Figure]]) -> Sequence[World]:
    """Return the worlds; of a single figure, so that those stand together that share their first key's value."""
    firsts = list(dict.fromkeys(world.words[:1] for world in layout.worlds))
    return (
        layout.worlds
        if len({figure for own in figures.values() for figure in own}) > 1
        else sorted(layout.worlds, key=lambda world: firsts.index(world.words[:1]))
    )


def _headings(columns: Sequence[tuple[World, Figure]], called: Callable[[str], str], *, corner: str) -> pd.Index[Any]:
    """Return one line for a single world; otherwise two, the upper of which goes over several columns where it can."""
    import pandas as pd

    worlds = {world.label: [called(word) for word in world.words] for world, _ in columns}
    headings = {figure.heading for _, figure in columns}
    if len(worlds) == 1:
        return pd.Index([figure.heading for _, figure in columns], name=corner)
    if len(headings) > 1:
        pairs = [(", ".join(worlds[world.label]), figure.heading) for world, figure in columns]
    elif min(map(len, worlds.values())) > 1:
        corner = headings.pop()
        pairs = [(words[0], ", ".join(words[1:])) for words in worlds.values()]
    else:
        pairs = [(figure.heading, ", ".join(worlds[world.label])) for world, figure in columns]
    return pd.MultiIndex.from_tuples(pairs, names=[corner, None])


def _cell(settings: Sequence[Setting], world: World, row: int, figure: Figure, *, interval: bool) -> str:
    place = world.cells.get(row)
    if place is None:
        return MISSING
    text = figure_text(settings[place].over_seeds(figure.name), figure, interval=interval)
    return text + settings[place].seeds_with(figure.name)


def row_order(study: Study, style: TableStyle, *, within: World | None = None) -> list[int]:
    """Return the rows that a table shows, by mean place over the worlds where they are sorted, or within one."""
    layout = study.layout
    rows = list(range(len(layout.rows))) if within is None else sorted(within.cells)
    if style.sort is not None:
        places = {place: rank for rank, place in enumerate(order_of(study.settings, study.runs, style.sort))}
        ranks: dict[int, list[float]] = {}
        chosen = enumerate(layout.row_of) if within is None else ((p, row) for row, p in within.cells.items())
        for place, row in chosen:
            ranks.setdefault(row, []).append(places[place])
        rows.sort(key=lambda row: mean(ranks[row]))
    return rows[: style.top]


def _notes(study: Study, *, interval: bool, has_bold: bool) -> list[str]:
    seeds = sorted({len(setting.counted) for setting in study.settings})
    counts = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    words = [_SPREAD, *([_INTERVAL] if interval and seeds[-1] >= FEWEST_SEEDS else [])]
    spread = f"{'; '.join(words)}; {counts} seed{'' if counts == '1' else 's'} a setting"
    bold = ["bold: the best of its column"] if has_bold else []
    return [spread, *bold, *cut_short(study.runs), *remarks(study.runs, study.settings)]


def best_rows(settings: Sequence[Setting], world: World, figure: str) -> list[int]:
    """Return the rows of a world with the best mean of a figure; none where there is nothing to be better than."""
    judged = {row: place for row, place in world.cells.items() if not settings[place].is_under_way}
    able = {row: settings[place] for row, place in judged.items() if settings[place].is_compared(figure)}
    means = {row: value for row, setting in able.items() if (value := setting.figure(figure)) is not None}
    if len(judged) < 2 or not means:
        return []
    views = (view for place in world.cells.values() for view in settings[place].views)
    best = (min if is_less_better(figure, views) else max)(means.values())
    return [row for row, value in means.items() if value == best]


def figure_text(estimate: Estimate, figure: Figure, *, interval: bool) -> str:
    """Return a cell: the mean, with deviation and interval where the figure shows them and there are several seeds."""
    mean, sd, low, high = (finite(value) for value in (estimate.mean, estimate.sd, estimate.low, estimate.high))
    if mean is None:
        return MISSING

    def number(value: float) -> str:
        shown = value * figure.times
        if figure.digits is None:
            return f"{shown:.4g}"
        # Of what is small two digits: 45 kB are not 0.0 MB.
        is_small = not figure.has_spread and 0 < abs(shown) < 10.0 ** (1 - figure.digits)
        return f"{shown:.2g}" if is_small else f"{shown:.{figure.digits}f}"

    if not figure.has_spread or sd is None:
        return number(mean)
    ends = f" [{number(low)}, {number(high)}]" if interval and low is not None and high is not None else ""
    return f"{number(mean)} ± {number(sd)}{ends}"


def _as_csv(runs: Sequence[ReportRun], style: TableStyle) -> str:
    """Return a line per setting; of rows and columns that were chosen a line per row."""
    import pandas as pd

    study = study_of(runs, rows=style.rows, columns=style.columns)
    layout = study.layout
    order = row_order(study, style)
    if not style.is_laid_out:
        places = [place for row in order for place in layout.places_of(row)]
        if style.sort is None and style.top is None:
            places.sort()
        # As objects: a column of counts with a gap would become one of floating-point numbers.
        return csv_table(pd.DataFrame(setting_rows(study, places), dtype=object))
    figures = dict.fromkeys(figure.name for world in layout.worlds for figure in _figures(study, style, world))
    frame = world_frame(study, [*figures], order=order)
    heads: list[Any] = frame.columns.to_list()
    frame.columns = pd.Index([f"{world} {name}_{part}".strip() for world, name, part in heads])
    return csv_table(frame.reset_index(names="row").astype(object))


def world_frame(study: Study, figures: Sequence[str], *, order: Sequence[int]) -> pd.DataFrame:
    """Return rows by worlds in numbers: columns are a world, a figure and ``mean``, ``sd`` or ``seeds``; SI units."""
    import pandas as pd

    settings, layout = study.settings, study.layout
    columns = [(world, name) for world in layout.worlds for name in figures]
    cells = []
    for row in order:
        estimates = [None if (p := w.cells.get(row)) is None else settings[p].over_seeds(name) for w, name in columns]
        cells.append([x for e in estimates for x in ((e.mean, e.sd, e.count) if e else (math.nan, math.nan, 0))])
    heads = [(world.label, name, part) for world, name in columns for part in ("mean", "sd", "seeds")]
    return pd.DataFrame(
        cells,
        index=pd.Index([layout.rows[row] for row in order], name="row"),
        columns=pd.MultiIndex.from_tuples(heads, names=["world", "figure", "over seeds"]),
    )


def setting_rows(study: Study, places: Iterable[int]) -> list[dict[str, Any]]:
    """Return settings' figures by column, in SI units and unrounded, None where there is none, and the world of each.

    Of a setting that is in several worlds it is the first.
    """
    rows = []
    spent = spent_of(run.view for run in study.runs)
    metrics = metrics_of(run.view for run in study.runs)
    figures = [*(f.name for f in FIGURES), *(f.name for f in OF_REPLAYS if f.name in spent), *metrics]
    for place in places:
        setting = study.settings[place]
        row: dict[str, Any] = {"setting": setting.label, "method": study.runs[setting.runs[0]].method}
        row |= {"seeds": len(setting.counted), "failed": setting.failed}
        for name in figures:
            estimate = setting.over_seeds(name)
            row |= {f"{name}_{part}": finite(getattr(estimate, part)) for part in ("mean", "sd", "low", "high")}
        world = next(world for world in study.layout.worlds if place in world.cells.values())
        rows.append(row | {"world": world.label})
    return rows
