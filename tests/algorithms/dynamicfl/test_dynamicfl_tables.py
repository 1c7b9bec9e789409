"""The tables and figures of DynamicFL's paper, as files."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fedsweep.catalog import resolve
from fedsweep.config import load_config
from fedsweep.engine.forecast import check_first_round
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.checks import check_experiment
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.table_file import SCALES, TableFile, read_table, table_names

RUNS = [f"table{n}" for n in (1, 2, 3, 4, *range(9, 23))] + ["figure1", "figure3", "figure4"]
GROUPS = [f"figure{n}" for n in range(5, 20)]
# Best accuracies of a CNN on CIFAR-10 in percent, in the order Dir 0.1, Dir 0.3, K=1, K=2 (DynamicFL, Table 4).
TABLE4 = {
    "DynamicSGD": (75.4, 77.3, 73.9, 77.2),
    "a-g": (66.9, 71.3, 57.2, 69.9),
    "d-e": (66.0, 72.9, 42.3, 65.6),
    "FedAvg": (65.0, 69.6, 19.1, 66.3),
}


@cache
def table(name: str) -> TableFile:
    return read_table(f"dynamicfl/{name}")


def distinct(cells: list[Cell]) -> list[Cell]:
    """One seed of each."""
    return list({(cell.row, cell.column): cell for cell in cells}.values())


def test_every_table_and_figure_of_experiments_is_there() -> None:
    assert {name for name in table_names() if name.startswith("dynamicfl/")} == {
        f"dynamicfl/{name}" for name in (*RUNS, *GROUPS)
    }


@pytest.mark.parametrize("name", [*RUNS, *GROUPS])
def test_the_base_and_every_cell_of_every_scale_are_configurations(name: str) -> None:
    resolve(load_config(f"dynamicfl/{name}"))
    for scale in SCALES:
        cells = distinct(cells_of(table(name), scale))
        assert cells
        for cell in cells:
            resolve(cell.config)


@pytest.mark.parametrize("name", RUNS)
def test_smoke_runs_on_built_in_data_with_a_few_rounds(name: str) -> None:
    for cell in distinct(cells_of(table(name), "smoke")):
        assert cell.config.scenario.dataset == "digits" and cell.config.training.rounds <= 5
        experiment = build_experiment(cell.config)
        check_experiment(experiment)
        check_first_round(experiment)


@pytest.mark.parametrize("name", RUNS)
def test_small_is_on_real_data_with_one_column_and_few_runs(name: str) -> None:
    cells = cells_of(table(name), "small")
    assert {cell.config.scenario.dataset for cell in cells} <= {"cifar10", "fashion_mnist"}
    assert len({cell.column for cell in cells}) == 1 and len(cells) <= 15


@pytest.mark.parametrize("name", RUNS)
def test_full_scale_is_the_papers_set_up(name: str) -> None:
    """Sections 8 to 10 of the specification of its experiments: the same for every method of a table."""
    for cell in distinct(cells_of(table(name), "full")):
        config = cell.config
        training, scenario = config.training, config.scenario
        rate = {"cnn": 0.01, "resnet18": 0.03}[config.model.name]
        assert (training.rounds, training.cohort_size, training.local_epochs, training.batch_size) == (800, 10, 5, 10)
        assert training.optimizer.model_dump() == {
            "name": "sgd",
            "lr": rate,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 5e-4,
        }
        assert training.schedule.model_dump() == {"kind": "cosine", "floor": 1e-4}  # type: ignore[union-attr]
        assert (training.clip_norm, training.optimizer_state) == (10.0, "persist")
        assert (scenario.clients, scenario.transform) == (100, "dynamicfl")
        assert scenario.dataset in ("cifar10", "cifar100", "femnist")


@pytest.mark.parametrize("name", RUNS)
def test_cost_is_measured_without_training_and_accuracy_is_the_best(name: str) -> None:
    measures = {measure.name: measure for measure in table(name).measures}
    assert measures["cost"].cost and measures["cost"].of == "comm_ratio" and measures["cost"].over == "mean"
    assert measures["accuracy"].over == "best" and measures["accuracy"].percent


def test_table_4_prints_the_papers_accuracies() -> None:
    printed = table("table4").printed
    for row, accuracies in TABLE4.items():
        found = [printed[row][column]["accuracy"] for column in ("Dir 0.1", "Dir 0.3", "K=1", "K=2")]
        assert found == list(accuracies)
    assert {row: printed[row]["K=1"].get("cost") for row in printed if "K=1" in printed[row]} == {
        "DynamicSGD": 0.996,
        "a-g": 0.273,
        "d-e": None,
        "FedAvg": 0.004,
    }


@pytest.mark.parametrize(
    ("name", "row", "method", "budgets"),
    [
        ("table2", "Fix-0.3 b-g", {"high_interval": "b", "low_interval": "g"}, ("fixed", 0.3)),
        ("table3", "Dynamic-0.3 c-g", {"high_interval": "c", "low_interval": "g"}, ("dynamic", 0.3)),
        ("table4", "d-e", {"high_interval": "d", "low_interval": "e"}, ("fixed", 0.3)),
        ("table9", "Fix-0.9 a-g", {"high_interval": "a", "low_interval": "g"}, ("fixed", 0.9)),
        ("table18", "Dynamic-0.6 c-g", {"high_interval": "c", "low_interval": "g"}, ("dynamic", 0.6)),
        ("table19", "Fix-0.3 b*", {"high_interval": "b", "high_only": True}, ("fixed", 0.3)),
        ("table22", "e-f", {"high_interval": "e", "low_interval": "f"}, ("dynamic", 0.3)),
    ],
)
def test_rows_set_levels_and_budgets(name: str, row: str, method: dict[str, Any], budgets: tuple[str, float]) -> None:
    cells = cells_of(table(name), "full", rows=row)
    for cell in cells:
        found = resolve(cell.config)
        assert {key: found.method[key] for key in method} == method
        assert found.scenario.budgets is not None
        assert (found.scenario.budgets.kind, found.scenario.budgets.parameters["budget_fraction"]) == budgets
    assert len(cells) == len(table(name).columns) * 4


def test_table_22_has_every_pair_of_levels() -> None:
    assert table("table22").row_names == [f"{x}-{y}" for x in "abcdefg" for y in "abcdefg" if x < y]


def test_table_1_asks_for_every_size() -> None:
    for cell in cells_of(table("table1"), "full", rows="*high"):
        assert cell.config.scenario.budgets is None
        assert f"{resolve(cell.config).method['group_size']} high" == cell.row


@pytest.mark.parametrize("name", GROUPS)
def test_figures_of_groups_name_their_instances(name: str) -> None:
    found = table(name)
    assert found.kind == "groups" and found.row_names == ["dynacomm", "exhaustive", "genetic"]
    (active,) = found.groups["active"]
    assert found.groups["sizes"] == list(range(1, 11)) and active in (10, 30)
    assert {cell.config.training.cohort_size for cell in cells_of(found, "full")} == {active}
