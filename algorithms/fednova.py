"""FedNova: each client's move counts per step that it took, so that those who take more steps do not pull more.

Source: Wang, Liu, Liang, Joshi, Poor (2020): Tackling the objective inconsistency problem in heterogeneous federated
optimization. NeurIPS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import ClientUpdate, State, SyncContext, Weighting, by_samples


def normalised(shares_M: Tensor, updates: Sequence[ClientUpdate]) -> Tensor:
    """Return ``q_k t / t_k`` in float64 [M], with t the mean of the t_k; 0 for a client that took no step.

    Args:
        shares_M: The q_k, which sum to 1.
        updates: With their effective steps t_k.
    """
    shares = shares_M.tolist()
    # Summed exactly, so that equal steps have themselves as their mean and the factor below is 1.
    mean_steps = math.fsum(q * u.effective_steps for q, u in zip(shares, updates, strict=True))

    def factor(steps: float) -> float:
        if math.isclose(steps, mean_steps, rel_tol=1e-12):  # equal steps: FedAvg, bit for bit
            return 1.0
        return mean_steps / steps if steps else 0.0

    weights = [q * factor(u.effective_steps) for q, u in zip(shares, updates, strict=True)]
    return torch.tensor(weights, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class NormalizedMoves(Weighting):
    """``w <- w + t * sum_k q_k (y_k - a_k) / t_k``: t_k the effective steps of client k, t their mean, q_k by samples.

    Effective steps are the sum of the weights with which a client's gradients entered its move: its steps for plain
    SGD, more with momentum.

    Source: Wang et al. (2020), Eqs. 6 to 8. Reading: the clients' momentum starts at zero in each round, as the
    paper's sums presuppose; weight decay and a client's terms are part of the gradient; buffers, of which the paper
    has none, take the mean in proportion to these weights. Reading: of sub-models a value moves by the sum over its
    holders, divided by the sum of their q_k.
    """

    sums_to_one: ClassVar[bool] = False
    from_anchor: ClassVar[bool] = True
    needs_effective_steps: ClassVar[bool] = True

    def shares_of(self, updates: Sequence[ClientUpdate]) -> Tensor:
        return by_samples(updates)

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return normalised(by_samples(updates), updates), state


@with_card(Card(title="FedNova", source="Wang et al., NeurIPS 2020", limits=(Limit(tolerance=1e-6, equal_sizes=True),)))
def fednova() -> FederatedMethod:
    """FedAvg with moves normalised by the clients' effective steps; weights by samples."""
    return FederatedMethod(
        name="fednova",
        weighting=NormalizedMoves(),
    )
