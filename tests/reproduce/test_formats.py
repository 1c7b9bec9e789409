from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.reproduce.formats import as_html, as_latex, as_markdown, as_text, html_fragment
from fedsweep.reproduce.measured.grid import Grid, GridCell, Measured, setting_of
from fedsweep.results.typeset import latex_text, markdown_text

Changed = Callable[[str, str], Path]


def grid_of(table: TableFile, **more: object) -> Grid:
    good = {"accuracy": Measured(mean=72.14, sd=0.44, count=3, of=3), "cost": Measured(mean=0.5, sd=0.0, count=3, of=3)}
    cells = (
        GridCell(row="FedAvg", column="even", measured=good, standing="paper"),
        GridCell(row="FedAvg", column="K=2", measured={}, standing="paper", problems=("seed 0: failed: a < b",)),
    )
    setting = setting_of(cells_of(table, "full", rows="FedAvg"))
    grid = Grid(
        table=table, scale="full", rows=("FedAvg", "SCAFFOLD"), columns=("even", "K=2"), cells=cells, setting=setting
    )
    return replace(grid, **more)  # type: ignore[arg-type]


def test_text_has_measured_beside_printed_in_the_papers_layout(table: TableFile) -> None:
    lines = as_text(grid_of(table)).splitlines()
    assert lines[0] == "Somebody 2024, Table 7: Two methods on digits"
    assert lines[1] == "scale full; digits; mlp; 3 rounds; seeds 0, 1, 2"
    assert re.split(r"\s{2,}", lines[3].strip()) == ["even", "even", "K=2", "K=2"]
    assert re.split(r"\s{2,}", lines[5]) == [
        "FedAvg",
        "72.1±0.4*† (70.0±0.5)",
        "0.500±0.000 (0.500)",
        "failed",
        "failed (0.900)",
    ]
    assert lines[6].startswith("SCAFFOLD")
    below = "\n".join(lines[8:])
    assert "*: further from what is printed than the tolerance (Accuracy (%) 2, Cost 0.05)." in below
    assert "SCAFFOLD is missing: scaffold is not there yet" in below and "FedAvg | K=2: seed 0: failed: a < b" in below
    assert "The paper does not say which digits." in below and "±, measured: sample standard deviation" in below
    assert "±, printed: standard deviation." in below and "†: mean ± spread of measured and printed" in below
    assert "Each figure is the mean over 3 seeds." in below


def test_a_measure_that_no_run_has_is_told(table: TableFile) -> None:
    figures = {"accuracy": Measured(mean=72.14, count=3, of=3), "cost": Measured(of=3)}
    grid = grid_of(table)
    assert "no run has" not in as_text(grid)
    cells = (replace(grid.cells[0], measured=figures), grid.cells[1])
    assert "Cost: no run has comm_ratio." in as_text(replace(grid, cells=cells))
    untold = replace(cells[0], untold=("its costs follow from the training",))
    assert "no run has" not in as_text(replace(grid, cells=(untold,)))


def test_smoke_says_that_it_is_not_the_papers_setting(table: TableFile) -> None:
    grid = grid_of(table)
    cells = tuple(replace(cell, standing="other") for cell in grid.cells)
    text = as_text(replace(grid, scale="smoke", cells=cells))
    assert text.splitlines()[2].startswith("The scale smoke is not the paper's setting") and "*" not in text
    assert text.count("setting") == 1 and "72.1±0.4 (70.0±0.5)" in text
    good = replace(grid_of(table).cells[0], column="K=2")
    mixed = as_text(replace(grid, cells=(cells[0], good)))
    assert "72.1±0.4‡ (70.0±0.5)" in mixed and "‡: the settings are not the paper's" in mixed


def test_runs_that_have_not_finished_are_not_said_to_have_other_settings(table: TableFile) -> None:
    good = grid_of(table).cells[0]
    under_way = replace(good, standing="other", problems=("seed 0: killed after round 2",))
    for cells in ((under_way,), (under_way, replace(good, column="K=2"))):
        text = " ".join(as_text(grid_of(table, cells=cells)).split())
        assert "With --set, or of runs that have not finished, this is not the paper's setting" in text


def test_a_printed_figure_loses_no_digit_however_small(changed: Changed) -> None:
    table = read_table(changed("cost: 0.5}", "cost: [0.00005, 1.5e-7]}"))
    assert "(5e-05±1.5e-07)" in as_text(grid_of(table))


