"""Fleets: where the clients are. The engine talks to this interface; what lies behind changes no bit.

:class:`LocalFleet` holds all clients in this process; ``ray_fleet`` lays them on Ray actors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fedsweep.client.lanes.grouping import Lanes
from fedsweep.client.messages import Handle, Question, Segment, SegmentReply, Stepping
from fedsweep.client.shards import ClientTests
from fedsweep.client.worker import Worker
from fedsweep.experiment.experiment import Experiment, client_side
from fedsweep.records import Payload, State

if TYPE_CHECKING:
    from fedsweep.client.lanes.together import MakeLanes

_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True)
class ExchangeInUse:
    """The way in which workers aggregate among themselves.

    Attributes:
        name: ``in place`` (one worker), ``shared memory`` (of one node), ``network`` (of several) or ``server`` (they
            don't).
        notes: Sentences on why it is not a faster one.
    """

    name: str = "in place"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """The vectors that workers exchange.

    Attributes:
        num_values: Length of the model's vector.
        dtype: Its type.
        capacity: Most attendees of a sync point.
        own_gpu: Each worker has a GPU to itself.
    """

    num_values: int
    dtype: torch.dtype
    capacity: int
    own_gpu: bool = False

    @classmethod
    def of(cls, experiment: Experiment, *, own_gpu: bool = False) -> Vectors:
        """Return an experiment's."""
        layout = experiment.layout
        return cls(
            num_values=layout.num_values,
            dtype=layout.dtype,
            capacity=experiment.most_in_cohort,
            own_gpu=own_gpu and experiment.device == "cuda",
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a group's mapped files take."""
        # One for each attendee, and one for their mean.
        return (self.capacity + 1) * self.num_values * self.dtype.itemsize


class Fleet(ABC):
    """Trains the clients: in this process, or on Ray actors."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Workers that clients can be placed on."""

    @property
    @abstractmethod
    def folds(self) -> bool:
        """Return whether workers can aggregate among themselves."""

    @property
    def exchange(self) -> ExchangeInUse:
        """Return which exchange workers aggregate by, as of now."""
        return ExchangeInUse()

    @abstractmethod
    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        """Run a segment on the workers and wait for all of them.

        Raises:
            ClientJobError: A client's work failed.
            WorkerLost: A worker died or hangs; after :meth:`repair` the round can be begun again.
            MemoryLost: What a client remembers is gone; only a checkpoint brings it back.
        """

    @abstractmethod
    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        """Ask clients, see :meth:`Worker.measure`; raises as :meth:`play`."""

    def prove(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> Stepping:
        """Have one worker choose how all step their clients, see :meth:`Worker.prove`; raises as :meth:`play`."""
        return Stepping(
            kind="loop", notes=("lanes: this fleet has no way to try them: clients are stepped one by one",)
        )

    def ready(self) -> None:
        """Wait for workers that were just made; until then the caller can do other things while they start."""

    def repair(self) -> None:
        """Replace lost workers."""

    def fetch(self, handle: Handle) -> State:
        """Return the memory behind a handle."""
        return handle

    def keep(self, memory: State) -> Handle:
        """Return a handle for a memory that was read from a checkpoint."""
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
    """Place clients evenly: the longest work first, each on the least loaded worker, frequency by frequency.

    Clients that synchronise equally often are levelled among themselves first: they wait for each other, so an
    imbalance among them can't be made up by others' work.
    """
    totals = [0.0] * num_workers
    workers: dict[int, int] = {}
    for frequency in sorted({syncs for syncs, _ in loads.values()}, reverse=True):
        class_totals = [0.0] * num_workers
        # Ties go by number, here and below, so that the same round is laid out the same when it is begun anew.
        members = sorted((k for k, (s, _) in loads.items() if s == frequency), key=lambda k: (-loads[k][1], k))
        for client in members:
            best = min(range(num_workers), key=lambda w: (class_totals[w], totals[w], w))
            class_totals[best] += loads[client][1]
            totals[best] += loads[client][1]
            workers[client] = best
    return workers


def merged_answers(answers: Sequence[SegmentReply]) -> SegmentReply:
    """Return one answer from the workers' answers.

    By client, so that sums over them come out the same however the clients lie.
    """
    first = next((answer for answer in answers if answer.aggregate is not None), None)
    return SegmentReply(
        replies=tuple(sorted((r for answer in answers for r in answer.replies), key=attrgetter("client"))),
        totals=_by_client(answer.totals for answer in answers),
        memories=_by_client(answer.memories for answer in answers),
        aggregate=None if first is None else first.aggregate,
        residual=None if first is None else first.residual,
        anchors={version: vector for answer in answers for version, vector in answer.anchors.items()},
        notes=tuple(sorted({note for answer in answers for note in answer.notes})),
    )


def _by_client(parts: Iterable[Mapping[int, _Part]]) -> dict[int, _Part]:
    return dict(sorted((item for part in parts for item in part.items()), key=itemgetter(0)))


def make_worker(
    experiment: Experiment, index: int = 0, make_lanes: MakeLanes = Lanes, *, beside_server: bool = False
) -> Worker:
    """Make a worker for an experiment's clients, in any process or the server's; ``index`` is its number, from 0."""
    side, world, tests = client_side(experiment), experiment.world, None
    if experiment.method.evaluation.client_test() is not None:
        tests = ClientTests(images=world.test_images, labels=world.test_labels, indices=experiment.test_shares)
    model, layout = experiment.new_model(), experiment.layout
    return Worker(
        side,
        world.data,
        model,
        layout=layout,
        index=index,
        tests=tests,
        make_lanes=make_lanes,
        models_stay=beside_server and experiment.device == "cuda" and experiment.method.averages_alone,
    )


class LocalFleet(Fleet):
    """All clients in this process, one after the other, or in lanes."""

    def __init__(self, experiment: Experiment, make_lanes: MakeLanes = Lanes) -> None:
        self._worker = make_worker(experiment, make_lanes=make_lanes, beside_server=True)

    @property
    def num_workers(self) -> int:
        """One."""
        return 1

    @property
    def folds(self) -> bool:
        """Always."""
        return True

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        return self._worker.run(segment, anchor, memories)

    def prove(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> Stepping:
        return self._worker.prove(segment, anchor, memories)

    def place(self, loads: Mapping[int, tuple[int, float]]) -> dict[int, int]:
        return dict.fromkeys(loads, 0)

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        return self._worker.measure(question, vector, memories)
