"""What FedAS, AugFL and FedKTL have in common: memories, purity, a run from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import fedsweep

torch.set_num_threads(1)
METHODS: dict[str, dict[str, Any]] = {
    "fedas": {},
    "augfl": {"teacher_steps": 10, "server_batch": 16},
    "fedktl": {"latent_width": 3, "decoder_steps": 5, "server_epochs": 3},
}
each_method = pytest.mark.parametrize("name", METHODS)


@each_method
def test_it_runs_from_a_configuration(name: str, tmp_path: Path) -> None:
    config = {
        "name": name,
        "method": {"name": name, **METHODS[name]},
        "scenario": {"clients": 8, "server_data": {"proxy": {"per_class": 5, "labelled": True}}},
        "training": {"rounds": 2, "cohort_size": 4},
        "evaluation": {"per_client": True},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    result = fedsweep.run(config, out=tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert all(0 < a <= 1 for a in result.rounds.column("personal_accuracy").to_pylist())
    table = pq.read_table(tmp_path / "run" / "client_accuracy.parquet")
    assert table.num_rows == 16
    assert sum(table.column("personal_samples").to_pylist()) == 2 * 360  # the whole test set, each sample once
