from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError
from fedsweep.reproduce.cells import Cell, base_of, cells_of, chosen, stand_in_of, standing_of
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.reproduce.reproduction import TableRequest, reproduction
from fedsweep.sweeps.prepared_trial import overlaid

Changed = Callable[[str, str], Path]


def one(table: TableFile, scale: str, row: str, column: str, **more: object) -> Cell:
    (cell,) = cells_of(table, scale, rows=row, columns=column, seeds=[0], **more)  # type: ignore[arg-type]
    return cell


def test_cells_go_row_by_row_with_the_seeds_of_their_scale(table: TableFile) -> None:
    assert [(c.row, c.column, c.seed) for c in cells_of(table, "smoke")] == [
        ("FedAvg", "even", 0),
        ("FedAvg", "K=2", 0),
        ("FedProx", "even", 0),
        ("FedProx", "K=2", 0),
    ]
    assert [(c.label, c.seed) for c in cells_of(table, "small")] == [("FedAvg | even", 0), ("FedAvg | even", 1)]
    assert len(cells_of(table, "full")) == 2 * 2 * 3


def test_later_settings_win_from_the_base_over_column_row_and_scale_to_the_user(table: TableFile) -> None:
    rounds = {
        (scale, column): one(table, scale, "FedProx", column).config.training.rounds
        for scale in ("smoke", "full")
        for column in ("even", "K=2")
    }
    assert rounds == {("smoke", "even"): 2, ("smoke", "K=2"): 1, ("full", "even"): 3, ("full", "K=2"): 3}
    assert one(table, "full", "FedProx", "even").config.method == {"name": "fedprox", "mu": 0.1}
    assert one(table, "smoke", "FedProx", "even").config.method == {"name": "fedprox", "mu": 0.2}
    mine = one(table, "smoke", "FedProx", "K=2", overrides=["training.rounds=9", "method.mu=0.3"])
    assert (mine.config.training.rounds, mine.config.method["mu"]) == (9, 0.3)


@pytest.mark.parametrize(
    ("column", "row", "scale", "key", "value"),
    [
        ("method.mu: 1", "method: {name: fedprox}", "method.mu: 2", "method", {"name": "fedprox", "mu": 2}),
        ("method: {name: fedprox, mu: 3}", "method.mu: 4", "seed: 9", "method", {"name": "fedprox", "mu": 4}),
        ("scenario: {clients: 8}", "scenario.clients: 9", "scenario: {root: r}", "scenario.clients", 9),
        ("training.local_steps: 7", "training: {local_steps: 8}", "seed: 9", "training.local_steps", 8),
    ],
)
def test_values_turn_the_base_into_the_cell(
    column: str, row: str, scale: str, key: str, value: object, tmp_path: Path
) -> None:
    (tmp_path / "t.yaml").write_text(
        f"""
scenario: {{clients: 6, partition: {{kind: iid}}}}
training: {{local_steps: 2}}
table:
  title: t
  source: s
  measures: [{{name: test_accuracy}}]
  columns: [{{name: c, set: {{{column}}}}}]
  rows: [{{name: r, set: {{{row}}}}}]
  scales: {{smoke: {{set: {{{scale}}}}}}}
"""
    )
    table = read_table(tmp_path / "t.yaml")
    (cell,) = cells_of(table, "smoke")
    assert cell.values[key] == value
    assert load_config(overlaid(base_of(table), cell.values)) == cell.config and cell.config.seed == 0


def test_patterns_go_by_name_in_either_case_and_take_the_place_of_the_scales_choice(table: TableFile) -> None:
    assert chosen("row", table, "small", pattern="fed*") == ["FedAvg", "FedProx"]
    assert chosen("row", table, "small", pattern="scaffold, *prox") == ["FedProx", "SCAFFOLD"]
    assert chosen("row", table, "small") == ["FedAvg"]
    with pytest.raises(ConfigError, match="--rows: unknown row 'FedPorx'; did you mean 'FedProx'"):
        cells_of(table, "smoke", rows="FedAvg,FedPorx")
    with pytest.raises(ConfigError, match="--columns: unknown column 'x'"):
        cells_of(table, "smoke", columns="x")


