"""Planning a round: who takes part, how much each does, when they synchronise, and what that will cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from fedsweep.engine import clock
from fedsweep.engine.clock import TimingInputs
from fedsweep.engine.cost import CostModel, Missed
from fedsweep.engine.dropouts import Closing, LostWork, check_points, close_round
from fedsweep.engine.hubs import clock as hubs_clock
from fedsweep.engine.hubs.messages import check_merges, of_jobs, of_merges
from fedsweep.engine.lazy_clients import LazyClients
from fedsweep.engine.ledger import Size
from fedsweep.engine.per_client import present_counts
from fedsweep.engine.round_codecs import ServerMessages
from fedsweep.engine.state import RunState
from fedsweep.errors import InvariantError
from fedsweep.experiment.checks import nobody_drops_out
from fedsweep.experiment.clients import ClientColumns
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask, wrong
from fedsweep.records import ClientWork, RoundContext, State, SyncPoint
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, Direction, SubModel
from fedsweep.world.availability import Availability
from fedsweep.world.budgets import RunSpending
from fedsweep.world.devices import fails


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """A round before it is played.

    Attributes:
        context: What planning knew; cohort, work and sub-models are final.
        points: The sync points.
        components: The components' states after planning.
        clock: Virtual seconds at the round's end; None without devices.
        ready: When clients whose work goes on over that end will be done.
        hub_times: Virtual seconds at which hubs but the server will have their models.
        values: Scalars that models will move, both ways; payloads come on top.
        num_bytes: Bytes that models and masks will move, both ways; payloads come on top.
        index_bytes: Of these the sub-models' masks, down: with each client's first download.
        timing_inputs: By which its work was timed: with the measurements, as far as planning knows them, and the
            server's messages before the round.
        lost: Members of the cohort that drop out; the sync points are without them.
    """

    context: RoundContext
    points: tuple[SyncPoint, ...]
    components: Mapping[str, State]
    clock: float | None
    values: int
    num_bytes: int
    index_bytes: int
    timing_inputs: TimingInputs
    lost: Mapping[int, LostWork] = field(default_factory=dict)
    ready: Mapping[int, float] = field(default_factory=dict)
    hub_times: Mapping[int, float] = field(default_factory=dict)

    @property
    def folds(self) -> bool:
        """Tell whether workers could go through the sync points among themselves, as far as the plan has a say.

        They average what they hold: whole models of the cohort's members, at each point of some, and have places for as
        many as a selection is asked for, which may choose more.
        """
        cohort, inner = set(self.context.cohort), self.points[:-1]
        return (
            len(self.points) > 1
            and len(cohort) <= self.context.full_cohort_size
            and not any(point.idle or point.discard or point.merges or not point.attend for point in inner)
            and all(submodel == FULL_MODEL for submodel in self.context.submodels.values())
            and all(job.client in cohort for point in self.points for job in point.start)
            and all(client in cohort for point in inner for client in point.attend)
        )

    def submodel(self, client: int) -> SubModel:
        """Return the part that a client trains; who goes on with earlier work has the whole model."""
        return self.context.submodels.get(client, FULL_MODEL)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A planned round on the virtual clock.

    Attributes:
        end: Virtual seconds at its end; None without devices.
        ready: When clients whose work goes on over that end will be done.
        lost: Members of the cohort that drop out.
        points: The sync points without these; None: as planned.
        hub_times: See :class:`RoundPlan`.
    """

    end: float | None = None
    ready: Mapping[int, float] = field(default_factory=dict)
    lost: Mapping[int, LostWork] = field(default_factory=dict)
    points: tuple[SyncPoint, ...] | None = None
    hub_times: Mapping[int, float] = field(default_factory=dict)


