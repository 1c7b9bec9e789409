"""docs/tables.md: a table with a measure and a figure of its own is made, and says what they do wrong."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsweep.cli import main
from fedsweep.reproduce import kinds
from fedsweep.results.view import load_run

PAGE = "docs/tables.md"


@pytest.fixture
def folder(pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    pages.write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_study", None)
    kinds.measure_function.cache_clear()


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_pages_measure_and_figure_are_in_the_table(
    shared_ray: Any, pages: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = (line for line in pages.commands(PAGE) if "my_study" in line)
    assert main([*shlex.split(command)[1:], "--set", "tracking.uri=none"]) == 0, capsys.readouterr().err
    out = folder / "runs" / "my-study"
    assert "First round above a half" in (out / "table.txt").read_text()
    assert (out / "figures" / "accuracies.png").stat().st_size > 1000
    for cell in json.loads((out / "measured.json").read_text())["cells"]:
        (run,) = out.glob(f"*-{cell['row']}_{cell['column'].replace(' ', '_')}_seed=0")
        accuracies = load_run(run).column("test_accuracy")
        first = next((n for n, accuracy in enumerate(accuracies, start=1) if accuracy > 0.5), None)
        assert cell["measured"]["first"]["mean"] == first
    module = folder / "my_study.py"
    module.write_text(module.read_text().replace("return figure", "return axes").replace("next((", "[0][7] or next(("))
    sys.modules.pop("my_study")
    kinds.measure_function.cache_clear()
    assert main(["reproduce", "--resume", "--out", str(out)]) == 1
    words = capsys.readouterr()
    assert "FedAvg | Dir 0.1: first: the measure 'my_study:first_above_half' failed (" in words.out
    assert "IndexError: list index out of range" in (out / "table.md").read_text()
    assert "the figure 'my_study:heatmap' must give Figure, but gives Axes" in words.err
