from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError
from fedsweep.reproduce.definition.table_file import TableFile, has_table, read_table, table_names
from fedsweep.reproduce.reproduction import TableRequest, reproduction

Changed = Callable[[str, str], Path]


def test_a_table_is_its_section_and_the_rest_of_the_file_is_the_base(table: TableFile) -> None:
    assert (table.name, table.title, table.kind) == ("tiny", "Two methods on digits", "runs")
    assert table.row_names == ["FedAvg", "FedProx", "SCAFFOLD"] and table.column_names == ["even", "K=2"]
    assert "table" not in table.base and table.base["training"]["rounds"] == 3


def test_run_ignores_the_section(table_path: Path) -> None:
    config = load_config(table_path)
    assert config.training.rounds == 3 and "table" not in config.tree() and "table" not in config.given


def test_measures_have_defaults_from_their_name_and_unit(changed: Changed) -> None:
    accuracy, cost = read_table(changed("label: Cost, of: comm_ratio,", "of: comm_ratio,")).measures
    assert (accuracy.digits, cost.digits, cost.label, cost.over) == (1, 3, "cost", "mean")


def test_printed_numbers_are_found_with_their_spread(table: TableFile) -> None:
    assert table.printed_value("FedAvg", "even", measure="accuracy") == 70.0
    assert table.printed_sd("FedAvg", "even", measure="accuracy") == 0.5
    assert table.printed_value("FedAvg", "even", measure="cost") == 0.5
    assert table.printed_sd("FedAvg", "even", measure="cost") is None
    assert table.printed_value("FedProx", "even", measure="accuracy") is None


def test_full_needs_no_entry_and_another_scale_does(table: TableFile, changed: Changed) -> None:
    assert table.seeds_of("full") == [0, 1, 2] and table.seeds_of("smoke") == [0]
    other = read_table(changed("    small: {seeds: [0, 1], rows: [FedAvg], columns: [even]}\n", ""))
    with pytest.raises(ConfigError, match=r"no scale 'small' \(it has: smoke, full\)"):
        other.scale("small")
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        table.scale("smok")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rows: [FedAvg]", "rows: [FedAvgg]", "unknown row of scales.small 'FedAvgg'; did you mean 'FedAvg'"),
        ("columns: [even]", "columns: [K=1]", "unknown column of scales.small 'K=1'; did you mean 'K=2'"),
        ("FedAvg: {even:", "FedAgv: {even:", "unknown row of printed 'FedAgv'; did you mean 'FedAvg'"),
        ("K=2: {cost: 0.9}", "K=3: {cost: 0.9}", "unknown column of printed.FedAvg 'K=3'; did you mean 'K=2'"),
        ("{cost: 0.9}", "{costs: 0.9}", "unknown measure of printed.FedAvg.K=2 'costs'; did you mean 'cost'"),
        ("name: FedProx,", "name: FedAvg,", "rows must differ, but 'FedAvg' is there more than once"),
        (
            "percent: true",
            "percents: true",
            r"unknown key 'table.measures.0.percents'; did you mean 'table.measures.0.p",
        ),
        ("over: best", "over: worst", r"table.measures.0.over: input should be 'last', .* but got 'worst'"),
        ("  title: Two methods on digits\n", "", r"table.title is missing"),
        ("seeds: [0, 1, 2]", "seeds: [0, 0]", "seeds must differ"),
        ("    smoke: {seeds: [0]", "    tiny: {seeds: [0]", "table.scales.tiny"),
        ("over: mean, tol", "share_of: flops, target: 0.5, tol", "neither target nor over: at_best goes with it"),
        ("over: mean, tol", "share_of: flops, over: at_best, tol", "neither target nor over: at_best goes with it"),
        ("  notes:", "  claims: [{above: FedAvg, apart: 1.0}]\n  notes:", "apart goes with an order"),
        ("missing: scaffold is not there yet", "missing: no, set: {method.name: x}", "can't set anything"),
        ("notes:\n    -", "name: other\n  notes:\n    -", "table.name can't be given"),
    ],
)
def test_what_is_wrong_is_named_with_the_file_and_the_nearest(old: str, new: str, said: str, changed: Changed) -> None:
    path = changed(old, new)
    with pytest.raises(ConfigError, match=said) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_without_the_section_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\n# table: no\n")
    assert not has_table(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="lacks the section table:"):
        read_table(tmp_path / "a.yaml")


def test_an_unknown_table_is_an_error_with_the_nearest() -> None:
    assert "dynamicfl/table4" in table_names()
    with pytest.raises(ConfigError, match="did you mean 'dynamicfl/table4'"):
        read_table("dynamicfl/tabel4")


def test_a_shipped_table_keeps_its_name_when_it_is_given_as_a_file() -> None:
    from fedsweep.config.presets import find_preset

    path = find_preset("dynamicfl/table4")
    assert path is not None and read_table(path).name == "dynamicfl/table4"


@pytest.mark.parametrize("method", ["{merge: 5}", "{merge: [1]}", "{merge: null}", "{merge: [name]}", "{merge: name}"])
def test_what_is_no_method_is_wrong_input(method: str, changed: Callable[[str, str], Path]) -> None:
    path = changed("method: {name: fedprox, mu: 0.1}}, scales: {smoke: {method.mu: 0.2}}", f"method: {method}}}")
    assert read_table(path).row("FedProx").why_missing == ""
    with pytest.raises(ConfigError, match=r"^cell FedProx \| even: method: .*merge"):
        reproduction(TableRequest(table=str(path), scale="full"))
