"""docs/own-tasks.md: its examples run, learn, and are as short as it says."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.cli import main

PAGE = "docs/own-tasks.md"
SMALL = ["runtime.backend=local", "tracking.uri=none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figure", "first", "last"),
    [
        ("letters", "test_accuracy", (0.0, 0.4), (0.8, 1.0)),
        ("views", "neighbour", (0.85, 0.92), (0.93, 1.0)),
        ("made", "energy", (3.0, 9.0), (0.0, 2.0)),
    ],
)
def test_the_pages_examples_learn(
    folder: Path, name: str, figure: str, first: tuple[float, float], last: tuple[float, float]
) -> None:
    rows = fedsweep.run(f"{name}.yaml", overrides=SMALL, out=folder / name).to_pandas()[figure]
    assert first[0] < rows.iloc[0] < first[1] and last[0] < rows.iloc[-1] < last[1], rows.tolist()


@pytest.mark.slow
def test_the_pages_commands_run(pages: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in pages.commands(PAGE):
        more = [word for pair in SMALL for word in ("--set", pair)]
        assert main([*shlex.split(command)[1:], *more]) == 0, capsys.readouterr().err
    base, adapted = (fedsweep.load(f"runs/{name}").to_pandas() for name in ("my_base", "adapted"))
    assert float(adapted["perplexity"].iloc[-1]) < float(base["perplexity"].iloc[-1])
    assert float(adapted["total_bytes"].iloc[-1]) < float(base["total_bytes"].iloc[-1]) / 5


def test_each_example_is_at_most_forty_lines(pages: Any) -> None:
    text = (pages.root / PAGE).read_text()
    for section in text.split("\n## ")[1:]:
        blocks = [part.split("\n", 1)[1] for part in section.split("```")[1::2]]
        lines = [line for block in blocks for line in block.splitlines() if line.strip()]
        assert 0 < len(lines) <= 40, section.splitlines()[0]
