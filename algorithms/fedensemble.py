"""FedEnsemble: FedAvg, tested as the ensemble of the clients' models.

Source: the baseline of Zhu, Hong, Zhou (2021): Data-free knowledge distillation for heterogeneous federated learning.
ICML; and of DynamicFL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    FULL_MODEL,
    ClientUpdate,
    Evaluation,
    RoundRecord,
    ServerContext,
    State,
    SyncContext,
    logits_with,
)

from .parts.ensembles import upload_logits

Members = Literal["participants", "all"]


@dataclass(frozen=True, kw_only=True)
class SumOfLogits(Evaluation):
    """The sum of the members' logits; the server's model answers where nobody took part.

    Attributes:
        members: ``"participants"``: the clients of the last aggregation, as in DynamicFL's program; ``"all"``: all
            clients, as in the authors', where those who did not take part hold the model that the round began with.

    Source: the programs. Reading: raw logits, neither weighted by samples nor turned into probabilities; the loss is
    that of their sum, as in the authors' program. Each member has its own buffers.
    """

    needs_updates: ClassVar[bool] = True
    members: Members = "participants"

    @property
    def asks_models(self) -> bool:
        return True

    def init(self, context: ServerContext) -> State:
        return {"num_clients": context.num_clients, "round": 0, "sent": None, "voters": []}

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        """Store the members, so that the run can be tested again, and the model that the round began with.

        Sub-models are no vectors that another process could read, so an ensemble of these is not kept.
        """
        whole = all(update.submodel == FULL_MODEL for update in updates)
        voters = [u.vector.clone() for u in updates if u.vector is not None] if whole else None
        state = {**state, "voters": voters}
        if self.members == "participants" or state["round"] == sync.round:
            return state
        # At the round's first sync point nothing has been made of it yet; at later ones it is no longer the server's.
        began = sync.layout.views(sync.anchors[sync.version])
        return {**state, "round": sync.round, "sent": {name: value.clone() for name, value in began.items()}}

    def observe(self, state: State, record: RoundRecord) -> State:
        """Drop the voters after a round without participants."""
        return state if record.attendees else {**state, "voters": []}

    def voters(self, state: State) -> Sequence[Tensor] | None:
        """Return the participants' models of the last round; None where clients train parts of the model."""
        voters: Sequence[Tensor] | None = state.get("voters")
        return voters

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        if not updates:
            logits: Tensor = model(inputs)
            return logits
        total = sum(upload_logits(model, update, inputs) for update in updates)
        others = state["num_clients"] - len(updates)
        if state["sent"] is not None and others:
            sent = {name: value.to(inputs.device) for name, value in state["sent"].items()}
            # Asked once: all who did not take part hold the same model.
            total = total + others * logits_with(model, sent, inputs)
        return total  # type: ignore[return-value]


@with_card(Card(title="FedEnsemble", source="Zhu et al., ICML 2021", needs=("classes",), limits=(Limit(),)))
def fedensemble(*, members: Members = "participants") -> FederatedMethod:
    """FedAvg, tested as the ensemble of the clients' models: the sum of their logits.

    The models that travel are FedAvg's bit for bit.

    Args:
        members: participants: the clients of the round's last aggregation (DynamicFL); all: all clients, where those
            who did not take part hold the model that the round began with (FedGen's authors).
    """
    return FederatedMethod(
        name="fedensemble",
        evaluation=SumOfLogits(members=members),
    )
