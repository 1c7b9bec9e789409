"""FedDHAD's tables: what each cell is, and where its targets and units come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsweep.catalog import resolve
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_experiment
from fedsweep.reproduce.cell_texts import notes
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.sections import Measure
from fedsweep.reproduce.definition.table_file import TableFile, read_table, table_names
from fedsweep.reproduce.measured.grid import measured, summed_up, value_of, views_of
from fedsweep.reproduce.reproduction import TableRequest, reproduction
from fedsweep.results.view import load_run
from fedsweep.world.data.datasets import stand_in

NAMES = [name for name in table_names() if name.startswith("feddhad/")]
# The learning rates of the control parameters by network and data set, from the paper's table of hyper-parameters.
FEDDH = {
    "CIFAR-10 LeNet": (1e-4, 0.999, 1e-4, 0.99),
    "CIFAR-10 CNN": (1e-3, 0.9999, 0.1, 0.99),
    "CIFAR-100 LeNet": (0.01, 0.99, 0.1, 0.99),
    "CIFAR-100 CNN": (1e-3, 0.9999, 1e-4, 0.99),
    "SVHN LeNet": (0.01, 0.999, 0.01, 0.99),
    "SVHN CNN": (0.01, 0.999, 1e-3, 0.99),
    "SVHN VGG": (1e-3, 0.9, 1e-4, 0.999),
    "TinyImageNet ResNet": (0.1, 0.9, 0.1, 0.999),
}
FEDDHAD = {
    "CIFAR-10 LeNet": (0.01, 0.9999, 1e-4, 0.99),
    "CIFAR-10 CNN": (1e-4, 0.999, 0.1, 0.99),
    "CIFAR-100 LeNet": (0.01, 0.9999, 1e-4, 0.99),
    "CIFAR-100 CNN": (0.01, 0.9999, 1e-4, 0.99),
    "SVHN LeNet": (1e-4, 0.999, 0.1, 0.99),
    "SVHN CNN": (0.1, 0.99, 0.01, 0.99),
    "SVHN VGG": (0.1, 0.99, 0.01, 0.99),
    "TinyImageNet ResNet": (0.1, 0.9999, 1e-3, 0.99),
}
TARGETS = {
    "CIFAR-10 LeNet": 0.54,
    "CIFAR-10 CNN": 0.72,
    "CIFAR-100 LeNet": 0.26,
    "CIFAR-100 CNN": 0.41,
    "SVHN LeNet": 0.85,
    "SVHN CNN": 0.88,
    "SVHN VGG": 0.91,
    "TinyImageNet ResNet": 0.36,
}


def rates(method: dict[str, Any]) -> tuple[float, ...]:
    part = method["merge"][0] if "merge" in method else method
    return tuple(part[key] for key in ("learning_rate_v", "decay_v", "learning_rate_b", "decay_b"))


def test_all_eleven_tables_and_figures_with_an_experiment_are_there_and_three_of_our_own() -> None:
    numbered = {*(f"table{n}" for n in (2, 3, 4, 6, 7)), *(f"figure{n}" for n in range(2, 8))}
    assert len(numbered) == 11 and {name.removeprefix("feddhad/") for name in NAMES} == {
        *numbered,
        "dropout",
        "multiplier",
        "overfitting",
    }
    for name in numbered:
        source = read_table(f"feddhad/{name}").source
        assert source == f"Liu et al. 2025 (FedDHAD), {name[:-1].capitalize()} {name[-1]}"


@pytest.mark.parametrize(("name", "size"), [("table3", 168), ("table4", 168), ("table2", 8), ("table6", 24)])
def test_every_row_is_printed_in_every_column_with_every_measure(name: str, size: int) -> None:
    table = read_table(f"feddhad/{name}")
    places = [(r, c, m.name) for r in table.row_names for c in table.column_names for m in table.measures]
    assert len(places) == size and all(table.printed_value(r, c, measure=m) is not None for r, c, m in places)


def test_tables_print_what_others_print_of_the_same_runs() -> None:
    three = read_table("feddhad/table3").printed
    for name in ("table6", "table7"):
        for row, columns in read_table(f"feddhad/{name}").printed.items():
            for column, of in columns.items():
                assert row not in three or three[row][column]["accuracy"] == of["accuracy"]
    for figure, table in ((2, 3), (3, 4)):
        assert read_table(f"feddhad/figure{figure}").printed == read_table(f"feddhad/table{table}").printed


def test_figure_7_prints_what_can_only_be_the_square_of_the_coefficient() -> None:
    """R^2 = 0.552 over 100 points has the printed p value, a coefficient of 0.552 has not."""
    of = read_table("feddhad/figure7").printed["FedAvg"]["CIFAR-10 LeNet"]
    assert of == {"r2": 0.552}
    t = 0.5515**0.5 * math.sqrt(98 / (1 - 0.5515))
    from scipy.stats import t as student  # type: ignore[import-untyped]

    assert 2 * student.sf(t, df=98) == pytest.approx(9.27e-19, rel=0.05)


@pytest.mark.parametrize(("row", "column"), [("FedAvg", "CIFAR-10 CNN"), ("FedDHAD", "CIFAR-100 LeNet")])
def test_figures_and_the_ablation_reuse_the_runs_of_the_tables(row: str, column: str) -> None:
    found = {}
    for name in ("table3", "figure2", "figure4"):
        (cell,) = cells_of(read_table(f"feddhad/{name}"), "full", rows=row, columns=column, seeds=[1])
        found[name] = resolve(cell.config).hash()
    assert len({*found.values()}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_each_cell_of_each_scale_is_a_configuration(name: str) -> None:
    table = read_table(name)
    for scale in ("smoke", *(s for s in ("small", "full") if s in table.scales)):
        cells = cells_of(table, scale)
        assert cells
        for cell in cells:
            assert cell.config.scenario.partition.parameters["min_samples"] == 10
    assert {cell.config.scenario.dataset for cell in cells_of(table, "smoke")} == {"digits"}


@pytest.mark.parametrize("name", ["feddhad/table3", "feddhad/table4", "feddhad/figure4"])
def test_full_cells_have_the_papers_learning_rates_and_targets(name: str) -> None:
    for cell in cells_of(read_table(name), "full"):
        assert cell.config.evaluation.targets == [TARGETS[cell.column]]
        assert cell.config.training.rounds == (1000 if "ResNet" in cell.column else 500)
        known = {"FedDH": FEDDH, "FedDHAD": FEDDHAD}.get(cell.row)
        if known is not None:
            assert rates(cell.config.method) == known[cell.column]


@pytest.mark.parametrize("row", ["FjORD", "MOON+FjORD"])
def test_ordered_dropout_runs_with_batch_norm_at_the_papers_scale(row: str) -> None:
    (cell,) = cells_of(read_table("feddhad/table4"), "full", rows=row, columns="TinyImageNet ResNet", seeds=[0])
    experiment = build_experiment(resolve(cell.config), stand_in("tiny_imagenet", image_size=32))
    assert experiment.world.proxy is not None
    proxy = experiment.world.proxy
    assert proxy is not None and len(proxy[0]) == 10 * 200


def test_small_cells_are_real_data() -> None:
    cells = cells_of(read_table("feddhad/table3"), "small")
    assert {cell.config.scenario.dataset for cell in cells} == {"cifar10"}
    assert {cell.config.evaluation.targets[0] for cell in cells} == {0.3}
    assert {cell.row for cell in cells if cell.seed == 0} == {*read_table("feddhad/table3").row_names}


def test_a_row_may_set_more_in_one_column(changed: Callable[[str, str], Path]) -> None:
    path = changed("{name: FedAvg}", "{name: FedAvg, set: {training.rounds: 5}, columns: {K=2: {training.rounds: 7}}}")
    table = read_table(path)
    assert {cell.column: cell.config.training.rounds for cell in cells_of(table, "full") if cell.row == "FedAvg"} == {
        "even": 5,
        "K=2": 7,
    }
    with pytest.raises(ConfigError, match=r"'K=3'.*did you mean 'K=2'"):
        read_table(changed("{name: FedAvg}", "{name: FedAvg, columns: {K=3: {seed: 1}}}"))


def test_a_measure_may_take_the_cells_own_target(
    tmp_path: Path, make_run: Callable[..., Path], table: TableFile
) -> None:
    columns = {"test_accuracy": [0.2, 0.6, 0.5], "sim_time_s": [3.0, 6.0, 9.0]}
    folder = make_run(tmp_path / "run", columns=columns)
    measure = Measure(name="time", of="sim_time_s", target="cell")
    assert value_of(load_run(folder), measure) is None
    (folder / "config.yaml").write_text("name: made\nevaluation: {targets: [0.5, 0.1]}\n")
    assert value_of(load_run(folder), measure) == 6.0
    (folder / "config.yaml").write_text("name: taken over from a table with another target\n")
    cell = cells_of(table, "small", overrides=["evaluation.targets=[0.5]"])[0]
    changed = table.model_copy(update={"measures": [measure]})
    assert measured(changed, views_of(changed, {cell: folder}), scale="small").cells[0].measured["time"].mean == 6.0


def test_a_row_may_be_judged_by_its_clients_own_models(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Its accuracy, its target's crossing and its best round; a run without the column has no figure, not another's."""
    table = read_table("feddhad/table6")
    (cell,) = cells_of(table, "small", rows="FedKTL", seeds=[0], overrides=["evaluation.targets=[0.7]"])
    own = [{"personal_accuracy": share} for share in (0.5, 0.6, 0.9)]
    columns = {"test_accuracy": [0.1, 0.8, 0.1], "extra": own, "sim_time_s": [3.0, 6.0, 9.0]}
    folder = make_run(tmp_path / "run", columns=columns, best_test_accuracy=0.8, test_accuracy=0.1)
    grid = measured(table, views_of(table, {cell: folder}), scale="small")
    found = grid.cells[0].measured
    assert found["accuracy"].mean == pytest.approx((0.5 + 0.6 + 0.9) / 3) and found["time"].mean == 9.0
    assert "FedKTL: accuracy, and targets, by accuracy of the clients' own models (personal_accuracy)." in notes(grid)
    bare = make_run(tmp_path / "bare", columns={"test_accuracy": [0.1, 0.8, 0.1]}, test_accuracy=0.1)
    assert measured(table, views_of(table, {cell: bare}), scale="small").cells[0].measured["accuracy"].mean is None


