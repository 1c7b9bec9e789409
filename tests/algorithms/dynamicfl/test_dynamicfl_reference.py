"""The whole method against a second, plain implementation of sections 3 and 8 of its specification, in numpy alone.

Every client holds as many samples as a batch, so every batch is the whole client set and no draw of batches can
differ. Cohorts and groups are taken from the run's records; everything else is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsweep.algorithms.dynamicfl.two_speed import LEVELS, dynamicfl
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.state import RunState
from fedsweep.records import RoundRecord
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.world.budgets import DynamicBudget, FixedBudget

Floats = NDArray[np.float64]

CLIENTS, COHORT, BATCH, STEPS, ROUNDS, RATE = 20, 10, 5, 20, 4, 0.1
CLASSES, FEATURES = 4, 6
MOMENTUM, DECAY, CLIP = 0.9, 5e-4, 0.4


@dataclass
class Client:
    """One client: its data, and the momentum buffer that it keeps for the whole run."""

    inputs: Floats
    targets: NDArray[np.int64]
    momentum: Floats

    def step(self, weights: Floats) -> Floats:
        """One step of SGD with clipping, then weight decay, then Nesterov's momentum."""
        matrix = weights[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)
        logits = self.inputs @ matrix.T + weights[CLASSES * FEATURES :]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        errors = odds / odds.sum(axis=1, keepdims=True)
        errors[np.arange(len(self.targets)), self.targets] -= 1.0
        errors /= len(self.targets)
        gradient = np.concatenate([(errors.T @ self.inputs).ravel(), errors.sum(axis=0)])
        gradient = gradient * min(1.0, CLIP / (float(np.sqrt(gradient @ gradient)) + 1e-6))
        gradient = gradient + DECAY * weights
        self.momentum = MOMENTUM * self.momentum + gradient
        return weights - RATE * (gradient + MOMENTUM * self.momentum)


def reference(records: Sequence[RoundRecord], start: Floats, *, high: int, low: int, reset: bool) -> Floats:
    """W_g after the rounds."""
    images, labels = clients_data()
    clients = [
        Client(
            images[k * BATCH : (k + 1) * BATCH].reshape(BATCH, FEATURES), labels[k * BATCH : (k + 1) * BATCH], start * 0
        )
        for k in range(CLIENTS)
    ]
    server = start
    for record in records:
        intervals = {k: min(high if k in (record.high_frequency or ()) else low, STEPS) for k in record.cohort}
        models = dict.fromkeys(record.cohort, server)
        for step in range(1, STEPS + 1):
            for k in record.cohort:
                if reset and step == 1:
                    clients[k].momentum = start * 0
                models[k] = clients[k].step(models[k])
            due = [k for k in record.cohort if (step % intervals[k] == 0 and step <= STEPS - 2) or step == STEPS]
            if due:
                sizes = np.array([len(clients[k].targets) for k in due], dtype=np.float64)
                server = sum(n * models[k] for n, k in zip(sizes, due, strict=True)) / sizes.sum()
                models |= dict.fromkeys(due, server)
    return server


def clients_data() -> tuple[Floats, NDArray[np.int64]]:
    return tiny_data(num_samples=CLIENTS * BATCH, num_classes=CLASSES, features=FEATURES, dtype=np.float64)


def run(high: str, low: str, budget: FixedBudget | DynamicBudget) -> tuple[RunState, Floats]:
    images, labels = clients_data()
    experiment = tiny_experiment(
        dynamicfl(high_interval=high, low_interval=low, group="random"),
        num_clients=CLIENTS,
        cohort_size=COHORT,
        rounds=ROUNDS,
        batch_size=BATCH,
        local_epochs=STEPS,
        learning_rate=RATE,
        optimizer=OptimizerSettings(
            momentum=MOMENTUM, nesterov=True, weight_decay=DECAY, clip_norm=CLIP, keep="persist"
        ),
        double=True,
        sizes=(BATCH,) * CLIENTS,
        images=images,
        labels=labels,
        budgets=budget.assign(CLIENTS, stream(0, "budgets")),
    )
    engine = local_engine(experiment)
    start = engine.start()
    return run_rounds(engine, start), start.vector.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("high", "low", "budget"),
    [("b", "c", FixedBudget(budget_fraction=0.5)), ("a", "g", DynamicBudget(budget_fraction=0.6))],
    ids=["b-c Fix-0.5", "a-g Dynamic-0.6"],
)
def test_four_rounds_equal_a_plain_implementation(high: str, low: str, budget: FixedBudget | DynamicBudget) -> None:
    state, start = run(high, low, budget)
    assert all(len(record.cohort) == COHORT and record.local_steps == COHORT * STEPS for record in state.records)
    assert sum(len(record.high_frequency or ()) for record in state.records) > ROUNDS
    intervals = {"high": LEVELS[high], "low": LEVELS[low]}
    expected = reference(state.records, start, **intervals, reset=False)
    np.testing.assert_allclose(state.vector.numpy(), expected, rtol=0, atol=1e-12)
    assert float(np.abs(expected - start).max()) > 0.1
    forgetful = reference(state.records, start, **intervals, reset=True)
    assert float(np.abs(state.vector.numpy() - forgetful).max()) > 1e-4
