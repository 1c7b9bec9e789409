"""DynamicFL and DynamicSGD against closed forms on quadratics, and against centralised SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny_groups import every, two_speed
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg, fedsgd
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalStep, Objective
from fedsweep.method import FederatedMethod
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

MOMENTUM = OptimizerSettings(momentum=0.9, nesterov=True)


class Point(nn.Module):
    """One parameter, x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([2.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x * torch.ones(len(inputs), 2, dtype=self.x.dtype)


@dataclass(frozen=True, kw_only=True)
class Quadratic(Objective):
    """``h / 2 (x - z)^2``; a sample's two features are z and h."""

    def loss(self, step: LocalStep) -> Tensor:
        z, h = step.inputs.flatten(1).unbind(1)
        assert isinstance(step.model, Point)
        loss: Tensor = (0.5 * h * (step.model.x - z) ** 2).mean()
        return loss


def point_after(
    method: FederatedMethod,
    *,
    curvatures: Sequence[float] = (1.0, 1.0, 1.0),
    centres: Sequence[float] = (1.0, -3.0, 7.0),
    sizes: tuple[int, ...] = (10, 20, 5),
    learning_rate: float = 0.1,
    rounds: int = 4,
    steps: int = 10,
    optimizer: OptimizerSettings | None = None,
) -> float:
    """x after rounds of ten steps of three clients with zbar (1, -3, 7) and n (10, 20, 5), from x0 = 2."""
    samples = np.repeat(np.column_stack([centres, curvatures]), sizes, axis=0)
    experiment = tiny_experiment(
        FederatedMethod(
            name=method.name, source="", objective=Quadratic(), pacing=method.pacing, settings=method.settings
        ),
        num_clients=3,
        cohort_size=3,
        rounds=rounds,
        local_steps=steps,
        batch_size=5,
        learning_rate=learning_rate,
        optimizer=optimizer,
        build=Point,
        double=True,
        sizes=sizes,
        images=samples.reshape(-1, 1, 1, 2),
        labels=np.zeros(sum(sizes), dtype=np.int64),
    )
    return float(run_rounds(local_engine(experiment)).vector[0])


@pytest.mark.parametrize(
    "method",
    [
        two_speed(0, 1, high=1, low=10, sync_rule="paper"),
        two_speed(0, 1, high=1, low=10, sync_rule="authors"),
        two_speed(2, high=3, low=4, sync_rule="paper"),
        every(1),
        every(4),
        every(10),
        fedavg(),
    ],
    ids=["1-1-k", "1-1-k authors", "3-3-4", "1", "4", "k", "fedavg"],
)
def test_equal_curvatures_give_the_closed_form_at_any_intervals(method: FederatedMethod) -> None:
    """x = x* + (1 - eta)^(k r) (x0 - x*), x* = (10 x 1 + 20 x -3 + 5 x 7) / 35 = -3/7, eta .1, k 10, r 4."""
    optimum = (10 * 1 + 20 * -3 + 5 * 7) / 35
    assert optimum + 0.9**40 * (2 - optimum) == pytest.approx(-0.3926749985708, abs=1e-12)
    assert point_after(method) == pytest.approx(-0.3926749985708, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_three_clients_in_two_groups_converge_at_the_rate_of_fedsgd(seed: int) -> None:
    """DynamicFL's Theorem 1, on drawn quadratics: each round takes the distance times (1 - eta)^k with both."""
    draws = stream(seed, "theorem 1").numpy()
    centres, sizes = draws.normal(scale=5.0, size=3).tolist(), tuple(int(n) for n in 5 * draws.integers(1, 6, size=3))
    rate, steps, rounds = draws.uniform(0.02, 0.5), int(draws.integers(2, 9)), 2
    optimum = float(np.average(centres, weights=sizes))
    dynamic = two_speed(*draws.permutation(3)[:2].tolist(), high=1, low=steps, sync_rule="authors")
    for method in (dynamic, fedsgd()):
        moves = 1 if method.name == "fedsgd" else steps  # fedsgd plays one step a round
        found = point_after(
            method, centres=centres, sizes=sizes, learning_rate=rate, rounds=rounds * steps // moves, steps=moves
        )
        assert found - optimum == pytest.approx((1 - rate) ** (rounds * steps) * (2 - optimum), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("interval", "optimizer", "expected"),
    [
        (1, None, 2.0991868141163614),
        (10, None, 2.067544140925423),
        (1, MOMENTUM, 2.3024396877733815),
        (10, MOMENTUM, 2.042541259316483),
    ],
)
def test_different_curvatures_give_the_specifications_numbers(
    interval: int, optimizer: OptimizerSettings | None, expected: float
) -> None:
    found = point_after(every(interval), curvatures=(1.0, 0.3, 2.0), learning_rate=0.01, optimizer=optimizer)
    assert found == pytest.approx(expected, abs=1e-12)


def centralised(rounds: int, steps: int, optimizer: OptimizerSettings, sizes: Sequence[int]) -> Tensor:
    """SGD on the size-weighted mean of the clients' full gradients; momentum is reset in each round."""
    experiment = whole_batches(fedavg(), sizes=sizes)
    images, labels = experiment.world.data.images, experiment.world.data.labels
    model = experiment.build_model()
    for _ in range(rounds):
        sgd = torch.optim.SGD(
            model.parameters(),
            lr=0.1,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
        )
        for _ in range(steps):
            sgd.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for part, size in zip(experiment.world.indices, sizes, strict=True):
                logits = model(torch.from_numpy(images[part]))
                loss = loss + size / sum(sizes) * nn.functional.cross_entropy(logits, torch.from_numpy(labels[part]))
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole_batches(method: FederatedMethod, *, sizes: Sequence[int] = (4, 4, 4), rounds: int = 2, **more: object):  # type: ignore[no-untyped-def]
    """Clients whose every batch holds the same multiple of each of their samples."""
    return tiny_experiment(
        method,
        num_clients=len(sizes),
        cohort_size=len(sizes),
        rounds=rounds,
        local_steps=6,
        batch_size=4,
        double=True,
        sizes=sizes,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "optimizer",
    [OptimizerSettings(), MOMENTUM, OptimizerSettings(momentum=0.9, weight_decay=0.1)],
    ids=["plain", "nesterov", "heavy ball and decay"],
)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 2, 1)])
def test_interval_one_is_centralised_sgd_on_the_weighted_gradients(
    optimizer: OptimizerSettings, sizes: tuple[int, ...]
) -> None:
    found = run_rounds(local_engine(whole_batches(every(1), sizes=sizes, optimizer=optimizer))).vector
    torch.testing.assert_close(found, centralised(2, 6, optimizer, sizes), rtol=0, atol=1e-12)


def test_interval_one_is_not_centralised_sgd_with_persistent_momentum_or_clipping() -> None:
    reference = {rounds: centralised(rounds, 6, MOMENTUM, (4, 4, 4)) for rounds in (1, 2)}
    kept = OptimizerSettings(momentum=0.9, nesterov=True, keep="persist")
    first = run_rounds(local_engine(whole_batches(every(1), rounds=1, optimizer=kept))).vector
    second = run_rounds(local_engine(whole_batches(every(1), rounds=2, optimizer=kept))).vector
    torch.testing.assert_close(first, reference[1], rtol=0, atol=1e-12)
    assert float((second - reference[2]).abs().max()) > 1e-4
    clipped = OptimizerSettings(momentum=0.9, nesterov=True, clip_norm=0.1)
    found = run_rounds(local_engine(whole_batches(every(1), rounds=1, optimizer=clipped))).vector
    assert float((found - reference[1]).abs().max()) > 1e-4