class Planner:
    """Plans rounds from the run's state alone.

    Args:
        experiment: The experiment.
        costs: The sub-models' costs.
    """

    def __init__(self, experiment: Experiment, costs: CostModel) -> None:
        self._experiment, self._costs, stop = experiment, costs, experiment.training.stop
        self._spending = RunSpending(most_bytes=stop.total_bytes, most_s=stop.sim_time_s)
        self._everybody, self._asks_singly = range(len(experiment.world.profiles)), experiment.world.asks_singly
        self._most_selected = experiment.world.stragglers.num_selected(experiment.training.cohort_size)
        self._clients = ClientColumns.of(() if experiment.world.is_drawn else experiment.world.profiles)

    def plan(self, state: RunState) -> RoundPlan:
        """Return the next round.

        Raises:
            InvariantError: A component broke a promise (a cohort member that is not there, say).
            ConfigError: The scenario's policy for stragglers can't judge the method's rounds.
        """
        components = dict(state.components)
        context, components["selection"] = self._cohort(state)
        method, when = self._experiment.method, f"in round {context.round}"
        context = replace(context, stream=stream(self._experiment.seed, "submodels", context.round))
        parts, components["submodels"] = ask(method.submodels, "assign", components["submodels"], context, when=when)
        context = replace(context, submodels=parts)
        inputs = TimingInputs(
            costs=self._costs,
            seed=self._experiment.seed,
            probes=method.probes(components, context.round) if method.having["probes"] else (),
            sends_at_once=method.pacing.sends_at_once,
            server_messages=ServerMessages.of(state, self._costs) if self._costs.encodes_down else None,
        )
        context = replace(context, stream=stream(self._experiment.seed, "pacing", context.round))
        if state.clock is not None:
            # Before pacing, which may decide by them who is waited for.
            context = replace(context, durations=clock.durations(context, inputs, in_full=not method.pacing.has_hubs))
        points: tuple[SyncPoint, ...] = ()
        if context.cohort or context.in_flight:
            points, components["pacing"] = ask(method.pacing, "plan", components["pacing"], context, when=when)
        if method.pacing.draws_candidates:
            context = _of_those_who_work(context, points)
        self._check(points, context)
        timing = Timing() if state.clock is None else self._timed(points, context, inputs)
        points, lost = points if timing.points is None else timing.points, timing.lost
        models, index_bytes = self._traffic(points, context, lost=lost, server_messages=inputs.server_messages)
        return RoundPlan(
            context=context,
            points=points,
            components=components,
            clock=timing.end,
            values=models.values,
            num_bytes=models.num_bytes + index_bytes,
            index_bytes=index_bytes,
            lost=lost,
            ready=timing.ready,
            hub_times=timing.hub_times,
            timing_inputs=inputs,
        )

    def with_cohort(self, state: RunState) -> RoundContext:
        """Return the next round as far as it is known once its cohort is chosen: who works, and how much."""
        return self._cohort(state)[0]

    def _cohort(self, state: RunState) -> tuple[RoundContext, State]:
        experiment, round = self._experiment, state.round + 1
        world, method = experiment.world, experiment.method
        classes, chooser = experiment.classes(round), state.components["selection"]
        samples, present, available = self._presence(round, classes, state)
        context = RoundContext(
            round=round,
            available=available,
            present=present,
            classes=classes,
            cohort_size=min(self._most_selected, len(available)),
            full_cohort_size=self._most_selected,
            profiles=world.profiles,
            in_flight=tuple(sorted(state.held)),
            clock=state.clock or 0.0,
            ready=state.ready,
            num_values=self._costs.message_values,
            budgets=world.budgets,
            topology=world.topology,
            hub_times=state.hub_times,
            spending=replace(self._spending, num_bytes=state.total_bytes, seconds=state.clock or 0.0),
            model=self._costs.model,
            stream=stream(experiment.seed, "selection", round),
        )
        cohort: tuple[int, ...] = ()
        if available:
            cohort, chooser = ask(method.selection, "choose", chooser, context, when=f"in round {round}")
        there = set(available) if isinstance(available, tuple) else available
        if not all(client in there for client in cohort) or len(set(cohort)) < len(cohort):
            raise InvariantError(f"selection must give available clients, each once, but gave {cohort}")
        # Ascending from here on, for the order of all sums; `drawn` has the order in which they were chosen.
        work = {k: self._work(k, int(samples[k]), classes.get(k)) for k in sorted(cohort)}
        return replace(context, cohort=tuple(work), drawn=cohort, work=work), chooser

    def _presence(
        self, round: int, classes: Mapping[int, tuple[int, ...]], state: RunState
    ) -> tuple[Sequence[int] | np.ndarray, Sequence[int], Sequence[int]]:
        """Return each client's number of samples in a round, who is there, and who of these has data."""
        world, seed = self._experiment.world, self._experiment.seed
        if self._asks_singly:
            lazy = LazyClients(world=world, seed=seed, round=round, classes=classes, history=state.accuracies)
            return lazy.samples, self._everybody, lazy.available
        samples = self._clients.num_samples
        if classes:
            samples = present_counts(self._clients.label_counts_NC, classes).sum(axis=1)
        present = self._everybody if world.availability is None else self._present(world.availability, state, round)
        # Under drift a client may have no sample of its classes.
        have_all = present is self._everybody and bool(np.all(samples))
        return samples, present, present if have_all else tuple(k for k in present if samples[k])

    def _present(self, availability: Availability, state: RunState, round: int) -> tuple[int, ...]:
        world, seed = self._experiment.world, self._experiment.seed
        present = availability.draw(
            round,
            capabilities=self._clients.capabilities,
            history=dict(state.accuracies),
            stream_for=lambda k: stream(seed, "availability", round, k),
        )
        if not isinstance(present, tuple) or not set(present) <= set(range(len(world.profiles))):
            must = f"a tuple of client ids from 0 to {len(world.profiles) - 1}"
            raise wrong(availability, "draw", must=must, answer=present, when=f"in round {round}")
        return present

    def _work(self, client: int, samples: int, classes: tuple[int, ...] | None) -> ClientWork:
        steps, batch, whole = self._experiment.local_steps(client, samples)
        return ClientWork(steps=steps, batch_size=batch, whole_batches=whole, num_samples=samples, classes=classes)

    # -- cost ----------------------------------------------------------------------------------------------------

    def _timed(self, points: tuple[SyncPoint, ...], context: RoundContext, inputs: TimingInputs) -> Timing:
        if self._experiment.method.pacing.has_hubs:
            end, hub_times = hubs_clock.round_end(points, context, inputs)
            return Timing(end=end, hub_times=hub_times)
        end, ready = clock.round_end(points, context, inputs)
        closing = self._closing(points, context, inputs)
        if closing is None:
            return Timing(end=end, ready=ready)
        points, end, duration_s = self._closed(points, context, closing, inputs)
        lost = {client: dropout.work_by(duration_s) for client, dropout in closing.lost.items()}
        return Timing(end=end, ready=ready, lost=lost, points=points)

    def _closing(self, points: tuple[SyncPoint, ...], context: RoundContext, inputs: TimingInputs) -> Closing | None:
        """Find who drops out of the round, and when it ends; None where everybody is always waited for.

        Members of the cohort without a job get nothing and send nothing, so they can't be lost.
        """
        world, seed = self._experiment.world, self._experiment.seed
        working = {job.client for point, _ in with_repeats(points) for job in point.start}
        devices = {
            k: device for k in context.cohort if k in working and (device := context.profiles[k].device) is not None
        }
        if not devices or nobody_drops_out(world.stragglers, [d.drop_probability for d in devices.values()]):
            return None
        return close_round(
            world.stragglers,
            {k: clock.whole_round(k, context, inputs) for k in devices},
            context.work,
            steps_s={k: clock.steps_s(k, context, inputs) for k in devices},
            fails=lambda k: fails(devices[k], seed=seed, round=context.round, client=k),
            # Not the cohort's size: a policy may have more chosen than it wants.
            wanted=min(self._experiment.training.cohort_size, len(context.available)),
        )

    def _closed(
        self, points: tuple[SyncPoint, ...], context: RoundContext, closing: Closing, inputs: TimingInputs
    ) -> tuple[tuple[SyncPoint, ...], float, float]:
        """Return the sync points without those who drop out, the clock at the round's end, and how long it lasts."""
        check_points(self._experiment.world.stragglers, self._experiment.method, points)
        left = closing.kept(points)
        if len(points) > 1 and left:
            # Whoever is alive is waited for.
            end = clock.round_end(left, context, inputs)[0]
            return left, end, end - context.clock
        return left, context.clock + closing.duration_s, closing.duration_s

    def _traffic(
        self,
        points: tuple[SyncPoint, ...],
        context: RoundContext,
        *,
        lost: Mapping[int, LostWork],
        server_messages: ServerMessages | None = None,
    ) -> tuple[Size, int]:
        """Return models' messages, and the bytes of masks."""
        messages: Counter[tuple[int, Direction, Missed]] = Counter()
        for client, work in lost.items():
            messages.update({(client, "down", ()): 1, (client, "up", ()): int(work.sends)})
        sent, masks = set(lost), 0
        for point, times in with_repeats(points):
            if self._experiment.method.pacing.has_hubs:
                for node, direction, _ in (*of_jobs(point), *of_merges(point)):
                    messages[node, direction, ()] += times
                    masks += times * context.submodels.get(node, FULL_MODEL).index_bytes()
                continue
            down = [job.client for job in point.start if not job.resume]
            sent.update(down)
            messages.update(dict.fromkeys(((client, "down", ()) for client in down), times))
            messages.update(dict.fromkeys(((client, "up", ()) for client in point.attend), times))
        if server_messages is not None:
            sent_down = server_messages.downloads(points, lost).items()
            messages = Counter({key: times for key, times in messages.items() if key[1] == "up"})
            messages.update((client, "down", missed) for client, sent_to in sent_down for missed in sent_to)
        values = num_bytes = 0
        for (client, direction, missed), times in messages.items():
            sizes = self._costs.sizes(context.submodels.get(client, FULL_MODEL), direction, missed).values()
            values += times * sum(size.values for size in sizes)
            num_bytes += times * sum(size.num_bytes for size in sizes)
        return Size(values, num_bytes), masks + sum(context.submodels.get(k, FULL_MODEL).index_bytes() for k in sent)

    def _check(self, points: tuple[SyncPoint, ...], context: RoundContext) -> None:
        steps: dict[int, int] = {}
        out: set[int] = set()
        unsent = set(context.in_flight)
        for point, times in with_repeats(points):
            # What a second one in a row finds, all others after it find, too.
            for _ in range(min(times, 2)):
                for job in point.start:
                    if job.client not in context.work:
                        raise InvariantError(f"pacing gave client {job.client} a job, but it is not of the cohort")
                    if job.client in out:
                        raise InvariantError(f"pacing gave client {job.client} a job while it is at another")
                    if job.resume and job.client not in steps and job.client not in context.in_flight:
                        raise InvariantError(
                            f"pacing lets client {job.client} resume, but it has nothing to go on from"
                        )
                    steps[job.client] = steps.get(job.client, 0) + job.steps
                    out.add(job.client)
                absent = [client for client in point.attend if client not in out and client not in unsent]
                if absent:
                    raise InvariantError(
                        f"client {absent[0]} attends a sync point, but it has neither a job nor earlier work"
                    )
                out, unsent = out - set(point.attend), unsent - set(point.attend)
            if point.merges:
                check_merges(point)
            for job in point.start:
                steps[job.client] += max(0, times - 2) * job.steps
        for client, taken in steps.items():
            if taken > context.work[client].steps:
                raise InvariantError(
                    f"pacing gave client {client} {taken} local steps, but it has {context.work[client].steps}"
                )


def _of_those_who_work(context: RoundContext, points: tuple[SyncPoint, ...]) -> RoundContext:
    """Return the round without those of its cohort that got no job."""
    working = {job.client for point in points for job in point.start}
    return replace(
        context,
        cohort=tuple(k for k in context.cohort if k in working),
        drawn=tuple(k for k in context.drawn if k in working),
        work={k: work for k, work in context.work.items() if k in working},
        submodels={k: part for k, part in context.submodels.items() if k in working},
        durations={k: seconds for k, seconds in context.durations.items() if k in working},
    )


def with_repeats(points: tuple[SyncPoint, ...]) -> list[tuple[SyncPoint, int]]:
    """Return the sync points with how often each comes in a row: hundreds of repeats cost as one.

    Repeats are the same object, as pacing makes them; points that are merely equal are not joined.
    """
    runs = [list(run) for _, run in groupby(points, key=id)]
    return [(run[0], len(run)) for run in runs]
