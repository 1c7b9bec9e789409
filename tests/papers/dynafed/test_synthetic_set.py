"""What a finished run's synthetic set does: training from scratch, clients' losses, pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedsweep
from fedsweep.config.load import load_config
from fedsweep.errors import DataError
from fedsweep.papers.dynafed.synthetic_set import client_losses, scratch_accuracy, synthetic_set
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.table_file import read_table
from fedsweep.reproduce.figures.scene import draw
from fedsweep.reproduce.measured.grid import measured, value_of
from fedsweep.results.view import load_run

TEXT = """
name: tiny-synthesis
scenario: {clients: 6, partition: {kind: dirichlet_balanced, dirichlet_alpha: 0.1}}
model: {name: mlp, hidden_width: 16}
method: {name: dynafed, snapshots: 4, horizon_rounds: 2, inner_steps: 3, iterations: 8, images_per_class: 2,
  inner_rate: 0.5, augment: false, finetune_epochs: 3}
training: {rounds: 4, cohort_size: 4, local_epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 1.0e-2}}
runtime: {backend: local}
tracking: {uri: none}
table:
  title: Synthetic images of digits
  source: Somebody 2023, Figures 3, 4 and 6
  measures: [{name: scratch, of: scratch_accuracy, percent: true}]
  rows: [{name: DynaFed}]
  columns: [{name: digits}]
  figures:
    - {name: losses, kind: client_losses}
    - {name: images, kind: pictures}
"""


@pytest.fixture(scope="module")
def table_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "tiny.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def run(table_path: Path) -> Path:
    folder = table_path.with_name("run")
    fedsweep.run(load_config(table_path), out=folder)
    return folder


def test_the_set_is_read_from_the_newest_checkpoint(run: Path) -> None:
    found = synthetic_set(run)
    assert found.images.shape == (20, 1, 8, 8) and found.labels.shape == (20, 10)
    assert float(found.labels.abs().sum()) > 0  # they are learned, from zero


def test_a_network_from_scratch_knows_what_the_set_says_and_is_the_same_each_time(run: Path, table_path: Path) -> None:
    accuracy = scratch_accuracy(load_run(run))
    assert 0 <= accuracy <= 1 and accuracy == scratch_accuracy(load_run(run))
    assert value_of(load_run(run), read_table(table_path).measures[0]) == accuracy


def test_losses_fall_in_local_training_and_are_followed_through_the_passes_of_fine_tuning(run: Path) -> None:
    found = client_losses(run)
    assert len(found.clients) == 3 == len(set(found.clients)) and set(found.local) == set(found.tuned)
    for client in found.clients:
        local, tuned = found.local[client], found.tuned[client]
        assert local[0, 0] == 0 and local[-1, 1] < local[0, 1] and (np.diff(local[:, 0]) > 0).all()
        assert len(tuned) == 1 + 3 and tuned[0, 0] >= local[-1, 0]
        assert tuned[0, 1] != tuned[-1, 1] and tuned[0, 1] > local[-1, 1]
    assert found.mean > 0


@pytest.mark.slow
def test_the_pictures_are_drawn_from_the_run(run: Path, table_path: Path, tmp_path: Path) -> None:
    table = read_table(table_path)
    (cell,) = cells_of(table, "full")
    for figure in table.figures:
        views = {cell: load_run(run)}
        paths = draw(figure, measured(table, views, scale="full"), views, path_stem=tmp_path / figure.name)
        assert all(path.stat().st_size > 1000 for path in paths)


def test_a_run_without_a_synthetic_set_says_so(table_path: Path, tmp_path: Path) -> None:
    fedsweep.run(load_config(table_path, ["method={name: fedavg}", "training.rounds=1"]), out=tmp_path / "plain")
    with pytest.raises(DataError, match="no synthetic set"):
        synthetic_set(tmp_path / "plain")
