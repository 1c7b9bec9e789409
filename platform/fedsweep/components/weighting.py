"""Weighting: how much each attendee counts in an aggregation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsweep.components.base import ServerComponent
from fedsweep.records import ClientUpdate, State, SyncContext

When = Literal["always", "round_end"]


class Weighting(ServerComponent):
    """Gives each attendee its aggregation weight.

    Class attributes:
        sums_to_one: The weights are shares, and the mean of the models is what comes of them. Otherwise they are steps:
            the params move by ``sum c_k (y_k - x)``, which may be shorter or longer than the mean's move; buffers go as
            far, but never beyond the mean. Then a round does not fold.
        from_anchor: A move is counted from the model that the client started from, ``y_k - a_k``, however old that is,
            and not from the server's present one; buffers take the mean. Then a round does not fold either.
        needs_effective_steps: ``ClientUpdate.effective_steps`` is read, so the optimiser must have such a number.

    Source: Wang et al. (2020), FedNova, and Nguyen et al. (2022), FedBuff, are steps from anchors; Xie et al. (2019),
    FedAsync, is a step towards one model, ``x + c (y - x)``.
    """

    sums_to_one: ClassVar[bool] = True
    from_anchor: ClassVar[bool] = False
    needs_effective_steps: ClassVar[bool] = False

    @abstractmethod
    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        """Weights [M] in float64, non-negative, that sum to 1 unless the class says otherwise; the new state.

        Where ``needs_updates`` is False, the weights of a sync point inside a round depend on who attends alone.
        """


def by_samples(updates: Sequence[ClientUpdate]) -> Tensor:
    """``n_k / sum_j n_j`` in float64 [M]."""
    counts = torch.tensor([u.num_samples for u in updates], dtype=torch.float64)
    return counts / counts.sum()


@dataclass(frozen=True, kw_only=True)
class BySamples(Weighting):
    """Weights proportional to the clients' numbers of samples.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return by_samples(updates), state


@dataclass(frozen=True, kw_only=True)
class Uniform(Weighting):
    """The same weight for each attendee."""

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return torch.full((len(updates),), 1.0 / len(updates), dtype=torch.float64), state
