"""Aggregation of completed models: what a client does not hold of the model counts with the server's value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsweep.components.aggregation import Replace, ServerUpdate
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.trees import weighted_mean

Aggregate = Literal["masked", "complete"]


@dataclass(frozen=True, kw_only=True)
class CompleteNet(ServerUpdate):
    """``w + sum_k q_k m_k (w_k - w)``: the mean of all attendees' models, gaps filled with the server's values.

    Where a share of the weights holds a coordinate, it moves by that share of what the mean over its holders moves. A
    coordinate that nobody holds stays as it is, bit for bit.

    Source: Wen, Jeon, Huang (2022), FedDrop, complete networks; Caldas et al. (2018), the authors' program, where
    changes padded with zeros are averaged over all clients.
    """

    needs_updates: ClassVar[bool] = True

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        rows, held = [], torch.zeros(sync.layout.num_values, dtype=torch.bool)
        for update in updates:
            if update.vector is None:
                raise ValueError("an aggregation on the server needs the attendees' models")
            part = update.submodel.embed(update.vector, sync.layout)
            held |= True if part.cover is None else part.cover
            rows.append(part.vector if part.cover is None else torch.where(part.cover, part.vector, sync.vector))
        out = torch.empty_like(sync.vector)
        weighted_mean(rows, weights.tolist(), out)
        return torch.where(held, out, sync.vector), state


def aggregation(aggregate: Aggregate) -> ServerUpdate:
    """``"masked"``: each coordinate is the mean over its holders; ``"complete"``: :class:`CompleteNet`."""
    return CompleteNet() if aggregate == "complete" else Replace()
