"""A sweep's summary as a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.bounded import MOST_DOCUMENT_BYTES, parse_json, read_regular
from fedsweep.errors import InputError
from fedsweep.results.texts import bytes_text, some_of
from fedsweep.results.view import load_run
from fedsweep.sweeps.sweep_folder import SUMMARY, SweepFolder

if TYPE_CHECKING:
    from rich.console import Console

    from fedsweep.results.seed_statistics import Estimate
    from fedsweep.sweeps.summary import SettingRow, Summary, TrialRow

_MOST_LINES = 12
_SHARES = ("test_accuracy", "best_test_accuracy", "validation_accuracy")


def print_summary(summary: Summary, console: Console) -> None:
    """Print settings with means over seeds, the differences that are real, failures and notes."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", overflow="fold")
    for heading in ("seeds", *(f"{name} (95%)" for name in summary.metrics), "sd", "bytes", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting in summary.settings:
        table.add_row(*_cells(setting, summary.metrics))
    console.print(table, markup=False)
    differences = [
        {**asdict(d), "first": summary.settings[d.first].label, "second": summary.settings[d.second].label}
        for d in summary.differences
    ]
    verdict = verdict_lines(differences, summary.metrics[0], summary.modes[0], num_settings=len(summary.settings))
    for line in (
        *verdict,
        *_front_lines(summary),
        *map(_failure_line, summary.failed),
        *(f"note: {text}" for text in summary.notes),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def best_text(summary: Summary) -> str:
    """Return what stands behind the number of finished trials: the best setting, or why there is none."""
    if not summary.settings or len(summary.failed) == len(summary.trials):
        return ""
    first, metric = summary.settings[0], summary.metrics[0]
    if first.misses:  # those that miss a constraint come after those that keep all
        return ", but no setting keeps all of sweep.constraints"
    if len(summary.groups) > 1:
        return f", {len(summary.groups)} worlds, each with a best of its own"
    mean = first.figures[metric].mean
    return f", none of which has {metric}" if math.isnan(mean) else f", best {metric}: {mean:.4g} ({first.label})"


def _front_lines(summary: Summary) -> list[str]:
    """Describe each world's front: its hypervolume over seeds, and who is on it."""
    lines = []
    for world, front in summary.fronts.items():
        of = f" of world {world + 1} of {len(summary.groups)}" if len(summary.groups) > 1 else ""
        names = [f"{summary.settings[place].label} ({count})" for place, count in front.settings.items()]
        volume = _estimate_text(front.volume, summary.metrics[0])
        seeds = f"{front.volume.count} seed{'s' if front.volume.count > 1 else ''}"
        on_it = some_of(names, _MOST_LINES)
        share = f"hypervolume {volume} of the box that its points span, over {seeds}; on it (seeds): {on_it}"
        lines.append(f"front of {', '.join(summary.metrics)}{of}: {share}")
    return lines


def _cells(setting: SettingRow, metrics: tuple[str, ...]) -> list[str]:
    first = setting.figures[metrics[0]]
    return [
        setting.label
        + (f" ({setting.cut_short} ended early)" if setting.cut_short else "")
        + (f" (misses {', '.join(setting.misses)})" if setting.misses else ""),
        str(len(setting.seeds)),
        *(_estimate_text(setting.figures[name], name) for name in metrics),
        "-" if math.isnan(first.sd) else _figure_text(first.sd, metrics[0]),
        bytes_text(None if math.isnan(setting.figures["total_bytes"].mean) else setting.figures["total_bytes"].mean),
        str(setting.failed or "-"),
    ]


def _estimate_text(estimate: Estimate, name: str) -> str:
    if math.isnan(estimate.mean):
        return "-"
    text = _figure_text(estimate.mean, name)
    if math.isnan(estimate.low):
        return text
    return f"{text} [{_figure_text(estimate.low, name)}, {_figure_text(estimate.high, name)}]"


def _figure_text(value: float, name: str) -> str:
    return f"{value:.4f}" if name in _SHARES else f"{value:.4g}"


def verdict_lines(differences: Sequence[Mapping[str, Any]], metric: str, mode: str, *, num_settings: int) -> list[str]:
    """Describe differences between settings, as ``summary.json`` has them, that are more than chance, in lines.

    The mode is ``max`` or ``min``.
    """
    judged = [d for d in differences if d["p_value"] is not None and not math.isnan(d["p_value"])]
    if not judged:
        # A difference stands for each two of one world that have a seed at which no scheduler ended either.
        alone = "no two have whole trials in one world at one seed"
        why = "that takes at least three seeds that both have" if differences else alone
        return [f"no setting can be told from another: {why}"] * bool(num_settings > 1)
    real = [d for d in judged if d["is_real"]]
    head = f"{len(real)} of {len(judged)} differences in {metric} are more than chance (paired seeds, 95%)"
    lines = [f"  {_difference_text(d, metric, mode)}" for d in real[:_MOST_LINES]]
    more = [f"  and {len(real) - _MOST_LINES} more, in summary.json"] if len(real) > _MOST_LINES else []
    return [head + (":" if real else ""), *lines, *more]


def read_verdict(folder: Path) -> list[str]:
    """:func:`verdict_lines` of a sweep's folder; none without a summary, a line on one older than its trials."""
    try:
        tree = parse_json(read_regular(folder / SUMMARY, max_bytes=MOST_DOCUMENT_BYTES))
        (metric, mode), *_ = tree["metrics"].items()
        if is_outdated(folder, tree.get("trials")):
            return [f"no verdict yet: {folder / SUMMARY} is older than the trials; the sweep writes it anew at its end"]
        return verdict_lines(tree["differences"], metric, mode, num_settings=len(tree["settings"]))
    except (FileNotFoundError, InputError):  # a damaged plan is among the report's notes
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return [f"{folder / SUMMARY}: not a readable summary: {type(error).__name__}"]


def is_outdated(folder: Path, trials: Sequence[Mapping[str, Any]] | None) -> bool:
    """Check that a sweep has other trials than its summary, or that one has finished since: it goes on."""
    sweep = SweepFolder(folder)
    if trials is None or not sweep.has_plan:
        return False
    plan = sweep.read_plan()
    had_finished = {trial["folder"]: trial["status"] == "finished" for trial in trials}
    others = [trial.folder for trial in plan.trials if trial.folder not in had_finished]
    if had_finished.keys() - {trial.folder for trial in plan.trials}:
        return True
    # A summary leaves out the trials for which a budget has no room: they have not finished.
    if others and not plan.config_tree.get("sweep", {}).get("budget"):
        return True
    waiting = [name for name, was_finished in had_finished.items() if not was_finished]
    return any(_has_finished(folder / name) for name in (*others, *waiting))


def _has_finished(run: Path) -> bool:
    try:
        return load_run(run).status == "finished"
    except InputError:
        return False


def _difference_text(difference: Mapping[str, Any], metric: str, mode: str) -> str:
    word = "better" if (difference["mean"] > 0) == (mode == "max") else "worse"
    low, high = sorted((abs(difference["low"]), abs(difference["high"])))
    gap = f"{_figure_text(abs(difference['mean']), metric)} [{_figure_text(low, metric)}, {_figure_text(high, metric)}]"
    return f"{difference['first']} is {word} than {difference['second']} by {gap}, {difference['pairs']} seeds"


def _failure_line(row: TrialRow) -> str:
    seed = "" if row.seed is None else f" (seed {row.seed})"
    return f"{row.status}: {row.trial.label}{seed}, round {row.rounds}: {row.reason or 'no reason is known'}"
