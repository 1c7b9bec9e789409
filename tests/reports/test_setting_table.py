"""Settings as a table of a paper: rows of methods, groups of columns of worlds."""

from __future__ import annotations

import csv
import io
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fedsweep.errors import ConfigError
from fedsweep.reports.compare import compared_runs, print_comparison
from fedsweep.reports.page import build_report, render
from fedsweep.reports.setting_table import TableStyle, settings_as
from fedsweep.reports.sources import find_sources
from fedsweep.results.selection import leading_figure, only_those
from fedsweep.results.settings import ReportRun
from fedsweep.runs.run_folder import RunFolder
from fedsweep.study import Results
from fedsweep.testing import tiny_record

ROUND = tiny_record(round=1, bytes_up=1_000_000, bytes_down=500_000)
# Method, skew and epochs -> accuracies of two seeds; FedProx is the best at 0.1, FedAvg at 1.
ACCURACIES = {
    ("fedavg", 0.1, 1): (0.2, 0.4),
    ("fedavg", 1.0, 1): (0.8, 0.9),
    ("fedprox", 0.1, 1): (0.5, 0.5),
    ("fedprox", 1.0, 1): (0.6, 0.7),
}


def write_study(path: Path, accuracies: Mapping[tuple[str, float, int], tuple[float, ...]]) -> list[ReportRun]:
    for (method, alpha, epochs), values in accuracies.items():
        for seed, accuracy in enumerate(values):
            folder = RunFolder.create(path / f"{method}-{alpha}-{epochs}-{seed}", overwrite=False)
            folder.write_config(
                f"name: study {method} dirichlet_alpha={alpha:g}\nseed: {seed}\nmethod: {{name: {method}}}\n"
                f"scenario: {{partition: {{kind: dirichlet, dirichlet_alpha: {alpha}}}}}\n"
                f"training: {{local_epochs: {epochs}}}\n"
            )
            folder.write_rounds([replace(ROUND, test_accuracy=accuracy)])
            folder.write_result({"status": "finished"})
    return compared_runs([path])


@pytest.fixture
def runs(tmp_path: Path) -> list[ReportRun]:
    return write_study(tmp_path, ACCURACIES)


def test_latex_has_a_column_for_each_world_and_its_best_is_bold(runs: list[ReportRun]) -> None:
    lines = settings_as(runs, "latex").splitlines()
    start = lines.index(r"\begin{tabular}{lrr}")
    assert lines[start + 2 : start + 8] == [
        r"Method & \multicolumn{2}{c}{Accuracy (\%)} \\",
        r"\cmidrule(lr){2-3}",
        r" & $\alpha$=0.1 & $\alpha$=1 \\",
        r"\midrule",
        r"fedavg & 30.00 $\pm$ 14.14 & \textbf{85.00 $\pm$ 7.07} \\",
        r"fedprox & \textbf{50.00 $\pm$ 0.00} & 65.00 $\pm$ 7.07 \\",
    ]


def test_nothing_is_said_of_bold_where_nothing_is(tmp_path: Path) -> None:
    runs = write_study(tmp_path, {("fedavg", 0.1, 1): (0.2,), ("fedavg", 1.0, 1): (0.8,)})
    assert "bold" not in settings_as(runs, "latex") and "**" not in settings_as(runs, "md")


def test_worlds_are_groups_of_the_figures_that_were_asked_for(runs: list[ReportRun]) -> None:
    lines = settings_as(runs, "latex", TableStyle(figures=["acc", "bytes"])).splitlines()
    assert r"Method & \multicolumn{2}{c}{$\alpha$=0.1} & \multicolumn{2}{c}{$\alpha$=1} \\" in lines
    assert r" & Accuracy (\%) & MB sent & Accuracy (\%) & MB sent \\" in lines
    # Who sends least is the best, and all send the same.
    assert any(line.startswith(r"fedavg & 30.00 $\pm$ 14.14 & \textbf{1.5} & \textbf{85.00") for line in lines)


