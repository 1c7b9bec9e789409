"""The tables and figures of DynamicFL's paper, as files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from fedsweep.catalog import resolve
from fedsweep.config import load_config
from fedsweep.engine.forecast import check_first_round
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.checks import check_experiment
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.definition.sections import FULL, SCALES
from fedsweep.reproduce.definition.table_file import TableFile, read_table, table_names
from fedsweep.streams import Stream
from fedsweep.world.partitions.kinds import Dirichlet

TABLES = [f"table{n}" for n in (1, 2, 3, 4, *range(9, 23))]
CURVES = [f"figure{n}" for n in (3, *range(21, 25), *range(26, 30), *range(31, 34))]
TRENDS = [f"figure{n}" for n in (4, 20, 25, 30)]
RUNS = [*TABLES, "figure1", *CURVES, *TRENDS]
GROUPS = [f"figure{n}" for n in range(5, 20)]
BASELINES = ["FedProx", "FedEnsemble", "SCAFFOLD", "FedGen", "FedDyn", "FedNova", "FedAvg"]
PAIRS = [
    "a", "a-b", "a-c", "a-d", "a-e", "a-f", "a-g", "a*", "b", "b-c", "b-d", "b-e", "b-f", "b-g", "b*",
    "c", "c-d", "c-e", "c-f", "c-g", "c*", "d", "d-e", "d-f", "d-g", "d*",
]  # fmt: skip
# Of each data set the tables of budgets by partition, in the order of the table of pairs.
_CHECKED: set[str] = set()
PARTITIONS = {20: (9, 10, 11, 12), 21: (13, 14, 15, 16), 22: (17, 18, 19)}


@cache
def table(name: str) -> TableFile:
    return read_table(f"dynamicfl/{name}")


@cache
def cells_at(name: str, scale: str) -> tuple[Cell, ...]:
    return tuple(cells_of(table(name), scale))


@cache
def hashes(name: str, scale: str) -> set[str]:
    return {resolve(cell.config).hash() for cell in cells_at(name, scale)}


def distinct(cells: Sequence[Cell]) -> list[Cell]:
    """One seed of each."""
    return list({(cell.row, cell.column): cell for cell in cells}.values())


def printed(name: str, measure: str = "accuracy") -> dict[tuple[str, str], Any]:
    """What a table prints of a measure, by row and column."""
    found = table(name).printed
    return {(r, c): of[measure] for r, columns in found.items() for c, of in columns.items() if measure in of}


def column(name: str, heading: str, measure: str = "accuracy") -> dict[str, Any]:
    """What a table prints in a column, by row."""
    return {row: value for (row, c), value in printed(name, measure).items() if c == heading}


@pytest.mark.slow
def test_all_fifty_tables_and_figures_with_an_experiment_are_there() -> None:
    found = {name.removeprefix("dynamicfl/") for name in table_names() if name.startswith("dynamicfl/")}
    assert found == {*RUNS, *GROUPS} and len(found) == 50
    for name in found:
        kind, number = name[:-1].rstrip("0123456789"), name.lstrip("tablefigur")
        assert table(name).source == f"Le et al. 2024 (DynamicFL), {kind.capitalize()} {number}"


@pytest.mark.parametrize("name", [*RUNS, *GROUPS])
def test_the_base_is_a_configuration_and_every_scale_is_there(name: str) -> None:
    resolve(load_config(f"dynamicfl/{name}"))
    assert {*SCALES} <= {FULL, *table(name).scales}


@pytest.fixture(scope="module")
def each_split_is_drawn_once() -> Iterator[None]:
    """Most cells have the same few, whose thousand draws take nearly all of the time that their worlds take."""
    split, drawn = Dirichlet.split, {}

    def kept(partition: Dirichlet, labels: Any, num_clients: int, stream: Stream, **more: Any) -> Any:
        key = partition, labels.tobytes(), num_clients, stream
        if key not in drawn:
            drawn[key] = split(partition, labels, num_clients, stream, **more)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dirichlet, "split", kept)
        yield


@pytest.mark.usefixtures("each_split_is_drawn_once")
@pytest.mark.parametrize("name", RUNS)
def test_smoke_runs_on_built_in_data_with_a_few_rounds(name: str) -> None:
    for cell in distinct(cells_at(name, "smoke")):
        assert cell.config.scenario.dataset == "digits" and cell.config.training.rounds <= 5
        key = resolve(cell.config).hash()
        if key in _CHECKED:
            continue  # other tables show the same run
        _CHECKED.add(key)
        experiment = build_experiment(cell.config)
        check_experiment(experiment)
        check_first_round(experiment)


@pytest.mark.parametrize("name", RUNS)
def test_small_is_on_real_data_with_few_runs(name: str) -> None:
    cells = cells_at(name, "small")
    assert {cell.config.scenario.dataset for cell in cells} == {"cifar10"}
    assert {cell.config.model.name for cell in cells} == {"cnn"}
    assert len({cell.config.scenario.partition.model_dump_json() for cell in cells}) == 1 and len(distinct(cells)) <= 11


@pytest.mark.parametrize("name", RUNS)
def test_full_scale_is_the_papers_set_up(name: str) -> None:
    """Sections 8 to 10 of the specification of its experiments: the same for every method of a table."""
    for cell in distinct(cells_at(name, "full")):
        config = cell.config
        training, scenario = config.training, config.scenario
        rate = {"cnn": 0.01, "resnet18": 0.03}[config.model.name]
        rounds = 200_000 if cell.row == "FedSGD" else 800
        assert (training.rounds, training.cohort_size, training.local_epochs, training.batch_size) == (
            rounds,
            10,
            5,
            10,
        )
        assert training.optimizer.model_dump() == {
            "name": "sgd",
            "lr": rate,
            "momentum": 0.0 if cell.row == "SCAFFOLD" else 0.9,
            "nesterov": cell.row != "SCAFFOLD",
            "weight_decay": 5e-4,
        }
        assert training.schedule.model_dump() == {"kind": "cosine", "floor": 1e-4}
        assert (training.clip_norm, training.optimizer_state) == (10.0, "persist")
        assert (scenario.clients, scenario.transform) == (100, "dynamicfl")
        assert scenario.dataset in ("cifar10", "cifar100", "femnist")
        if cell.row in BASELINES:
            assert training.equal_steps and scenario.budgets is None


@pytest.mark.parametrize("name", RUNS)
def test_cost_is_measured_without_training_and_accuracy_is_the_best(name: str) -> None:
    measures = {measure.name: measure for measure in table(name).measures}
    assert [*measures] == (["accuracy"] if name in ("table1", "table2", "table3") else ["accuracy", "cost"])
    assert measures["accuracy"].over == "best" and measures["accuracy"].percent
    assert all(m.cost and m.of == "comm_ratio" and m.over == "mean" for n, m in measures.items() if n == "cost")


def test_tables_2_and_3_repeat_columns_of_tables_12_16_and_17() -> None:
    for budget in ("Fix", "Dynamic"):
        for data, other in (("CIFAR-10", "table12"), ("CIFAR-100", "table16")):
            assert column("table2", f"{data} {budget}") == column(other, f"ResNet-18 {budget}")
            assert column("table3", f"{data} {budget}") == column(other, f"CNN {budget}")
        assert column("table3", f"FEMNIST {budget}") == column("table17", f"CNN {budget}")


def test_baselines_beside_the_pairs_are_those_of_the_tables_of_budgets() -> None:
    for number, others in PARTITIONS.items():
        pairs = table(f"table{number}")
        assert pairs.row_names == [*PAIRS, *BASELINES]
        for heading, other in zip(pairs.column_names, others, strict=True):
            for measure in ("accuracy", "cost"):
                beside, own = (
                    column(n, h, measure) for n, h in ((f"table{number}", heading), (f"table{other}", "CNN Fix"))
                )
                for row in BASELINES:
                    bare = number == 22 and not isinstance(beside[row], list) and isinstance(own[row], list)
                    assert beside[row] == (own[row][0] if bare else own[row]), (number, heading, row)


def test_the_choices_of_a_table_print_what_it_prints() -> None:
    for name in ("table4", "figure3", *CURVES, *TRENDS):
        number = (
            20
            if name in ("table4", "figure3", "figure4")
            else next(t for t, first in ((22, 30), (21, 25), (20, 20)) if int(name.removeprefix("figure")) >= first)
        )
        whole = printed(f"table{number}")
        part = printed(name)
        assert part and all(whole[place] == value for place, value in part.items())
    assert len(printed("table4")) == len(printed("table4", "cost")) == 22 * 4


@pytest.mark.parametrize("number", range(9, 23))
def test_every_figure_is_printed_with_its_bracket_where_there_were_two_runs(number: int) -> None:
    found = printed(f"table{number}")
    rows, columns = table(f"table{number}").row_names, table(f"table{number}").column_names
    budgets = number < 20
    per_row = {row: sum(place[0] == row for place in found) for row in rows}
    assert all(
        per_row[row] == len(columns) // (1 if row not in ("DynamicSGD", *BASELINES) or not budgets else 2)
        for row in rows
    )
    bare = {("FedProx", "Dir 0.01"), ("FedEnsemble", "Dir 0.01"), ("FedNova", "Dir 0.01"), ("FedNova", "Dir 0.1")}
    bare |= {("FedEnsemble", "Dir 0.3"), ("FedNova", "Dir 0.3")}
    for (row, column_name), value in found.items():
        one_run = (number in (21, 22) and row in PAIRS) or (number == 22 and (row, column_name) in bare)
        assert value == "N/A" or isinstance(value, list) != one_run
    assert table(f"table{number}").spread == "standard error of two runs"


def test_printed_costs_fall_from_level_to_level_and_grow_with_the_budget() -> None:
    for number in range(9, 20):
        for heading in table(f"table{number}").column_names:
            costs = column(f"table{number}", heading, "cost")
            for level in "abc":
                assert costs[f"{level}-g 0.3"] < costs[f"{level}-g 0.6"] < costs[f"{level}-g 0.9"]
            for share in ("0.3", "0.6", "0.9"):
                assert costs[f"a-g {share}"] > costs[f"b-g {share}"] > costs[f"c-g {share}"]
    for number in (20, 21, 22):
        for heading in table(f"table{number}").column_names:
            costs = column(f"table{number}", heading, "cost")
            for level in "abcd":
                own = [costs[row] for row in PAIRS if row.startswith(level)]
                assert own == sorted(own, reverse=True)


@pytest.mark.parametrize(
    ("name", "row", "heading", "method", "budgets"),
    [
        ("table2", "b-g 0.3", "CIFAR-10 Fix", {"high_interval": "b", "low_interval": "g"}, ("fixed", 0.3)),
        ("table3", "c-g 0.9", "FEMNIST Dynamic", {"high_interval": "c", "low_interval": "g"}, ("dynamic", 0.9)),
        ("table4", "d-e", "K=1", {"high_interval": "d", "low_interval": "e"}, ("fixed", 0.3)),
        ("table13", "a-g 0.6", "ResNet-18 Dynamic", {"high_interval": "a", "low_interval": "g"}, ("dynamic", 0.6)),
        ("table21", "d*", "Dir 0.3", {"high_only": True, "idle_clients": "authors"}, ("fixed", 0.3)),
        ("table22", "b", "Dir 0.01", {"high_interval": "b", "low_interval": "b"}, None),
    ],
)
def test_rows_set_levels_and_budgets(
    name: str, row: str, heading: str, method: dict[str, Any], budgets: tuple[str, float] | None
) -> None:
    cells = cells_of(table(name), "full", rows=row, columns=heading)
    assert [cell.seed for cell in cells] == ([0] if name in ("table21", "table22") else [0, 1])
    for cell in cells:
        found = resolve(cell.config)
        assert {key: found.method[key] for key in method} == method
        own = found.scenario.budgets
        assert (None if own is None else (own.kind, own.parameters["budget_fraction"])) == budgets


def test_table_1_asks_for_every_share_by_both_choices() -> None:
    for cell in cells_of(table("table1"), "full"):
        resolved = resolve(cell.config)
        assert cell.config.scenario.budgets is None
        if cell.row not in ("1.0", "0.0"):
            assert resolved.method["group_size"] == round(10 * float(cell.row))
            assert resolved.method["group"] == cell.column.split()[1].lower()
    assert len(printed("table1")) == 9 * 4 + 2 * 2


@pytest.mark.parametrize("name", GROUPS)
def test_figures_of_groups_have_both_cohorts_and_the_printed_mutation(name: str) -> None:
    found = table(name)
    assert found.kind == "groups" and found.row_names == ["brute force", "genetic algorithm", "DynaComm"]
    assert (found.options["active"], found.options["mutation"]) == ([10, 30], 0.01)
    assert found.options["sizes"] == list(range(1, 11)) and len(found.columns) == 1


def test_figures_5_to_8_are_four_of_the_others() -> None:
    for first, second in ((5, 13), (6, 16), (7, 17), (8, 19)):
        one, other = (cells_of(table(f"figure{n}"), "full")[0].config for n in (first, second))
        assert one.scenario == other.scenario and table(f"figure{first}").printed == table(f"figure{second}").printed


@pytest.mark.slow
def test_asking_for_tables_of_the_same_runs_trains_once() -> None:
    for name in ("table4", "figure20", "figure3"):
        assert hashes(name, "smoke") <= hashes("table20", "smoke")
    for name, whole in (
        ("table4", "table20"),
        ("figure20", "table20"),
        ("figure24", "table20"),
        ("figure31", "table22"),
    ):
        assert hashes(name, "full") < hashes(whole, "full")
    assert hashes("table2", "full") < hashes("table12", "full") | hashes("table16", "full")
    assert hashes("table3", "full") < hashes("table12", "full") | hashes("table16", "full") | hashes("table17", "full")
