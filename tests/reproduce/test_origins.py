"""What a table says of its runs beside their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.reproduce.origins import with_origins
from fedsweep.results.view import RunView

IDLE, LONE = "there was no refresh: clients train the whole model", "nobody trained"


def run(*remarks: Any) -> RunView:
    return RunView(folder=Path("t/run"), config={}, result={"remarks": [*remarks]}, columns={})


def cell(row: str, column: str, seed: int) -> Cell:
    return Cell(row=row, column=column, seed=seed, values={}, config_tree={})


def test_work_that_did_not_happen_is_told_with_its_rows_or_cells(table: Any) -> None:
    views: dict[Cell, RunView | str] = {
        cell("FedAD", "a", 0): run(IDLE),
        cell("FedAD", "a", 1): run(IDLE, IDLE),
        cell("FedAD", "b", 0): run(IDLE),
        cell("FedDHAD", "a", 0): run(IDLE, LONE),
        cell("FedDHAD", "b", 0): run(),
        cell("FedDHAD", "b", 1): run(IDLE),
        cell("FedAvg", "a", 0): "it was not run",
        cell("FedAvg", "b", 0): run(7),  # a foreign file's
    }
    grid = Grid(table=table, scale="smoke", rows=(), columns=(), cells=())
    assert with_origins(grid, views, Path("t")).notes == (
        f"FedAD, FedDHAD | a, FedDHAD | b (1 of 2 seeds): {IDLE}.",
        f"FedDHAD | a: {LONE}.",
    )
