"""FedBuff: nobody waits; the server moves once its buffer holds enough of the clients' moves.

Source: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba (2022): Federated learning with buffered asynchronous
aggregation. AISTATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsweep import Card, FederatedMethod, with_card
from fedsweep.components import ClientUpdate, Count, NotNegative, Positive, State, SyncContext, Weighting

from .parts.arrivals import Arrivals, Discount, IdleClients, staleness_of


@dataclass(frozen=True, kw_only=True)
class BufferedMoves(Weighting):
    """``x <- x + rate / K sum_k discount(s_k) (y_k - a_k)``: the buffer's K moves from the models that clients got.

    Attributes:
        server_learning_rate: Above 0.
        discount: What a move counts by its staleness.

    Source: Nguyen et al. (2022), Algorithm 1: divided by K, not by the sum of the discounts; clients count alike,
    whatever their samples. Reading: buffers, of which the paper has none, take the mean in proportion to the weights.
    """

    sums_to_one: ClassVar[bool] = False
    from_anchor: ClassVar[bool] = True

    server_learning_rate: Positive
    discount: Discount

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        share = self.server_learning_rate / len(updates)
        return share * self.discount(staleness_of(updates, sync)), state


@with_card(Card(title="FedBuff", source="Nguyen et al., AISTATS 2022", needs=("devices",), live=("mean_staleness",)))
def fedbuff(
    *,
    buffer_size: Count | None = None,
    server_learning_rate: Positive = 1.0,
    exponent: NotNegative = 0.5,
    concurrency: Count | None = None,
) -> FederatedMethod:
    """Nobody waits: the server takes the mean of as many moves as its buffer holds.

    A round is one buffer.

    Args:
        buffer_size: Moves from one model of the server to the next; null: half of the clients at work, 1 to 10. The
            paper has 10 with a thousand at work.
        server_learning_rate: Multiplies their mean, above 0.
        exponent: A move counts (1 + s) ** -exponent after the server's model changed s times; 0: all alike.
        concurrency: Clients at work at a time; null: training.cohort_size.
    """
    return FederatedMethod(
        name="fedbuff",
        selection=IdleClients(concurrency=concurrency, buffer_size=buffer_size),
        pacing=Arrivals(concurrency=concurrency, buffer_size=buffer_size),
        weighting=BufferedMoves(
            server_learning_rate=server_learning_rate, discount=Discount(kind="polynomial", exponent=exponent)
        ),
    )
