"""DynaFed's tables: the paper's set-up at full scale, its printed figures, and cells that can be run."""

from __future__ import annotations

import pytest

from fedsweep.algorithms.dynafed.distillation import TrajectoryDistillation
from fedsweep.catalog import build_method
from fedsweep.config import load_config
from fedsweep.config.schema import Config
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.table_file import TableFile, read_table

NAMES = [
    *(f"dynafed/table{number}" for number in range(1, 7)),
    *(f"dynafed/figure{number}" for number in (2, 3, 5, 6, 7)),
]
MISSING = ["Scaffold", "FedDF", "FedBE", "ABAVG", "FedGen", "FedMix"]


def config_of(cell: Cell) -> Config:
    return load_config(cell.given)


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
        assert training.cohort_fraction == (0.2 if name == "dynafed/table5" else 0.4)
        assert (training.batch_size, training.optimizer_state) == (32, "persist")
        assert (training.optimizer.name, training.optimizer.lr) == ("adam", 1e-3)
        rounds = {1: 20 if name == "dynafed/figure6" else 200, 5: 100, 10: 50}
        assert training.rounds == rounds[training.local_epochs]  # type: ignore[index]
        component, skew = synthesis_of(config), config.scenario.partition.model_dump()["dirichlet_alpha"]
        longer = {"cifar100": (8, 1e-4), "cinic10": (20, 2.5e-4)}
        usual = longer.get(config.scenario.dataset, (20, 1e-4))
        epochs_at_least_skewed = 15 if config.scenario.dataset == "cifar10" and skew == 0.16 else usual[0]
        assert component.finetune_learning_rate == usual[1]
        assert component.finetune_epochs in (usual[0], epochs_at_least_skewed)
        if name in ("dynafed/table1", "dynafed/table5"):
            assert component.finetune_epochs == epochs_at_least_skewed


def test_main_table_has_the_printed_figures_of_all_nine_methods() -> None:
    table = read_table("dynafed/table1")
    assert len(table.column_names) == 9
    for row in table.row_names:
        for column in table.column_names:
            assert table.printed_value(row, column, measure="accuracy") is not None
            assert table.printed_sd(row, column, measure="accuracy") is not None
    assert table.printed["FedMix"]["CINIC-10 .04"]["accuracy"] == [50.22, 1.41]
    assert table.printed["DynaFed"]["FMNIST .01"]["accuracy"] == [87.52, 0.15]
    assert table.printed["FedAvg"]["CIFAR-10 .16"]["accuracy"] == [69.74, 1.29]
    assert [row.name for row in table.rows if row.missing] == MISSING


def test_real_data_is_only_compared_with_in_figure_6() -> None:
    for name in NAMES:
        expected = "proxy" if name == "dynafed/figure6" else "none"
        assert {synthesis_of(config).real_reference for config in distilling(read_table(name), "full")} == {expected}


def test_trajectory_and_number_of_images_vary_in_figures_5_and_7() -> None:
    five = {
        (s.snapshots, s.synthesis.horizon_rounds) for s in map(synthesis_of, distilling(read_table(NAMES[8]), "full"))
    }
    assert five == {(snapshots, horizon) for snapshots in (11, 16, 21, 26, 31) for horizon in (3, 5, 8)}
    seven = {synthesis_of(config).images_per_class for config in distilling(read_table(NAMES[10]), "full")}
    assert seven == {1, 5, 10, 15, 30, 50}
