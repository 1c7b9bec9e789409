"""FedDHAD: FedDH's weights on FedAD's sub-models.

Source: Liu et al. (2025), FedDHAD: federated learning with dynamic aggregation and adaptive dropout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsweep import Card, FederatedMethod, Limit, card_of, merge, with_card
from fedsweep.components import parameters_of, takes

from .fedad import fedad
from .feddh import feddh

_CARDS = [card_of(part) or Card() for part in (feddh, fedad)]


@with_card(
    Card(
        title="FedDHAD",
        source="Liu et al. 2025, FedDHAD",
        merges=("feddh", "fedad"),
        needs=tuple(need for card in _CARDS for need in card.needs),
        up=tuple(count for card in _CARDS for count in card.up),
        limits=(Limit(given={"base_rate": 0.0}, of="feddh"),),
        live=tuple(name for card in _CARDS for name in card.live),
        differs=tuple(text for card in _CARDS for text in card.differs),
        small={name: value for card in _CARDS for name, value in card.small.items()},
    )
)
@takes(feddh, fedad)
def feddhad(**parameters: Any) -> FederatedMethod:
    """FedDH's weights on FedAD's sub-models: bit for bit the merge of the two."""
    weights, parts = feddh(**parameters_of(feddh, parameters)), fedad(**parameters_of(fedad, parameters))
    return dataclasses.replace(merge(weights, parts), name="feddhad")
