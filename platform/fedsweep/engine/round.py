"""Playing a planned round on a fleet: segments, sync points, what travels and what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsweep.client.messages import Arrays, Reply, RoundTotals, Segment, Tally, Turn
from fedsweep.components.base import ServerComponent
from fedsweep.components.probes import Probe
from fedsweep.engine.aggregation import Aggregator, SyncPlace
from fedsweep.engine.ledger import Ledger, sizes
from fedsweep.engine.plan import RoundPlan
from fedsweep.engine.state import RunState
from fedsweep.errors import InvariantError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Fleet, SegmentResult
from fedsweep.records import ClientUpdate, State, SyncPoint
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout


@dataclass(kw_only=True)
class Played:
    """A round as it went.

    Attributes:
        vector: The server's model [V].
        version: Its version.
        components: The components' states.
        ledger: What travelled.
        attendees: Clients of the last aggregation.
        weights: Their weights.
        updates: Their updates.
        totals: Each client's round.
        memories: What clients remember, where that changed.
        sync_points: Aggregations.
        anchors: The server's models of this round by version.
        server_time_s: Seconds that the server spent aggregating.
        attended: Clients whose work reached the server.
        masked: Clients that have got their sub-model's masks, which travel once a round.
    """

    vector: Tensor
    version: int
    components: dict[str, State]
    ledger: Ledger = field(default_factory=Ledger)
    attendees: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    updates: tuple[ClientUpdate, ...] = ()
    totals: dict[int, RoundTotals] = field(default_factory=dict)
    memories: dict[int, Any] = field(default_factory=dict)
    sync_points: int = 0
    anchors: dict[int, Tensor] = field(default_factory=dict)
    server_time_s: float = 0.0
    attended: set[int] = field(default_factory=set)
    masked: set[int] = field(default_factory=set)


class Player:
    """Plays rounds.

    Args:
        experiment: The experiment.
        fleet: Where the clients are.
        aggregator: The server's side.
        layout: How the full model lies in its vector.
    """

    def __init__(self, experiment: Experiment, fleet: Fleet, aggregator: Aggregator, layout: FlatLayout) -> None:
        self._experiment, self._fleet, self._aggregator, self._layout = experiment, fleet, aggregator, layout

    def play(self, plan: RoundPlan, state: RunState, *, attempt: int, keep: Callable[[str, State], None]) -> Played:
        """Play a round from its start.

        Args:
            plan: The round.
            state: The run before it; stays as it is.
            attempt: How often the round was begun before.
            keep: Saves a refinement's unfinished work.

        Raises:
            WorkerLost: A worker was lost; the fleet can be repaired and the round begun anew.
        """
        played = Played(vector=state.vector, version=state.version, components=dict(plan.components))
        played.anchors[state.version] = state.vector
        self._meter_lost(plan, played)
        whole_round = self._folds(plan, played)
        groups = [plan.points] if whole_round and plan.points else [(point,) for point in plan.points]
        opened: set[int] = set()
        first = 0
        for number, points in enumerate(groups):
            last = number == len(groups) - 1
            segment = self._segment(plan, state, played, points=points, opened=opened, attempt=attempt, closes=last)
            self._meter_down(plan, segment, played)
            memories = {t.client: state.memories[t.client] for t in segment.turns if t.client in state.memories}
            result = self._fleet.play(segment, played.vector.numpy(), memories)
            self._take(plan, state, segment, result, played, index=first + len(points) - 1, last=last, keep=keep)
            first += len(points)
        return played

    # -- before a segment ----------------------------------------------------------------------------------------

    def _folds(self, plan: RoundPlan, played: Played) -> bool:
        """Whether the workers can go through the whole round among themselves."""
        method = self._experiment.method
        components: list[ServerComponent] = [c for _, c in method.server_components()]
        return (
            len(plan.points) > 1
            and self._fleet.folds
            and method.server_update.plain_mean
            and not any(c.needs_updates for c in components if c not in method.refinements)
            and not any(type(c).learn is not ServerComponent.learn for c in components)
            and all(r.when == "round_end" for r in method.refinements)
            and not any(term.sends for term in method.terms)
            and not any(point.idle or point.discard or not point.attend for point in plan.points[:-1])
            and all(s == FULL_MODEL for s in plan.context.submodels.values())
            and not self._probes(played, plan.context.round)
            and not any(self._broadcast(played, k) for k in plan.context.cohort)
            and all(job.client in plan.context.cohort for point in plan.points for job in point.start)
            and all(k in plan.context.cohort for point in plan.points[:-1] for k in point.attend)
        )

    def _segment(
        self,
        plan: RoundPlan,
        state: RunState,
        played: Played,
        *,
        points: Sequence[SyncPoint],
        opened: set[int],
        attempt: int,
        closes: bool,
    ) -> Segment:
        context = plan.context
        starting = [k for p in points for k in (job.client for job in p.start) if k not in opened]
        resuming = {job.client for p in points for job in p.start if job.resume}
        turns = []
        for client in dict.fromkeys(starting):
            held = state.held.get(client) if client in resuming else None
            turns.append(
                Turn(client=client, work=context.work[client], submodel=self._submodel(plan, client), held=held)
            )
            opened.add(client)
        sent = {job.client for p in points for job in p.start if not job.resume}
        broadcasts = {k: arrays for k in sorted(sent) if (arrays := self._broadcast(played, k))}
        return Segment(
            round=context.round,
            attempt=attempt,
            learning_rate=self._experiment.training.schedule(context.round),
            points=tuple(points),
            weights=self._fold_weights(plan, points[:-1], played),
            turns=tuple(turns),
            version=played.version,
            broadcasts=broadcasts,
            probes=self._probes(played, context.round),
            closes=closes,
            workers=self._fleet.place(self._loads(plan)),
            remembers=self._remembers(plan),
        )

    def _remembers(self, plan: RoundPlan) -> bool:
        """Whether clients have something to keep after the round."""
        last_seen: dict[int, bool] = {}
        for point in plan.points:
            last_seen |= {job.client: False for job in point.start}
            last_seen |= dict.fromkeys(point.attend, True)
        method, optimizer = self._experiment.method, self._experiment.training.optimizer
        kept = optimizer.keep == "persist" or any(term.stateful for term in method.terms)
        return kept or not all(last_seen.values())

    def _loads(self, plan: RoundPlan) -> dict[int, tuple[int, float]]:
        """How often each client synchronises, and its steps times its batch."""
        syncs = dict.fromkeys(plan.context.cohort, 0)
        for point in plan.points:
            for client in point.attend:
                if client in syncs:
                    syncs[client] += 1
        work = plan.context.work
        return {k: (syncs[k], float(work[k].steps * work[k].batch_size)) for k in syncs if k not in plan.lost}

    def _fold_weights(
        self, plan: RoundPlan, points: Sequence[SyncPoint], played: Played
    ) -> tuple[tuple[float, ...], ...]:
        known: dict[tuple[int, ...], tuple[float, ...]] = {}
        for index, point in enumerate(points):
            if point.attend not in known:
                updates = [self._announced(plan, k, played) for k in point.attend]
                place = self._place(plan, played, index=index, ends_round=False)
                weights, _ = self._aggregator.weigh(played.components["weighting"], updates, place)
                known[point.attend] = tuple(weights.tolist())
        return tuple(known[point.attend] for point in points)

    def _announced(self, plan: RoundPlan, client: int, played: Played) -> ClientUpdate:
        """What is known of an attendee before it has worked."""
        work = plan.context.work[client]
        return ClientUpdate(
            client=client,
            vector=None,
            layout=self._layout,
            submodel=FULL_MODEL,
            anchor_version=played.version,
            num_samples=work.num_samples,
            steps=0,
            effective_steps=0.0,
            learning_rate=self._experiment.training.schedule(plan.context.round),
            samples_since_anchor=work.num_samples,
            classes_since_anchor=work.classes,
        )

    def _meter_down(self, plan: RoundPlan, segment: Segment, played: Played) -> None:
        for point in segment.points:
            for job in point.start:
                if not job.resume:
                    arrays = segment.broadcasts.get(job.client, {})
                    self._meter_download(plan, job.client, broadcast=arrays, played=played)

    def _meter_download(self, plan: RoundPlan, client: int, *, broadcast: Arrays, played: Played) -> None:
        submodel = self._submodel(plan, client)
        played.ledger.model(client, "down", sizes(submodel.layout(self._layout)))
        if client not in played.masked:
            played.ledger.packed("down", submodel.index_bytes())
            played.masked.add(client)
        played.ledger.payload(client, "down", broadcast)

    def _meter_lost(self, plan: RoundPlan, played: Played) -> None:
        """What clients that drop out move."""
        for client, work in plan.lost.items():
            self._meter_download(plan, client, broadcast=self._broadcast(played, client), played=played)
            if work.sends:
                self._meter_upload(plan, client, played)

    def _meter_upload(self, plan: RoundPlan, client: int, played: Played) -> None:
        played.ledger.model(client, "up", sizes(self._submodel(plan, client).layout(self._layout)))

    # -- after a segment -----------------------------------------------------------------------------------------

    def _take(
        self,
        plan: RoundPlan,
        state: RunState,
        segment: Segment,
        result: SegmentResult,
        played: Played,
        *,
        index: int,
        last: bool,
        keep: Callable[[str, State], None],
    ) -> None:
        began = time.perf_counter()
        for point in segment.points:
            for client in point.attend:
                self._meter_upload(plan, client, played)
            played.attended.update(point.attend)
        folded = len(segment.points) - 1
        played.sync_points += folded
        played.version += folded
        if result.aggregate is not None:
            played.vector = torch.from_numpy(np.array(result.aggregate))
            played.anchors[played.version] = played.vector
        for client, reply in result.replies.items():
            played.ledger.payload(client, "up", reply.extras)
        point = segment.points[-1]
        if point.attend and not point.discard:
            self._aggregate(plan, state, point, result, played, index=index, last=last, keep=keep)
        played.totals.update(result.totals)
        played.memories.update(result.memories)
        played.server_time_s += time.perf_counter() - began

    def _aggregate(
        self,
        plan: RoundPlan,
        state: RunState,
        point: SyncPoint,
        result: SegmentResult,
        played: Played,
        *,
        index: int,
        last: bool,
        keep: Callable[[str, State], None],
    ) -> None:
        updates = []
        for client in sorted({*point.attend, *point.idle}):
            if client in result.replies:
                updates.append(self._update(plan, result.replies[client], result.vectors[client]))
            elif client in point.idle:
                idle = self._announced(plan, client, played)
                updates.append(replace(idle, vector=state.vector, anchor_version=state.version))
            else:
                updates.append(self._held_update(state, client))
        anchors = {**state.anchors, **played.anchors}
        place = replace(self._place(plan, played, index=index, ends_round=last), anchors=anchors)
        vector, weights, played.components = self._aggregator.sync(
            played.components, updates, place, keep=keep, resumed=state.partial
        )
        played.vector, played.version = vector, played.version + 1
        played.anchors[played.version] = vector
        played.sync_points += 1
        played.attendees = tuple(u.client for u in updates)
        played.weights = tuple(weights.tolist())
        played.updates = tuple(updates)

    def _update(self, plan: RoundPlan, reply: Reply, vector: np.ndarray) -> ClientUpdate:
        submodel = self._submodel(plan, reply.client)
        work = plan.context.work[reply.client]
        return _client_update(
            reply.client,
            reply.tally,
            torch.from_numpy(np.array(vector)),
            layout=submodel.layout(self._layout),
            submodel=submodel,
            num_samples=work.num_samples,
            learning_rate=self._experiment.training.schedule(plan.context.round),
            extras={name: torch.from_numpy(np.array(value)) for name, value in reply.extras.items()},
        )

    def _held_update(self, state: RunState, client: int) -> ClientUpdate:
        """The update of a client that worked in earlier rounds only."""
        if client not in state.held:
            raise InvariantError(f"client {client} attends a sync point, but it has neither a job nor earlier work")
        tally = state.held[client]
        memory = self._fleet.fetch(state.memories[client])
        return _client_update(
            client,
            tally,
            torch.from_numpy(np.array(memory["held"])),
            layout=self._layout,
            submodel=FULL_MODEL,
            num_samples=tally.samples,
            learning_rate=self._experiment.training.schedule(state.round),
            extras={},
        )

    # -- small things --------------------------------------------------------------------------------------------

    def _place(self, plan: RoundPlan, played: Played, *, index: int, ends_round: bool) -> SyncPlace:
        return SyncPlace(
            round=plan.context.round,
            index=index,
            ends_round=ends_round,
            vector=played.vector,
            anchors=played.anchors,
            learning_rate=self._experiment.training.schedule(plan.context.round),
            cohort=plan.context.cohort,
            classes=plan.context.classes,
        )

    def _submodel(self, plan: RoundPlan, client: int) -> SubModel:
        return plan.context.submodels.get(client, FULL_MODEL)

    def _probes(self, played: Played, round: int) -> tuple[Probe, ...]:
        found: dict[str, Probe] = {}
        for seam, component in self._experiment.method.server_components():
            for probe in component.probes(played.components[seam], round):
                if found.setdefault(probe.name, probe) != probe:
                    raise InvariantError(f"two different probes of a round are called {probe.name!r}")
        return tuple(found[name] for name in sorted(found))

    def _broadcast(self, played: Played, client: int) -> Arrays:
        arrays: Arrays = {}
        for seam, component in self._experiment.method.server_components():
            for name, value in component.broadcast(played.components[seam], client).items():
                if name in arrays:
                    raise InvariantError(f"two components broadcast something called {name!r}")
                arrays[name] = value.detach().cpu().numpy()
        return arrays


def _client_update(
    client: int,
    tally: Tally,
    vector: Tensor,
    *,
    layout: FlatLayout,
    submodel: SubModel,
    num_samples: int,
    learning_rate: float,
    extras: Mapping[str, Tensor],
) -> ClientUpdate:
    return ClientUpdate(
        client=client,
        vector=vector,
        layout=layout,
        submodel=submodel,
        anchor_version=tally.anchor_version,
        num_samples=num_samples,
        steps=tally.steps,
        effective_steps=tally.effective_steps,
        learning_rate=learning_rate,
        samples_since_anchor=tally.samples,
        classes_since_anchor=tally.classes,
        train_loss=tally.loss_sum / tally.steps if tally.steps else float("nan"),
        extras=dict(extras),
    )
