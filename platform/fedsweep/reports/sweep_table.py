"""A sweep's summary as a table for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedsweep.results.texts import bytes_text

if TYPE_CHECKING:
    from rich.console import Console

    from fedsweep.results.seed_statistics import Difference, Estimate
    from fedsweep.sweeps.summary import SettingRow, Summary, TrialRow

_MOST_LINES = 12
_SHARES = ("test_accuracy", "best_test_accuracy", "validation_accuracy")


def print_summary(summary: Summary, console: Console) -> None:
    """Prints settings with means over seeds, the differences that are real, failures and notes."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", overflow="fold")
    for heading in ("seeds", *(f"{name} (95%)" for name in summary.metrics), "sd", "bytes", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting in summary.settings:
        table.add_row(*_cells(setting, summary.metrics))
    console.print(table)
    for line in (*_difference_lines(summary), *map(_failure_line, summary.failed), *_note_lines(summary)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cells(setting: SettingRow, metrics: tuple[str, ...]) -> list[str]:
    first = setting.figures[metrics[0]]
    return [
        setting.label + (f" ({setting.cut_short} ended early)" if setting.cut_short else ""),
        str(len(setting.seeds)),
        *(_estimate_text(setting.figures[name], name) for name in metrics),
        "-" if math.isnan(first.sd) else _figure_text(first.sd, metrics[0]),
        bytes_text(None if math.isnan(setting.figures["total_bytes"].mean) else setting.figures["total_bytes"].mean),
        str(setting.failed or "-"),
    ]


def _estimate_text(found: Estimate, name: str) -> str:
    if math.isnan(found.mean):
        return "-"
    text = _figure_text(found.mean, name)
    if math.isnan(found.low):
        return text
    return f"{text} [{_figure_text(found.low, name)}, {_figure_text(found.high, name)}]"


def _figure_text(value: float, name: str) -> str:
    return f"{value:.4f}" if name in _SHARES else f"{value:.4g}"


def _difference_lines(summary: Summary) -> list[str]:
    known = [d for d in summary.differences if not math.isnan(d.p_value)]
    if not known:
        return ["no setting can be told from another: that takes at least three seeds that both have"] * bool(
            len(summary.settings) > 1
        )
    real = [d for d in known if d.is_real]
    head = f"{len(real)} of {len(known)} differences in {summary.metrics[0]} are more than chance (paired seeds, 95%)"
    lines = [f"  {_difference_text(summary, d)}" for d in real[:_MOST_LINES]]
    more = [f"  and {len(real) - _MOST_LINES} more, in summary.json"] if len(real) > _MOST_LINES else []
    return [head + (":" if real else ""), *lines, *more]


def _difference_text(summary: Summary, difference: Difference) -> str:
    metric, better_is_more = summary.metrics[0], summary.modes[0] == "max"
    first, second = summary.settings[difference.first], summary.settings[difference.second]
    word = "better" if (difference.mean > 0) == better_is_more else "worse"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    gap = f"{_figure_text(abs(difference.mean), metric)} [{_figure_text(low, metric)}, {_figure_text(high, metric)}]"
    return f"{first.label} is {word} than {second.label} by {gap}, {difference.pairs} seeds"


def _failure_line(row: TrialRow) -> str:
    seed = "" if row.seed is None else f" (seed {row.seed})"
    return f"{row.status}: {row.trial.label}{seed}, round {row.rounds}: {row.reason or 'no reason is known'}"


def _note_lines(summary: Summary) -> list[str]:
    return [f"note: {text}" for text in summary.notes]
