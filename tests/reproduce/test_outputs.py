from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedsweep.errors import OutputError
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.formats import as_text
from fedsweep.reproduce.measured.grid import Grid, GridCell, Measured
from fedsweep.reproduce.outputs import has_outputs, read_grid, remove_outputs, write_outputs
from fedsweep.runs.run_folder import MEASURED

CELL = {"row": "FedAvg", "column": "even", "standing": "paper"}


@pytest.fixture
def grid(table: TableFile) -> Grid:
    found = {"accuracy": Measured(mean=73.0, sd=0.5, count=3, of=3), "cost": Measured(mean=None, count=0, of=3)}
    return Grid(
        table=table,
        scale="full",
        rows=("FedAvg",),
        columns=("even",),
        cells=(GridCell(row="FedAvg", column="even", measured=found, standing="paper", problems=("seed 9: no",)),),
        setting={"seeds": [0, 1, 2], "rounds": [3, 3], "datasets": ["digits"], "versions": {"torch": "1"}},
        notes=("a note",),
    )


def test_a_table_is_written_in_all_forms_and_read_back_the_same(grid: Grid, tmp_path: Path) -> None:
    written = write_outputs(grid, tmp_path / "out")
    assert [path.name for path in written] == [
        MEASURED,
        "table.txt",
        "table.md",
        "table.tex",
        "tabular.tex",
        "table.html",
    ]
    assert all(path.stat().st_size > 100 for path in written)
    assert (tmp_path / "out" / "tabular.tex").read_text().splitlines()[3].startswith(r"\begin{tabular}")
    again = read_grid(tmp_path / "out")
    assert again == grid and as_text(again) == (tmp_path / "out" / "table.txt").read_text()
    (tmp_path / "out" / "figures").mkdir()
    (tmp_path / "out" / "figures" / "of-an-earlier-table.png").touch()
    remove_outputs(tmp_path / "out")
    assert not has_outputs(tmp_path / "out") and not list((tmp_path / "out").rglob("*.*"))


def test_the_json_has_measured_printed_and_the_setting(grid: Grid, tmp_path: Path) -> None:
    write_outputs(grid, tmp_path)
    tree = json.loads((tmp_path / MEASURED).read_text())
    accuracy = tree["cells"][0]["measured"]["accuracy"]
    assert {key: accuracy[key] for key in ("mean", "sd", "count", "printed", "printed_sd", "deviates")} == {
        "mean": 73.0,
        "sd": 0.5,
        "count": 3,
        "printed": 70.0,
        "printed_sd": 0.5,
        "deviates": True,
    }
    assert tree["cells"][0]["measured"]["cost"]["mean"] is None
    assert (tree["scale"], tree["setting"]["versions"]) == ("full", {"torch": "1"})


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"version": 2},
        {"scale": "tiny"},
        {"scale": ["full"]},
        {"rows": ["no such row"]},
        {"rows": []},
        {"setting": []},
        {"cells": [{"row": "FedAvg"}]},
        {"cells": {"a": 1}},
        {"cells": [{"row": "FedAvg", "column": "even", "standing": "best"}]},
        {"cells": [{**CELL, "measured": {"accuracy": {"mean": 1.0, "count": -3}}}]},
        {"cells": [{**CELL, "measured": {"accuracy": {"mean": math.inf, "count": 3}}}]},
        {"cells": [{**CELL, "measured": {"accuracy": {"mean": 1.0, "sd": -1.0, "count": 3}}}]},
        {"cells": [{**CELL, "by_seed": {"accuracy": {"0": math.inf, "1": -math.inf}}}]},
        {"cells": [{**CELL, "by_seed": {"accuracy": {"0": 10**400}}}]},
        {"table": {"title": "<script>"}},
        {"table": None},
        {"notes": 3},
    ],
    ids=str,
)
def test_a_damaged_table_is_an_error_that_names_the_file(change: dict[str, Any], grid: Grid, tmp_path: Path) -> None:
    write_outputs(grid, tmp_path)
    path = tmp_path / MEASURED
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(OutputError, match=MEASURED):
        read_grid(tmp_path)


def test_a_table_of_costs_that_has_none_is_refused(grid: Grid, tmp_path: Path) -> None:
    write_outputs(grid, tmp_path)
    tree = json.loads((tmp_path / MEASURED).read_text())
    tree["table"]["measures"][1]["cost"] = False
    (tmp_path / MEASURED).write_text(json.dumps({**tree, "costs_only": True}))
    with pytest.raises(OutputError, match="it shows no measures"):
        read_grid(tmp_path)


def test_a_table_of_more_figures_than_a_page_holds_is_refused(grid: Grid, tmp_path: Path) -> None:
    write_outputs(grid, tmp_path)
    path = tmp_path / MEASURED
    tree = json.loads(path.read_text())
    tree["table"] |= {
        "rows": [{"name": f"r{k}"} for k in range(1000)],
        "columns": [{"name": f"c{k}"} for k in range(1000)],
    }
    tree["table"] |= {"printed": {}, "figures": [], "scales": {grid.scale: {}}}
    tree |= {key: [entry["name"] for entry in tree["table"][key]] for key in ("rows", "columns")}
    path.write_text(json.dumps({**tree, "cells": []}))
    with pytest.raises(OutputError, match="more than 200000 figures"):
        read_grid(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "\0", "[1]"], ids=["none", "cut", "deep", "zero", "list"])
def test_a_file_that_is_no_table_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / MEASURED).write_text(text)
    with pytest.raises(OutputError, match=MEASURED):
        read_grid(tmp_path)


def test_the_page_has_the_pictures_and_links_to_the_runs(grid: Grid, tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "curves.png").write_bytes(b"a picture")
    (tmp_path / "figures" / "curves.pdf").write_bytes(b"not shown")
    run = tmp_path / "0001-FedAvg_K=2 & more"
    run.mkdir()
    (run / "config.yaml").write_text("name: x\n")
    write_outputs(grid, tmp_path)
    page = (tmp_path / "table.html").read_text()
    assert page.count("<img ") == 1 and "data:image/png;base64,YSBwaWN0dXJl" in page
    assert '<a href="0001-FedAvg_K%3D2%20%26%20more/">0001-FedAvg_K=2 &amp; more</a>' in page
