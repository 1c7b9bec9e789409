"""A round as it happens: what is sent, what the clients train, what the server makes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from fedsweep.client.messages import ClientTask, Handle, Progress, Reply, RoundTotals, Segment, SegmentReply
from fedsweep.components.base import Published
from fedsweep.components.probes import Probe
from fedsweep.engine.aggregation import client_update, held_update
from fedsweep.engine.cost import Charges
from fedsweep.engine.plan import RoundPlan
from fedsweep.engine.round_codecs import RoundCodecs
from fedsweep.engine.round_tools import RoundTools
from fedsweep.engine.state import HubModel, RunState
from fedsweep.errors import InvariantError
from fedsweep.guard import ask
from fedsweep.records import ClientUpdate, RoundRecord, State, SyncContext, SyncPoint
from fedsweep.submodel import FULL_MODEL
from fedsweep.world.availability import HISTORY_EPOCHS


class Round:
    """One round of a run, from its plan to what the next one follows from.

    It begins where the run's state is, which it never changes: a round that loses a worker is thrown away, and another
    one begun from the same plan and state comes to the same bits.

    Args:
        plan: The round.
        state: The run's state before it.
        tools: What it is played with.
        attempt: How often it was begun before.

    Attributes:
        learning_rate: The clients'.
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
        codecs: What goes through codecs.
        server_time_s: Seconds that the server spent aggregating.
        server_flops: FLOPs of what components computed there; in round 1 also before it.
        attended: Clients whose work reached the server, or in a ``HubRound`` another hub.
        models: At other hubs than the server, by hub; see :class:`~fedsweep.engine.hubs.round.HubRound`.
        figures: Further columns of the round.

    Class attributes:
        charges: What charges its messages.
    """

    charges: ClassVar[type[Charges]] = Charges
    models: Mapping[int, HubModel] = {}
    figures: Mapping[str, float] = {}

    def __init__(self, plan: RoundPlan, state: RunState, tools: RoundTools, attempt: int = 0) -> None:
        self.plan, self.state, self._tools, self._attempt = plan, state, tools, attempt
        self._method, self._fleet, self._costs = tools.experiment.method, tools.fleet, tools.costs
        self.learning_rate = tools.experiment.training.schedule(plan.context.round)
        self.vector, self.version = state.vector, state.version
        self.components: dict[str, State] = dict(plan.components)  # a copy: another round may begin from the same plan
        messages = plan.timing_inputs.server_messages
        downloads = None if messages is None else messages.downloads(plan.points, plan.lost)
        self._charges = self.charges(self._costs, plan.submodel, state.published, downloads)
        self.ledger = self._charges.ledger
        self.attendees: tuple[int, ...] = ()
        self.weights: tuple[float, ...] = ()
        self.updates: tuple[ClientUpdate, ...] = ()
        self.totals: dict[int, RoundTotals] = {}
        self.memories: dict[int, Handle] = {}
        self.anchors: dict[int, Tensor] = {state.version: state.vector}
        self.codecs = RoundCodecs(self._costs, tools.experiment.seed, state)
        self.sync_points, self.server_time_s = 0, 0.0
        self.server_flops: list[float] = [state.setup_server_flops]
        self.attended: set[int] = set()
        self._passed = 0  # sync points gone through
        self._opened: set[int] = set()  # clients whose part in the round has begun

    def play(self) -> Round:
        """Send, train, aggregate, segment by segment; the round itself, for a chain.

        Raises:
            WorkerLost: A worker was lost; the fleet can be repaired and the round begun anew.
        """
        if self.plan.lost:
            # No segment has a task of theirs, so nothing else would count what they moved.
            self._charge_lost()
        points_of_round = self.plan.points
        folds = len(points_of_round) > 1 and self._folds()
        for points in [points_of_round] if folds else [(point,) for point in points_of_round]:
            # Send: what each client that starts from the server's model is given.
            segment = self._segment(points)
            for job in (job for point in points for job in point.start if not job.resume):
                self._charges.download(job.client, segment.published)
            # Train: on the workers, which also aggregate among themselves at all points but the last.
            remembered = self.state.memories
            memories = {task.client: remembered[task.client] for task in segment.tasks if task.client in remembered}
            reply = self._fleet.play(segment, self.vector, memories)
            self._passed += len(points)
            # Aggregate: what came back, on the server.
            began = time.perf_counter()
            answers = self._receive(segment, reply)
            if (points[-1].attend or points[-1].merges) and not points[-1].discard:
                self._aggregate(points[-1], answers)
            self.server_time_s += time.perf_counter() - began
        return self

    def state_after(self, record: RoundRecord) -> RunState:
        """Return the run's state after the round, with its row."""
        before = self.state
        unfinished = {k: t for k, t in before.held.items() if k not in self.attended and k not in self.totals}
        unfinished |= {k: total.progress for k, total in self.totals.items() if total.progress is not None}
        accuracies = dict(before.accuracies)
        for client, total in self.totals.items():
            if total.pass_accuracies:
                accuracies[client] = (*accuracies.get(client, ()), *total.pass_accuracies)[-HISTORY_EPOCHS:]
        # Of earlier models only those are kept that somebody's unfinished work started from.
        versions = {progress.anchor_version for progress in unfinished.values()}
        anchors = {**before.anchors, **self.anchors}
        return replace(
            before,
            round=self.plan.context.round,
            version=self.version,
            vector=self.vector,
            components=self.components,
            memories=self.remembered,
            held=dict(sorted(unfinished.items())),
            anchors={version: anchors[version] for version in sorted(versions) if version in anchors},
            accuracies=dict(sorted(accuracies.items())),
            clock=self.plan.clock,
            ready=self.plan.ready,
            total_bytes=before.total_bytes + self.ledger.total_bytes,
            setup_flops=0,
            setup_server_flops=0.0,
            partial={},
            models=dict(sorted(self.models.items())),
            hub_times=self.plan.hub_times,
            published=dict(sorted({**before.published, **self._charges.published}.items())),
            left=self.codecs.residual,
            sent_contents=self.codecs.sent_contents,
            **(
                {}
                if (messages := self.plan.timing_inputs.server_messages) is None
                else messages.after(self.plan.points)
            ),
            wall_time_s=before.wall_time_s + record.wall_time_s + record.eval_time_s,
            records=(*before.records, record),
        )

    @property
    def remembered(self) -> Mapping[int, Handle]:
        """Clients' memories after the round."""
        # Work that was held, and is now delivered, is nobody's any more.
        gone = self.totals.keys() | (set() if self._tools.clients_remember else self.attended)
        return {k: m for k, m in self.state.memories.items() if k not in gone} | self.memories

    def opening(self, clients: int, *, steps: int) -> Segment:
        """Return the first jobs of so many clients, of that many steps at most, for one worker to try lanes with.

        Nothing is played or counted, but the round counts these clients as begun: another has to be made to play it.
        """
        point = next(point for point in self.plan.points if point.start)
        jobs = tuple(replace(job, steps=min(job.steps, steps)) for job in point.start[:clients])
        attend = tuple(sorted(job.client for job in jobs))
        return replace(self._segment((replace(point, start=jobs, attend=attend, idle=()),)), probes=(), workers={})

    # -- send ----------------------------------------------------------------------------------------------------

    def _folds(self) -> bool:
        """Tell whether the round is one segment ("folded"): workers play all of its sync points among themselves.

        That saves a way to the server and back at each. It is allowed where no server component could see a difference:
        the method averages and no more, everybody trains the whole model, nobody is measured in this round, messages
        are as long as was planned, and the fleet's workers have an exchange.
        """
        # The fleet last: on Ray its answer waits until the actors are there. What is decoded as a sum the server adds.
        return (
            self._method.folds
            and not (self.codecs.up_sums or self._costs.up_varies)
            and self.plan.folds
            and not self._probes()
            and self._fleet.folds
        )

    def _probes(self) -> tuple[Probe, ...]:
        """Return this round's measurements, as components see it by now."""
        return self._method.probes(self.components, self.plan.context.round)

    def _segment(self, points: tuple[SyncPoint, ...]) -> Segment:
        context = self.plan.context
        # A client has one task a round, in the segment where it begins; in later ones its worker knows it.
        jobs = [job for point in points for job in point.start]
        starting = [k for k in dict.fromkeys(job.client for job in jobs) if k not in self._opened]
        resuming = {job.client for job in jobs if job.resume}
        self._opened.update(starting)
        return Segment(
            round=context.round,
            attempt=self._attempt,
            learning_rate=self.learning_rate,
            points=points,
            weights=tuple(self._inner_weights(points[:-1])) if len(points) > 1 else (),
            tasks=tuple(
                ClientTask(
                    client=k,
                    work=context.work[k],
                    submodel=self.plan.submodel(k),
                    progress=self.state.held.get(k) if k in resuming else None,
                )
                for k in starting
            ),
            version=self.version,
            published=self._published() if self._method.having["publish"] else {},
            probes=self._probes() if self._method.having["probes"] else (),
            closes=self._passed + len(points) == len(self.plan.points),
            workers=self._workers,
            remembers=self._remembers,
            stepping=self.state.stepping,
            residual=self.codecs.residual,
            codecs=self._tools.codecs,
        )

    def _inner_weights(self, points: tuple[SyncPoint, ...]) -> Iterator[tuple[float, ...]]:
        """Yield the attendees' weights at the points of a folded round, which depend on who attends alone."""
        weights_of: dict[tuple[int, ...], tuple[float, ...]] = {}
        for index, point in enumerate(points):
            # Two-speed rounds have hundreds of points with two sets of attendees: weights are found once for each.
            if point.attend not in weights_of:
                # Of clients that have yet to work: an inner point's weights don't depend on models, see `folds`.
                updates = [self._update(k, point, self._unworked(k, self.vector, self.version)) for k in point.attend]
                sync = self._sync(index, ends_round=False)
                weights, _ = self._tools.aggregator.weigh(self.components["weighting"], updates, sync)
                weights_of[point.attend] = tuple(weights.tolist())
            yield weights_of[point.attend]

    @cached_property
    def _remembers(self) -> bool:
        """Tell whether clients have something to keep after the round."""
        last_seen: dict[int, bool] = {}
        for point in self.plan.points:
            last_seen |= {job.client: False for job in point.start}
            last_seen |= dict.fromkeys(point.attend, True)
        return self._tools.clients_remember or not all(last_seen.values())

    # Once a round: from segment to segment a client's work lies where it began.
    @cached_property
    def _workers(self) -> dict[int, int]:
        """Which worker each client is on, by how often it synchronises and its steps times its batch."""
        work = self.plan.context.work
        syncs = {client: 0 for client in self.plan.context.cohort if client not in self.plan.lost}
        for point in self.plan.points:
            for client in syncs.keys() & set(point.attend):
                syncs[client] += 1
        return self._fleet.place({k: (n, float(work[k].steps * work[k].batch_size)) for k, n in syncs.items()})

    def _published(self) -> dict[str, Published]:
        published: dict[str, Published] = {}
        for seam, component in self._method.having["publish"]:
            when = f"in round {self.plan.context.round}"
            contents = ask(component, "publish", self.components[seam], when=when)
            if twice := published.keys() & contents.keys():
                raise InvariantError(f"two components publish something called {min(twice)!r}")
            published |= contents
        return self.codecs.sent(published, self._passed) if self.codecs.down_encodes else published

    def _charge_lost(self) -> None:
        """Charge clients that drop out; their work is not done, as nobody would see it: cards say what they send."""
        published, lost = self._published() if self.plan.lost else {}, self.plan.lost
        seen = self.state.taken_part if lost and self._tools.card_traffic.goes_up else set()
        for client, work in self.plan.lost.items():
            self._charges.download(client, published)
            self._charges.published.pop(client, None)  # it forgets the round
            if work.sends:
                self._charges.upload(client)
                self.ledger.message(client, "up", {"beside": self._tools.card_traffic.up_from(client, self.plan, seen)})

    # -- aggregate -----------------------------------------------------------------------------------------------

    def _receive(self, segment: Segment, reply: SegmentReply) -> dict[int, Reply]:
        """Charge and keep what came back; returns the attendees' answers by client."""
        if reply.notes:
            self._tools.note(reply.notes)
        answers = {answer.client: answer for answer in reply.replies}
        for point in segment.points[:-1]:
            for client in point.attend:
                self._charges.upload(client)
            self.attended.update(point.attend)
        for client in segment.points[-1].attend:
            self._charges.upload(client, answers.get(client))
        self.attended.update(segment.points[-1].attend)
        # All points but the last were aggregated by the workers; each made a version of the model.
        folded = len(segment.points) - 1
        self.sync_points += folded
        self.version += folded
        if reply.aggregate is not None:
            self.vector = self.anchors[self.version] = reply.aggregate
            self.codecs.residual = reply.residual
            self.anchors.update(reply.anchors)
        self.totals.update(reply.totals)
        self.memories.update(reply.memories)
        return answers

    def _aggregate(self, point: SyncPoint, answers: Mapping[int, Reply]) -> None:
        # Ascending by client: floating-point sums depend on their order, and who answers first is chance.
        sync = self._sync(self._passed - 1, ends_round=self._passed == len(self.plan.points))
        move = self._summed(point, answers, sync) if self.codecs.up_sums else None
        updates = [self._update(k, point, answers.get(k), move) for k in sorted({*point.attend, *point.idle})]
        self.sync_points += bool(point.attend)
        self._take_in(point, updates, sync)
        # Last, so that each component learns of the model that the next round starts from.
        if self._method.having["learn"]:
            after = replace(sync, vector=self.vector)
            self.components = self._tools.aggregator.learned(self.components, updates, after)

    def _take_in(self, point: SyncPoint, updates: list[ClientUpdate], sync: SyncContext) -> None:
        """Aggregate at the server."""
        self.vector, weights, self.components = self._tools.aggregator.aggregate(
            self.components,
            updates,
            sync,
            keep=self._keep,
            resumed=self.state.partial,
            sent=self._sent if self.codecs.down_encodes else None,
        )
        self.version += 1
        # Kept by version, since an update is a move from the model that its client started from, not from the newest.
        self.anchors[self.version] = self.vector
        self.attendees = tuple(u.client for u in updates)
        self.weights = tuple(weights.tolist())
        self.updates = tuple(updates)

    def _update(self, client: int, point: SyncPoint, reply: Reply | None, move: Tensor | None = None) -> ClientUpdate:
        """Make a client's update from what it sent, what it was sent where it is idle, or what it kept."""
        if reply is None and client not in point.idle:
            # Its last steps were in the round before, so the rate is that one's.
            rate = self._tools.experiment.training.schedule(self.state.round)
            return held_update(client, self.state, self._fleet.fetch, learning_rate=rate, layout=self._costs.layout)
        submodel = self.plan.submodel(client) if reply is not None else FULL_MODEL
        # Whoever is idle stands for the model that the round began with, as it would still have it.
        reply = reply or self._unworked(client, self.state.vector, self.state.version)
        if reply.encoded is not None:
            anchor = {**self.state.anchors, **self.anchors}[reply.progress.anchor_version]
            reply = self.codecs.received(reply, submodel, anchor, move)
        return client_update(
            reply,
            learning_rate=self.learning_rate,
            layout=self._costs.layout,
            submodel=submodel,
        )

    def _sent(self, vector: Tensor) -> Tensor:
        return self.codecs.sent_model(vector, self.vector, self._passed - 1)

    def _summed(self, point: SyncPoint, answers: Mapping[int, Reply], sync: SyncContext) -> Tensor:
        """Return the move that the mean of what clients sent says [P], where a codec decodes that."""
        # By weights that need no models.
        models = {k: replace(reply, vector=self.vector, encoded=None) for k, reply in answers.items()}
        updates = [self._update(k, point, models.get(k)) for k in sorted({*point.attend, *point.idle})]
        weights, _ = self._tools.aggregator.weigh(self.components["weighting"], updates, sync)
        share = {update.client: weight for update, weight in zip(updates, weights.tolist(), strict=True)}
        return self.codecs.received_sum(list(answers.values()), [share[k] for k in answers])

    def _unworked(self, client: int, vector: Tensor, version: int) -> Reply:
        """Return the answer of a client of the cohort that has not taken a step since it had this model [V]."""
        work = self.plan.context.work[client]
        progress = Progress(anchor_version=version, samples=work.num_samples, classes=work.classes)
        return Reply(client=client, vector=vector, progress=progress)

    def _sync(self, index: int, *, ends_round: bool) -> SyncContext:
        """Return a sync point of the round, by its number."""
        context = self.plan.context
        return SyncContext(
            round=context.round,
            index=index,
            ends_round=ends_round,
            version=self.version,
            vector=self.vector,
            anchors={**self.state.anchors, **self.anchors},
            learning_rate=self.learning_rate,
            cohort=context.cohort,
            classes=context.classes,
            count_flops=self.server_flops.append,
            **self._tools.of_syncs,
        )

    def _keep(self, call: str, tree: State) -> None:
        """Save a refinement's unfinished work with the state that the round began from: the rest is done anew."""
        self._tools.keep(replace(self.state, partial={**self.state.partial, call: tree}))
