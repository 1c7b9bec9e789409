"""Asynchrony on the virtual clock: clients work side by side, and the server takes what arrives.

A round lasts until the server's next model: it ends with the arrival that fills the buffer. So the model does not
change inside a round, and whoever starts during one starts from the right model, though its work is computed at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsweep import ConfigError
from fedsweep.components import (
    Checked,
    ClientUpdate,
    Count,
    LocalJob,
    NotNegative,
    Pacing,
    RoundContext,
    Selection,
    ServerContext,
    State,
    SyncContext,
    SyncPoint,
)

Staleness = Literal["constant", "hinge", "polynomial"]


def staleness_of(updates: Sequence[ClientUpdate], sync: SyncContext) -> Tensor:
    """Return the number of changes of the server's model since each client received its own, in float64 [M]."""
    return torch.tensor([sync.version - u.anchor_version for u in updates], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Discount(Checked):
    """Factor of an update's weight by its staleness s; 1 for a fresh one.

    Attributes:
        kind: ``"constant"``: 1; ``"hinge"``: 1 up to ``grace``, then ``1 / (slope (s - grace) + 1)``;
            ``"polynomial"``: ``(1 + s) ** -exponent``.
        exponent: At least 0.
        slope: At least 0.
        grace: At least 0.

    Source: Xie et al. (2019), FedAsync, section 5.2. Reading: an update is fresh, s = 0, where the server's model did
    not change while its client worked; the paper counts that as 1.
    """

    kind: Staleness = "polynomial"
    exponent: NotNegative = 0.5
    slope: NotNegative = 10.0
    grace: NotNegative = 4.0

    def __call__(self, staleness_M: Tensor) -> Tensor:
        """Return the factors [M]."""
        if self.kind == "polynomial":
            return (1 + staleness_M) ** -self.exponent
        if self.kind == "hinge":
            return 1 / (self.slope * (staleness_M - self.grace).clamp(min=0) + 1)
        return torch.ones_like(staleness_M)


def at_work(concurrency: int | None, context: RoundContext) -> int:
    """Return the number of clients at work at a time, where enough are there."""
    return concurrency or context.full_cohort_size or context.cohort_size


def buffered(buffer_size: int | None, concurrency: int | None, context: RoundContext) -> int:
    """Return the number of updates per model of the server; by default half of the clients at work, 1 to 10."""
    return buffer_size or min(10, max(1, at_work(concurrency, context) // 2))


@dataclass(frozen=True, kw_only=True)
class IdleClients(Selection):
    """Draws those who may start in a round, uniformly among the clients that are not at work.

    First those who fill the free places, which are FedAvg's cohort where nobody is at work and clients are listed, not
    asked one by one, then those who take the places that become free before the buffer is full.

    Attributes:
        concurrency: Clients at work at a time, at least 1; None: ``training.cohort_size``.
        buffer_size: Updates from one model of the server to the next, at least 1; None: see :func:`buffered`.

    Source: Nguyen et al. (2022), FedBuff, Algorithm 1.
    """

    concurrency: int | None
    buffer_size: int | None

    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        idle = set(context.available) - set(context.in_flight)
        free = at_work(self.concurrency, context) - len(context.in_flight)
        later = buffered(self.buffer_size, self.concurrency, context) - 1
        generator = context.stream.numpy()
        drawn: list[int] = []
        for places in (free, later):
            # In order, since the draw is by place, and a set has none.
            left = sorted(idle - set(drawn))
            if left and places > 0:
                drawn += generator.choice(left, size=min(places, len(left)), replace=False).tolist()
        return tuple(drawn), state


@dataclass(frozen=True, kw_only=True)
class Arrivals(Pacing):
    """The round of one buffer: it ends with the arrival that fills it.

    Events follow one another by their time on the virtual clock, clients of one time by their number. What arrives at a
    moment is taken in before anybody starts at that moment; so a place that becomes free with the last arrival is
    filled in the next round, from the new model. Whoever is still at work then goes on, and arrives in a later round.

    Attributes:
        concurrency: See :class:`IdleClients`.
        buffer_size: Likewise.

    Source: Nguyen et al. (2022), FedBuff, Algorithm 1; with a buffer of one Xie et al. (2019), FedAsync. Reading: a
    client has at most one update in a buffer, though a very fast one could have trained twice. Where clients run short,
    the round ends with what is there.
    """

    draws_candidates: ClassVar[bool] = True
    sends_at_once: ClassVar[bool] = True

    concurrency: Count | None
    buffer_size: Count | None

    def carries_work(self) -> bool:
        """Return True: an update that is under way waits for a later round."""
        return True

    def init(self, context: ServerContext) -> State:
        """Return an empty state: the engine keeps the updates under way.

        Raises:
            ConfigError: The clients have no devices, or there are too few of them.
        """
        if context.profiles[0].device is None:
            raise ConfigError(
                "an asynchronous method needs a virtual clock to tell who arrives first, but scenario.devices is null;"
                " set it to {profile: phone-wifi}, say"
            )
        for name in ("concurrency", "buffer_size"):
            value = getattr(self, name)
            if value is not None and value > context.num_clients:
                raise ConfigError(
                    f"method.{name} must be at most scenario.clients={context.num_clients}, since a client is at work"
                    f" once at a time and once in a buffer, but got {value}"
                )
        return {}

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        working = [(context.ready.get(k, context.clock), k) for k in context.in_flight]
        heapq.heapify(working)
        free = deque([context.clock] * (at_work(self.concurrency, context) - len(working)))
        waiting = deque(context.drawn)
        jobs: list[LocalJob] = []
        arrived: list[int] = []
        size = buffered(self.buffer_size, self.concurrency, context)
        while len(arrived) < size:
            if waiting and free and (not working or free[0] < working[0][0]):
                client, begin = waiting.popleft(), free.popleft()
                jobs.append(LocalJob(client=client, steps=context.work[client].steps, not_before=begin))
                heapq.heappush(working, (begin + context.durations[client], client))
            elif working:
                moment, client = heapq.heappop(working)
                arrived.append(client)
                free.append(moment)
            else:
                break
        start = tuple(sorted(jobs, key=lambda job: job.client))
        return (SyncPoint(start=start, attend=tuple(sorted(arrived))),), state
