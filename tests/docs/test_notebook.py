"""examples/study.ipynb was executed as it stands, is small, and its cells run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "study.ipynb"
MAGIC = "%%writefile "


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    found = cell["source"]
    return found if isinstance(found, str) else "".join(found)


def test_it_was_executed_in_order_without_errors_and_is_small() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert NOTEBOOK.stat().st_size < 300_000
    assert not any(place in NOTEBOOK.read_text() for place in ("/tmp/", "/home/", "/root/"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    yield tmp_path
    plt.close("all")
    sys.modules.pop("study_methods", None)


@pytest.mark.ray
def test_its_cells_run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names: dict[str, Any] = {}
    for number, cell in enumerate(code_cells()):
        text = source(cell)
        if text.startswith(MAGIC):
            first, _, rest = text.partition("\n")
            (place / first.removeprefix(MAGIC).strip()).write_text(rest)
            continue
        quick = text.replace("ROUNDS, SEEDS = 20, [0, 1, 2]", "ROUNDS, SEEDS = 2, [0]")
        assert (quick != text) == (number == 0)
        exec(compile(quick, f"cell {number}", "exec"), names)
    assert len(names["study"]) == 3
    assert names["again"].num_samples == 360
    assert r"\toprule" in capsys.readouterr().out