def test_a_row_without_a_cell_in_the_columns_asked_for_is_told_those_that_it_has(changed: Changed) -> None:
    path = changed("{name: FedAvg}", "{name: FedAvg, only: [K=2]}")
    with pytest.raises(ConfigError, match=r"can be measured \(FedAvg: it has cells in K=2 alone\)"):
        reproduction(TableRequest(table=str(path), rows="FedAvg", columns="even"))


def test_a_name_with_a_patterns_characters_is_found(changed: Changed) -> None:
    table = read_table(changed("  - {name: FedProx,", "  - {name: 'a[*], b',"))
    assert chosen("row", table, "full", pattern="a[*], b") == ["a[*], b"]
    starred = read_table(changed("  - {name: FedProx,", "  - {name: Fed*,"))
    assert chosen("row", starred, "full", pattern="fed*") == ["Fed*"]
    assert chosen("row", starred, "full", pattern="fed*,*avg") == ["FedAvg", "Fed*"]


def test_seeds_are_given_as_seeds(table: TableFile) -> None:
    assert [c.seed for c in cells_of(table, "small", seeds=[7, 5])] == [7, 5]
    with pytest.raises(ConfigError, match="give --seeds"):
        cells_of(table, "small", overrides=["seed=3"])
    with pytest.raises(ConfigError, match="seeds must differ"):
        cells_of(table, "small", seeds=[1, 1])


def test_a_wrong_setting_names_the_cell(changed: Changed) -> None:
    table = read_table(changed("method.mu: 0.2", "trainin.rounds: 2"))
    with pytest.raises(ConfigError, match=r"cell FedProx \| even: unknown key 'trainin'"):
        _ = one(table, "smoke", "FedProx", "even").config


def test_cells_are_equal_by_row_column_and_seed(table: TableFile) -> None:
    first, again = one(table, "smoke", "FedAvg", "even"), one(table, "full", "FedAvg", "even")
    assert first == again and hash(first) == hash(again) and first.values != again.values


def test_only_what_the_full_scale_has_is_the_papers_setting(table: TableFile) -> None:
    assert standing_of(table, one(table, "full", "FedProx", "K=2")) == "paper"
    fewer_rounds = one(table, "smoke", "FedAvg", "K=2")
    assert standing_of(table, fewer_rounds) == "costs"
    assert standing_of(table, one(table, "smoke", "FedProx", "K=2")) == "other"
    assert standing_of(table, one(table, "full", "FedAvg", "even", overrides=["scenario.clients=7"])) == "other"
    assert standing_of(table, one(table, "full", "FedAvg", "even", overrides=["runtime.backend=local"])) == "paper"


@pytest.mark.parametrize(
    ("name", "stand_in"),
    [("feddhad/figure7", "digits, mlp"), ("feddhad/table3", "digits, mlp"), ("fedstg/table1", "digits")],
)
def test_a_heading_names_what_stands_in_for_the_data_set_and_the_network_that_it_speaks_of(
    name: str, stand_in: str
) -> None:
    table = read_table(name)
    assert stand_in_of(table, cells_of(table, "smoke")[0]) == stand_in


@pytest.mark.parametrize(
    ("name", "is_papers"),
    [("dynafed/figure5", True), ("dynamicfl/figure10", True), ("feddhad/table3", True), ("feddhad/overfitting", False)],
)
def test_a_table_with_a_papers_number_is_a_papers_even_where_nothing_is_printed(name: str, is_papers: bool) -> None:
    assert read_table(name).is_papers is is_papers


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_patterns_that_are_no_text_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name} are patterns in one text, as in 'FedAvg,Fed\*', but got \('a', 'b'\)"
    ):
        TableRequest(table="any", **{name: ("a", "b")})  # type: ignore[arg-type]
