"""Fleets: where the clients are. The engine talks to this interface; what lies behind changes no bit.

:class:`LocalFleet` holds all clients in this process; ``ray_fleet`` lays them on Ray actors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsweep.client.messages import Arrays, Reply, RoundTotals, Segment, SegmentReply
from fedsweep.client.worker import Worker
from fedsweep.components.probes import Probe
from fedsweep.records import State

Handle = Any  # what a fleet gives for a memory: the memory itself, or a reference to it


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """All workers' answers to a segment, together.

    Attributes:
        replies: By client, ascending.
        vectors: The models of the last point's attendees, by client.
        totals: By client, when the round closed.
        memories: By client, when the round closed.
        aggregate: The server's model after the last folded point; None where none was folded.
    """

    replies: Mapping[int, Reply]
    vectors: Mapping[int, np.ndarray]
    totals: Mapping[int, RoundTotals]
    memories: Mapping[int, Handle]
    aggregate: np.ndarray | None


class Fleet(ABC):
    """Where the clients are."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Workers that clients can be placed on."""

    @property
    @abstractmethod
    def folds(self) -> bool:
        """Whether workers can aggregate among themselves."""

    @abstractmethod
    def play(self, segment: Segment, anchor: np.ndarray, memories: Mapping[int, Handle]) -> SegmentResult:
        """Run a segment on the workers and wait for all of them.

        Raises:
            ClientJobError: A client's work failed.
            WorkerLost: A worker died or hangs; after :meth:`repair` the round can be begun again.
            MemoryLost: What a client remembers is gone; only a checkpoint brings it back.
        """

    @abstractmethod
    def measure(self, clients: Sequence[int], probes: Sequence[Probe], vector: np.ndarray) -> Mapping[int, Arrays]:
        """The set-up exchange, see :meth:`Worker.measure`."""

    def ready(self) -> None:
        """Wait for workers that were just made; until then the caller can do other things while they start."""

    def repair(self) -> None:
        """Replace lost workers."""

    def fetch(self, handle: Handle) -> State:
        """The memory behind a handle."""
        return handle

    def keep(self, memory: State) -> Handle:
        """A handle for a memory that was read from a checkpoint."""
        return memory

    def place(self, loads: Mapping[int, tuple[int, float]]) -> dict[int, int]:
        """Lay clients on workers so that their loads are level; which goes where changes no bit.

        Args:
            loads: For each client how often it synchronises, and its work in any unit.

        Returns:
            For each client its worker's number.
        """
        return level(loads, self.num_workers)

    def close(self) -> None:
        """End the workers."""


def level(loads: Mapping[int, tuple[int, float]], num_workers: int) -> dict[int, int]:
    """Longest-first placement, frequency class by frequency class.

    Clients that synchronise equally often are levelled among themselves first: they wait for each other, so an
    imbalance among them can't be made up by others' work.
    """
    totals = [0.0] * num_workers
    workers: dict[int, int] = {}
    for frequency in sorted({syncs for syncs, _ in loads.values()}, reverse=True):
        class_totals = [0.0] * num_workers
        members = sorted((k for k, (s, _) in loads.items() if s == frequency), key=lambda k: (-loads[k][1], k))
        for client in members:
            best = min(range(num_workers), key=lambda w: (class_totals[w], totals[w], w))
            class_totals[best] += loads[client][1]
            totals[best] += loads[client][1]
            workers[client] = best
    return workers


def combine(answers: Sequence[SegmentReply], memories: Mapping[int, Handle]) -> SegmentResult:
    """One result from the workers' answers, in an order that does not depend on them."""
    replies = {reply.client: reply for answer in answers for reply in answer.replies}
    vectors = {
        reply.client: vector for answer in answers for reply, vector in zip(answer.replies, answer.vectors, strict=True)
    }
    totals = {client: t for answer in answers for client, t in answer.totals.items()}
    aggregates = [answer.aggregate for answer in answers if answer.aggregate is not None]
    return SegmentResult(
        replies=dict(sorted(replies.items())),
        vectors=dict(sorted(vectors.items())),
        totals=dict(sorted(totals.items())),
        memories=dict(sorted(memories.items())),
        aggregate=aggregates[0] if aggregates else None,
    )


class LocalFleet(Fleet):
    """All clients in this process, one after the other."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def num_workers(self) -> int:
        """One."""
        return 1

    @property
    def folds(self) -> bool:
        """Always."""
        return True

    def play(self, segment: Segment, anchor: np.ndarray, memories: Mapping[int, Handle]) -> SegmentResult:
        answer = self._worker.run(segment, anchor, memories)
        return combine([answer], answer.memories)

    def measure(self, clients: Sequence[int], probes: Sequence[Probe], vector: np.ndarray) -> Mapping[int, Arrays]:
        return self._worker.measure(clients, probes, vector)
