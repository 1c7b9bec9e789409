"""Local training: each client trains a model of its own, and nothing travels.

It is the baseline of personalised learning: what a client's own data are worth without the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsweep import Card, FederatedMethod, with_card

from .parts.own_models import KeepsModel, OwnModels, Travels

_TERM = "local_only"


@dataclass(frozen=True, kw_only=True)
class OwnModel(KeepsModel):
    """Goes on with the model that the client had last; at first with the server's initial one."""

    needs_anchor: ClassVar[bool] = False
    name: str = _TERM


@with_card(Card(title="Local", source="baseline", needs=("features", "classes"), live=("personal_accuracy",)))
def local_only() -> FederatedMethod:
    """Clients train models of their own, and nothing travels.

    ``test_accuracy`` is that of the initial model, which nobody trains. What counts is ``personal_accuracy``: the
    clients' own models on their own shares of the test set.
    """
    return FederatedMethod(
        name=_TERM,
        terms=(OwnModel(),),
        submodels=Travels(method=_TERM, part="nothing"),
        evaluation=OwnModels(term=_TERM),
    )
