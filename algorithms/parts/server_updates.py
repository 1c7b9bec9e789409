"""Server updates: a rate and a momentum of the server's own; completed models.

Completed, what a client does not hold of the model counts with the server's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from fedsweep.components import (
    BelowOne,
    ClientUpdate,
    Covered,
    Positive,
    Replace,
    ServerContext,
    ServerUpdate,
    State,
    SyncContext,
    combined,
    weighted_mean,
)

Aggregate = Literal["masked", "complete"]


def in_whole(update: ClientUpdate, sync: SyncContext) -> Covered:
    """Return an attendee's model among the values of the full one, for a component that ``needs_updates``."""
    return update.submodel.embed(cast(Tensor, update.vector), sync.layout)


@dataclass(frozen=True, kw_only=True)
class ServerMomentum(ServerUpdate):
    """``v <- momentum * v + (mean - w)``, ``w <- w + server_learning_rate * v``; buffers take the mean.

    Attributes:
        momentum: Share of the last move that is kept, at least 0 and below 1.
        server_learning_rate: Above 0.

    Source: Hsu, Qi, Brown (2019), section 4.3.
    """

    needs_updates: ClassVar[bool] = True
    momentum: BelowOne
    server_learning_rate: Positive = 1.0

    @property
    def follows_mean(self) -> bool:
        return self.server_learning_rate == 1

    def init(self, context: ServerContext) -> State:
        """Return the velocity 0; only parameters have one."""
        return {"velocity": torch.zeros(context.layout.num_params, dtype=context.layout.dtype)}

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        mean, params = combined(updates, weights, sync), slice(sync.layout.num_params)
        velocity = self.momentum * state["velocity"] + (mean[params] - sync.vector[params])
        mean[params] = sync.vector[params] + self.server_learning_rate * velocity
        return mean, {"velocity": velocity}


def server_steps(*, momentum: float = 0.0, server_learning_rate: float = 1.0) -> ServerUpdate:
    """Return the plain mean without momentum and at rate 1, bit for bit; else the momentum update.

    Raises:
        ConfigError: A value is out of its range.
    """
    if not momentum and server_learning_rate == 1:
        return Replace()
    return ServerMomentum(momentum=momentum, server_learning_rate=server_learning_rate)


@dataclass(frozen=True, kw_only=True)
class CompleteNet(ServerUpdate):
    """``w + sum_k q_k m_k (w_k - w)``: the mean of all attendees' models, gaps filled with the server's values.

    Where a share of the weights holds a coordinate, it moves by that share of what the mean over its holders moves. A
    coordinate that nobody holds stays as it is, bit for bit.

    Source: Wen, Jeon, Huang (2022), FedDrop, complete networks; Caldas et al. (2018), the authors' program, where
    changes padded with zeros are averaged over all clients.
    """

    needs_updates: ClassVar[bool] = True
    combines: ClassVar[bool] = False

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        rows, covered = [], torch.zeros(sync.layout.num_values, dtype=torch.bool)
        for update in updates:
            part = in_whole(update, sync)
            covered |= True if part.cover is None else part.cover
            rows.append(part.vector if part.cover is None else torch.where(part.cover, part.vector, sync.vector))
        out = torch.empty_like(sync.vector)
        weighted_mean(rows, weights.tolist(), out)
        # A mean of equal values may be off by rounding.
        return torch.where(covered, out, sync.vector), state


def aggregation(aggregate: Aggregate) -> ServerUpdate:
    """Return for ``"masked"`` each coordinate's mean over its holders, for ``"complete"`` :class:`CompleteNet`."""
    return CompleteNet() if aggregate == "complete" else Replace()
