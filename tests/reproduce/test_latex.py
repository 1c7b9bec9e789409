"""LaTeX of tables: it fits where it says that it does, in the paper's arrangement."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from fedsweep.reproduce.cell_texts import headings
from fedsweep.reproduce.definition.table_file import TableFile, read_table, table_names
from fedsweep.reproduce.latex import COLUMN, PAGE, as_latex, as_tabular
from fedsweep.reproduce.measured.grid import Grid, GridCell, Measured

PAPERS = ("dynamicfl", "dynafed", "feddhad", "fedstg")
PROGRAM = shutil.which("pdflatex") or shutil.which("tectonic")
table_named = cache(read_table)


def grid_of(table: TableFile, scale: str) -> Grid:
    """Every cell has the widest figure that it is likely to have: the paper's in size, with a deviation and marks."""
    cells = []
    for row in table.row_names:
        for column in table.column_names:
            measured = {}
            for measure in table.measures:
                printed = table.printed_value(row, column, measure=measure.name)
                usual = 88.0 if measure.percent else 0.888 if measure.digits else 8888.0
                mean = printed if isinstance(printed, float | int) else usual
                measured[measure.name] = Measured(mean=mean * 1.1, sd=mean / 20, count=3, of=3)
            if table.has_cell(row, column):
                standing = "paper" if scale == "full" else "other"
                cells.append(GridCell(row=row, column=column, measured=measured, standing=standing))
    setting = {"seeds": [0, 1, 2], "rounds": [200, 800], "datasets": ["cifar10"], "networks": ["cnn"]}
    return Grid(
        table=table,
        scale=scale,
        rows=tuple(table.row_names),
        columns=tuple(table.column_names),
        cells=tuple(cells),
        setting=setting,
    )


def narrow_tables() -> list[str]:
    names = [name for name in table_names() if name.partition("/")[0] in PAPERS]
    return [name for name in names if len(headings(grid_of(table_named(name), "full"))) <= 8]


def width_of(text: str) -> float:
    return float(re.search(r"about (\d+) pt", text)[1])  # type: ignore[index]


@pytest.mark.slow
def test_tables_with_up_to_eight_columns_of_figures_fit_a_page_and_narrow_ones_a_column() -> None:
    names = narrow_tables()
    assert {"dynamicfl/table4", "dynamicfl/table12", "dynafed/table2", "feddhad/table6", "fedstg/table1"} <= {*names}
    widths = {name: width_of(as_tabular(grid_of(table_named(name), "full"))) for name in names}
    assert {name for name, width in widths.items() if width > PAGE} == set()
    assert widths["fedstg/table1"] <= COLUMN and widths["fedstg/table2"] <= COLUMN
    text = as_latex(grid_of(table_named("fedstg/table1"), "full"))
    assert r"\begin{table}" in text
    assert r"\begin{table*}" in as_latex(grid_of(table_named("dynamicfl/table12"), "full"))


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="neither pdflatex nor tectonic is installed")
def test_they_compile_without_an_overfull_box_in_the_width_that_they_name(tmp_path: Path) -> None:
    body = []
    for name in narrow_tables():
        for scale in ("full", "smoke"):
            tabular = as_tabular(grid_of(table_named(name), scale))
            room = COLUMN if width_of(tabular) <= COLUMN else PAGE
            body.append(rf"\typeout{{TABLE {name} {scale}}}\noindent\begin{{minipage}}{{{room}pt}}\noindent")
            body.append(rf"{tabular}\end{{minipage}}\clearpage")
            body.append(rf"{as_latex(grid_of(table_named(name), scale))}\clearpage")  # with caption, claims and notes
    page = r"\documentclass[10pt]{article}\usepackage{booktabs}\usepackage[margin=1cm]{geometry}\textwidth=500pt"
    page += r"\textheight=900pt\begin{document}\setlength{\parindent}{0pt}" + "\n".join(body) + r"\end{document}"
    (tmp_path / "all.tex").write_text(page)
    options = ["-interaction=nonstopmode"] if "pdflatex" in str(PROGRAM) else ["--keep-logs"]
    command = [str(PROGRAM), *options, "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=300)
    log = (tmp_path / "all.log").read_text(errors="replace")
    assert done.returncode == 0, log[-3000:]
    overfull = re.findall(r"TABLE (\S+ \S+)(?:(?!TABLE).)*?(Overfull \\hbox \([\d.]+pt)", log, flags=re.DOTALL)
    assert overfull == []
