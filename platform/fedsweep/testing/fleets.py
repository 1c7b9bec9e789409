"""Fleets in this process that do what a fleet elsewhere might: split, dawdle, measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedsweep.client.messages import Handle, Question, Segment, SegmentReply
from fedsweep.components.probes import sent_of
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Fleet, LocalFleet, make_worker, merged_answers
from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.records import Payload, SyncPoint
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout
from fedsweep.world.topology import SERVER


class SplitFleet(Fleet):
    """Three workers, on which clients lie the other way round, and whose answers come last first.

    Args:
        experiment: The experiment.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._workers = [make_worker(experiment, index) for index in range(3)]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def folds(self) -> bool:
        return False

    def place(self, loads: Mapping[int, tuple[int, float]]) -> dict[int, int]:
        return {client: self.num_workers - 1 - worker for client, worker in super().place(loads).items()}

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        answers = []
        for index, worker in enumerate(self._workers):
            mine = {k: memory for k, memory in memories.items() if segment.workers.get(k) == index}
            answers.append(worker.run(segment, anchor, mine))
        reply = merged_answers(answers)
        return replace(reply, replies=reply.replies[::-1])

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        payloads: dict[int, Payload] = {}
        for k in reversed(question.clients):
            payloads |= self._workers[k % 3].measure(question.of((k,)), vector, memories)
        return dict(sorted(payloads.items()))


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts as torch's own counter does, but for no module: that one can't be used where gradients are asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return out


class FlopFleet(LocalFleet):
    """Counts the floating-point operations of the clients' steps and measurements.

    Attributes:
        flops: Of each round.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self.flops: Counter[int] = Counter()

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        with _Flops() as counter:
            reply = super().play(segment, anchor, memories)
        self.flops[segment.round] += counter.total
        return reply


class MeasuringFleet(LocalFleet):
    """Counts again what crosses it: the arrays themselves, not what somebody says of them.

    Attributes:
        up: Bytes from the clients, of all rounds.
        down: Bytes to them.
        setup: Bytes of the exchange before round 1.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._layout: FlatLayout = experiment.layout
        self._has: dict[tuple[int, str], tuple[Tensor, str]] = {}
        self.up = self.down = self.setup = 0

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        parts = {task.client: task.submodel for task in segment.tasks}
        if not any(point.merges for point in segment.points):  # there masks travel with each message
            self.down += sum(task.submodel.index_bytes() for task in segment.tasks if task.progress is None)
        for point in segment.points:
            self._count_hubs(point)
            # Who starts from its own model is sent none.
            for client in (job.client for job in point.start if not job.resume and job.model != job.client):
                part = parts.get(client, FULL_MODEL)
                self.down += self._alive(part, part.extract(anchor, self._layout))
                self.down += self._published(segment, client, part)
        reply = super().play(segment, anchor, memories)
        self.up += sum(BYTES_PER_VALUE * self._layout.num_values * len(p.attend) for p in segment.points[:-1])
        answered = set()
        for answer in reply.replies:
            answered.add(answer.client)
            if segment.points[-1].merges:
                places = [merge.hub for merge in segment.points[-1].merges if answer.client in merge.clients]
                copies = len(places) - (answer.client in places)
                part = parts.get(answer.client, FULL_MODEL)
                self.up += copies * (self._alive(part, answer.vector) + part.index_bytes())
                continue
            self.up += _bytes(answer.extras)
            if answer.encoded is None:
                self.up += self._alive(parts.get(answer.client, FULL_MODEL), answer.vector)
            else:
                self.up += _bytes(answer.encoded, packed_for=self._layout.dtype) + _bytes({"rest": answer.vector})
        # Who kept work of earlier rounds sends what it kept then.
        self.up += BYTES_PER_VALUE * self._layout.num_values * len(set(segment.points[-1].attend) - answered)
        return reply

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        answers = super().measure(question, vector, memories)
        if question.round:
            return answers  # a test, which is no part of the run
        model = self._layout.num_params + self._layout.num_buffers
        receivers = {k for k in answers for probe in question.probes if probe.reads_model and probe.asks(k)}
        self.setup += BYTES_PER_VALUE * model * len(receivers)
        self.setup += sum(_bytes(sent_of(answer, question.probes)) for answer in answers.values())
        return answers

    def _count_hubs(self, point: SyncPoint) -> None:
        """Count whole models from hub to hub, which no worker sees."""
        whole = BYTES_PER_VALUE * self._layout.num_values
        for merge in (merge for merge in point.merges if merge.travels):
            for hub in merge.hubs:
                if hub >= 0 or merge.hub == SERVER:
                    self.up += whole * (hub != merge.hub)
                else:
                    self.down += whole

    def _alive(self, part: SubModel, vector: Tensor) -> int:
        """Return bytes of a part's vector; of a mask's, those of the values that are alive."""
        dead = 0
        if type(part).message is not SubModel.message:
            cover = part.embed(vector, self._layout).cover
            dead = 0 if cover is None else int((~cover).sum())
        return BYTES_PER_VALUE * (vector.numel() - dead)

    def _published(self, segment: Segment, client: int, part: SubModel) -> int:
        total = 0
        for name, content in segment.published.items():
            value, key = content.value, part.key() if content.like else ""
            last = self._has.get((client, name))
            if content.is_kept and last is not None and last[1] == key and torch.equal(last[0], value):
                continue
            self._has[client, name] = (value, key)
            size = part.layout(self._layout).num_params if content.like else value.numel()
            total += _bytes({name: value.flatten()[:size]})
        return total


def _bytes(tensors: Payload, *, packed_for: torch.dtype | None = None) -> int:
    """Count bytes; a codec's message for a model of some type has other wide types as they are."""

    def width(values: Tensor) -> int:
        is_whole = packed_for is not None and values.dtype != packed_for
        return values.element_size() if is_whole else min(4 * (1 + values.is_complex()), values.element_size())

    bits = [t for t in tensors.values() if t.dtype == torch.bool]
    values = [t for t in tensors.values() if t.dtype != torch.bool]
    return sum(-(-t.numel() // 8) for t in bits) + sum(width(t) * t.numel() for t in values)
