"""The server's move towards the clients' mean, with a rate and a momentum of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep.components.server_update import Replace, ServerUpdate, mean_of_updates
from fedsweep.records import ClientUpdate, ServerContext, State, SyncContext

from .ranges import below_one, positive


@dataclass(frozen=True, kw_only=True)
class ServerMomentum(ServerUpdate):
    """``v <- momentum * v + (mean - w)``, ``w <- w + server_learning_rate * v``; buffers take the mean.

    Attributes:
        momentum: Share of the last move that is kept, at least 0 and below 1.
        server_learning_rate: Above 0.

    Source: Hsu, Qi, Brown (2019), section 4.3.
    """

    needs_updates: ClassVar[bool] = True
    momentum: float
    server_learning_rate: float = 1.0

    def init(self, context: ServerContext) -> State:
        """No velocity yet; only parameters have one."""
        return {"velocity": torch.zeros(context.layout.num_params, dtype=context.layout.dtype)}

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        mean, params = mean_of_updates(updates, weights, sync), slice(sync.layout.num_params)
        velocity = self.momentum * state["velocity"] + (mean[params] - sync.vector[params])
        mean[params] = sync.vector[params] + self.server_learning_rate * velocity
        return mean, {"velocity": velocity}


def server_steps(*, momentum: float = 0.0, server_learning_rate: float = 1.0) -> ServerUpdate:
    """The plain mean where there is neither momentum nor another rate than 1, bit for bit; else the momentum update.

    Raises:
        ConfigError: A value is out of its range.
    """
    below_one(momentum=momentum)
    positive(server_learning_rate=server_learning_rate)
    if not momentum and server_learning_rate == 1:
        return Replace()
    return ServerMomentum(momentum=momentum, server_learning_rate=server_learning_rate)
