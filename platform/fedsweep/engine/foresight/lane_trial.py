"""Whether an experiment's clients can be stepped together: tried on a step of two clients, nothing is kept of it."""

from __future__ import annotations

from dataclasses import replace

from fedsweep.client.lanes.grouping import alone, why_alone
from fedsweep.client.messages import LaneSettings
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment, client_side
from fedsweep.fleet.fleet import LocalFleet


def executor_in_words(experiment: Experiment) -> str:
    """How clients will be stepped; tried where it is not one by one."""
    if experiment.lanes is None:
        return "loop, clients one by one"
    return "; ".join([f"lanes, {experiment.lanes.width} clients at once", *lanes_refused(experiment)])


def lanes_refused(experiment: Experiment) -> tuple[str, ...]:
    """What a run would say of clients that can't be stepped together, as far as its first round shows."""
    tried = replace(experiment, lanes=LaneSettings(width=2))
    engine = Engine(tried, LocalFleet(tried))
    state = engine.start()
    plan = engine.planner.plan(state)
    side, found = client_side(tried), dict[str, None]()
    for client in plan.context.cohort:
        work, submodel = plan.context.work[client], plan.submodel(client)
        is_padded = not work.whole_batches and work.num_samples % work.batch_size > 0
        reason = why_alone(side, submodel, tried.template, is_padded=is_padded)
        if reason is not None:
            found[alone(reason)] = None
    point = next(point for point in plan.points if point.start)
    jobs = tuple(replace(job, steps=1) for job in point.start[:2])
    once = replace(point, start=jobs, attend=tuple(sorted(job.client for job in jobs)), idle=(), discard=True)
    engine._played(replace(plan, points=(once,)), state)
    return tuple(dict.fromkeys([*found, *engine.notes]))
