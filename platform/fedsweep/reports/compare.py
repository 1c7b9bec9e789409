"""Runs side by side, or settings over their seeds, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedsweep.errors import ConfigError, OutputError
from fedsweep.reports.setting_table import FORMATS, settings_as
from fedsweep.reports.who_pays import print_shares
from fedsweep.results.seed_statistics import Estimate, finite
from fedsweep.results.settings import ReportRun, Setting, group_settings, report_runs, shortly_called
from fedsweep.results.texts import MISSING, bytes_text, seconds_text
from fedsweep.results.view import load_runs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# The most important first: on a narrow terminal the last ones go. Names may take several lines.
_OF_RUNS = ("run", "method", "acc", "best", "bytes", "ratio", "sim", "wall", "s/round", "seed", "status", "rounds")
_OF_SETTINGS = (
    *("setting", "method", "acc", "sd", "95%", "best"),
    *("bytes", "ratio", "sim", "wall", "s/round", "seeds", "failed"),
)
BY = ("run", "setting")
Form = Literal["text", "md", "latex", "csv"]
_NUM_NAMES, _NARROWEST_NAME, _GAP = 2, 8, 2
_WIDEST = 100_000


def compared_runs(folders: Iterable[str | Path]) -> list[ReportRun]:
    """The runs in or below the folders, in the order given.

    Raises:
        OutputError: One of the folders does not exist or holds no run.
        InputError: A run's file is damaged.
    """
    runs, bad = report_runs(load_runs(folders))
    if bad:
        raise OutputError(bad[0])
    return runs


def print_comparison(runs: Sequence[ReportRun], console: Console, *, by: str = "run", form: str = "text") -> None:
    """Prints the table, and that of classes and clients where runs were tested by them.

    Args:
        runs: All runs.
        console: Where to.
        by: ``run`` or ``setting``.
        form: One of :data:`~fedsweep.reports.setting_table.FORMATS`.

    Raises:
        ConfigError: There is no such form or line, or a form that is for settings is asked for runs.
    """
    for name, value, known in (("--by", by, BY), ("--format", form, FORMATS)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, but is {value!r}")
    if form != "text":
        if by != "setting":
            raise ConfigError(f"--format {form} is for means over seeds; give --by setting, too")
        console.file.write(settings_as(runs, form) + "\n")
        return
    (print_settings if by == "setting" else print_runs)(runs, console)
    print_shares(group_settings(runs), console)


def print_runs(runs: Sequence[ReportRun], console: Console) -> None:
    """Prints a line per run, within the terminal's width; without a terminal nothing is cut."""
    styles = [{"finished": "", "failed": "red"}.get(run.status, "yellow") for run in runs]
    _print(_OF_RUNS, [_run_cells(run) for run in shortly_called(runs)], styles, console)


def print_settings(runs: Sequence[ReportRun], console: Console) -> None:
    """Prints a line per setting with means over its seeds; see :func:`print_runs`."""
    settings = group_settings(runs)
    styles = ["red" if setting.failed else "" for setting in settings]
    methods = [runs[setting.runs[0]].method for setting in settings]
    _print(_OF_SETTINGS, [_setting_cells(*both) for both in zip(settings, methods, strict=True)], styles, console)


def _run_cells(run: ReportRun) -> list[str]:
    return [
        run.label,
        run.method,
        _percent(run.view.figure("test_accuracy")),
        _percent(run.view.figure("best_test_accuracy")),
        bytes_text(run.view.figure("total_bytes")),
        _ratio(run.view.figure("comm_ratio")),
        seconds_text(run.view.figure("sim_time_s")),
        seconds_text(run.view.figure("wall_time_s")),
        seconds_text(run.view.figure("round_time_s")),
        MISSING if run.view.seed is None else str(run.view.seed),
        run.status,
        str(run.num_rounds),
    ]


def _setting_cells(setting: Setting, method: str) -> list[str]:
    accuracy = setting.over_seeds("test_accuracy")
    return [
        setting.label,
        method,
        _percent(finite(accuracy.mean)),
        _percent(finite(accuracy.sd)),
        _interval(accuracy),
        _percent(setting.figure("best_test_accuracy")),
        bytes_text(setting.figure("total_bytes")),
        _ratio(setting.figure("comm_ratio")),
        seconds_text(setting.figure("sim_time_s")),
        seconds_text(setting.figure("wall_time_s")),
        seconds_text(setting.figure("round_time_s")),
        str(len(setting.counted)),
        str(setting.failed or MISSING),
    ]


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.2f}%"


def _interval(found: Estimate) -> str:
    ends = finite(found.low), finite(found.high)
    return MISSING if None in ends else " to ".join(map(_percent, ends))


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str], console: Console) -> None:
    from rich.measure import Measurement

    if console.is_terminal:
        table = _table(_that_fit(headings, rows, console.width), rows, styles)
    else:
        table = _table(headings, rows, styles)
        whole = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
        console.width = max(console.width, whole)
    console.print(table)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        is_name = place < _NUM_NAMES
        side: Literal["left", "right"] = "left" if is_name or heading == "status" else "right"
        table.add_column(heading, justify=side, no_wrap=not is_name, overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(cell) for cell in row[: len(headings)]), style=style)
    return table


def _that_fit(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Sequence[str]:
    from rich.cells import cell_len

    sizes = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    sizes[:_NUM_NAMES] = [min(size, _NARROWEST_NAME) for size in sizes[:_NUM_NAMES]]
    while len(sizes) > _NUM_NAMES and sum(sizes) + _GAP * (len(sizes) - 1) > width:
        sizes.pop()
    return headings[: len(sizes)]
