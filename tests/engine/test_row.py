"""The figures of a row against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.config.load import load_config
from fedsweep.experiment.build import build_experiment
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import load_vector


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def test_the_ratio_is_that_of_the_mean_number_of_steps_and_counts_buffers() -> None:
    """4, 8 and 16 samples in batches of 4 are 1, 2 and 4 steps; all models travel once each way: 1 / mean(1, 2, 4)."""
    experiment = tiny_experiment(fedavg(), num_clients=3, cohort_size=3, sizes=(4, 8, 16), build=with_batch_norm)
    [row] = run_rounds(local_engine(experiment), rounds=1).records
    assert row.local_steps == 7
    assert row.comm_ratio == pytest.approx(3 / 7, abs=1e-15)


@pytest.mark.parametrize("codec", ["bf16", "sign", "qsgd"])
def test_budgets_bind_what_a_message_is_worth(codec: str) -> None:
    """Through a codec the high rate costs less: who keeps to it is within its budget, whatever its values are."""
    way, training = {"name": codec}, {"rounds": 1, "cohort_size": 4, "local_steps": 4}
    scenario = {"clients": 4, "budgets": {"kind": "fixed", "budget_fraction": 0.5}}
    tree = {"scenario": scenario, "training": training, "communication": {"up": way, "down": way}}
    over = {}
    for name in ("fedavg", "dynamicsgd"):
        experiment = build_experiment(load_config({**tree, "method": {"name": name}}))
        over[name] = run_rounds(local_engine(experiment)).records[0].over_budget
    assert over == {"fedavg": 0, "dynamicsgd": 2}


def test_the_test_loss_is_the_mean_over_samples_whatever_the_batch() -> None:
    losses = []
    for batch in (96, 10, 7):
        experiment = replace(tiny_experiment(fedavg()), evaluation_batch=batch)
        engine = local_engine(experiment)
        state = run_rounds(engine, rounds=1)
        losses.append(state.records[-1].test_loss)
    model = experiment.build_model()
    load_vector(model, engine.layout, state.vector)
    images = torch.from_numpy(np.array(experiment.world.test_images))
    expected = nn.functional.cross_entropy(model(images), torch.from_numpy(np.array(experiment.world.test_labels)))
    assert losses == pytest.approx([float(expected.detach())] * 3, rel=1e-5)