def test_where_nothing_is_classified_the_tasks_first_figure_takes_the_accuracys_place(tmp_path: Path) -> None:
    for seed, (method, rmse) in enumerate((("fedavg", 0.5), ("fedprox", 0.75))):
        folder = RunFolder.create(tmp_path / method, overwrite=False)
        measures = "[{name: rmse, mode: min}, {name: r2, mode: max}]"
        folder.write_config(f"name: {method}\nscenario: {{task: {{kind: regression, metrics: {measures}}}}}\n")
        folder.write_rounds([tiny_record(bytes_up=44_600 * (seed + 1), bytes_down=0, extra={"rmse": rmse, "r2": -0.5})])
        folder.write_result({"status": "finished"})
    runs = compared_runs([tmp_path])
    lines = settings_as(runs, "latex").splitlines()
    # Of few bytes two digits are shown, not none.
    assert r"Setting & rmse & MB sent & Ratio \\" in lines
    assert r"fedavg & \textbf{0.5} & 0.045 & 0.500 \\" in lines and r"fedprox & 0.75 & 0.089 & 0.500 \\" in lines
    first, _ = csv.DictReader(io.StringIO(settings_as(runs, "csv")))
    assert (first["rmse_mean"], first["r2_mean"], first["test_accuracy_mean"]) == ("0.5", "-0.5", "")
    assert Results([tmp_path]).to_pandas("run")[["rmse", "r2"]].values.tolist() == [[0.5, -0.5], [0.75, -0.5]]
    assert leading_figure(run.view for run in runs) == "rmse"
    page = render(build_report(find_sources([str(tmp_path)], uri=None)), made=datetime.now(UTC))
    assert "Nothing that is learned here has an accuracy." in page and "Nothing was evaluated yet." not in page


def test_markdown_has_the_same_with_intervals_where_they_are_asked_for_and_three_seeds_have_them(
    runs: list[ReportRun], tmp_path: Path
) -> None:
    lines = settings_as(runs, "md").splitlines()
    assert (
        lines[0]
        == "| Method | Accuracy (%) \N{GREEK SMALL LETTER ALPHA}=0.1 | Accuracy (%) \N{GREEK SMALL LETTER ALPHA}=1 |"
    )
    assert lines[2] == "| fedavg | 30.00 ± 14.14 | **85.00 ± 7.07** |"
    assert settings_as(runs, "md", TableStyle(interval=True)).splitlines() == lines
    more = {key: (*values, sum(values) / 2) for key, values in ACCURACIES.items()}
    text = settings_as(write_study(tmp_path / "more", more), "md", TableStyle(interval=True))
    assert "**85.00 ± 5.00 [72.58, 97.42]**" in text and "Student's t" in text


def test_two_keys_are_two_lines_of_headings(tmp_path: Path) -> None:
    cells = {(m, a, e): (0.5,) for m in ("fedavg", "fedprox") for e in (1, 2) for a in (0.1, 1.0)}
    lines = settings_as(write_study(tmp_path, cells), "latex", TableStyle(columns=["dirichlet_alpha", "local_epochs"]))
    assert r"Accuracy (\%) & \multicolumn{2}{c}{$\alpha$=0.1} & \multicolumn{2}{c}{$\alpha$=1} \\" in lines
    assert r" & local epochs=1 & local epochs=2 & local epochs=1 & local epochs=2 \\" in lines


def test_keys_are_called_as_a_reader_wants(runs: list[ReportRun]) -> None:
    text = settings_as(runs, "latex", TableStyle(labels={"dirichlet_alpha": "skew"}))
    assert " & skew=0.1 & skew=1 " in text


def test_csv_has_worlds_too(runs: list[ReportRun]) -> None:
    rows = list(csv.DictReader(io.StringIO(settings_as(runs, "csv"))))
    assert [(row["setting"], row["world"]) for row in rows][:2] == [
        ("fedavg dirichlet_alpha=0.1", "dirichlet_alpha=0.1"),
        ("fedavg dirichlet_alpha=1", "dirichlet_alpha=1"),
    ]
    wide = list(csv.DictReader(io.StringIO(settings_as(runs, "csv", TableStyle(rows=["method"], sort="-acc")))))
    assert [row["row"] for row in wide] == ["FedAvg", "FedProx"]
    assert float(wide[1]["dirichlet_alpha=1 test_accuracy_mean"]) == pytest.approx(0.65)
    assert wide[1]["dirichlet_alpha=1 test_accuracy_seeds"] == "2"


def test_a_run_that_diverged_is_no_part_of_a_mean(tmp_path: Path) -> None:
    runs = write_study(tmp_path, {**ACCURACIES, ("moon", 0.1, 1): (math.nan, 0.9), ("moon", 1.0, 1): (math.nan,)})
    lines = settings_as(runs, "latex").splitlines()
    assert r"moon & \textbf{90.00} & - \\" in lines


def printed(runs: list[ReportRun], **options: Any) -> list[str]:
    from rich.console import Console

    page = io.StringIO()
    print_comparison(runs, Console(file=page, width=200, color_system=None), **options)
    return [line.rstrip() for line in page.getvalue().splitlines()]


