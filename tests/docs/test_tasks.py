"""docs/tasks.md: its examples run and learn, its own task included."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.catalog import TABLES
from fedsweep.cli import main

PAGE = "docs/tasks.md"
SMALL = ["runtime.backend=local", "tracking.uri=none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figure", "least", "most"),
    [
        ("diabetes", "r2", 0.2, 1.0),
        ("lines", "perplexity", 1.0, 8.0),
        ("shapes", "mean_iou", 0.3, 1.0),
        ("pairs", "micro_f1", 0.4, 1.0),
        ("codes", "reconstruction", 0.1, 0.5),
        ("hidden", "masked_r2", 0.3, 1.0),
        ("counts", "deviance", 0.0, 1.6),
    ],
)
def test_the_pages_examples_learn(folder: Path, name: str, figure: str, least: float, most: float) -> None:
    rows = fedsweep.run(f"{name}.yaml", overrides=SMALL, out=folder / name).to_pandas()
    assert least < rows[figure].iloc[-1] < most, rows[figure].tolist()


def test_the_pages_command_runs(pages: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = pages.commands(PAGE)
    extra = [word for pair in (*SMALL, "training.rounds=2") for word in ("--set", pair)]
    assert main([*shlex.split(command)[1:], *extra]) == 0, capsys.readouterr().err
    assert main(["compare", "runs"]) == 0
    assert "deviance" in capsys.readouterr().out


def test_each_task_and_its_figures_are_in_the_table(pages: Any) -> None:
    text = (pages.root / PAGE).read_text()
    for name, task in TABLES["scenario.task"].names().items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{figure}`" in row for figure in task.measures if name != "classification"), row
