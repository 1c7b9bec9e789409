"""FedDHAD: FedDH's weights on FedAD's sub-models.

Source: Liu et al. (2025), FedDHAD: federated learning with dynamic aggregation and adaptive dropout.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import Any

from fedsweep.card import Card, Limit, card_of, with_card
from fedsweep.method import FederatedMethod, merge

from .fedad import fedad
from .feddh import feddh

_PARTS = (feddh, fedad)
_CARDS = [card_of(part) or Card() for part in _PARTS]


@with_card(
    Card(
        needs=tuple(need for card in _CARDS for need in card.needs),
        up=" + ".join(f"({card.up})" for card in _CARDS),
        limits=(Limit(given={"base_rate": 0.0}, of="feddh"),),
        live=tuple(name for card in _CARDS for name in card.live),
        differs=tuple(text for card in _CARDS for text in card.differs),
        small={name: value for card in _CARDS for name, value in card.small.items()},
    )
)
def feddhad(**parameters: Any) -> FederatedMethod:
    """FedDH's weights on FedAD's sub-models: bit for bit the merge of the two, with the parameters of both."""
    owns = [
        {name: parameters[name] for name in inspect.signature(part).parameters if name in parameters} for part in _PARTS
    ]
    if unknown := parameters.keys() - owns[0].keys() - owns[1].keys():
        raise TypeError(f"feddhad has no parameter {min(unknown)!r}")
    return dataclasses.replace(merge(feddh(**owns[0]), fedad(**owns[1])), name="feddhad")


# The two builders are the schema: what each of them takes, says of it and has by default is written once, there.
feddhad.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [parameter for part in _PARTS for parameter in inspect.signature(part).parameters.values()]
)
feddhad.__annotations__ = {key: hint for part in _PARTS for key, hint in typing.get_type_hints(part).items()}
feddhad.__doc__ = f"{feddhad.__doc__}\n\nArgs:\n" + "\n".join(
    (inspect.getdoc(part) or "").partition("Args:\n")[2].rstrip() for part in _PARTS
)
