"""Refinement: work on the aggregated model on the server, after the server update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from fedsweep.components.base import ServerComponent
from fedsweep.components.weighting import When
from fedsweep.records import ClientUpdate, State, SyncContext


class Refinement(ServerComponent):
    """Changes the aggregated model; a method has a tuple of these.

    Class attributes:
        when: At every aggregation, or only at the one that ends the round.
    """

    when: ClassVar[When] = "round_end"

    @abstractmethod
    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        """The refined vector [V] and the new state."""
