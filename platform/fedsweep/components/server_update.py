"""Server update: the new server model from the attendees' models and their weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep.components.base import ServerComponent
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.trees import coverage_mean


class ServerUpdate(ServerComponent):
    """Turns an aggregation into the server's next model.

    Class attributes:
        plain_mean: ``apply`` is the coverage mean and nothing else.
    """

    plain_mean: ClassVar[bool] = False

    @abstractmethod
    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        """The server's next vector [V] and the new state.

        Only the first ``layout.num_params`` coordinates may be extrapolated; buffers and riders take the mean.
        """


def mean_of_updates(updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
    """What the weights make of the attendees' models [V], sorted by client id: their coverage mean.

    Where the weighting gives steps instead of shares (``Weighting.sums_to_one``), the server's params and the step;
    steps from the server that sum to 1 are the mean, bit for bit. Where they sum to less, the server's buffers have
    the rest, as its params do.
    """
    covered = []
    for update in updates:
        if update.vector is None:
            raise ValueError("an aggregation on the server needs the attendees' models")
        covered.append(update.submodel.embed(update.vector, sync.layout))
    rows, covers = [c.vector for c in covered], [c.cover for c in covered]
    total = float(weights.sum())
    if sync.moves_from is None or (math.isclose(total, 1, rel_tol=1e-12) and _start_at_server(updates, sync)):
        return coverage_mean(sync.vector, rows, covers, weights.tolist())
    shares = (weights / total).tolist() if total else [0.0] * len(updates)
    vector = coverage_mean(sync.vector, rows, covers, shares) if total else sync.vector.clone()
    if sync.moves_from == "server" and total < 1:
        vector = torch.lerp(sync.vector, vector, total)
    params = slice(sync.layout.num_params)
    # Differences of near vectors: in float64, so that a step of nearly all weight is nearly the mean.
    server = sync.vector[params].double()
    starts = [
        sync.anchors[u.anchor_version][params].double() if sync.moves_from == "anchor" else server for u in updates
    ]
    moves = [row[params].double() - start for row, start in zip(rows, starts, strict=True)]
    held = [None if cover is None else cover[params] for cover in covers]
    vector[params] = (server + total * coverage_mean(torch.zeros_like(server), moves, held, shares)).to(vector)
    return vector


def _start_at_server(updates: Sequence[ClientUpdate], sync: SyncContext) -> bool:
    """Whether every update's move is counted from the server's present model."""
    starts = {u.anchor_version for u in updates} if sync.moves_from == "anchor" else set()
    return all(torch.equal(sync.anchors[version], sync.vector) for version in starts)


@dataclass(frozen=True, kw_only=True)
class Replace(ServerUpdate):
    """The weighted mean of the attendees' models is the server's next model.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    needs_updates: ClassVar[bool] = False
    plain_mean: ClassVar[bool] = True

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        return mean_of_updates(updates, weights, sync), state
