"""Runs side by side, or settings over their seeds, as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedsweep.errors import ConfigError, OutputError
from fedsweep.reports.setting_table import FORMATS, TableStyle, row_order, setting_table, settings_as
from fedsweep.reports.who_pays import print_shares
from fedsweep.reports.world_parts import most_sent, share_of_box
from fedsweep.results.seed_statistics import Estimate, finite
from fedsweep.results.selection import leading_figure, only_those, order_of
from fedsweep.results.settings import ReportRun, Setting, report_runs, shortly_called
from fedsweep.results.texts import MISSING, bytes_text, metric_text, metric_title, seconds_text
from fedsweep.results.view import ENERGY, MONEY, RunView, load_runs, metrics_of, spent_of
from fedsweep.results.worlds import study_of
from fedsweep.tasks.declaration import Declaration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# The most important first: on a narrow terminal the last ones go. Names may take several lines.
_OF_RUNS = ("run", "method", "acc", "best", "bytes", "ratio", "sim", "wall", "s/round", "seed", "status", "rounds")
_OF_SETTINGS = (
    *("setting", "method", "acc", "sd", "95%", "best"),
    *("bytes", "volume", "ratio", "sim", "wall", "s/round", "seeds", "failed"),
)
BY = ("run", "setting")
Form = Literal["text", "md", "latex", "csv"]
# Behind the simulated time, where replays know them.
_OF_REPLAYS = {ENERGY: "energy", MONEY: "money"}
_NUM_NAMES, _NARROWEST_NAME, _GAP = 2, 8, 2
_WIDEST = 100_000


def compared_runs(folders: Iterable[str | Path], *, only: Sequence[str] = ()) -> list[ReportRun]:
    """Return the runs in or below the folders, in the order given.

    Args:
        folders: Run folders, or folders with runs below them.
        only: Conditions that they satisfy, see :func:`~fedsweep.results.selection.only_those`.

    Raises:
        ConfigError: No folder is named, or no run satisfies the conditions.
        OutputError: One of the folders does not exist or holds no run.
        InputError: A run's file is damaged.
    """
    views = load_runs(folders)
    if not views:
        raise ConfigError("no folder is named; give a run's, or one with runs below it")
    runs, bad = report_runs(views)
    if bad:
        raise OutputError(bad[0])
    return only_those(runs, only)


def print_comparison(
    runs: Sequence[ReportRun], console: Console, *, by: str = "run", form: str = "text", style: TableStyle | None = None
) -> None:
    """Print the table, and that of classes and clients where runs were tested by them.

    Args:
        runs: All runs.
        console: Where to.
        by: ``run`` or ``setting``; rows and columns of the style are of settings whatever it is.
        form: One of :data:`~fedsweep.reports.setting_table.FORMATS`.
        style: Rows, columns, order.

    Raises:
        ConfigError: There is no such form, line, key or figure, or a form that is for settings is asked for runs.
    """
    style = style or TableStyle()
    for name, value, choices in (("--by", by, BY), ("--format", form, FORMATS)):
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, but is {value!r}")
    is_laid_out = style.rows is not None or style.columns is not None
    if form != "text":
        if by != "setting" and not is_laid_out:
            raise ConfigError(f"--format {form} is for means over seeds; give --by setting, too")
        console.file.write(settings_as(runs, form, style) + "\n")
        return
    if by == "run" and not is_laid_out:
        print_runs(runs, console, style=style)
    elif style.is_laid_out:
        print_layout(runs, console, style=style)
    else:
        print_settings(runs, console, style=style)
    print_shares(study_of(runs), console)


def print_runs(runs: Sequence[ReportRun], console: Console, *, style: TableStyle | None = None) -> None:
    """Print a line per run, within the terminal's width; without a terminal nothing is cut."""
    style = style or TableStyle()
    order = range(len(runs)) if style.sort is None else order_of(runs, runs, style.sort)
    called = shortly_called(runs)
    shown = [called[place] for place in order][: style.top]
    styles = [{"finished": "", "failed": "red"}.get(run.status, "yellow") for run in shown]
    metrics = metrics_of(run.view for run in runs)
    spent = spent_of(run.view for run in runs)
    rows = [_run_cells(run, metrics, spent) for run in shown]
    _print(_headings(_OF_RUNS, metrics, spent), rows, styles, console)


def print_settings(runs: Sequence[ReportRun], console: Console, *, style: TableStyle | None = None) -> None:
    """Print a line per setting with means over its seeds, world by world; see :func:`print_runs`."""
    style = style or TableStyle()
    study = study_of(runs)
    settings, layout = study.settings, study.layout
    metrics, cells, styles = metrics_of(run.view for run in runs), [], []
    spent = spent_of(run.view for run in runs)
    headings = _headings(_OF_SETTINGS, metrics, spent)
    for world in layout.worlds:
        if len(layout.worlds) > 1:
            cells.append([world.label, *[""] * (len(headings) - 1)])
            styles.append("bold")
        order = row_order(study, style, within=world)
        curves = {place: c.accuracy_by_bytes() for place in world.settings if (c := settings[place].curve)}
        most = most_sent(curves.values())
        volumes = {place: share_of_box(curve, most=most) for place, curve in curves.items()}
        for place, row in ((world.cells[row], row) for row in order):
            setting = settings[place]
            method = runs[setting.runs[0]].method
            own = _setting_cells(setting, method, metrics, spent, volume=volumes.get(place))
            cells.append([layout.rows[row] if len(layout.worlds) > 1 else setting.label, *own[1:]])
            styles.append("red" if setting.failed else "")
    _print(headings, cells, styles, console)


