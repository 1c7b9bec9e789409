"""FedNova: each client's move counts per step that it took, so that those who take more steps do not pull more.

Source: Wang, Liu, Liang, Joshi, Poor (2020): Tackling the objective inconsistency problem in heterogeneous federated
optimization. NeurIPS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedsweep.components.server_update import ServerUpdate, mean_of_updates
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, State, SyncContext


@dataclass(frozen=True, kw_only=True)
class NormalizedAverage(ServerUpdate):
    """``w <- w + t * sum_k q_k (y_k - w) / t_k``, with t_k the effective steps of client k and t their mean.

    Effective steps are the sum of the weights with which a client's gradients entered its move: its steps for plain
    SGD, more with momentum. Buffers take the plain mean.

    Source: Wang et al. (2020), Eqs. 6 to 8. Reading: the clients' momentum starts at zero in each round, as the
    paper's sums presuppose; weight decay and a client's terms are part of the gradient.
    """

    needs_updates: ClassVar[bool] = True

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        for update in updates:
            if math.isnan(update.effective_steps):
                raise ConfigError(
                    "fednova divides a client's move by its effective steps, which Adam has not, but client"
                    f" {update.client} trained with it; set training.optimizer to {{name: sgd, lr: 0.05}}, say"
                )
        mean_steps = math.fsum(q * u.effective_steps for q, u in zip(weights.tolist(), updates, strict=True))
        scaled = [_scaled(update, mean_steps, sync) for update in updates]
        return mean_of_updates(scaled, weights, sync), state


def _scaled(update: ClientUpdate, mean_steps: float, sync: SyncContext) -> ClientUpdate:
    """The update as if the client had moved for ``mean_steps`` effective steps; who took none did not move."""
    equal = math.isclose(update.effective_steps, mean_steps, rel_tol=1e-12)  # then it is FedAvg bit for bit
    if equal or not update.effective_steps or update.vector is None:
        return update
    anchor = update.submodel.extract(sync.anchors[update.anchor_version], sync.layout)
    params = slice(update.layout.num_params)
    vector = update.vector.clone()
    move = update.vector[params] - anchor[params]
    vector[params] = anchor[params] + move * (mean_steps / update.effective_steps)
    return replace(update, vector=vector)


def fednova() -> FederatedMethod:
    """FedAvg with moves normalised by the clients' effective steps; weights by samples."""
    return FederatedMethod(
        name="fednova",
        source="Wang et al. (2020), Tackling the objective inconsistency problem in heterogeneous optimization",
        server_update=NormalizedAverage(),
    )
