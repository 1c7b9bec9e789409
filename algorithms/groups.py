"""Choosing the high-frequency group of a two-speed round.

Source: DynamicFL, section 3 (DynaComm): the group's labels should look like the population's, under budgets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedsweep.streams import Stream


@dataclass(frozen=True, kw_only=True)
class GroupProblem:
    """One choice of a group among a round's clients.

    Attributes:
        counts_AC: Label counts of the active clients [A, C], int64, at least one sample each.
        population_C: Class shares of the whole training set [C]; they sum to 1.
        eligible_A: Who can afford the high frequency [A], bool.
        max_size: Greatest size of the group that the server can afford, 0..A.
        stream: Random numbers of this choice.
    """

    counts_AC: np.ndarray
    population_C: np.ndarray
    eligible_A: np.ndarray
    max_size: int
    stream: Stream


class GroupChooser(ABC):
    """Chooses the high-frequency group. A concrete chooser is a frozen dataclass."""

    @abstractmethod
    def choose(self, problem: GroupProblem) -> tuple[int, ...]:
        """Rows of the chosen clients, ascending: eligible ones, at most ``max_size``; possibly none."""

    def reads_labels(self) -> bool:
        """Whether the clients have to send their label counts."""
        return True


@dataclass(frozen=True, kw_only=True)
class RandomGroup(GroupChooser):
    """Uniform among the eligible clients, as many as the server can afford."""

    def choose(self, problem: GroupProblem) -> tuple[int, ...]:
        """See :meth:`GroupChooser.choose`."""
        rows = np.flatnonzero(problem.eligible_A)
        size = min(problem.max_size, len(rows))
        return tuple(sorted(int(row) for row in problem.stream.numpy().choice(rows, size=size, replace=False)))

    def reads_labels(self) -> bool:
        """No."""
        return False
