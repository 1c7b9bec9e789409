"""The correlation of label divergence and loss gap over clients."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.errors import ConfigError
from fedsweep.reproduce import divergence_gap
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.divergence_gap import CSV, ClientGaps, client_gaps, correlation, ranks, run_kind
from fedsweep.reproduce.table_file import read_table
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
  kind: divergence_gap
  measures:
    - {name: pearson}
    - {name: signed, of: pearson_signed}
  rows:
    - {name: FedAvg}
  columns:
    - {name: digits}
  seeds: [0, 1]
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
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


def test_the_gap_is_to_the_loss_over_all_samples() -> None:
    """F = (1 x 2.0 + 3 x 0.4) / 4 = 0.8."""
    gaps = ClientGaps(num_samples=np.array([1, 3]), divergence=np.array([0.1, 0.2]), loss=np.array([2.0, 0.4]))
    assert gaps.signed_gap == pytest.approx([1.2, -0.4])
    assert gaps.gap == pytest.approx([1.2, 0.4])
    assert gaps.figures() == pytest.approx({"pearson": -1.0, "spearman": -1.0, "pearson_signed": -1.0})


def test_each_client_is_tested_on_its_own_samples() -> None:
    """Equal logits have the loss ln 4 on any labels; logits that favour class 0 do not."""
    experiment = tiny_experiment(fedavg())
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    assert client_gaps(experiment, model).loss == pytest.approx([math.log(4)] * 6)
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    gaps = client_gaps(experiment, model)
    shares = [float((experiment.world.data.labels[i] == 0).mean()) for i in experiment.world.indices]
    assert sorted(shares, reverse=True) == shares and shares[0] == 1.0  # sorted by label, so class 0 comes first
    norm = math.log(math.exp(9) + 3)
    assert gaps.loss == pytest.approx([norm - 9 * share for share in shares], abs=1e-6)
    assert (gaps.divergence > 0).all() and (gaps.divergence <= math.log(2)).all()


def test_a_table_runs_its_cells_and_finished_ones_only_once(tmp_path: Path) -> None:
    path = tmp_path / "gap.yaml"
    path.write_text(TEXT)
    table = read_table(path)
    cells = cells_of(table, "full")
    out = tmp_path / "out"
    out.mkdir()
    first = run_kind(table, scale="full", cells=cells, out=out, quiet=True)
    written = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    again = run_kind(table, scale="full", cells=cells, out=out, quiet=True)
    assert first.cells == again.cells
    assert {file: file.stat().st_mtime_ns for file in out.rglob("result.json")} == written and len(written) == 2
    (cell,) = first.cells
    assert cell.measured["pearson"].count == 2 and not cell.problems
    assert -1 <= (cell.measured["signed"].mean or 9) <= 1
    rows = list(csv.DictReader((out / CSV).read_text().splitlines()))
    assert [(row["seed"], row["client"]) for row in rows[:7]] == [*(("0", str(k)) for k in range(6)), ("1", "0")]
    assert len(list((out / "figures").glob("*.png"))) == len(list((out / "figures").glob("*.pdf"))) == 2


def test_the_tracking_store_lies_above_the_tables_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "gap.yaml", []
    path.write_text(TEXT.replace("seeds: [0, 1]", "seeds: [0]"))
    monkeypatch.setattr(divergence_gap, "make_observers", lambda config, folder: asked.append(folder) or [])
    table, out = read_table(path), tmp_path / "out"
    out.mkdir()
    run_kind(table, scale="full", cells=cells_of(table, "full"), out=out, quiet=True)
    assert asked == [out]


def test_cells_that_would_share_a_folder_are_an_error_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "gap.yaml"
    path.write_text(TEXT.replace("- {name: FedAvg}", "- {name: '+ 1'}\n    - {name: '= 1'}"))
    table = read_table(path)
    with pytest.raises(ConfigError, match="would share the folder '1-digits-seed0'"):
        run_kind(table, scale="full", cells=cells_of(table, "full"), out=tmp_path, quiet=True)
    assert not list(tmp_path.glob("*/"))


def test_an_unknown_measure_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "gap.yaml"
    path.write_text(TEXT.replace("{name: pearson}", "{name: pearsson}"))
    table = read_table(path)
    with pytest.raises(ConfigError, match="did you mean 'pearson'"):
        run_kind(table, scale="full", cells=cells_of(table, "full"), out=tmp_path, quiet=True)
