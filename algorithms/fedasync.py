"""FedAsync: nobody waits; each model that arrives is mixed into the server's, the less the staler it is.

Source: Xie, Koyejo, Gupta (2019): Asynchronous federated optimization. arXiv:1903.03934.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsweep import Card, FederatedMethod, with_card
from fedsweep.components import ClientUpdate, Count, NotNegative, Share, State, SyncContext, Weighting

from .fedprox import Proximal
from .parts.arrivals import Arrivals, Discount, IdleClients, Staleness, staleness_of


@dataclass(frozen=True, kw_only=True)
class Mixing(Weighting):
    """``x <- (1 - c) x + c y`` with ``c = mixing discount(s)``, s the staleness of y.

    Attributes:
        mixing: What a fresh model counts, 0..1; 0 leaves the server's as it is.
        discount: What a stale one counts of that.

    Source: Xie et al. (2019), Algorithm 1. Reading: buffers, of which the paper has none, are mixed as the params are.
    """

    # The rest, 1 - c, is the server's own model's.
    sums_to_one: ClassVar[bool] = False

    mixing: Share
    discount: Discount

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return self.mixing * self.discount(staleness_of(updates, sync)), state


@with_card(Card(title="FedAsync", source="Xie, Koyejo, Gupta 2019", needs=("devices",), live=("mean_staleness",)))
def fedasync(
    *,
    mixing: Share = 0.6,
    staleness: Staleness = "polynomial",
    exponent: NotNegative = 0.5,
    slope: NotNegative = 10.0,
    grace: NotNegative = 4.0,
    mu: NotNegative = 0.005,
    concurrency: Count | None = None,
) -> FederatedMethod:
    """Nobody waits: the server mixes in each model when it arrives, the less the staler it is.

    A round is one arrival.

    Args:
        mixing: What a fresh model counts against the server's, 0..1.
        staleness: What one counts of that after the server's model changed s times. constant: all; hinge: all while s
            is at most grace, then 1 / (slope (s - grace) + 1); polynomial: (1 + s) ** -exponent.
        exponent: With polynomial, at least 0.
        slope: With hinge, at least 0.
        grace: With hinge, at least 0.
        mu: Strength of a pull to the model that the client received, as in fedprox; 0: none.
        concurrency: Clients at work at a time; null: training.cohort_size.
    """
    discount = Discount(kind=staleness, exponent=exponent, slope=slope, grace=grace)
    return FederatedMethod(
        name="fedasync",
        # None rather than one of strength 0, for which each client would keep a copy of the model that it received.
        terms=(Proximal(mu=mu),) if mu else (),
        selection=IdleClients(concurrency=concurrency, buffer_size=1),
        pacing=Arrivals(concurrency=concurrency, buffer_size=1),
        weighting=Mixing(mixing=mixing, discount=discount),
    )