def test_rows_with_models_of_the_clients_say_whose_accuracy_it_is() -> None:
    assert {row.name: row.accuracy for row in read_table("feddhad/table6").rows if row.accuracy} == dict.fromkeys(
        ("FedAS", "FedKTL", "AugFL"), "personal_accuracy"
    )


def test_a_measure_may_be_shown_in_another_unit() -> None:
    assert summed_up([651720.0], Measure(name="macs", per=1e6)).mean == pytest.approx(0.65172)
    assert summed_up([0.5], Measure(name="accuracy", percent=True)).mean == 50.0


def test_tables_3_and_7_train_once_and_read_their_own_targets() -> None:
    """What a run is tested by changes no model, so the targets are no part of what a run is known by."""
    rows = ("FedDHAD", "FedDH", "FedAD", "FedAvg")
    third, seventh = (
        reproduction(TableRequest(table=f"feddhad/{name}", scale="full", rows=",".join(rows), columns="CIFAR-10 LeNet"))
        for name in ("table3", "table7")
    )
    assert set(third.firsts) == set(seventh.firsts) and len(third.firsts) == 12
    targets = [{tuple(cell.config.evaluation.targets) for cell in table.cells} for table in (third, seventh)]
    assert targets == [{(0.54,)}, {(0.59,)}]
