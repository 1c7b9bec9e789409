"""FedProx: a proximal term that keeps clients near the model they received.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith (2020): Federated optimization in heterogeneous networks. MLSys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import LocalStep, LocalTerm, NotNegative, ParamTree


@dataclass(frozen=True, kw_only=True)
class Proximal(LocalTerm):
    """The gradient of ``mu / 2 * ||params - anchor||^2``.

    Attributes:
        mu: Strength, above 0.

    Source: Li et al. (2020), Eq. 2. Reading: with the factor 1/2 of the paper, which some programs leave out; added
    to the gradient before clipping and momentum.
    """

    mu: NotNegative
    name: str = "proximal"

    def gradient(self, step: LocalStep) -> ParamTree:
        return {name: self.mu * (value.detach() - step.anchor[name]) for name, value in step.params.items()}


@with_card(
    Card(
        title="FedProx",
        source="Li et al., MLSys 2020",
        limits=(Limit(given={"mu": 0.0}),),
        golden=(4.31942,),
        golden_given={"mu": 1.0},
    )
)
def fedprox(*, mu: NotNegative = 0.01, penalty: Literal["half", "full"] = "half") -> FederatedMethod:
    """FedAvg with a proximal term on the clients.

    Args:
        mu: Strength of the term, at least 0; 0 is FedAvg bit for bit. 0.01 is DynamicFL's choice.
        penalty: half: mu / 2 times the squared distance (the paper); full: mu times (DynaFed's program).
    """
    return FederatedMethod(
        name="fedprox",
        terms=(Proximal(mu=mu if penalty == "half" else 2 * mu),) if mu else (),
    )