def print_layout(runs: Sequence[ReportRun], console: Console, *, style: TableStyle) -> None:
    """Print the rows and columns that the style asks for; on terminals the best of each world is bold."""
    table = setting_table(runs, style, form="text")
    columns = table.frame.columns
    heads = ["\n".join(head) for head in columns.to_list()] if columns.nlevels > 1 else columns.to_list()
    rows = [[str(name), *cells] for name, *cells in table.frame.itertuples(name=None)]
    _print(["", *heads], rows, [""] * len(rows), console, num_names=1, bold=[(row, c + 1) for row, c in table.bold])
    for text in table.notes[:1]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _headings(names: Sequence[str], metrics: Mapping[str, Declaration], spent: Iterable[str]) -> list[str]:
    """The headings with those of metrics behind the accuracies, and of what is spent behind the time."""
    place, last = names.index("best") + 1, names.index("sim") + 1
    more = [metric_title(*item) for item in metrics.items()]
    return [*names[:place], *more, *names[place:last], *(_OF_REPLAYS[name] for name in spent), *names[last:]]


def _spent_cells(of: RunView | Setting, spent: Iterable[str]) -> list[str]:
    return [MISSING if (value := of.figure(name)) is None else f"{value:.4g}" for name in spent]


def _run_cells(run: ReportRun, metrics: Mapping[str, Declaration], spent: Iterable[str]) -> list[str]:
    return [
        run.label,
        run.method,
        _percent(run.view.figure("test_accuracy")),
        _percent(run.view.figure("best_test_accuracy")),
        *(metric_text(run.view.last(name), declaration) for name, declaration in metrics.items()),
        bytes_text(run.view.figure("total_bytes")),
        _ratio(run.view.figure("comm_ratio")),
        seconds_text(run.view.figure("sim_time_s")),
        *_spent_cells(run.view, spent),
        seconds_text(run.view.figure("wall_time_s")),
        seconds_text(run.view.figure("round_time_s")),
        MISSING if run.view.seed is None else str(run.view.seed),
        run.status,
        str(run.num_rounds),
    ]


def _setting_cells(
    setting: Setting, method: str, metrics: Mapping[str, Declaration], spent: Iterable[str], *, volume: float | None
) -> list[str]:
    # Of what is compared: the accuracy, or where nothing is classified the task's first figure.
    leading = leading_figure(setting.views)
    estimate, read = setting.over_seeds(leading), metrics.get(leading)
    return [
        setting.label,
        method,
        _percent(finite(setting.over_seeds("test_accuracy").mean)) + setting.seeds_with("test_accuracy"),
        _spread_text(finite(estimate.sd), read),
        _interval(estimate, read),
        _percent(setting.figure("best_test_accuracy")),
        *(metric_text(setting.figure(name), read) + setting.seeds_with(name) for name, read in metrics.items()),
        bytes_text(setting.figure("total_bytes")),
        _ratio(volume),
        _ratio(setting.figure("comm_ratio")),
        seconds_text(setting.figure("sim_time_s")),
        *_spent_cells(setting, spent),
        seconds_text(setting.figure("wall_time_s")),
        seconds_text(setting.figure("round_time_s")),
        str(len(setting.counted)),
        str(setting.failed or MISSING),
    ]


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.2f}%"


def _spread_text(value: float | None, read: Declaration | None) -> str:
    return _percent(value) if read is None else metric_text(value, read)


def _interval(estimate: Estimate, read: Declaration | None) -> str:
    ends = finite(estimate.low), finite(estimate.high)
    return MISSING if None in ends else " to ".join(_spread_text(end, read) for end in ends)


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _print(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
    console: Console,
    *,
    num_names: int = _NUM_NAMES,
    bold: Collection[tuple[int, int]] = (),
) -> None:
    """Print a table whose first columns are names, and in which some cells are bold."""
    from rich.measure import Measurement

    shown = _that_fit(headings, rows, console.width, num_names=num_names) if console.is_terminal else headings
    table = _table(shown, rows, styles, num_names=num_names, bold=bold)
    if not console.is_terminal:
        whole = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
        console.width = max(console.width, whole)
    console.print(table)


def _table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
    *,
    num_names: int,
    bold: Collection[tuple[int, int]],
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        is_name = place < num_names
        side: Literal["left", "right"] = "left" if is_name or heading == "status" else "right"
        table.add_column(Text(heading), justify=side, no_wrap=not is_name, overflow="fold")
    for number, (row, style) in enumerate(zip(rows, styles, strict=True)):
        cells = enumerate(row[: len(headings)])
        table.add_row(*(Text(cell, style="bold" if (number, c) in bold else "") for c, cell in cells), style=style)
    return table


def _that_fit(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, num_names: int) -> Sequence[str]:
    from rich.cells import cell_len

    def size(text: str) -> int:
        return max(map(cell_len, text.split("\n")))

    sizes = [max(map(size, column)) for column in zip(headings, *rows, strict=True)]
    sizes[:num_names] = [min(wide, _NARROWEST_NAME) for wide in sizes[:num_names]]
    while len(sizes) > num_names and sum(sizes) + _GAP * (len(sizes) - 1) > width:
        sizes.pop()
    return headings[: len(sizes)]
