"""Which pictures of a table are drawn, and which are left out without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsweep.reproduce.measured.grid import measured, views_of
from fedsweep.reproduce.reproduction import TableRequest, reproduction
from fedsweep.reproduce.task import _drawn, begin
from fedsweep.sweeps.sweep_folder import SweepFolder


def test_costs_alone_shorten_long_runs_and_lengthen_none(changed: Callable[[str, str], Path], tmp_path: Path) -> None:
    path = changed("{method: {name: fedprox, mu: 0.1}}", "{training.rounds: 100}")
    request, folder = TableRequest(table=str(path), scale="full"), SweepFolder(tmp_path / "out")
    task = begin(request, folder, resume=False, overwrite=False, costs_only=True)
    rounds = {(cell.row, cell.config.training.rounds) for cell in task.reproduction.cells}
    assert rounds == {("FedAvg", 3), ("FedProx", 80)}


FIGURES = """  figures:
    - {name: even, kind: bars, y: accuracy, columns: [even]}
    - {name: prox, kind: bars, y: accuracy, rows: [FedProx]}
    - {name: all, kind: bars, y: accuracy}
    - {name: grouped, kind: curves, groups: {Prox: [FedProx]}}
  notes:
"""


@pytest.mark.parametrize(
    ("rows", "columns", "wanted"),
    [
        (None, None, ["even", "prox", "all", "grouped"]),
        (None, "K=2", ["prox", "all", "grouped"]),
        ("FedAvg", "even", ["even", "all"]),
        ("FedAvg", "K=2", ["all"]),
    ],
)
def test_a_picture_of_what_was_not_asked_for_is_no_problem(
    rows: str | None, columns: str | None, wanted: list[str], changed: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Nothing has run, so that each picture that is looked at says so."""
    path = changed("  notes:\n", FIGURES)
    found = reproduction(TableRequest(table=str(path), scale="full", rows=rows, columns=columns))
    views = views_of(found.table, found.folders(tmp_path))
    pictures, problems, _ = _drawn(found, measured(found.table, views, scale="full"), views, folder=tmp_path)
    assert pictures == [] and [problem.split()[2] for problem in problems] == wanted
    assert all("none of the runs that it shows has rounds, or they failed" in problem for problem in problems)
