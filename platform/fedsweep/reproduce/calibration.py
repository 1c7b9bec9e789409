"""The time of a run's own steps on this machine, from a few of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fedsweep.driver.run import one_thread
from fedsweep.engine.engine import Engine
from fedsweep.engine.plan import RoundPlan
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.records import LocalJob, SyncPoint
from fedsweep.world.availability import AlwaysAvailable

# A measurement takes about so long, or so many repeats; so many images are tested; so many steps warm up.
_SECONDS, _MOST_REPEATS = 0.4, 20
_TESTED = 100
_WARM = 2


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The time of a step and a turn on one core, in seconds of CPU time.

    Attributes:
        step: A local step of one client.
        turn: What a client's part in a round takes beside its steps.
        test: Testing one sample.
    """

    step: float
    turn: float
    test: float


def calibrate(experiment: Experiment) -> Speed:
    """Time some steps of a run's first clients, with its own method, network and batches; nothing is kept of it.

    Components are as they are before the exchange ahead of round 1, which may ask every client for something.

    Raises:
        ConfigError: The run can't be planned.
    """
    world = experiment.world
    # A first round in which nobody is there has no step to time.
    there = None if world.availability is None else AlwaysAvailable()
    few = replace(world, test_images=world.test_images[:1], test_labels=world.test_labels[:1], availability=there)
    tried = replace(experiment, world=few)
    engine = Engine(tried, LocalFleet(tried))
    clock = None if world.profiles[0].device is None else 0.0
    state = RunState(vector=tried.initial_vector, components=dict(tried.initial_states), clock=clock)
    with one_thread():
        step, turn = _steps(engine, engine.planner.plan(state), state)
        return Speed(step=step, turn=turn, test=_tested(experiment))


def _steps(engine: Engine, plan: RoundPlan, state: RunState) -> tuple[float, float]:
    """Return seconds of a step, and of a client's part in a round beside its steps."""
    lanes = engine.experiment.lanes
    point = next(point for point in plan.points if any(job.steps for job in point.start))
    jobs = [job for job in point.start if job.steps][: 1 if lanes is None else lanes.width]
    most = min(plan.context.work[job.client].steps for job in jobs)

    def taken(steps: int) -> float:
        once = SyncPoint(
            start=tuple(LocalJob(client=job.client, steps=steps) for job in jobs),
            attend=tuple(sorted(job.client for job in jobs)),
            discard=True,
        )
        return _timed(engine.round_class(replace(plan, points=(once,)), state, engine.tools).play) / len(jobs)

    many = max(1, min(most, round(_SECONDS / max(taken(min(_WARM, most)) / min(_WARM, most), 1e-4))))
    longer, shorter = _mean(lambda: taken(many)), _mean(lambda: taken(1))
    if many == 1 or longer <= shorter:
        return longer / many, 0.0
    step = (longer - shorter) / (many - 1)
    return step, max(shorter - step, 0.0)


def _mean(measure: Callable[[], float]) -> float:
    """Return the mean of a measurement that is repeated while all together are short."""
    values = [measure()]
    while sum(values) < _SECONDS / 2 and len(values) < _MOST_REPEATS:
        values.append(measure())
    return sum(values) / len(values)


def _tested(experiment: Experiment) -> float:
    """Return seconds of one sample's test."""
    images = torch.from_numpy(experiment.world.test_images[:_TESTED].copy())
    inputs = experiment.world.data.transform(images, generator=None, train=False)
    inputs = inputs.to(dtype=experiment.layout.dtype)[: experiment.evaluation_batch]
    model = experiment.new_model().eval()
    with torch.inference_mode():
        model(inputs)
        return _timed(lambda: model(inputs)) / len(inputs)


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
