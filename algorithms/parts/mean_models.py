"""Tests the plain mean of clients' models in place of the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsweep.components.evaluation import Evaluation
from fedsweep.models.functional import logits_with
from fedsweep.records import ClientUpdate, ServerContext, State, SyncContext

Of = Literal["active", "all"]


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
        """Takes in the attendees' models; what a sub-model does not hold stays as it was."""
        if not updates:
            return state
        rows = sync.vector.repeat(len(updates), 1) if state["models"] is None else state["models"].clone()
        for number, update in enumerate(updates):
            if update.vector is None:
                raise ValueError("a mean of models needs the attendees' models")
            row = number if self.of == "active" else update.client
            held = update.submodel.embed(update.vector, sync.layout)
            rows[row] = held.vector if held.cover is None else torch.where(held.cover, held.vector, rows[row])
        mean = rows.double().mean(dim=0).to(sync.layout.dtype)
        return {"models": rows if self.of == "all" else None, "mean": sync.layout.views(mean)}

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        return logits_with(model, {name: value.to(inputs.device) for name, value in state["mean"].items()}, inputs)
