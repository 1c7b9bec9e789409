"""A sweep's summary for people, and what of it is read back."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console

from fedsweep.reports.sweep_table import print_summary, read_verdict, verdict_lines
from fedsweep.results.seed_statistics import estimate
from fedsweep.sweeps.fairness import TrialWorld
from fedsweep.sweeps.summary import SettingRow, Summary

METRIC = "test_accuracy"


def summary(label: str) -> Summary:
    setting = SettingRow(
        label=label,
        world=TrialWorld(shared="w", budgets=None),
        values={},
        seeds=(0,),
        failed=0,
        cut_short=0,
        figures={name: estimate([0.5]) for name in (METRIC, "total_bytes")},
    )
    return Summary(metrics=(METRIC,), modes=("max",), trials=(), settings=(setting,), differences=(), notes=())


def test_a_setting_is_called_as_it_is() -> None:
    file = io.StringIO()
    print_summary(summary("[/]a[red]b"), Console(file=file))
    assert "[/]a[red]b" in file.getvalue()


def test_settings_of_other_worlds_are_not_told_that_they_lack_seeds() -> None:
    assert verdict_lines([], METRIC, "max", num_settings=2) == [
        "no setting can be told from another: no two have whole trials in one world at one seed"
    ]
    assert verdict_lines([], METRIC, "max", num_settings=1) == []


def test_a_summary_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "summary.json")
    assert read_verdict(tmp_path) == [f"{tmp_path / 'summary.json'}: not a readable summary: OSError"]
