"""DynaFed's tables: the paper's set-up at full scale, its printed figures, and cells that can be run."""

from __future__ import annotations

import pytest

from fedsweep.algorithms.dynafed.distillation import TrajectoryDistillation
from fedsweep.catalog import build_method
from fedsweep.config import load_config
from fedsweep.config.schema import Config
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.definition.table_file import TableFile, read_table, table_names

NAMES = [
    *(f"dynafed/table{number}" for number in range(1, 7)),
    *(f"dynafed/figure{number}" for number in range(2, 8)),
]
METHODS = ["FedAvg", "FedProx", "Scaffold", "FedDF", "FedBE", "ABAVG", "FedGen", "FedMix", "DynaFed"]
# These end with the synthesis, or soon after it.
SHORT = {"dynafed/figure3": 40, "dynafed/figure4": 20, "dynafed/figure6": 20}
# Figures printed for each method, in the tables' order.
PRINTED = {1: 9, 2: 4, 3: 4, 4: 4, 5: 4, 6: 3}


def config_of(cell: Cell) -> Config:
    return load_config(cell.config_tree)


def synthesis_of(config: Config) -> TrajectoryDistillation:
    refinement = build_method(config.method).refinements[0]
    assert isinstance(refinement, TrajectoryDistillation)
    return refinement


def distilling(table: TableFile, scale: str) -> list[Config]:
    """The configurations of a table's cells that run DynaFed."""
    found = [config_of(cell) for cell in cells_of(table, scale)]
    return [config for config in found if build_method(config.method).name == "dynafed"]


@pytest.mark.parametrize("name", NAMES)
def test_every_scale_builds_and_leaves_rounds_for_the_synthesis(name: str) -> None:
    table = read_table(name)
    for scale in ("smoke", "small", "full"):
        configs = distilling(table, scale)
        assert configs
        for config in configs:
            assert synthesis_of(config).snapshots - 1 <= config.training.rounds
    assert {config.scenario.dataset for config in distilling(table, "smoke")} == {"digits"}
    assert {config.scenario.dataset for config in distilling(table, "small")} == {"fashion_mnist"}


@pytest.mark.parametrize("name", NAMES)
def test_full_scale_is_the_set_up_of_the_paper(name: str) -> None:
    for config in distilling(read_table(name), "full"):
        training = config.training
        assert (config.scenario.clients, config.scenario.partition.kind) == (80, "dirichlet_balanced")
        assert training.cohort_fraction == (0.2 if name in ("dynafed/table6", "dynafed/figure7") else 0.4)
        assert (training.batch_size, training.optimizer_state) == (32, "persist")
        assert (training.optimizer.name, training.optimizer.lr) == ("adam", 1e-3)
        rounds = SHORT.get(name, {1: 200, 5: 100, 10: 50}[training.local_epochs])  # type: ignore[index]
        assert training.rounds == rounds
        component, skew = synthesis_of(config), config.scenario.partition.model_dump()["dirichlet_alpha"]
        longer = {"cifar100": (8, 1e-4), "cinic10": (20, 2.5e-4)}
        usual = longer.get(config.scenario.dataset, (20, 1e-4))
        epochs_at_least_skewed = 15 if config.scenario.dataset == "cifar10" and skew == 0.16 else usual[0]
        assert component.finetune_learning_rate == usual[1]
        assert component.finetune_epochs in (usual[0], epochs_at_least_skewed)
        if name in ("dynafed/table1", "dynafed/table6"):
            assert component.finetune_epochs == epochs_at_least_skewed


def test_all_twelve_tables_and_figures_with_an_experiment_are_there() -> None:
    assert [name for name in table_names() if name in NAMES] == sorted(NAMES) and len(NAMES) == 12
    for name in NAMES:
        kind, number = name.removeprefix("dynafed/")[:-1], name[-1]
        assert read_table(name).source == f"Pi et al. 2023 (DynaFed), {kind.capitalize()} {number}"


@pytest.mark.parametrize("number", PRINTED)
def test_every_method_of_a_table_is_printed_with_its_deviation_in_every_column(number: int) -> None:
    table = read_table(f"dynafed/table{number}")
    (measure,) = table.measures
    assert table.row_names == METHODS and len(table.column_names) == PRINTED[number]
    for row in METHODS:
        for column in table.column_names:
            value = table.printed[row][column][measure.name]
            assert isinstance(value, list) and value[1] < value[0]
    assert table.spread == "standard deviation of three runs" and table.seeds == [0, 1, 2]


def test_rounds_to_a_target_are_means_of_three_runs() -> None:
    """All means are thirds, to the printed digit."""
    for columns in read_table("dynafed/table4").printed.values():
        for of in columns.values():
            mean, _ = of["rounds"]  # type: ignore[misc]
            assert abs(3 * mean - round(3 * mean)) <= 0.151


def test_figures_are_curves_of_tables() -> None:
    for figure, table in ((2, 1), (7, 6)):
        whole, part = read_table(f"dynafed/table{table}").printed, read_table(f"dynafed/figure{figure}").printed
        assert part and all(whole[row][c] == of for row, columns in part.items() for c, of in columns.items())


def test_real_data_is_only_compared_with_in_figure_6() -> None:
    for name in NAMES:
        expected = "proxy" if name == "dynafed/figure6" else "none"
        assert {synthesis_of(config).real_reference for config in distilling(read_table(name), "full")} == {expected}


def test_trajectory_and_number_of_images_vary_in_figure_5() -> None:
    table = read_table("dynafed/figure5")
    cells = [cell for cell in cells_of(table, "full") if cell.seed == 0 and cell.row != "FedGen"]
    found = {(cell.row, cell.column): synthesis_of(config_of(cell)) for cell in cells}
    lengths = {row: s.snapshots - 1 for (row, column), s in found.items() if column == "by length"}
    assert lengths == {f"L={length}": length for length in (10, 15, 20, 25)}
    assert {s.synthesis.horizon_rounds for s in found.values()} == {5}
    sizes = {(row, 10 * s.images_per_class) for (row, column), s in found.items() if column != "by length"}
    assert sizes == {(f"Dir .{skew}", size) for skew in ("01", "04", "16") for size in (10, 50, 100, 150, 300, 500)}
