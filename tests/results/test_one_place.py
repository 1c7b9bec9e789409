"""Compare, report, a sweep's summary and reproduce say the same of the same folder."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from client_tables import write_clients
from rich.console import Console

from fedsweep.reports.compare import compared_runs, print_settings
from fedsweep.reports.page import build_report, render
from fedsweep.reports.sources import find_sources
from fedsweep.reports.sweep_table import print_summary
from fedsweep.reproduce.formats import as_text
from fedsweep.reproduce.measured.grid import measured, views_of
from fedsweep.reproduce.reproduction import Reproduction, TableRequest, reproduction
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.fairness import TrialWorld
from fedsweep.sweeps.summary import summarise
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.testing import tiny_record

TABLE = """
name: tiny
scenario: {clients: 2}
training: {rounds: 3, cohort_size: 2, local_steps: 2}
evaluation: {targets: [0.5]}
tracking: {uri: none}
table:
  title: t
  source: s
  measures:
    - {name: acc, of: test_accuracy, percent: true, digits: 2}
    - {name: best, of: best_test_accuracy, percent: true, digits: 2}
    - {name: bytes, of: total_bytes, digits: 0}
    - {name: round, of: round, target: cell, digits: 1}
    - {name: wall, of: wall_time_s, target: cell, digits: 2}
  rows: [{name: FedAvg}, {name: FedProx, set: {method: {name: fedprox, mu: 0.1}}}]
  columns: [{name: even}]
"""
# Row and seed -> test accuracies by round; not every round is evaluated, and the best is not the last.
ACCURACIES: dict[tuple[str, int], Sequence[float | None]] = {
    ("FedAvg", 0): (0.3, 0.61, None, 0.5, None),
    ("FedAvg", 1): (0.2, None, 0.58, 0.55),
    ("FedAvg", 2): (0.1, 0.2, 0.3, 0.4),
    ("FedProx", 0): (0.7, 0.8),
    ("FedProx", 1): (0.65, 0.72),
    ("FedProx", 2): (None, 0.9),
}


@pytest.fixture
def found(tmp_path: Path) -> Reproduction:
    """A table of two methods and three seeds, whose folder looks as if it had been made."""
    (tmp_path / "tiny.yaml").write_text(TABLE)
    made = reproduction(TableRequest(table=str(tmp_path / "tiny.yaml"), scale="full", seeds=(0, 1, 2)))
    for cell, path in made.folders(tmp_path / "out").items():
        folder = RunFolder.create(path, overwrite=False)
        folder.write_config(cell.config.to_yaml())
        write_clients(folder, [[2, 1], [0, 1]])
        rounds = enumerate(ACCURACIES[cell.row, cell.seed], start=1)
        folder.write_rounds([tiny_record(r, test_accuracy=a, wall_time_s=1.0, eval_time_s=0.25) for r, a in rounds])
        folder.write_result({"status": "finished"})
    return made


def printed(show: Callable[[Console], None]) -> str:
    console = Console(file=io.StringIO(), width=400)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_same_folder_has_the_same_figures_everywhere(found: Reproduction, tmp_path: Path) -> None:
    """FedAvg ends at 50, 55 and 40 %: mean 48.33, deviation 7.64; it sent 1200 bytes in each of 5, 4 and 4 rounds."""
    out = tmp_path / "out"
    compared = printed(lambda console: print_settings(compared_runs([out]), console)).splitlines()
    report = build_report(find_sources([str(out)], uri=None))
    page = re.sub(r"<[^>]+>", " ", render(report, made=datetime.now(UTC)))
    summary = summarise(
        SweepFolder(out), list(found.by_key.values()), [TrialWorld(shared="w", budgets=None)] * 6, config=found.config
    )
    sweep = printed(lambda console: print_summary(summary, console))
    grid = measured(found.table, views_of(found.table, found.folders(out)), scale="full")
    table = as_text(grid)

    fedavg = next(line for line in compared if " FedAvg " in line)
    assert "48.33%  7.64%  40.00% to 55.00%  53.00%  5.2 kB" in fedavg and fedavg.split()[-2:] == ["3", "-"]
    assert re.search(r"48\.33 %\s+40\.00 to 55\.00\s+7\.64\s+53\.00 %\s+5\.2 kB", page)
    assert re.search(r"0\.4833 \[0\.4000, 0\.5500\]\s+0\.0764\s+5\.2 kB", sweep)
    assert "48.33±7.64" in table and "53.00±11.36" in table and "5200±693" in table

    setting = next(s for s in report.settings if report.runs[s.runs[0]].method == "FedAvg")
    row = next(row for row in summary.settings if "FedAvg" in row.label)
    cell = grid.cell("FedAvg", "even")
    assert cell is not None
    for name, measure, unit in (("test_accuracy", "acc", 100), ("best_test_accuracy", "best", 100)):
        over = setting.over_seeds(name)
        assert over == row.figures[name]
        assert (cell.measured[measure].mean, cell.measured[measure].sd) == pytest.approx(
            (unit * over.mean, unit * over.sd)
        )
    assert setting.over_seeds("total_bytes") == row.figures["total_bytes"]
    assert cell.measured["bytes"].mean == row.figures["total_bytes"].mean


def test_what_a_target_took_is_the_same_in_the_report_and_in_the_table(found: Reproduction, tmp_path: Path) -> None:
    """0.5 is reached in rounds 2 and 3 by two of three seeds of FedAvg, after 2.5 and 3.75 seconds."""
    report = build_report(find_sources([str(tmp_path / "out")], uri=None))
    place = next(k for k, s in enumerate(report.settings) if report.runs[s.runs[0]].method == "FedAvg")
    (row,) = [row for row in report.targets if row.setting == place]
    assert (row.target, row.reached, row.runs, row.took["round"], row.took["total_bytes"]) == (0.5, 2, 3, 2.5, 3000.0)
    views = views_of(found.table, found.folders(tmp_path / "out"))
    cell = measured(found.table, views, scale="full").cell("FedAvg", "even")
    assert cell is not None
    rounds = cell.measured["round"]
    assert (rounds.mean, rounds.count, rounds.never) == (2.5, 2, 1)
    assert cell.measured["wall"].mean == pytest.approx(3.125)
