"""FedProx: the proximal term."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny import normed, tiny_step, vector
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import Proximal, fedprox
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalStep, LocalTerm
from fedsweep.engine.round import Round
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing import local_engine, play_round, tiny_experiment
from fedsweep.testing.subject import Point, Quadratic


def played(method: FederatedMethod, **options: object) -> Round:
    return play_round(local_engine(tiny_experiment(method, **options)))  # type: ignore[arg-type]


def moves(method: FederatedMethod, **options: object) -> list[float]:
    """How far each client went from the model that it received."""
    start = local_engine(tiny_experiment(method, **options)).start().vector  # type: ignore[arg-type]
    return [float((u.vector - start).norm()) for u in played(method, **options).updates if u.vector is not None]


def test_without_the_half_the_penalty_is_twice_as_strong() -> None:
    full, half = vector(fedprox(mu=0.25, penalty="full"), rounds=2), vector(fedprox(mu=0.5), rounds=2)
    assert torch.equal(full, half) and not torch.equal(full, vector(fedprox(mu=0.25), rounds=2))


def test_the_first_step_is_fedavgs_for_any_mu() -> None:
    options = {"rounds": 1, "local_steps": 1}
    assert torch.equal(vector(fedprox(mu=5.0), **options), vector(fedavg(), **options))
    options = {"rounds": 1, "local_steps": 2}
    assert not torch.equal(vector(fedprox(mu=5.0), **options), vector(fedavg(), **options))


def test_quadratics_reach_the_specifications_numbers() -> None:
    """mu 1, eta 0.1, five steps from w = 1 on 1/2 w^2 and 2 (w - 10)^2: y = 0.66384 and 7.975.

    Client 0: w' = 0.8 w + 0.1 towards 1/2, so 1/2 + 1/2 x 0.8^5. Client 1: w' = 1/2 w + 4.1 towards 8.2, so
    8.2 - 7.2 / 2^5.
    """
    method = FederatedMethod(name="fedprox", source="", objective=Quadratic(), terms=fedprox(mu=1.0).terms)
    round = played(
        method,
        num_clients=2,
        cohort_size=2,
        local_steps=5,
        batch_size=1,
        build=Point,
        double=True,
        images=np.array([[1.0, 0.0], [4.0, 10.0]]).reshape(2, 1, 1, 2),
        labels=np.zeros(2, dtype=np.int64),
        sizes=(1, 1),
    )
    assert [float(u.vector[0]) for u in round.updates if u.vector is not None] == pytest.approx(
        [0.5 + 0.5 * 0.8**5, 8.2 - 7.2 / 2**5], abs=1e-12
    )
    assert float(round.vector[0]) == pytest.approx((0.66384 + 7.975) / 2, abs=1e-12)


@dataclass(frozen=True, kw_only=True)
class Penalty(LocalTerm):
    """``mu / 2 ||params - anchor||^2`` as a loss."""

    mu: float
    name: str = "penalty"

    def loss(self, step: LocalStep) -> Tensor:
        live = dict(step.model.named_parameters())
        return self.mu / 2 * sum(((live[n] - step.anchor[n]) ** 2).sum() for n in live)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "optimizer",
    [OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.01, clip_norm=0.5), OptimizerSettings(name="adam")],
    ids=["sgd", "adam"],
)
def test_the_gradient_form_is_the_loss_form(optimizer: OptimizerSettings) -> None:
    as_loss = FederatedMethod(name="fedprox", source="", terms=(Penalty(mu=0.7),))
    options = {"double": True, "local_epochs": 2, "optimizer": optimizer}
    found, expected = vector(fedprox(mu=0.7), **options), vector(as_loss, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_a_larger_mu_keeps_clients_closer() -> None:
    options = {"num_clients": 4, "cohort_size": 4, "local_epochs": 3}
    means = [float(np.mean(moves(fedprox(mu=mu), **options))) for mu in (0.0, 0.1, 1.0, 5.0)]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.7 * means[0]


def test_a_huge_mu_pins_clients_to_the_anchor() -> None:
    """With eta mu = 0.9 the fixed point is anchor - gradient / mu, a step of a hundredth of FedAvg's."""
    options = {"local_steps": 200, "learning_rate": 0.001}
    assert max(moves(fedprox(mu=900.0), **options)) < 0.02


def test_the_anchor_is_the_model_received_last_not_the_rounds_first() -> None:
    """With a sync point after every step each step starts at its own anchor, so the term never acts."""
    options = {"local_steps": 5, "rounds": 2}
    merged = merge(fedprox(mu=5.0), dynamicsgd(sync_rule="paper"))
    assert torch.equal(vector(merged, **options), vector(dynamicsgd(sync_rule="paper"), **options))


def test_the_term_reads_the_anchor_and_changes_nothing() -> None:
    params, anchor = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 4.0])}
    step = tiny_step(nn.Identity(), params=params, anchor=anchor)
    gradient = Proximal(mu=2.0).gradient(step)
    assert gradient is not None and gradient["w"].tolist() == [1.0, -4.0]
    assert params["w"].tolist() == [1.0, 2.0] and anchor["w"].tolist() == [0.5, 4.0]


def test_float_buffers_are_not_pulled() -> None:
    options = {"build": normed, "rounds": 1, "local_epochs": 2}
    plain, pulled = vector(fedavg(), **options), vector(fedprox(mu=3.0), **options)
    assert torch.equal(plain[-12:], pulled[-12:])
    assert not torch.equal(plain[:-12], pulled[:-12])
