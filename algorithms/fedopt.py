"""FedAvgM, FedAdagrad, FedAdam and FedYogi: the clients' mean move is a gradient for an optimiser on the server.

Source: Hsu, Qi, Brown (2019): Measuring the effects of non-identical data distribution for federated visual
classification. Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan (2021): Adaptive federated optimization.
ICLR. Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    BelowOne,
    ClientUpdate,
    Positive,
    ServerContext,
    ServerUpdate,
    State,
    SyncContext,
    combined,
    takes,
)

from .parts.server_updates import server_steps

# A second moment that no move can change leaves half of rate / adaptivity as the server's plain rate.
_PLAIN_RATE = {"server_learning_rate": 2e4, "adaptivity": 1e4, "momentum": 0.0}

Rule = Literal["adagrad", "adam", "yogi"]


@dataclass(frozen=True, kw_only=True)
class AdaptiveServer(ServerUpdate):
    """``m <- momentum * m + (1 - momentum) * D``, ``w <- w + rate * m / (sqrt(v) + adaptivity)`` with D = mean - w.

    v becomes ``v + D^2`` (adagrad), ``s v + (1 - s) D^2`` (adam) or ``v - (1 - s) D^2 sign(v - D^2)`` (yogi).
    Buffers take the mean.

    Attributes:
        rule: How v follows D.
        server_learning_rate: Of the server's steps, above 0; to be tuned together with the clients'.
        momentum: Of the first moment, at least 0 and below 1.
        second_momentum: Of the second moment, at least 0 and below 1.
        adaptivity: Added to the root of the second moment, which starts at its square; above 0.

    Source: Reddi et al. (2021), Algorithm 2. Reading: v starts at adaptivity squared, the least value that the paper
    allows, and there is no correction for the start, as in the paper; D^2 is the square of this round's move, not of m.
    """

    needs_updates: ClassVar[bool] = True
    rule: Rule
    server_learning_rate: Positive = 0.1
    momentum: BelowOne = 0.9
    second_momentum: BelowOne = 0.99
    adaptivity: Positive = 1e-3

    @property
    def follows_mean(self) -> bool:
        return False

    def init(self, context: ServerContext) -> State:
        """Return the first moment 0 and the second moment, adaptivity squared."""
        first = torch.zeros(context.layout.num_params, dtype=context.layout.dtype)
        return {"first": first, "second": torch.full_like(first, self.adaptivity**2)}

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        mean, params = combined(updates, weights, sync), slice(sync.layout.num_params)
        move = mean[params] - sync.vector[params]
        first = self.momentum * state["first"] + (1 - self.momentum) * move
        second = self._second(state["second"], move.square())
        # In place, since the mean is a vector of its own: behind the params, buffers and riders stay its.
        mean[params] = sync.vector[params] + self.server_learning_rate * first / (second.sqrt() + self.adaptivity)
        return mean, {"first": first, "second": second}

    def _second(self, second: Tensor, square: Tensor) -> Tensor:
        if self.rule == "adagrad":
            return second + square
        if self.rule == "adam":
            return self.second_momentum * second + (1 - self.second_momentum) * square
        return second - (1 - self.second_momentum) * square * (second - square).sign()


@with_card(Card(title="FedAvgM", source="Hsu et al. 2019", limits=(Limit(given={"momentum": 0.0}),)))
def fedavgm(*, momentum: BelowOne = 0.9, server_learning_rate: Positive = 1.0) -> FederatedMethod:
    """FedAvg with momentum on the server.

    Args:
        momentum: Share of the last move that is kept, at least 0 and below 1; with 0 and a rate of 1 it is FedAvg bit
            for bit.
        server_learning_rate: Multiplies the server's move, above 0.
    """
    update = server_steps(momentum=momentum, server_learning_rate=server_learning_rate)
    return FederatedMethod(name="fedavgm", server_update=update)


@with_card(
    Card(title="FedAdagrad", source="Reddi et al., ICLR 2021", limits=(Limit(given=_PLAIN_RATE, tolerance=1e-6),))
)
def fedadagrad(
    *, server_learning_rate: Positive = 0.1, momentum: BelowOne = 0.0, adaptivity: Positive = 1e-3
) -> FederatedMethod:
    """FedAvg with Adagrad on the server.

    Args:
        server_learning_rate: Of the server's steps, above 0; to be tuned together with the clients'.
        momentum: Of the first moment, at least 0 and below 1.
        adaptivity: Added to the root of the second moment, which starts at its square; above 0.
    """
    update = AdaptiveServer(
        rule="adagrad", server_learning_rate=server_learning_rate, momentum=momentum, adaptivity=adaptivity
    )
    return FederatedMethod(name="fedadagrad", server_update=update)


@with_card(
    Card(
        title="FedAdam",
        source="Reddi et al., ICLR 2021",
        limits=(Limit(given={**_PLAIN_RATE, "second_momentum": 1 - 1e-9}, tolerance=1e-6),),
    )
)
@takes(AdaptiveServer, but=("rule",))
def fedadam(**parameters: Any) -> FederatedMethod:
    """FedAvg with Adam on the server, without correction for the start."""
    return FederatedMethod(name="fedadam", server_update=AdaptiveServer(rule="adam", **parameters))


@with_card(Card(title="FedYogi", source="Reddi et al., ICLR 2021", limits=(Limit(given=_PLAIN_RATE, tolerance=1e-6),)))
@takes(AdaptiveServer, but=("rule",))
def fedyogi(**parameters: Any) -> FederatedMethod:
    """FedAvg with Yogi on the server: the second moment moves by the square of the move at most."""
    return FederatedMethod(name="fedyogi", server_update=AdaptiveServer(rule="yogi", **parameters))
