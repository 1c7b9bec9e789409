"""Compare, report, a sweep's summary and reproduce say the same of the same folder."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from client_tables import write_clients
from rich.console import Console

from fedsweep.reports.compare import compared_runs, print_settings
from fedsweep.reports.contents import Report
from fedsweep.reports.page import build_report, render
from fedsweep.reports.setting_table import TableStyle, settings_as
from fedsweep.reports.sources import find_sources
from fedsweep.reports.sweep_table import print_summary
from fedsweep.reproduce.definition.sections import FigureSpec
from fedsweep.reproduce.figures.scene import scene_of
from fedsweep.reproduce.formats import as_text
from fedsweep.reproduce.measured.grid import measured, summed_up, views_of
from fedsweep.reproduce.reproduction import Reproduction, TableRequest, reproduction
from fedsweep.results.settings import counted, remarks
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.fairness import TrialWorld
from fedsweep.sweeps.summary import Summary, summarise
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


def summary_of(found: Reproduction, out: Path) -> Summary:
    worlds = [TrialWorld(shared="w", budgets=None)] * 6
    return summarise(SweepFolder(out), list(found.by_key.values()), worlds, config=found.config)


def shown(found: Reproduction, out: Path) -> tuple[list[str], Report, str, Summary, str]:
    """What compare prints, the report and its page, the sweep's summary and what it prints, of one folder."""
    compared = printed(lambda console: print_settings(compared_runs([out]), console)).splitlines()
    report = build_report(find_sources([str(out)], uri=None))
    page = re.sub(r"<[^>]+>", " ", render(report, made=datetime.now(UTC)))
    summary = summary_of(found, out)
    return compared, report, page, summary, printed(lambda console: print_summary(summary, console))


def test_the_same_folder_has_the_same_figures_everywhere(found: Reproduction, tmp_path: Path) -> None:
    """FedAvg ends at 50, 55 and 40 %: mean 48.33, deviation 7.64; it sent 1200 bytes in each of 5, 4 and 4 rounds."""
    out = tmp_path / "out"
    compared, report, page, summary, sweep = shown(found, out)
    grid = measured(found.table, views_of(found.table, found.folders(out)), scale="full")
    table = as_text(grid)

    fedavg = next(line for line in compared if " FedAvg " in line)
    assert "48.33%  7.64%   29.36% to 67.31%  53.00%  5.2 kB" in fedavg and fedavg.split()[-2:] == ["3", "-"]
    assert re.search(r"48\.33 %\s+29\.36 to 67\.31\s+7\.64\s+53\.00 %\s+5\.2 kB", page)
    assert re.search(r"0\.4833 \[0\.2936, 0\.6731\]\s+0\.0764\s+5\.2 kB", sweep)
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


def test_runs_that_have_not_finished_count_alike_everywhere(found: Reproduction, tmp_path: Path) -> None:
    """Of FedAvg the seeds 0 and 1 have finished; of FedProx none, and one failed: those under way stand in for it."""
    out = tmp_path / "out"
    by_place = {(cell.row, cell.seed): RunFolder(path) for cell, path in found.folders(out).items()}
    ends = {("FedAvg", 2): None, ("FedProx", 0): "killed", ("FedProx", 1): None, ("FedProx", 2): "failed"}
    for place, status in ends.items():
        (by_place[place].path / "result.json").unlink()
        if status is not None:
            by_place[place].write_result({"status": status})

    compared, report, page, summary, sweep = shown(found, out)
    views = views_of(found.table, found.folders(out))
    grid = measured(found.table, views, scale="full")

    for row, mean, sd in (("FedAvg", "52.50", "3.54"), ("FedProx", "76.00", "5.66")):
        line = next(line for line in compared if f" {row} " in line)
        assert re.search(rf"{mean}%  {sd}%\s+-  ", line) and " 2 " in line
        assert re.search(rf"{mean} %\s+-\s+{sd}", page)
        assert f"{float(mean) / 100:.4f} " in sweep and "[" not in sweep.partition("\n\n")[0]
        cell = grid.cell(row, "even")
        assert cell is not None and cell.measured["acc"].count == 2 and f"{mean}±{sd}" in as_text(grid)
        (setting,) = (s for s in report.settings if report.runs[s.runs[0]].method == row)
        (found_row,) = (s for s in summary.settings if row in s.label)
        assert setting.over_seeds("best_test_accuracy") == found_row.figures["best_test_accuracy"]
        assert scene_of(FigureSpec(name="f", kind="bars", y="test_accuracy"), grid, views).measured(
            row, "even", measure=found.table.measures[0]
        ) == summed_up([view.figure("test_accuracy") for view in setting.views], found.table.measures[0])


def test_runs_under_way_are_shown_but_not_judged(found: Reproduction, tmp_path: Path) -> None:
    """FedProx is ahead, but none of its trials has finished: it is neither the best nor the paper's."""
    out = tmp_path / "out"
    for cell, path in found.folders(out).items():
        if cell.row == "FedProx":
            RunFolder(path).write_result({"status": "killed"})
    _, report, _, summary, _ = shown(found, out)
    assert ["FedAvg" in setting.label for setting in summary.settings] == [True, False]
    assert ["FedAvg" in setting.label for setting in report.settings] == [True, False]
    assert report.worlds[0].best == ()
    runs = compared_runs([out])
    table = settings_as(runs, "latex", TableStyle(sort="acc"))
    rows = [line for line in table.splitlines() if line.endswith(r"\\")]
    assert ["FedAvg" in line for line in rows[1:]] == [True, False] and "textbf" not in table
    (told,) = [text for text in remarks(runs, report.settings) if "under way" in text]
    assert "FedProx" in told and "FedAvg" not in told and told in table
    assert told in " ".join(render(report, made=datetime.now(UTC)).split())
    assert summary.headline["best_setting/test_accuracy"] == summary.settings[0].figures["test_accuracy"].mean
    assert summary.differences == ()
    (note,) = [note for note in summary.notes if "under way" in note]
    assert "FedProx" in note and "FedAvg" not in note
    grid = measured(found.table, views_of(found.table, found.folders(out)), scale="full")
    standings = {cell.row: (cell.standing, bool(cell.problems), len(cell.by_seed["acc"])) for cell in grid.cells}
    assert standings == {"FedAvg": ("paper", False, 3), "FedProx": ("other", True, 0)}


def test_a_trial_whose_process_died_before_it_wrote_is_told_so(found: Reproduction, tmp_path: Path) -> None:
    shutil.rmtree(next(path for cell, path in found.folders(tmp_path / "out").items() if cell.seed == 2))
    *_, sweep = shown(found, tmp_path / "out")
    assert "missing: FedAvg | even (seed 2), round 0: nothing of it was written" in " ".join(sweep.split())


def test_one_run_per_seed_counts_and_none_that_failed(tmp_path: Path) -> None:
    def run(seed: int, status: str, rounds: int = 2) -> RunView:
        result = {} if status == "unfinished" else {"status": status}
        return RunView(folder=tmp_path, config={"seed": seed}, result=result, columns={"round": [*range(rounds)]})

    double = [run(0, "unfinished"), run(0, "finished"), run(1, "finished"), run(0, "finished"), run(2, "killed")]
    assert counted(double) == [1, 2]
    assert counted([run(0, "failed"), run(1, "killed"), run(1, "unfinished"), run(2, "killed", rounds=0)]) == [1]
    assert counted([]) == []


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
