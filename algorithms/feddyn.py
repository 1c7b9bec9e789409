"""FedDyn: a penalty that moves with each client's past makes the clients' optima meet at that of their mean.

Source: Acar et al. (2021): Federated learning based on dynamic regularization. ICLR. Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    ClientFacts,
    ClientUpdate,
    ComponentReport,
    Evaluation,
    GlobalModel,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    NotNegative,
    ParamTree,
    Positive,
    ServerContext,
    ServerUpdate,
    State,
    SyncContext,
    Uniform,
    combined,
    logits_with,
)

from .parts.server_updates import in_whole

Of = Literal["active", "all"]


@dataclass(frozen=True, kw_only=True)
class DynamicRegularizer(LocalTerm):
    """The gradient of ``strength * (<H_k, params> + 1/2 ||params - anchor||^2)``; H_k is the sum of the client's moves.

    Attributes:
        strength: Above 0.

    Source: Acar et al. (2021), Eq. 1. Reading: H_k is the paper's ``- grad L_k / strength``, so that the memory has
    the parameters' unit and the strength may change.
    """

    stateful: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True
    strength: Positive
    name: str = "feddyn"

    def init(self, params: ParamTree) -> Memory:
        return {name: torch.zeros_like(value, device="cpu") for name, value in params.items()}

    def gradient(self, step: LocalStep) -> ParamTree:
        strength = self.strength_of(step.client)
        return {
            name: strength * (value.detach() - step.anchor[name] + torch.as_tensor(step.memory[name]).to(value))
            for name, value in step.params.items()
        }

    def strength_of(self, client: ClientFacts) -> float:
        """Return the client's own strength."""
        return self.strength

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, dict[str, Tensor]]:
        moves = {name: (value.detach() - work.anchor[name]).cpu() for name, value in work.params.items()}
        return {name: torch.as_tensor(memory[name]) + move for name, move in moves.items()}, {}


@dataclass(frozen=True, kw_only=True)
class SizedRegularizer(DynamicRegularizer):
    """The same with ``strength / (n_k / mean n)``: the optimum is that of the losses weighted by samples.

    Source: the authors' program for clients of unequal sizes; all its means are uniform.
    """

    needs_share: ClassVar[bool] = True

    def strength_of(self, client: ClientFacts) -> float:
        return self.strength / client.share


@dataclass(frozen=True, kw_only=True)
class AddMeanMove(ServerUpdate):
    """``w <- mean + H`` with H the mean over all N clients of the sums of their moves; buffers take the mean.

    Source: Acar et al. (2021), Algorithm 1. H is the paper's ``- h / strength``: the strength cancels. Reading: a
    value that no attendee's sub-model holds stays as it is, since there is no mean that H could be added to.
    """

    needs_updates: ClassVar[bool] = True

    def init(self, context: ServerContext) -> State:
        return {"moves": torch.zeros_like(context.vector[: context.layout.num_params]), "clients": context.num_clients}

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        vector, size = combined(updates, weights, sync), sync.layout.num_params
        # Of all attendees alike, whatever their weights: each of them adds its own move to its memory, too.
        total, is_held = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.bool)
        for update in updates:
            whole = in_whole(update, sync)
            move = whole.vector[:size].double() - sync.anchors[update.anchor_version][:size]
            total += move if whole.cover is None else move.masked_fill(~whole.cover[:size], 0.0)
            is_held |= True if whole.cover is None else whole.cover[:size]
        moves = state["moves"] + (total / state["clients"]).to(vector.dtype)
        vector[:size] += moves.masked_fill(~is_held, 0.0)
        return vector, {**state, "moves": moves}

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={"feddyn_offset_norm": float(state["moves"].double().norm())})


@dataclass(frozen=True, kw_only=True)
class MeanOfModels(Evaluation):
    """The mean of last models answers, each client counting alike; the server's initial model before the first.

    Attributes:
        of: ``"active"``: the clients of the last aggregation; ``"all"``: all clients, where one that never took part
            has the initial model. This keeps one model per client.
    """

    needs_updates: ClassVar[bool] = True
    of: Of

    def init(self, context: ServerContext) -> State:
        models = context.vector.repeat(context.num_clients, 1) if self.of == "all" else None
        return {"models": models, "mean": context.layout.views(context.vector.clone())}

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        """Take in the attendees' models; what a sub-model does not hold stays as it was."""
        if not updates:
            return state
        # A copy: a round that is begun anew starts from the state as it was.
        rows = sync.vector.repeat(len(updates), 1) if state["models"] is None else state["models"].clone()
        for number, update in enumerate(updates):
            row = number if self.of == "active" else update.client
            whole = in_whole(update, sync)
            rows[row] = whole.vector if whole.cover is None else torch.where(whole.cover, whole.vector, rows[row])
        mean = rows.double().mean(dim=0).to(sync.layout.dtype)
        return {"models": rows if self.of == "all" else None, "mean": sync.layout.views(mean)}

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        return logits_with(model, {name: value.to(inputs.device) for name, value in state["mean"].items()}, inputs)


@with_card(
    Card(
        title="FedDyn",
        source="Acar et al., ICLR 2021",
        limits=(Limit(given={"strength": 0.0}),),
        live=("feddyn_offset_norm",),
    )
)
def feddyn(
    *,
    strength: NotNegative = 0.1,
    penalty: Literal["dynamic", "none"] = "dynamic",
    weighting: Literal["uniform", "size"] = "uniform",
    tested: Literal["server", Of] = "server",
) -> FederatedMethod:
    """A penalty that moves with each client's past, and a server that adds it up.

    Clients' models count alike whatever their sizes.

    Args:
        strength: Of the penalty, at least 0; 0 is FedAvg bit for bit. 0.1 is DynamicFL's choice.
        penalty: dynamic; or none: the server's side alone, which DynamicFL's program comes to, as its penalties are 0.
        weighting: uniform: the optimum is that of the mean of the clients' losses; size: that of their losses weighted
            by samples, for which clients of many samples have a weaker penalty.
        tested: server; or the mean of the round's clients' (active) or of all clients' last models (all: the authors).
    """
    if weighting == "size" and penalty == "none":
        raise ConfigError(
            "method.weighting=size changes the clients' penalty, but method.penalty is none; leave out one of them"
        )
    if not strength:
        return FederatedMethod(name="feddyn")
    regularizer = SizedRegularizer if weighting == "size" else DynamicRegularizer
    return FederatedMethod(
        name="feddyn",
        terms=(regularizer(strength=strength),) if penalty == "dynamic" else (),
        weighting=Uniform(),
        server_update=AddMeanMove(),
        evaluation=GlobalModel() if tested == "server" else MeanOfModels(of=tested),
    )
