"""A worker: holds clients for a round and goes through its sync points. The same code runs in every fleet.

A Ray client actor wraps one; the local fleet is one. How several workers average among themselves is the
:class:`Exchange`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.client.flat_module import ModuleSlot
from fedsweep.client.local_round import LocalSession
from fedsweep.client.messages import Arrays, ClientSide, Reply, RoundTotals, Segment, SegmentReply, Turn
from fedsweep.client.shards import Shard, TrainingData
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.errors import ClientJobError, InvariantError
from fedsweep.records import Payload, State, SyncPoint, torch_tree
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, weighted_mean


class Exchange(ABC):
    """How workers aggregate among themselves at a sync point inside a segment."""

    @abstractmethod
    def mean(self, own: Mapping[int, Tensor], attendees: Sequence[int], weights: Sequence[float], out: Tensor) -> None:
        """Write the weighted mean of all attendees' vectors to ``out`` on every worker.

        Args:
            own: The vectors [V] of the attendees that are on this worker.
            attendees: All of them, ascending.
            weights: Theirs.
            out: [V] on the CPU.
        """


class Alone(Exchange):
    """All clients are on this worker."""

    def mean(self, own: Mapping[int, Tensor], attendees: Sequence[int], weights: Sequence[float], out: Tensor) -> None:
        weighted_mean([own[k] for k in attendees], weights, out)


class Worker:
    """Holds clients for a round.

    Args:
        side: The experiment's client side.
        data: What the clients train on.
        model: A template of the full model; taken over.
        layout: How the full model lies in its vector.
        index: The worker's number, from 0.
    """

    def __init__(
        self, side: ClientSide, data: TrainingData, model: nn.Module, *, layout: FlatLayout, index: int = 0
    ) -> None:
        self._side, self._data, self._layout, self.index = side, data, layout, index
        if side.device != "cpu":
            # cuDNN may otherwise choose algorithms by timing them, or ones that sum in no fixed order.
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
        self._template = model
        self._full_slot = ModuleSlot(model, layout, side.device)
        self._sessions: dict[int, LocalSession] = {}
        self._attended: set[int] = set()
        self._round = (0, 0)
        self._exchange: Exchange = Alone()

    def use_exchange(self, exchange: Exchange) -> None:
        """Average with other workers through this exchange from now on."""
        self._exchange = exchange

    def run(self, segment: Segment, anchor: np.ndarray, memories: Mapping[int, State]) -> SegmentReply:
        """Go through a segment.

        Args:
            segment: What to do; turns and jobs of clients on other workers are passed over.
            anchor: The server's model [V] at the segment's first point.
            memories: What the clients whose turn begins remember.

        Raises:
            ClientJobError: A client's work failed.
        """
        if (segment.round, segment.attempt) != self._round:
            self._sessions, self._attended = {}, set()
            self._round = (segment.round, segment.attempt)
        turns = {turn.client: turn for turn in segment.turns if self._mine(segment, turn.client)}
        for client in turns:
            self._sessions.pop(client, None)  # what an unfinished try of the round left
        probes = tuple(p for p in segment.probes if segment.closes or p.when != "round_end")
        current = torch.from_numpy(np.array(anchor))
        version = segment.version
        for number, point in enumerate(segment.points):
            self._start_jobs(segment, point, turns, current, version, memories)
            due = [k for k in point.attend if self._mine(segment, k) and k in self._sessions]
            for client in due:
                self._guard(segment, client, lambda k=client: self._sessions[k].advance(probes))
            self._attended.update(due)
            if number < len(segment.points) - 1:
                own = {k: self._sessions[k].vector.cpu() for k in due}
                self._exchange.mean(own, point.attend, segment.weights[number], current)
                version += 1
        return self._answer(segment, due, current)

    def _mine(self, segment: Segment, client: int) -> bool:
        return segment.workers.get(client, 0) == self.index

    def _start_jobs(
        self,
        segment: Segment,
        point: SyncPoint,
        turns: Mapping[int, Turn],
        current: Tensor,
        version: int,
        memories: Mapping[int, State],
    ) -> None:
        for job in point.start:
            client = job.client
            if not self._mine(segment, client):
                continue
            if client not in self._sessions:
                if client not in turns:
                    raise InvariantError(f"client {client} has a job in round {segment.round} but no turn")
                self._guard(segment, client, lambda k=client: self._open(segment, turns[k], memories.get(k)))
            session = self._sessions[client]
            broadcast = torch_tree(segment.broadcasts.get(client, {}))
            self._attended.discard(client)
            self._guard(
                segment,
                client,
                lambda s=session, j=job, b=broadcast: s.begin(
                    j, None if j.resume else current, version=version, broadcast=b, probes=segment.probes
                ),
            )

    def _open(self, segment: Segment, turn: Turn, memory: State) -> None:
        indices = self._side.indices[turn.client]
        if turn.work.classes is not None:
            indices = indices[np.isin(self._data.labels[indices], turn.work.classes)]
        shard = Shard(
            self._data.images,
            self._data.labels,
            indices,
            transform=self._data.transform,
            device=self._side.device,
            dtype=self._layout.dtype,
        )
        self._sessions[turn.client] = LocalSession(
            self._side,
            turn,
            round=segment.round,
            learning_rate=segment.learning_rate,
            slot=self._slot(turn.submodel),
            shard=shard,
            full=self._layout,
            memory=memory,
            num_classes=self._data.num_classes,
        )

    def _slot(self, submodel: SubModel) -> ModuleSlot:
        if submodel == FULL_MODEL:
            return self._full_slot
        module = submodel.build(self._template)
        if module is self._template:
            return self._full_slot  # a second slot would take the module's gradients away from the first
        return ModuleSlot(module, submodel.layout(self._layout), self._side.device)

    def _answer(self, segment: Segment, due: Sequence[int], current: Tensor) -> SegmentReply:
        replies, vectors = [], []
        for client in due:
            tally, extras = self._sessions[client].send()
            replies.append(Reply(client=client, tally=tally, extras=extras))
            vectors.append(self._sessions[client].vector.cpu().numpy().copy())
        totals: dict[int, RoundTotals] = {}
        kept: dict[int, State] = {}
        if segment.closes:
            for client, session in self._sessions.items():

                def end(s: LocalSession = session, k: int = client) -> None:
                    totals[k], memory = s.close(attended=k in self._attended)
                    if memory is not None:
                        kept[k] = memory

                self._guard(segment, client, end)
            self._sessions, self._attended = {}, set()
        folded = len(segment.points) > 1 and self.index == 0
        return SegmentReply(
            replies=tuple(replies),
            vectors=tuple(vectors),
            totals=totals,
            memories=kept,
            aggregate=current.numpy() if folded else None,
        )

    def _guard(self, segment: Segment, client: int, action: Any) -> None:
        """Run a client's work; whatever it raises comes out with the client, the round and the step."""
        try:
            action()
        except (ClientJobError, InvariantError, MemoryError):
            raise
        except Exception as error:
            session = self._sessions.get(client)
            step = 0 if session is None else session.step_reached
            raise ClientJobError(
                client=client, round=segment.round, step=step, reason=f"{type(error).__name__}: {error}"
            ) from error

    def measure(self, clients: Sequence[int], probes: Sequence[Probe], vector: np.ndarray) -> dict[int, Arrays]:
        """The set-up exchange: what each client measures at the initial model."""
        answers: dict[int, Arrays] = {}
        anchor = torch.from_numpy(np.array(vector)).to(self._side.device)
        params = self._layout.params(anchor)
        module = self._full_slot.bind(list(self._layout.views(anchor).values()))
        for client in clients:
            shard = Shard(
                self._data.images,
                self._data.labels,
                self._side.indices[client],
                transform=self._data.transform,
                device=self._side.device,
                dtype=self._layout.dtype,
            )
            inputs, targets = shard.everything()
            answers[client] = {}
            for probe in probes:
                module.eval()
                view = LocalClient(
                    client=client,
                    round=0,
                    inputs=inputs,
                    targets=targets,
                    num_classes=self._data.num_classes,
                    anchor=params,
                    params=params,
                    model=module,
                    forward_with=lambda p, x: torch.func.functional_call(module, p, (x,), strict=False),
                    stream=stream(self._side.seed, f"probe {probe.name}", 0, client),
                )
                payload: Payload = probe.measure(view)
                answers[client] |= {f"{probe.name}/{key}": v.detach().cpu().numpy() for key, v in payload.items()}
        return answers
