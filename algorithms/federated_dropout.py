"""Federated Dropout: each client trains a smaller network, of a fixed number of units that are drawn at random.

Source: Caldas et al. (2018): Expanding the reach of federated learning by reducing client resource requirements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

from fedsweep import Card, FederatedMethod, Limit, Stream, with_card
from fedsweep.components import (
    FULL_MODEL,
    PositiveShare,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    unit_submodel,
)

from .parts.server_updates import Aggregate, aggregation
from .parts.unit_draws import drawn_of_each, unit_groups_of


def num_kept(size: int, keep: float) -> int:
    """Return the number of units of a group that stay: ``keep * size``, rounded half up, at least 1."""
    # The slack: 0.29 x 50 is meant to be 14.5, but the product is a hair below.
    return max(1, floor(keep * size + 0.5 + 1e-9))


@dataclass(frozen=True, kw_only=True)
class RandomUnits(SubModelPolicy):
    """The same number of units of each group for everybody, drawn anew in each round.

    Attributes:
        keep: Share of each group's units, above 0 and at most 1.
        shared: All clients of a round have the same units; otherwise each has its own.

    Source: Caldas et al. (2018), section 3.2. Reading: activations are not rescaled, as in the authors' program.
    Reading: units that residual additions tie together are one group with one draw, so that sums add like to like.
    """

    keep: PositiveShare
    shared: bool = False

    def init(self, context: ServerContext) -> State:
        """Return an empty state.

        Raises:
            ConfigError: The network lists no units that can be left out.
        """
        if self.keep < 1:
            unit_groups_of(context.model, method="federated_dropout")
        return {}

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        if self.keep == 1 or not context.cohort:
            return dict.fromkeys(context.cohort, FULL_MODEL), state
        if self.shared:
            return dict.fromkeys(context.cohort, self._drawn(context, context.stream.child("units"))), state
        # A stream for each: who else is in the cohort changes no client's draw.
        return {k: self._drawn(context, context.stream.child("units", k)) for k in context.cohort}, state

    def _drawn(self, context: RoundContext, source: Stream) -> SubModel:
        groups = unit_groups_of(context.model, method="federated_dropout")
        counts = [num_kept(group.size, self.keep) for group in groups]
        return unit_submodel(groups, drawn_of_each(groups, counts, generator=source.numpy()))


@with_card(
    Card(title="Federated Dropout", source="Caldas et al. 2018", needs=("units",), limits=(Limit(given={"keep": 1.0}),))
)
def federated_dropout(
    *, keep: PositiveShare = 0.75, aggregate: Aggregate = "masked", shared: bool = False
) -> FederatedMethod:
    """FedAvg on sub-models: a fixed share of the channels, neurons and heads of each layer, drawn in each round.

    Args:
        keep: Share of each layer's units that a client trains, above 0 and at most 1; 1 is FedAvg bit for bit.
        aggregate: masked: each value is the mean over the clients that hold it; complete: clients that do not hold a
            value count with the server's, as in the authors' program. With shared units the two agree.
        shared: All clients of a round train the same units; otherwise each has its own.
    """
    return FederatedMethod(
        name="federated_dropout",
        submodels=RandomUnits(keep=keep, shared=shared),
        server_update=aggregation(aggregate),
    )
