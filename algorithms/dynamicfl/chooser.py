"""Choosing the high-frequency group of a two-speed round.

Source: DynamicFL, section 3 (DynaComm): the group's labels should look like the population's, under budgets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from fedsweep import ConfigError, Stream
from fedsweep.components import Checked, Payload, Probe

Floats = NDArray[np.float64]
# Random orders of a round's clients. All are held at once; in what is more, none is better by then.
Orders = Annotated[int, Ge(1), Le(100_000)]


@dataclass(frozen=True, kw_only=True)
class GroupProblem:
    """One choice of a group among a round's clients.

    Attributes:
        counts_AC: Label counts of the active clients [A, C], int64, at least one sample each; for a chooser that does
            not read labels C is 0.
        population_C: Class shares of the whole training set [C]; they sum to 1.
        eligible_A: Who can afford the high frequency [A], bool.
        max_size: Greatest size of the group that the server can afford, 0..A.
        stream: Random numbers of this choice.
        num_samples_A: The active clients' numbers of samples [A], at least 1; None where nobody needs them.
        features_AD: What the active clients sent before round 1 [A, D], for a chooser that asks for it.
        population_D: The size-weighted mean of all clients' features [D].
    """

    counts_AC: np.ndarray
    population_C: np.ndarray
    eligible_A: np.ndarray
    max_size: int
    stream: Stream
    num_samples_A: np.ndarray | None = None
    features_AD: Floats | None = None
    population_D: Floats | None = None


class GroupChooser(Checked, ABC):
    """Chooses the high-frequency group. A concrete chooser is a frozen dataclass.

    Attributes:
        needs_classes: What clients measure for it goes by classes, so that samples must have them.
    """

    needs_classes: ClassVar[bool] = False

    @abstractmethod
    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        """Return rows of the chosen clients, ascending: eligible ones, at most ``max_size``; possibly none.

        Args:
            problem: The clients and the budgets.
            size: Take so many, whatever ``max_size``; None: as many as suit.

        Raises:
            ConfigError: ``size`` is not between 1 and the number of usable clients.
        """

    def reads_labels(self) -> bool:
        """Return whether the clients have to send their label counts."""
        return True

    def setup(self, stream: Stream) -> tuple[Probe, ...]:
        """Return the probes that every client runs once, at the initial model, before round 1; none by default.

        Args:
            stream: Random numbers that all clients share.
        """
        return ()

    def features(self, answer: Payload) -> Floats:
        """Return one client's features [D], float64, from its answer to :meth:`setup`.

        Args:
            answer: What it sent, by name.
        """
        return np.zeros(0)


def sizes_of(problem: GroupProblem, num_usable: int, size: int | None) -> range:
    """Return the sizes that a group may have, see :meth:`GroupChooser.choose`; none where nobody may be in it.

    Raises:
        ConfigError: No set of ``num_usable`` clients has the given size.
    """
    if size is None:
        return range(1, min(problem.max_size, num_usable) + 1)
    if not 1 <= size <= num_usable:
        raise ConfigError(
            f"the group's size must be between 1 and the number of clients that may be in it, {num_usable},"
            f" but got {size}"
        )
    return range(size, size + 1)


@dataclass(frozen=True, kw_only=True)
class RandomGroup(GroupChooser):
    """Uniform among the eligible clients, as many as the server can afford."""

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        rows = np.flatnonzero(problem.eligible_A)
        number = max(sizes_of(problem, len(rows), size), default=0)
        return tuple(sorted(int(row) for row in problem.stream.numpy().choice(rows, size=number, replace=False)))

    def reads_labels(self) -> bool:
        return False
