"""Printed figures as a block, and tables that are a choice of another's rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsweep.errors import ConfigError
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.table_file import TableFile, read_table

Changed = Callable[[str, str], Path]
OLD = "printed:\n    FedAvg: {even: {accuracy: [70.0, 0.5], cost: 0.5}, K=2: {cost: 0.9}}"


def block(*lines: str) -> str:
    return "printed: |\n" + "\n".join(f"      {line}" for line in lines)


def test_a_block_says_the_same_as_a_mapping(table: TableFile, changed: Changed) -> None:
    path = changed(
        OLD,
        block(
            "row,      even accuracy, even cost, K=2 accuracy, K=2 cost", "FedAvg,   70.0/0.5,      0.5,       , 0.9"
        ),
    )
    assert read_table(path).printed == table.printed


def test_a_table_of_one_measure_has_columns_as_headings_and_words_for_what_is_no_number(changed: Changed) -> None:
    path = changed(OLD, block("row, even, K=2", "FedAvg, never, N/A", "SCAFFOLD, , 3"))
    cost = "    - {name: cost, label: Cost, of: comm_ratio, over: mean, tolerance: 0.05, cost: true}\n"
    path.write_text(path.read_text().replace(cost, ""))
    found = read_table(path)
    assert found.printed == {
        "FedAvg": {"even": {"accuracy": "never"}, "K=2": {"accuracy": "N/A"}},
        "SCAFFOLD": {"K=2": {"accuracy": 3.0}},
    }


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("row, evn cost", "FedAvg, 1"), "unknown heading 'evn cost'; did you mean 'even cost'"),
        (("row, even cost", "FedAvg, 1, 2"), "'FedAvg' has 2 figures below 1 headings"),
        (("row, even cost", "FedAvg, 1", "FedAvg, 2"), "the row 'FedAvg' more than once"),
        (("row, even cost", "FedAvg, 1/2/3"), "FedAvg, even cost: a figure is a number, mean/spread"),
        (("row, even cost", "FedAvg, nan?"), "but got 'nan?'"),
        (("row, even cost, even cost", "FedAvg, 1, 2"), "headings of table.printed must differ, but 'even cost'"),
        (("row, even cost", "FedAgv, 1"), "did you mean 'FedAvg'"),
    ],
)
def test_a_wrong_block_is_named_with_its_file(lines: tuple[str, ...], said: str, changed: Changed) -> None:
    path = changed(OLD, block(*lines))
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.fixture
def part(table_path: Path) -> Callable[[str], Path]:
    def write(only: str) -> Path:
        path = table_path.with_name("part.yaml")
        path.write_text(f"extends: {table_path.name}\nname: part\ntable: {{only: {only}}}\n")
        return path

    return write


def test_a_choice_of_rows_and_columns_takes_what_speaks_of_them_along(part: Callable[[str], Path]) -> None:
    found = read_table(part("{rows: [FedAvg], columns: [K=2], measures: [cost]}"))
    assert (found.row_names, found.column_names, [m.name for m in found.measures]) == (["FedAvg"], ["K=2"], ["cost"])
    assert found.printed == {"FedAvg": {"K=2": {"cost": 0.9}}} and found.base["name"] == "part"
    assert found.scale("small").rows == ["FedAvg"] and found.scale("small").columns is None
    assert {(cell.row, cell.column) for cell in cells_of(found, "small")} == {("FedAvg", "K=2")}


def test_a_columns_and_a_pictures_measures_are_cut_too(table_path: Path, part: Callable[[str], Path]) -> None:
    figure = "  figures: [{name: both, kind: bars, measures: [accuracy, cost]}]\n  notes:"
    text = table_path.read_text().replace("{name: even}", "{name: even, measures: [accuracy, cost]}")
    table_path.write_text(text.replace("  notes:", figure))
    found = read_table(part("{measures: [cost]}"))
    assert found.column("even").measures == found.figures[0].measures == ["cost"]


@pytest.mark.parametrize(
    ("claim", "left"),
    [
        ("{order: [FedAvg, FedProx]}", ["accuracy"]),
        ("{order: [FedAvg, FedProx], measure: cost}", ["cost"]),
        ("{above: FedAvg, cost: cost}", []),
    ],
)
def test_a_claim_goes_with_the_measure_that_it_speaks_of(
    claim: str, left: list[str], table_path: Path, part: Callable[[str], Path]
) -> None:
    table_path.write_text(table_path.read_text().replace("  notes:", f"  claims: [{claim}]\n  notes:"))
    for measure in ("accuracy", "cost"):
        assert len(read_table(part(f"{{measures: [{measure}]}}")).claims) == (measure in left)


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("claims: [{column_order: [K=2, even], measure: cost, rows: [FedProx]}]", False),
        ("claims: [{column_order: [K=2, even], measure: cost, rows: [FedProx, FedAvg]}]", True),
        ("figures: [{name: f, kind: bars, y: accuracy}]", False),
        ("figures: [{name: f, kind: bars, y: cost}]", True),
        ("figures: [{name: f, kind: bars, measures: [accuracy]}]", False),
        ("figures: [{name: f, kind: curves, rows: [FedProx]}]", False),
        ("figures: [{name: f, kind: curves, groups: {both: [FedProx]}}]", False),
        ("figures: [{name: f, kind: curves, groups: {both: [FedProx, FedAvg]}}]", True),
    ],
)
def test_a_claim_or_a_picture_of_what_is_cut_alone_goes_with_it(
    entry: str, left: bool, table_path: Path, part: Callable[[str], Path]
) -> None:
    table_path.write_text(table_path.read_text().replace("  notes:", f"  {entry}\n  notes:"))
    found = read_table(part("{rows: [FedAvg], measures: [cost]}"))
    assert len([*found.claims, *found.figures]) == left


@pytest.mark.parametrize("entry", ["figures: null", "claims: null", "scales: null", "figures: 5", "claims: [5]"])
def test_a_part_of_a_wrong_shape_beside_a_choice_is_refused_with_its_place(
    entry: str, part: Callable[[str], Path]
) -> None:
    path = part(f"{{rows: [FedAvg]}}, {entry}")
    with pytest.raises(ConfigError, match=rf"table\.{entry.partition(':')[0]}.*: input should be"):
        read_table(path)


@pytest.mark.parametrize(("old", "new"), [(OLD, block("row, even", "FedAvg, 1")), ("  notes:", "  only: {}\n  notes:")])
def test_an_entry_without_a_name_is_told_before_names_are_looked_for(old: str, new: str, changed: Changed) -> None:
    path = changed(old, new)
    path.write_text(path.read_text().replace("- {name: even}", "- even"))
    with pytest.raises(ConfigError, match="columns: each entry is a mapping with a name, but one is 'even'"):
        read_table(path)


def test_an_unknown_choice_is_an_error(part: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="unknown row 'FedAgv'; did you mean 'FedAvg'"):
        read_table(part("{rows: [FedAgv]}"))
    with pytest.raises(ConfigError, match="takes lists of names as rows, columns, measures"):
        read_table(part("{row: [FedAvg]}"))


def test_a_row_of_some_columns_and_of_its_own_seeds(changed: Changed) -> None:
    table = read_table(changed("{name: FedAvg}", "{name: FedAvg, only: [K=2], seeds: [4]}"))
    assert [(c.column, c.seed) for c in cells_of(table, "full") if c.row == "FedAvg"] == [("K=2", 4)]
    assert len([c for c in cells_of(table, "full") if c.row == "FedProx"]) == 2 * 3
    assert [c.seed for c in cells_of(table, "full", seeds=[1]) if c.row == "FedAvg"] == [1]


def test_a_row_whose_method_is_not_there_yet_says_so(changed: Changed) -> None:
    path = changed("{name: SCAFFOLD, missing: scaffold is not there yet}", "{name: S, set: {method: {name: scafold}}}")
    found = read_table(path)
    assert found.row("S").why_missing == "scafold is not there yet" and not found.has_cell("S", "even")
    assert {cell.row for cell in cells_of(found, "full")} == {"FedAvg", "FedProx"}
    merged = "{name: S, set: {method: {merge: [{name: moan}, {name: fedavg}, {name: fjard}]}}}"
    path = changed("{name: SCAFFOLD, missing: scaffold is not there yet}", merged)
    assert read_table(path).row("S").why_missing == "moan and fjard are not there yet"
    own = "{name: S, columns: {even: {method: {name: 'my.module:method'}}}}"
    path = changed("{name: SCAFFOLD, missing: scaffold is not there yet}", own)
    assert not read_table(path).row("S").why_missing
