"""Planning: who takes part in a round, which part of the model each client gets, and when they synchronise.

By default that is a uniform draw, the whole model, and one sync point a round. A sub-model really is smaller:
``extract`` gives the vector that travels, ``embed`` puts a client's vector back to full shape together with which
coordinates it covers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from fedsweep.components.base import ServerComponent
from fedsweep.guard import finite_vector, items, named, pair, returns
from fedsweep.parameters.ranges import Count
from fedsweep.records import ClientUpdate, LocalJob, RoundContext, ServerContext, State, SyncContext, SyncPoint
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.world.population import DrawnPresence

SyncRule = Literal["authors", "paper"]


class Selection(ServerComponent):
    """Chooses the cohort among the clients that are there."""

    @abstractmethod
    @returns(pair("a tuple of client ids, state", items(int, np.integer)))
    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        """Return the cohort, of ``context.available``, and the new state.

        Its order matters only to a pacing that reads ``context.drawn``.
        """


@dataclass(frozen=True, kw_only=True)
class UniformSelection(Selection):
    """Uniform without replacement, the same for every method at a seed.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        size = min(context.cohort_size, len(context.available))
        if isinstance(context.available, DrawnPresence):
            return context.available.draw(size, context.stream.numpy()), state
        places = context.stream.numpy().choice(len(context.available), size=size, replace=False)
        return tuple(sorted(context.available[place] for place in places.tolist())), state