def test_a_figure_of_some_seeds_and_a_target_never_reached_say_so(table: TableFile) -> None:
    some = {"accuracy": Measured(mean=70.0, count=2, of=3, sd=1.0), "cost": Measured(never=3, of=3)}
    text = as_text(grid_of(table, cells=(GridCell(row="FedAvg", column="even", measured=some),)))
    assert "70.0±1.0 [2/3] (70.0±0.5)" in text and "[k/n] of the k of n seeds that have it" in text
    assert "never [3] (0.500)" in text


def wide(changed: Changed, count: int) -> Grid:
    columns = "".join(f"    - {{name: Dirichlet {k}}}\n" for k in range(count))
    table = read_table(changed("    - {name: even}\n", f"    - {{name: even}}\n{columns}"))
    names = tuple(table.column_names)
    found = {"accuracy": Measured(mean=50.0, count=1, of=1), "cost": Measured(mean=0.123, count=1, of=1)}
    return grid_of(
        table, columns=names, cells=tuple(GridCell(row="FedAvg", column=name, measured=found) for name in names)
    )


@pytest.mark.parametrize("count", [1, 3, 12])
def test_text_fits_into_120_columns_and_shows_every_column_once(count: int, changed: Changed) -> None:
    text = as_text(wide(changed, count))
    assert max(map(len, text.splitlines())) <= 120
    for k in range(count):
        assert len(re.findall(rf"Dirichlet {k}\b", text)) == 2  # one for each measure


def test_latex_is_balanced_and_escapes_what_it_must(table: TableFile) -> None:
    text = as_latex(grid_of(table, notes=("50 % of $x_1$ & β ~ {a}\\b",)))
    assert r"50 \% of \$x\_1\$ \& $\beta$ \textasciitilde{} \{a\}\textbackslash{}b" in text
    assert text.count(r"\begin{") == text.count(r"\end{")
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn{2}" not in line]
    assert {line.replace(r"\&", "").count("&") for line in rows} == {4}
    assert r"72.1$\pm$0.4\textsuperscript{*$\dagger$}" in text and "(70.0$\\pm$0.5)" in text
    assert latex_text("--seeds") == "-{}-seeds" and latex_text("a - b-c") == "a - b-c"
    assert latex_text("\N{GREEK CAPITAL LETTER DELTA} ≈ \N{GREEK SMALL LETTER PI}") == r"$\Delta$ $\approx$ $\pi$"
    assert markdown_text("#1 $x$") == r"\#1 \$x\$"  # between two of them stands a formula
    assert latex_text('("a" and "b"), 5"') == "(``a'' and ``b''), 5''"


def test_markdown_has_a_cell_for_each_heading_and_escapes_bars(table: TableFile) -> None:
    text = as_markdown(grid_of(table))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in rows} == {6}
    assert r"FedAvg \| K=2: seed 0: failed: a &lt; b" in text
    assert r"- \[n] is a link" in as_markdown(grid_of(table, notes=("[n] is a link",)))  # or it would define one


def test_latex_groups_measures_under_their_column(table: TableFile) -> None:
    lines = as_latex(grid_of(table)).splitlines()
    start = lines.index(r"\toprule")
    assert lines[start + 1] == r" & \multicolumn{2}{c}{even} & \multicolumn{2}{c}{K=2} \\"
    assert lines[start + 2] == r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}"
    assert lines[start + 3].count("&") == 4 and lines[start + 4] == r"\midrule"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "sup"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "sup":
            assert self.open.pop() == tag


def test_html_is_well_formed_and_holds_no_element_that_came_from_a_text(changed: Changed) -> None:
    table = read_table(changed("title: Two methods on digits", "title: '<script>alert(1)</script>'"))
    evil = (GridCell(row="FedAvg", column="even", problems=("<img src=x onerror=alert(1)>",)),)
    for text in (as_html(grid_of(table, cells=evil)), html_fragment(grid_of(table, cells=evil))):
        tags = Tags()
        tags.feed(text)
        assert not tags.open and not {"script", "img"} & {*tags.seen}
        assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_costs_alone_leave_other_measures_out(table: TableFile) -> None:
    text = as_text(grid_of(table, costs_only=True))
    assert "Accuracy" not in text and "0.500±0.000 (0.500)" in text and "nothing was trained" in text
