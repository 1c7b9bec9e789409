"""Planning a round: who takes part, how much each does, when they synchronise, and what that will cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from fedsweep.engine.cost import CostModel
from fedsweep.engine.dropouts import Closing, LostWork, check_points, close_round
from fedsweep.engine.state import RunState
from fedsweep.errors import InvariantError
from fedsweep.experiment.checks import nobody_drops_out
from fedsweep.experiment.experiment import Experiment
from fedsweep.records import ClientWork, RoundContext, State, SyncPoint
from fedsweep.streams import Stream, stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.trees import FlatLayout
from fedsweep.world.devices import ClientTime, client_time, fails, jittered
from fedsweep.world.drift import round_classes


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """A round before it is played.

    Attributes:
        context: What planning knew; cohort, work and sub-models are final.
        points: The sync points.
        components: The components' states after planning.
        clock: Virtual seconds at the round's end; None without devices.
        values: Scalars that models will move, both ways; payloads come on top.
        index_bytes: Bytes of sub-models' masks, down: with each client's first download.
        lost: Members of the cohort that drop out; the sync points are without them.
    """

    context: RoundContext
    points: tuple[SyncPoint, ...]
    components: Mapping[str, State]
    clock: float | None
    values: int
    index_bytes: int
    lost: Mapping[int, LostWork] = field(default_factory=dict)


class Planner:
    """Plans rounds from the run's state alone.

    Args:
        experiment: The experiment.
        layout: How the full model lies in its vector.
        costs: The sub-models' costs.
    """

    def __init__(self, experiment: Experiment, layout: FlatLayout, costs: CostModel) -> None:
        self._experiment, self._layout, self._costs = experiment, layout, costs
        self._labels = experiment.world.data.labels

    def plan(self, state: RunState) -> RoundPlan:
        """The next round.

        Raises:
            InvariantError: A component broke a promise (a cohort member that is not there, say).
            ConfigError: The scenario's policy for stragglers can't judge the method's rounds.
        """
        components = dict(state.components)
        context = self._cohort(state, components)
        method = self._experiment.method
        submodels, components["submodels"] = method.submodels.assign(
            components["submodels"], replace(context, stream=self._seam("submodels", context.round))
        )
        context = replace(context, submodels=submodels)
        durations = self._durations(context)
        context = replace(context, durations=durations, stream=self._seam("pacing", context.round))
        points: tuple[SyncPoint, ...] = ()
        if context.cohort or context.in_flight:
            points, components["pacing"] = method.pacing.plan(components["pacing"], context)
        self._check(points, context)
        clock = self._clock(state, points, context)
        closing = self._closing(points, context)
        if closing is not None:
            points, clock = self._closed(state, points, context, closing=closing)
        lost = {} if closing is None else closing.lost
        values, index_bytes = self._traffic(points, context, lost=lost)
        return RoundPlan(
            context=context,
            points=points,
            components=components,
            clock=clock,
            values=values,
            index_bytes=index_bytes,
            lost=lost,
        )

    def _seam(self, name: str, round: int) -> Stream:
        return stream(self._experiment.seed, name, round)

    def _cohort(self, state: RunState, components: dict[str, State]) -> RoundContext:
        experiment, round = self._experiment, state.round + 1
        world, method = experiment.world, experiment.method
        classes = self.classes(round)
        samples = self._samples(classes)
        present = self._present(state, round)
        available = tuple(k for k in present if samples[k])
        context = RoundContext(
            round=round,
            available=available,
            present=present,
            classes=classes,
            cohort_size=min(world.stragglers.num_selected(experiment.training.cohort_size), len(available)),
            profiles=world.profiles,
            in_flight=tuple(sorted(state.held)),
            clock=state.clock or 0.0,
            num_values=self._layout.num_values,
            budgets=world.budgets,
            params=self._layout.params(state.vector),
            model=self._costs.model,
            stream=self._seam("selection", round),
        )
        cohort: tuple[int, ...] = ()
        if available:
            cohort, components["selection"] = method.selection.choose(components["selection"], context)
        if not set(cohort) <= set(available) or list(cohort) != sorted(set(cohort)):
            raise InvariantError(f"selection must give available clients in ascending order, but gave {cohort}")
        work = {k: self._work(k, samples[k], classes.get(k)) for k in cohort}
        return replace(context, cohort=cohort, work=work)

    def classes(self, round: int) -> dict[int, tuple[int, ...]]:
        """Under drift, all clients' classes of a round; empty without."""
        world, seed = self._experiment.world, self._experiment.seed
        if world.drift is None:
            return {}
        return round_classes(world.drift, seed=seed, num_clients=len(world.profiles), round=round)

    def _samples(self, classes: Mapping[int, tuple[int, ...]]) -> np.ndarray:
        profiles = self._experiment.world.profiles
        if not classes:
            return np.array([p.num_samples for p in profiles])
        return np.array([int(p.label_counts[list(classes[p.client])].sum()) for p in profiles])

    def _present(self, state: RunState, round: int) -> tuple[int, ...]:
        world, seed = self._experiment.world, self._experiment.seed
        if world.availability is None:
            return tuple(range(len(world.profiles)))
        return world.availability.draw(
            round,
            capabilities=np.array([p.capability for p in world.profiles]),
            history=dict(state.accuracies),
            stream_for=lambda k: stream(seed, "availability", round, k),
        )

    def _work(self, client: int, samples: int, classes: tuple[int, ...] | None) -> ClientWork:
        steps, batch, whole = self._experiment.local_steps(client, samples)
        return ClientWork(steps=steps, batch_size=batch, whole_batches=whole, num_samples=samples, classes=classes)

    # -- cost ----------------------------------------------------------------------------------------------------

    def samples_of_steps(self, work: ClientWork, steps: int) -> int:
        """Samples that go through this many steps from the round's start."""
        return work.samples_in(steps)

    def _durations(self, context: RoundContext) -> dict[int, float]:
        if not context.cohort or context.profiles[context.cohort[0]].device is None:
            return {}
        return {
            k: self._leg(context, k, 0, context.work[k].steps, down=True, masked=True, up=True) for k in context.cohort
        }

    def _closing(self, points: tuple[SyncPoint, ...], context: RoundContext) -> Closing | None:
        """Who drops out of the round, and when it ends; None where everybody is always waited for.

        Members of the cohort without a job get nothing and send nothing, so they can't be lost.
        """
        world, seed = self._experiment.world, self._experiment.seed
        working = {job.client for point, _ in alike(points) for job in point.start}
        devices = {
            k: device for k in context.cohort if k in working and (device := context.profiles[k].device) is not None
        }
        if not devices or nobody_drops_out(world.stragglers, [d.drop_probability for d in devices.values()]):
            return None
        return close_round(
            world.stragglers,
            {k: self._job_time(context, k, 0, context.work[k].steps, down=True, masked=True, up=True) for k in devices},
            context.work,
            fails=lambda k: fails(devices[k], seed=seed, round=context.round, client=k),
            wanted=min(self._experiment.training.cohort_size, len(context.available)),
        )

    def _closed(
        self, state: RunState, points: tuple[SyncPoint, ...], context: RoundContext, *, closing: Closing
    ) -> tuple[tuple[SyncPoint, ...], float | None]:
        """The sync points without those who drop out, and the clock at the round's end."""
        check_points(self._experiment.world.stragglers, self._experiment.method, points)
        left = closing.kept(points)
        if len(points) > 1 and left:
            return left, self._clock(state, left, context)  # whoever is alive is waited for
        return left, None if state.clock is None else state.clock + closing.duration_s

    def _leg(
        self, context: RoundContext, client: int, position: int, steps: int, *, down: bool, masked: bool, up: bool
    ) -> float:
        """Virtual seconds of one job: download (with the sub-model's masks or without), steps, upload."""
        return self._job_time(context, client, position, steps, down=down, masked=masked, up=up).total_s

    def _job_time(
        self, context: RoundContext, client: int, position: int, steps: int, *, down: bool, masked: bool, up: bool
    ) -> ClientTime:
        device = context.profiles[client].device
        if device is None:
            raise InvariantError(f"client {client} has no device")
        submodel = context.submodels.get(client, FULL_MODEL)
        samples = 0
        if steps:
            work = context.work[client]
            samples = self.samples_of_steps(work, position + steps) - self.samples_of_steps(work, position)
        bits = 32 * submodel.layout(self._layout).num_values
        return client_time(
            jittered(device, seed=self._experiment.seed, round=context.round, client=client),
            steps=steps,
            flops=self._costs.flops(submodel, samples),
            bits_down=(bits + 8 * submodel.index_bytes() * masked) if down else 0,
            bits_up=bits if up else 0,
        )

    def _clock(self, state: RunState, points: tuple[SyncPoint, ...], context: RoundContext) -> float | None:
        """Virtual time at the round's end: every sync point waits for its attendees."""
        if state.clock is None:
            return None
        now = state.clock
        started: dict[int, tuple[float, int, bool]] = {}
        position = dict.fromkeys(context.cohort, 0)
        masked: set[int] = set()  # a round's masks travel once

        def ends(client: int, begun: float, steps: int, *, down: bool, up: bool) -> float:
            before, first = position.get(client, 0), down and client not in masked
            masked.update([client] if first else [])
            position[client] = before + steps
            return begun + self._leg(context, client, before, steps, down=down, masked=first, up=up)

        for point in points:
            for job in point.start:
                started[job.client] = (max(now, job.not_before), job.steps, not job.resume)
            opened = now
            for client in point.attend:
                # Whoever has no job only sends what it did in earlier rounds.
                begun, steps, down = started.pop(client, (opened, 0, False))
                now = max(now, ends(client, begun, steps, down=down, up=True))
        for client, (begun, steps, down) in started.items():
            now = max(now, ends(client, begun, steps, down=down, up=False))
        return now

    def _traffic(
        self, points: tuple[SyncPoint, ...], context: RoundContext, *, lost: Mapping[int, LostWork]
    ) -> tuple[int, int]:
        once = [k for client, work in lost.items() for k in (client,) * (2 if work.sends else 1)]
        values = sum(context.submodels.get(k, FULL_MODEL).layout(self._layout).num_values for k in once)
        sent = set(lost)
        for point, times in alike(points):
            down = [job.client for job in point.start if not job.resume]
            sent.update(down)
            parts = [context.submodels.get(client, FULL_MODEL) for client in (*down, *point.attend)]
            values += times * sum(submodel.layout(self._layout).num_values for submodel in parts)
        return values, sum(context.submodels.get(k, FULL_MODEL).index_bytes() for k in sent)

    def _check(self, points: tuple[SyncPoint, ...], context: RoundContext) -> None:
        steps: dict[int, int] = {}
        out: set[int] = set()
        unsent = set(context.in_flight)
        for point, times in alike(points):
            # What a second one in a row finds, all others after it find, too.
            for _ in range(min(times, 2)):
                self._check_starts(point, context, steps=steps, out=out)
                absent = [client for client in point.attend if client not in out and client not in unsent]
                if absent:
                    raise InvariantError(
                        f"client {absent[0]} attends a sync point, but it has neither a job nor earlier work"
                    )
                out, unsent = out - set(point.attend), unsent - set(point.attend)
            for job in point.start:
                steps[job.client] += max(0, times - 2) * job.steps
        for client, taken in steps.items():
            if taken > context.work[client].steps:
                raise InvariantError(
                    f"pacing gave client {client} {taken} local steps, but it has {context.work[client].steps}"
                )

    @staticmethod
    def _check_starts(point: SyncPoint, context: RoundContext, *, steps: dict[int, int], out: set[int]) -> None:
        for job in point.start:
            if job.client not in context.work:
                raise InvariantError(f"pacing gave client {job.client} a job, but it is not of the cohort")
            if job.client in out:
                raise InvariantError(f"pacing gave client {job.client} a job while it is at another")
            if job.resume and job.client not in steps and job.client not in context.in_flight:
                raise InvariantError(f"pacing lets client {job.client} resume, but it has nothing to go on from")
            steps[job.client] = steps.get(job.client, 0) + job.steps
            out.add(job.client)


def alike(points: tuple[SyncPoint, ...]) -> list[tuple[SyncPoint, int]]:
    """The sync points, each with how often the very same one stands there in a row: hundreds of them cost as one."""
    runs = [list(run) for _, run in groupby(points, key=id)]
    return [(run[0], len(run)) for run in runs]