class SubModelPolicy(ServerComponent):
    """Decides each cohort member's sub-model.

    Class attributes:
        cuts: Clients may get less than the whole model.
        withholds: Clients have values of their own in what they are not sent, so that nobody else has their models.
    """

    cuts: ClassVar[bool] = True
    withholds: ClassVar[bool] = False

    @property
    def scales_steps(self) -> bool:
        """Tell whether parts may have a :meth:`~fedsweep.submodel.SubModel.step_scale`."""
        return False

    @property
    def draws_in_steps(self) -> bool:
        """Tell whether parts may have :attr:`~fedsweep.submodel.SubModel.step_parts`."""
        return False

    @abstractmethod
    @returns(pair("sub-models by client, state", named(SubModel)))
    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        """Return each cohort member's sub-model, and the new state."""

    @returns(pair("vector [{n}], state", finite_vector))
    def after_aggregate(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        """Return the server's next model [V] as the policy leaves it, and the new state: after all refinements.

        Where the parts of later rounds leave something out for good, this is where it becomes zero.
        """
        return vector, state


@dataclass(frozen=True, kw_only=True)
class WholeModel(SubModelPolicy):
    """Everybody gets the whole model."""

    cuts: ClassVar[bool] = False

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        return dict.fromkeys(context.cohort, FULL_MODEL), state


class Pacing(ServerComponent):
    """Plans the sync points of a round.

    Class attributes:
        syncs_inside: It is there to synchronise clients inside rounds; where it never does, the user is told.
        draws_candidates: The cohort is who may be asked: members that get no job have no part in the round.
        sends_at_once: Work that goes on over a round's end is sent as soon as it is done, whenever it is attended;
            otherwise clients keep it until the server asks.
        has_hubs: Models meet at other hubs than the server, or clients start from models of other hubs.
        has_server: Models meet at the server, too; false where there is none.
    """

    syncs_inside: ClassVar[bool] = False
    draws_candidates: ClassVar[bool] = False
    sends_at_once: ClassVar[bool] = False
    has_hubs: ClassVar[bool] = False
    has_server: ClassVar[bool] = True

    @abstractmethod
    @returns(pair("sync points, state", items(SyncPoint)))
    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        """Return the round's sync points in order, and the new state.

        Asked where there is a cohort, or a client that still holds work.
        """

    def carries_work(self) -> bool:
        """Tell whether clients may keep what they trained over a round's end and deliver it later."""
        return False

    def discards_work(self) -> bool:
        """Tell whether the server may throw away what clients send."""
        return False

    def first_models(self, context: ServerContext) -> Iterable[int]:
        """Return the hubs that have the initial model before round 1."""
        return ()

    def costs(self, context: RoundContext) -> tuple[float, float]:
        """Return a client's values per round at the high and at the low frequency, for the scenario's budgets.

        A pacing without two frequencies of its own takes the extremes: a sync point at every step, and one a round.
        """
        steps = max((work.steps for work in context.work.values()), default=1)
        return 2.0 * context.num_values * len(due_steps(1, steps, sync_rule="authors")), 2.0 * context.num_values


@dataclass(frozen=True, kw_only=True)
class OncePerRound(Pacing):
    """Everybody takes all its steps, then there is one aggregation.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        start = tuple(LocalJob(client=k, steps=context.work[k].steps) for k in context.cohort)
        return (SyncPoint(start=start, attend=context.cohort),), state


def due_steps(interval: int, steps: int, *, sync_rule: SyncRule) -> tuple[int, ...]:
    """Return those of ``steps`` local steps after which a client with this interval synchronises; the last one always.

    Source: DynamicFL, Algorithm 1. Reading: under ``"authors"`` the step before the last never synchronises, as
    in the authors' program, whose costs the paper prints (249 synchronisations in 250 steps at interval 1).

    Args:
        interval: Local steps between two synchronisations, at least 1; clipped to ``steps``.
        steps: Local steps of the round, at least 1.
        sync_rule: See :data:`SyncRule`.
    """
    interval = min(interval, steps)
    last = steps - 2 if sync_rule == "authors" else steps - 1
    return (*range(interval, last + 1, interval), steps)


def cut_round(dues: Mapping[int, Iterable[int]], idle: tuple[int, ...] = ()) -> tuple[SyncPoint, ...]:
    """Return sync points from the steps after which each client synchronises.

    All clients count their steps from the round's start; whoever synchronises at a step is averaged with all
    others that do, and goes on from that average. A client with fewer steps than others waits with its result for
    the round's end, which belongs to all.

    Args:
        dues: For each client its ascending steps; the last is its number of steps.
        idle: Clients that join the last average without having worked.
    """
    together: dict[tuple[int, ...], list[int]] = {}
    for client in sorted(dues):
        together.setdefault(tuple(dues[client]), []).append(client)
    # Clients with the same steps begin and end together, so most of a round's sync points are alike: each is made once.
    groups = list(together.values())
    last = max((steps[-1] for steps in together), default=0)
    begins: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, list[int]] = {}
    for group, steps in enumerate(together):
        for begin, end in pairwise((0, *steps)):
            begins.setdefault(begin, []).append((group, end - begin))
            ends.setdefault(last if end == steps[-1] else end, []).append(group)
    points_by_key: dict[Hashable, SyncPoint] = {}
    points: list[SyncPoint] = []
    moment_before = 0
    for moment in sorted(ends):
        begun, ended = begins.get(moment_before, []), ends[moment]
        key = (*begun, *ended, moment == last)
        if key not in points_by_key:
            jobs = [LocalJob(client=client, steps=steps) for group, steps in begun for client in groups[group]]
            points_by_key[key] = SyncPoint(
                start=tuple(sorted(jobs, key=attrgetter("client"))),
                attend=tuple(sorted(client for group in ended for client in groups[group])),
                idle=idle if moment == last else (),
            )
        points.append(points_by_key[key])
        moment_before = moment
    return tuple(points)


@dataclass(frozen=True, kw_only=True)
class FixedInterval(Pacing):
    """Everybody synchronises after every ``interval`` local steps and at the round's end.

    Attributes:
        interval: Local steps between two sync points, at least 1.
        sync_rule: See :func:`due_steps`.

    Source: DynamicFL, Algorithm 1; interval 1 is DynamicSGD.
    """

    interval: Count
    sync_rule: SyncRule = "authors"

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        dues = {k: due_steps(self.interval, context.work[k].steps, sync_rule=self.sync_rule) for k in context.cohort}
        return cut_round(dues), state
