"""A worker: holds clients for a round and goes through its sync points. The same code runs in every fleet.

A Ray client actor wraps one; the local fleet is one. How several workers average among themselves is the
:class:`Exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.client.coding import sent_down
from fedsweep.client.compute_device import start_device
from fedsweep.client.exchange import Exchange, InPlace
from fedsweep.client.lanes.grouping import Lanes
from fedsweep.client.lanes.lane import LaneSteps
from fedsweep.client.lanes.proof import proved
from fedsweep.client.local_round import LocalRound
from fedsweep.client.messages import ClientSide, ClientTask, Question, RoundTotals, Segment, SegmentReply, Stepping
from fedsweep.client.modules import BoundModule
from fedsweep.client.shards import ClientTests, Shard, TrainingData
from fedsweep.components.base import Published
from fedsweep.errors import ClientJobError, FedsweepError, InvariantError
from fedsweep.guard import cause_of, is_failure, placed_error
from fedsweep.records import ClientWork, Payload, State, SyncPoint
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, Inputs, as_tensors, on_device

if TYPE_CHECKING:
    from fedsweep.client.lanes.together import MakeLanes

# Errors that say themselves where they arose.
_OWN = (ClientJobError, InvariantError, MemoryError)


class Worker:
    """Holds clients for a round.

    Args:
        side: The experiment's client side.
        data: What the clients train on.
        model: A template of the full model; taken over.
        layout: How the full model lies in its vector.
        index: The worker's number, from 0.
        tests: What clients test their own models on, where they do.
        make_lanes: Makes what steps clients together.
        models_stay: Whole models stay where they were trained: the server, in this process, takes their mean there.
    """

    def __init__(
        self,
        side: ClientSide,
        data: TrainingData,
        model: nn.Module,
        *,
        layout: FlatLayout,
        index: int = 0,
        tests: ClientTests | None = None,
        make_lanes: MakeLanes = Lanes,
        models_stay: bool = False,
    ) -> None:
        self._side, self._data, self._layout, self.index, self._tests = side, data, layout, index, tests
        start_device(side.device, tf32=side.tf32)
        # On a GPU the data set lies there once; a client's samples are gathered there.
        self._images: np.ndarray | Inputs = data.images
        self._strata = data.stratum_of
        if side.device != "cpu":
            # Copied before: from shared memory arrays come read-only.
            self._images = on_device(as_tensors(np.array(data.images)), side.device)
        self._template = model
        self._full_slot = BoundModule(model, layout, side.device)
        self._rounds: dict[int, LocalRound] = {}
        self._attended: set[int] = set()
        self._round = (0, 0)
        self._exchange: Exchange = InPlace()
        self._models_stay = models_stay
        # Where lanes must prove themselves first, segments say from then on how clients are stepped.
        self._make_lanes = make_lanes
        self._lanes = None if side.lanes is None or side.lanes.proves else make_lanes(side, side.lanes)
        self._stepping: Stepping | None = None

    def use_exchange(self, exchange: Exchange) -> None:
        """Average with other workers through this exchange from now on."""
        self._exchange = exchange

    def run(self, segment: Segment, anchor: Tensor, memories: Mapping[int, State]) -> SegmentReply:
        """Go through a segment.

        Args:
            segment: What to do; tasks and jobs of clients on other workers are passed over.
            anchor: The server's model [V] at the segment's first point; stays as it is.
            memories: What the clients whose task begins remember.

        Raises:
            ClientJobError: A client's work failed.
        """
        if segment.stepping != self._stepping:
            self._stepping = segment.stepping
            settings = None if segment.stepping is None else segment.stepping.lanes
            self._lanes = None if settings is None else self._make_lanes(self._side, settings)
        if segment.codecs is not None:
            self._side = replace(self._side, codec=segment.codecs.up, down_codec=segment.codecs.down)
        if (segment.round, segment.attempt) != self._round:
            # A round that was given up, by whomever, is begun from its start: nothing of it may be gone on with.
            self._rounds, self._attended = {}, set()
            self._round = (segment.round, segment.attempt)
        tasks = {task.client: task for task in segment.tasks}
        for client in tasks:
            self._rounds.pop(client, None)  # what an unfinished try of the round left
        probes = tuple(p for p in segment.probes if segment.closes or p.when != "round_end")
        folded = len(segment.points) > 1
        # The lazy device does not turn float32 into float64 as it is copied, which the mean needs.
        mean_device = self._side.device if self._exchange.on_device and self._side.device != "lazy" else "cpu"
        # The server's model by now. Moved once, not for each client; a copy, where the exchange writes means into it. A
        # codec computes on the CPU.
        first_device = "cpu" if self._side.codec.encodes else self._side.device
        current = anchor.to(mean_device if folded else first_device, copy=folded)
        down, residual = self._side.down_codec, segment.residual
        for number, point in enumerate(segment.points):
            self._start_jobs(segment, point, tasks, current, segment.version + number, memories)
            # An attendee that has none here is another worker's, or delivers work of an earlier round, which the server
            # takes from its memory.
            due = [k for k in point.attend if k in self._rounds]
            taken = self._taken_together(due) if self._lanes is not None else {}
            for client in due:
                with self._guarded(segment.round, client):
                    self._rounds[client].advance(probes, taken.get(client))
            self._attended.update(due)
            if number < len(segment.points) - 1:
                # The exchange takes part in every process, also where no attendee is: all wait for the same mean.
                own = {k: self._rounds[k].sent().to(mean_device) for k in due}
                before = current
                if down.encodes or self._side.codec.encodes:
                    current = torch.empty_like(current)  # clients' moves, and the server's, are from the one before
                self._exchange.mean(own, point.attend, segment.weights[number], current, workers=segment.workers)
                if down.encodes:
                    residual = self._send_down(segment, number, current, before=before, residual=residual)
        # All workers have the same mean by now; one of them hands it over.
        locals_due = [self._rounds[client] for client in due]
        answer = self._answer(segment, due)
        if folded and self._side.codec.encodes:
            # The server has not seen what clients received from one another's mean.
            anchors = {r.progress.anchor_version: r.received.cpu() for r in locals_due if r.received is not None}
            answer = replace(answer, anchors=anchors)
        return replace(answer, aggregate=current.cpu(), residual=residual) if folded and not self.index else answer

    def prove(self, segment: Segment, anchor: Tensor, memories: Mapping[int, State]) -> Stepping:
        """Try ways of stepping the clients whose work begins with a segment; of the clients nothing is kept.

        Args:
            segment: All its clients are taken for this worker's.
            anchor: See :meth:`run`.
            memories: Likewise.
        """
        assert self._side.lanes is not None
        tasks = {task.client: task for task in segment.tasks}

        def begun() -> list[LocalRound]:
            self._rounds = {}
            self._start_jobs(segment, segment.points[0], tasks, anchor, segment.version, memories)
            return list(self._rounds.values())

        try:
            return proved(self._side, self._side.lanes, begun)
        finally:
            self._rounds, self._round = {}, (0, 0)

    def _send_down(
        self, segment: Segment, number: int, current: Tensor, *, before: Tensor, residual: Tensor | None
    ) -> Tensor | None:
        """Put the mean as clients decode it in its place, and return the residual after that message."""
        # On every worker alike: they have the same mean, and draw the same numbers.
        source = stream(self._side.seed, "codec down", segment.round, position=number)
        down = self._side.down_codec
        target, residual = sent_down(
            down, self._layout, target=current, before=before, residual=residual, stream=source
        )
        current.copy_(target)
        return residual

    def _taken_together(self, clients: Sequence[int]) -> Mapping[int, LaneSteps]:
        """Return the clients' steps that are due, as far as they can be taken in lanes."""
        assert self._lanes is not None
        taken = self._lanes.take([lane for k in clients if (lane := self._rounds[k].lane()) is not None])
        return {lane.facts.client: steps for lane, steps in taken.items()}

    def _start_jobs(
        self,
        segment: Segment,
        point: SyncPoint,
        tasks: Mapping[int, ClientTask],
        current: Tensor,
        version: int,
        memories: Mapping[int, State],
    ) -> None:
        for job in point.start:
            client = job.client
            if segment.workers.get(client, 0) != self.index:
                continue
            with self._guarded(segment.round, client):
                if client not in self._rounds:
                    if client not in tasks:
                        raise InvariantError(f"client {client} has a job in round {segment.round} but no task")
                    task, rate, memory = tasks[client], segment.learning_rate, memories.get(client)
                    self._rounds[client] = self._local_round(
                        task, round=segment.round, learning_rate=rate, memory=memory
                    )
                local = self._rounds[client]
                # It goes on: what has reached the server is no longer all that it did.
                self._attended.discard(client)
                anchor = None if job.resume else segment.models.get(job.model, current)
                broadcast = (
                    broadcast_of(segment.published, local.model.submodel, self._layout) if segment.published else {}
                )
                local.begin(job, anchor, version=version, broadcast=broadcast, probes=segment.probes)

    def _local_round(
        self, task: ClientTask, *, round: int, learning_rate: float, memory: State, tests: Shard | None = None
    ) -> LocalRound:
        work, labels = task.work, self._data.labels
        indices = self._side.indices[task.client]
        if work.classes is not None:
            indices = indices[np.isin(self._strata[indices], work.classes)]
        return LocalRound(
            self._side,
            task,
            round=round,
            learning_rate=learning_rate,
            slot=self._full_slot if task.submodel is FULL_MODEL else self._slot(task.submodel),
            shard=self._shard(self._images, labels, indices, num_visits=work.steps * work.batch_size),
            full=self._layout,
            memory=memory,
            num_classes=self._data.num_classes,
            strata=self._strata[indices],
            tests=tests,
        )

    def _shard(
        self,
        images: np.ndarray | Inputs,
        labels: np.ndarray,
        indices: np.ndarray,
        *,
        num_visits: int = 0,
    ) -> Shard:
        """Return a client's samples of a round."""
        return Shard(
            images,
            labels,
            indices,
            transform=self._data.transform,
            device=self._side.device,
            dtype=self._layout.dtype,
            num_visits=num_visits,
        )

    def _slot(self, submodel: SubModel) -> BoundModule:
        if submodel == FULL_MODEL:
            return self._full_slot
        module = submodel.build(self._template)
        if module is self._template:
            return self._full_slot  # a second slot would take the module's gradients away from the first
        return BoundModule(module, submodel.layout(self._layout), self._side.device, whole=self._template)

    def _answer(self, segment: Segment, due: Sequence[int]) -> SegmentReply:
        # Ascending by client, so that sums over them come out the same however the clients lie.
        replies = tuple(self._rounds[k].reply(leaves=segment.closes, on_device=self._models_stay) for k in sorted(due))
        totals: dict[int, RoundTotals] = {}
        memories: dict[int, State] = {}
        if segment.closes:
            # Steps that no sync point of the round waited for.
            together = self._taken_together(sorted(self._rounds)) if self._lanes is not None else {}
            for client, local in sorted(self._rounds.items()):
                with self._guarded(segment.round, client):
                    if client in together:
                        local.advance(lane_steps=together[client])
                    totals[client], memory = local.close(attended=client in self._attended)
                if memory is not None:
                    memories[client] = memory
            self._rounds, self._attended = {}, set()
        notes = () if self._lanes is None else self._lanes.all_notes
        return SegmentReply(replies=replies, totals=totals, memories=memories, notes=notes)

    @contextmanager
    def _guarded(self, round: int, client: int, own: tuple[type[Exception], ...] = _OWN) -> Iterator[None]:
        """Guard a client's work: but for ``own`` errors, what it raises comes out with client, round and step."""
        try:
            yield
        except own:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            local = self._rounds.get(client)
            step = 0 if local is None else local.steps.reached
            failure = ClientJobError(client=client, round=round, step=step, reason=placed_error(error))
            raise failure from cause_of(error)

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, State]) -> dict[int, Payload]:
        """Have clients measure at the server's model [V], which stays as it is; no term is asked."""
        answers: dict[int, Payload] = {}
        for client in question.clients:
            classes = question.classes.get(client)
            size = len(self._side.indices[client])
            work = ClientWork(steps=0, batch_size=1, whole_batches=False, num_samples=size, classes=classes)
            task = ClientTask(client=client, work=work, submodel=FULL_MODEL)
            tests = None
            if self._tests is not None:
                own = _of_classes(self._tests.indices[client], classes, self._tests.labels)
                tests = self._shard(self._tests.images, self._tests.labels, own)
            memory = memories.get(client)
            local = self._local_round(task, round=question.round, learning_rate=0.0, memory=memory, tests=tests)
            model = question.models.get(client, vector)
            # A probe may refuse the world, as an error of input.
            with self._guarded(question.round, client, (FedsweepError, MemoryError)):
                answers[client] = local.measured_at(model, question.probes, question.broadcast)
        return answers


def broadcast_of(contents: Mapping[str, Published], submodel: SubModel, full: FlatLayout) -> Payload:
    """Cut what is published to a client's part of the model; views where nothing is cut."""
    payload: Payload = {}
    for name, content in contents.items():
        if content.like is None:
            payload[name] = content.value
            continue
        part, values = submodel.layout(full), content.value
        if submodel != FULL_MODEL:
            whole = full.padded(values)
            covered = submodel.embed(submodel.extract(whole, full), full)
            # What the part does not hold is zero: the ledger counts the part's values alone, no others may arrive.
            travels = whole if covered.cover is None else covered.vector.masked_fill(~covered.cover, 0.0)
            values = submodel.extract(travels, full)
        payload |= {f"{name}/{param}": value for param, value in part.params(values).items()}
    return payload


def _of_classes(indices: np.ndarray, classes: tuple[int, ...] | None, strata: np.ndarray) -> np.ndarray:
    """Return the samples that are of certain classes; None: all."""
    return indices if classes is None else indices[np.isin(strata[indices], classes)]