def test_the_terminal_has_settings_world_by_world_sorted_and_cut(runs: list[ReportRun]) -> None:
    lines = printed(runs, by="setting", style=TableStyle(sort="acc", top=1))
    assert [line.split()[:3] for line in lines[1:]] == [
        ["dirichlet_alpha=0.1"],
        ["fedprox", "FedProx", "50.00%"],
        ["dirichlet_alpha=1"],
        ["fedavg", "FedAvg", "85.00%"],
    ]
    assert [line.split()[0] for line in printed(only_those(runs, ["seed=1"]), style=TableStyle(sort="acc"))[1:]] == [
        "fedavg",
        "fedprox",
        "fedprox",
        "fedavg",
    ]


def test_rows_and_columns_are_printed_without_a_form(runs: list[ReportRun]) -> None:
    lines = printed(runs, style=TableStyle(rows=["dirichlet_alpha"], columns=["method"]))
    assert lines[0].split() == ["Accuracy", "(%)", "Accuracy", "(%)"]
    assert lines[1].split() == ["method=fedavg", "method=fedprox"]
    assert lines[2].split() == ["dirichlet_alpha=0.1", *"30.00 ± 14.14 50.00 ± 0.00".split()]
    with pytest.raises(ConfigError, match="unknown figure 'acuracy'; did you mean 'accuracy'"):
        printed(runs, by="setting", style=TableStyle(figures=["acuracy"]))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_two_worlds_fit_a_papers_column(tmp_path: Path, runs: list[ReportRun]) -> None:
    """A column of IEEE's has 252 points, in which tables are set small."""
    table = settings_as(runs, "latex")
    (tmp_path / "t.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\setlength{\\textwidth}{252pt}\\begin{document}\\noindent\\small\n"
        f"{table}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert made.returncode == 0, made.stdout[-2000:]
    assert "Overfull" not in made.stdout


def write_metric(path: Path, method: str, values: Sequence[float], config: str, metric: str) -> None:
    for seed, value in enumerate(values):
        folder = RunFolder.create(path / f"{method}-{seed}", overwrite=False)
        folder.write_config(f"name: {method}\nseed: {seed}\nmethod: {{name: {method}}}\n{config}\n")
        folder.write_rounds([tiny_record(extra={metric: value})])
        folder.write_result({"status": "finished"})


def test_a_mean_over_those_seeds_alone_that_have_the_figure_says_so_and_is_not_the_best(tmp_path: Path) -> None:
    config = "evaluation: {metrics: [{name: 'my:score', mode: max}]}"
    write_metric(tmp_path, "fedavg", (0.5, 0.5, 0.5), config, "score")
    write_metric(tmp_path, "fedprox", (0.9, math.nan, math.nan), config, "score")
    runs = compared_runs([tmp_path])
    text = settings_as(runs, "latex", TableStyle(figures=["score"], sort="score"))
    assert r"fedavg & \textbf{0.5 $\pm$ 0} \\" in text and r"fedprox & 0.9 [1/3] \\" in text
    assert text.index("fedavg &") < text.index("fedprox &") and "[k/n]: of the k of n seeds" in text
    lines = printed(runs, by="setting", style=TableStyle(sort="score"))
    assert [line.split()[0] for line in lines[1:]] == ["fedavg", "fedprox"] and "0.9 [1/3]" in lines[2]


def test_what_is_learned_beside_classes_goes_by_its_own_first_figure(tmp_path: Path) -> None:
    write_study(tmp_path / "classes", {("fedavg", 1.0, 1): (0.2,), ("fedprox", 1.0, 1): (0.8,)})
    config = "scenario: {task: {kind: regression, metrics: [{name: rmse, mode: min}]}}"
    write_metric(tmp_path / "numbers", "fedavg", (0.75,), config, "rmse")
    write_metric(tmp_path / "numbers", "fedprox", (0.5,), config, "rmse")
    runs = compared_runs([tmp_path])
    shown = "\n".join(printed(runs, by="setting", style=TableStyle(sort="acc", top=1)))
    assert shown.count("FedProx") == 4 and "80.00%" in shown and " 0.5 " in shown and "FedAvg" not in shown
    text = settings_as(runs, "latex", TableStyle(rows=["method"]))
    assert r"\textbf{0.5} " in text and r"\textbf{80.00} " in text and "rmse" in text
    named = settings_as(runs, "latex", TableStyle(rows=["method"], figures=["acc"]))
    assert r"\textbf{0.5} " in named
