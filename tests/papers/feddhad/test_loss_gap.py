"""The correlation of label divergence and loss gap over clients."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedsweep
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.errors import ConfigError
from fedsweep.papers.feddhad.loss_gap import (
    ClientGaps,
    client_gaps,
    correlation,
    gap_figure,
    gaps_of,
    own_optimum,
)
from fedsweep.papers.model_measures import once_per_run
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.reproduce.figures.scene import scene_of
from fedsweep.reproduce.measured.grid import measured, views_of
from fedsweep.results.view import load_run
from fedsweep.testing import tiny_experiment

TEXT = """
name: tiny-gap
scenario: {clients: 6, partition: {kind: dirichlet, dirichlet_alpha: 0.3, min_samples: 5}}
training: {rounds: 1, cohort_size: 2, local_steps: 2}
runtime: {backend: local}
tracking: {uri: none}
table:
  title: Divergence and gap on digits
  source: Somebody 2024, Figure 7
  measures:
    - {name: gap_pearson}
    - {name: share, of: gap_r2}
  rows:
    - {name: FedAvg}
  columns:
    - {name: digits}
  seeds: [0, 1]
  figures:
    - {name: gaps, kind: loss_gap}
"""


def test_correlation_is_pearsons() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert correlation(x, 2 * x + 1) == pytest.approx(1.0)
    assert correlation(x, -x) == pytest.approx(-1.0)
    assert correlation(x, np.array([1.0, -1.0, -1.0, 1.0])) == pytest.approx(0.0)
    assert correlation(x, np.ones(4)) is None
    y = np.array([0.3, -0.2, 0.9, 0.1])
    assert correlation(x, y) == pytest.approx(float(np.corrcoef(x, y)[0, 1]))


def test_equal_values_share_a_rank() -> None:
    """The gaps are 2, 1, 0 and 3; the two largest divergences share ranks 2 and 3."""
    gaps = ClientGaps(
        divergence=np.array([0.3, 0.1, 0.3, 0.2]), loss=np.array([2.0, 1.0, 0.0, 3.0]), own_loss=np.zeros(4)
    )
    expected = np.corrcoef([2.5, 0, 2.5, 1], [2, 1, 0, 3])[0, 1]
    assert gaps.figures()["gap_spearman"] == pytest.approx(float(expected))


def test_the_degree_is_the_loss_at_the_global_optimum_less_that_at_the_clients_own() -> None:
    gaps = ClientGaps(
        divergence=np.array([0.1, 0.2, 0.3]), loss=np.array([2.0, 0.4, 1.5]), own_loss=np.array([1.9, 0.4, 0.1])
    )
    assert gaps.gap == pytest.approx([0.1, 0.0, 1.4])
    pearson = float(np.corrcoef(gaps.divergence, gaps.gap)[0, 1])
    assert gaps.figures() == pytest.approx({"gap_pearson": pearson, "gap_r2": pearson**2, "gap_spearman": 0.5})


def test_each_client_is_tested_on_its_own_samples_and_comes_to_its_own_optimum() -> None:
    """Equal logits have the loss ln 4 on any labels. With a bias alone the optimum is the entropy of the labels."""
    experiment = tiny_experiment(fedavg())
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gaps = client_gaps(experiment, model)
    assert gaps.loss == pytest.approx([math.log(4)] * 6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (gaps.gap > 0).all() and (gaps.divergence > 0).all() and (gaps.divergence <= math.log(2)).all()
    again = client_gaps(experiment, model)
    assert np.array_equal(gaps.own_loss, again.own_loss)


def test_what_a_network_draws_follows_from_the_runs_seed() -> None:
    experiment, before = tiny_experiment(fedavg()), torch.get_rng_state()
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 4))
    first = client_gaps(experiment, model).own_loss
    torch.rand(1)
    assert np.array_equal(first, client_gaps(experiment, model).own_loss)
    torch.set_rng_state(before)


def test_training_alone_ends_at_the_entropy_of_the_labels_where_inputs_say_nothing() -> None:
    targets = torch.tensor([0] * 3000 + [1] * 1000)
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    before, best = own_optimum(model, torch.zeros(4000, 3), targets, order=torch.Generator().manual_seed(1))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert before == pytest.approx(math.log(2)) and entropy - 1e-6 <= best == pytest.approx(entropy, abs=0.01)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> TableFile:
    path = tmp_path_factory.mktemp("table") / "gap.yaml"
    path.write_text(TEXT)
    return read_table(path)


@pytest.fixture(scope="module")
def run_cells(table: TableFile, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Cell, Path]:
    """The cells of the table, each in its run folder; not to be changed."""
    place = tmp_path_factory.mktemp("runs")
    folders = {cell: place / f"seed{cell.seed}" for cell in cells_of(table, "full")}
    for cell, folder in folders.items():
        fedsweep.run(cell.config, out=folder)
    return folders


@pytest.mark.slow
def test_a_table_has_the_correlations_of_its_runs(table: TableFile, run_cells: Mapping[Cell, Path]) -> None:
    (cell,) = measured(table, views_of(table, run_cells), scale="full").cells
    expected = [gaps_of(folder).figures()["gap_pearson"] for folder in run_cells.values()]
    assert cell.measured["gap_pearson"].mean == pytest.approx(np.mean(expected)) and not cell.problems
    assert cell.measured["gap_pearson"].count == 2 and -1 <= (cell.measured["share"].mean or 9) <= 1


def test_a_damaged_model_is_the_cells_problem(table: TableFile, run_cells: Mapping[Cell, Path], tmp_path: Path) -> None:
    damaged = {cell: Path(shutil.copytree(folder, tmp_path / folder.name)) for cell, folder in run_cells.items()}
    for folder in damaged.values():
        (folder / "model.safetensors").write_bytes(b"no model")
    (cell,) = measured(table, views_of(table, damaged), scale="full").cells
    assert "model.safetensors" in cell.problems[0]


def test_a_run_that_has_no_folder_here_is_the_cells_problem(table: TableFile, run_cells: Mapping[Cell, Path]) -> None:
    kept = {cell: replace(load_run(run), folder=Path("/nowhere")) for cell, run in run_cells.items()}
    problems = measured(table, views_of(table, kept), scale="full").problems
    assert problems and all("the run's model, which is not here; a run given by --from has none" in p for p in problems)


def test_what_is_read_of_a_folder_is_remembered_until_another_run_lies_there(tmp_path: Path) -> None:
    read: list[Path] = []
    asked = once_per_run(lambda folder: len(read) if read.append(folder) is None else 0)
    config = tmp_path / "config.yaml"
    config.write_text("")
    assert [asked(tmp_path), asked(tmp_path)] == [1, 1]
    os.utime(config, ns=(0, 0))  # as another run's has another time
    assert [asked(tmp_path), asked(tmp_path)] == [2, 2]


@pytest.mark.slow
def test_the_picture_has_a_point_for_each_client(table: TableFile, run_cells: Mapping[Cell, Path]) -> None:
    views = views_of(table, run_cells)
    scene = scene_of(table.figures[0], measured(table, views, scale="full"), views)
    (points,) = gap_figure(scene).axes[0].collections
    gaps = gaps_of(next(iter(run_cells.values())))
    assert np.array_equal(points.get_offsets(), np.stack([gaps.divergence, gaps.gap], axis=1))
    assert len(gaps.divergence) == 6


def test_an_unknown_correlation_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "gap.yaml"
    path.write_text(TEXT.replace("{name: gap_pearson}", "{name: gap_pearsson}"))
    with pytest.raises(ConfigError, match="did you mean 'gap_pearson'"):
        read_table(path)
