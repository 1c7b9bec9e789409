"""Local training: each client trains a model of its own, and nothing travels.

It is the baseline of personalised learning: what a client's own data are worth without the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsweep.card import Card, with_card
from fedsweep.components.local import LocalTerm, LocalWork, Memory
from fedsweep.method import FederatedMethod
from fedsweep.records import Payload
from fedsweep.trees import ParamTree

from .parts.own_models import OwnModels, Travels, kept, own_values

_TERM = "local_only"


@dataclass(frozen=True, kw_only=True)
class OwnModel(LocalTerm):
    """Goes on with the model that the client had last; at first with the server's initial one."""

    stateful: ClassVar[bool] = True
    needs_anchor: ClassVar[bool] = False
    name: str = _TERM

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        return memory, own_values(memory)

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return kept(work), {}


@with_card(Card(needs=("features",), live=("personal_accuracy",)))
def local_only() -> FederatedMethod:
    """Clients train on their own; nothing travels.

    ``test_accuracy`` is that of the initial model, which nobody trains. What counts is ``personal_accuracy``: the
    clients' own models on their own shares of the test set.
    """
    return FederatedMethod(
        name=_TERM,
        source="a baseline without a paper",
        terms=(OwnModel(),),
        submodels=Travels(method=_TERM, part="nothing"),
        evaluation=OwnModels(term=_TERM),
    )
