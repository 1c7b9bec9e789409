"""ABAVG: weights by accuracy on validation data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_sync, tiny_update
from torch import Tensor, nn

from fedsweep.algorithms.abavg import ByAccuracy, abavg
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.aggregation import Uniform
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.trees import layout_of

UNEQUAL = (4, 8, 12, 24, 28, 20)


def validation(num_samples: int = 40) -> tuple[np.ndarray, np.ndarray]:
    images, labels = tiny_data()
    return images[:num_samples], labels[:num_samples]


def run(method: FederatedMethod, **options: object) -> RunState:
    options = {"validation": validation()} | options
    return run_rounds(local_engine(tiny_experiment(method, **options)))  # type: ignore[arg-type]


def weights(values: list[float], *, sizes: list[int], times_size: bool = False) -> Tensor:
    """Of clients whose model says class 1 where the one input is below their value, on inputs 1 to 10 of class 1."""
    model = nn.Linear(1, 2)
    layout = layout_of(model)
    updates = [
        tiny_update(k, torch.tensor([0.0, -1.0, 0.0, value]), layout=layout, num_samples=n)
        for k, (value, n) in enumerate(zip(values, sizes, strict=True))
    ]
    sync = tiny_sync(
        model,
        torch.zeros(4),
        layout=layout,
        anchors={0: torch.zeros(4)},
        cohort=(0, 1, 2),
        validation_data=(torch.arange(1.0, 11.0)[:, None], torch.ones(10, dtype=torch.int64)),
    )
    return ByAccuracy(times_size=times_size).weigh({"accuracies": None}, updates, sync)[0]


def test_weights_by_hand() -> None:
    """Accuracies 0.2, 0.7 and 0.1 sum to 1; times samples 1, 1 and 11 they are 0.2, 0.7 and 1.1."""
    values = [2.5, 7.5, 1.5]
    assert weights(values, sizes=[1, 1, 1]).tolist() == pytest.approx([0.2, 0.7, 0.1])
    assert weights(values, sizes=[1, 1, 11], times_size=True).tolist() == pytest.approx([0.1, 0.35, 0.55])
    assert weights(values, sizes=[1, 1, 1]).dtype == torch.float64


def test_where_nobody_is_right_it_is_by_samples() -> None:
    assert weights([0.5, 0.5, 0.5], sizes=[1, 2, 1]).tolist() == [0.25, 0.5, 0.25]


def test_equal_accuracies_are_the_uniform_mean() -> None:
    """One validation sample that everybody gets right."""
    images, labels = tiny_data()
    options = {"sizes": UNEQUAL, "local_epochs": 3, "rounds": 1, "validation": (images[:1], labels[:1])}
    engine = local_engine(tiny_experiment(abavg(), **options))  # type: ignore[arg-type]
    state = run_rounds(engine)
    accuracies = state.components["weighting"]["accuracies"]
    assert accuracies.tolist() == [1.0] * 3
    assert torch.equal(state.vector, run(replace(fedavg(), weighting=Uniform()), **options).vector)


def test_the_weights_of_a_run_are_the_accuracies() -> None:
    state = run(abavg(), cohort_size=6, rounds=2)
    accuracies = state.components["weighting"]["accuracies"]
    found = np.array(state.records[-1].aggregation_weights)
    np.testing.assert_allclose(found, (accuracies / accuracies.sum()).numpy(), rtol=1e-12)
    assert found.max() > 1.2 * found.min()
    assert state.records[-1].extra["abavg_accuracy_max"] == float(accuracies.max())


def test_batch_statistics_are_the_clients_own_and_stay() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 4))

    engine = local_engine(tiny_experiment(abavg(), build=build, validation=validation()))
    run_rounds(engine)
    template = engine.tools.model
    assert torch.equal(template.state_dict()["1.running_mean"], torch.zeros(6))
    assert template.training == build().training


def test_without_validation_data_it_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"abavg needs labelled validation data on the server.*server_data\.validat"):
        check_experiment(tiny_experiment(abavg()))
    with pytest.raises(
        ConfigError, match=r"has no sample of it; set scenario\.server_data\.validation=0\.05, say, or a"
    ):
        check_experiment(tiny_experiment(abavg(), validation=validation(0)))


def test_the_validation_data_is_no_part_of_the_state() -> None:
    assert set(run(abavg()).components["weighting"]) == {"accuracies"}
