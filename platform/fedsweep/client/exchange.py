"""Aggregation among workers, without the server; of one worker it is a mean in place.

Workers of one node share memory (``fleet/shared_memory.py``), those of several the network (``fleet/network.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedsweep.trees import weighted_mean


class Exchange(ABC):
    """Aggregation among workers at a sync point inside a segment.

    Attributes:
        on_device: Vectors may lie on the clients' device; otherwise they are brought to the CPU.
    """

    on_device: bool = False

    @abstractmethod
    def mean(
        self,
        own: Mapping[int, Tensor],
        attendees: Sequence[int],
        weights: Sequence[float],
        out: Tensor,
        *,
        workers: Mapping[int, int],
    ) -> None:
        """Write the weighted mean of all attendees' vectors to ``out`` on every worker.

        Args:
            own: The vectors [V] of the attendees that are on this worker.
            attendees: All of them, ascending.
            weights: Theirs.
            out: [V], where the vectors are.
            workers: Which worker each client is on; 0 where it is not said.
        """


class InPlace(Exchange):
    """All clients are on this worker."""

    on_device = True

    def mean(
        self,
        own: Mapping[int, Tensor],
        attendees: Sequence[int],
        weights: Sequence[float],
        out: Tensor,
        *,
        workers: Mapping[int, int],
    ) -> None:
        weighted_mean([own[k] for k in attendees], weights, out)
