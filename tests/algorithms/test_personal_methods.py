"""What FedAS, AugFL and FedKTL have in common: memories, purity, a run from a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import fedsweep
from fedsweep.catalog import build_method
from fedsweep.experiment.experiment import Experiment
from fedsweep.runs.checkpoints.state_codec import from_bytes, to_bytes
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment

torch.set_num_threads(1)
METHODS: dict[str, dict[str, Any]] = {
    "fedas": {},
    "augfl": {"teacher_steps": 10, "server_batch": 16},
    "fedktl": {"latent_width": 3, "decoder_steps": 5, "server_epochs": 3},
}
each_method = pytest.mark.parametrize("name", METHODS)


def builder() -> Callable[[], nn.Module]:
    def net() -> nn.Module:  # local: pickled by value
        from fedsweep.models.networks.chains import Mlp

        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    return net


def experiment(name: str) -> Experiment:
    proxy = tiny_data(num_samples=40, seed=9)
    method = build_method({"name": name, **METHODS[name]})
    return tiny_experiment(method, build=builder(), rounds=4, cohort_size=4, proxy=proxy)


def test_all_that_is_kept_survives_a_checkpoint() -> None:
    for name in METHODS:
        engine = local_engine(experiment(name))
        half = run_rounds(engine, rounds=2)
        before = to_bytes([dict(half.components), dict(half.memories), half.vector])
        restored = dataclasses.replace(
            half,
            components={seam: from_bytes(to_bytes(state)) for seam, state in half.components.items()},
            memories={client: from_bytes(to_bytes(memory)) for client, memory in half.memories.items()},
        )
        straight, resumed = run_rounds(engine, half), run_rounds(engine, restored)
        assert to_bytes(dict(straight.components)) == to_bytes(dict(resumed.components))
        assert torch.equal(straight.vector, resumed.vector)
        assert str(straight.records[-1].personal_accuracies) == str(resumed.records[-1].personal_accuracies)
        assert to_bytes([dict(half.components), dict(half.memories), half.vector]) == before  # and nothing was changed


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
