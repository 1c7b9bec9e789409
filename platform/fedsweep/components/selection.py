"""Selection: who takes part in a round."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from fedsweep.components.base import ServerComponent
from fedsweep.records import RoundContext, State


class Selection(ServerComponent):
    """Chooses the cohort among the clients that are there."""

    @abstractmethod
    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        """The cohort, of ``context.available``, and the new state.

        Its order matters only to a pacing that reads ``context.drawn``.
        """


@dataclass(frozen=True, kw_only=True)
class UniformSelection(Selection):
    """Uniform without replacement, the same for every method at a seed.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        size = min(context.cohort_size, len(context.available))
        chosen = context.stream.numpy().choice(np.asarray(context.available), size=size, replace=False)
        return tuple(sorted(int(client) for client in chosen)), state
