"""The virtual clock: how long a planned round takes on the scenario's devices.

Functions of the plan alone, so that a limit or a forecast knows the time before anything is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsweep.engine.cost import CostModel
from fedsweep.errors import InvariantError
from fedsweep.records import RoundContext, SyncPoint
from fedsweep.submodel import FULL_MODEL
from fedsweep.world.devices import ClientTime, client_time, jittered


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A client's way from one sync point to the next.

    Attributes:
        client: Who.
        steps: Local steps on the way.
        after: Local steps of the round that it took before.
        down: The server sends its model first.
        masked: With the sub-model's masks, which travel once a round.
        up: The client sends its model at the end.
    """

    client: int
    steps: int
    after: int = 0
    down: bool = True
    masked: bool = True
    up: bool = True


def leg_time(leg: Leg, context: RoundContext, costs: CostModel, *, seed: int) -> ClientTime:
    """Virtual seconds of download, steps and upload, with the round's jitter.

    Args:
        leg: The way.
        context: The round; the client is of its cohort, unless it takes no steps.
        costs: The sub-models' costs.
        seed: The run's.
    """
    device = context.profiles[leg.client].device
    if device is None:
        raise InvariantError(f"client {leg.client} has no device")
    submodel = context.submodels.get(leg.client, FULL_MODEL)
    samples = 0
    if leg.steps:
        # Counted from the round's start, since the last batch of a pass may be small.
        work = context.work[leg.client]
        samples = work.samples_in(leg.after + leg.steps) - work.samples_in(leg.after)
    bits = costs.bits(submodel)
    return client_time(
        jittered(device, seed=seed, round=context.round, client=leg.client),
        steps=leg.steps,
        flops=costs.flops(submodel, samples),
        bits_down=(bits + 8 * submodel.index_bytes() * leg.masked) if leg.down else 0,
        bits_up=bits if leg.up else 0,
    )


def whole_round(client: int, context: RoundContext, costs: CostModel, *, seed: int) -> ClientTime:
    """What a member of the cohort needs for all of its steps with one message down and one up."""
    return leg_time(Leg(client=client, steps=context.work[client].steps), context, costs, seed=seed)


def durations(context: RoundContext, costs: CostModel, *, seed: int) -> dict[int, float]:
    """Virtual seconds that each member of the cohort would need for its whole round; empty without devices."""
    if not context.cohort or context.profiles[context.cohort[0]].device is None:
        return {}
    return {k: whole_round(k, context, costs, seed=seed).total_s for k in context.cohort}


def round_end(points: tuple[SyncPoint, ...], context: RoundContext, costs: CostModel, *, seed: int) -> float:
    """The clock at the round's end: every sync point waits for its attendees, and the round for all jobs.

    Args:
        points: The round's.
        context: The round; its ``clock`` is the start.
        costs: The sub-models' costs.
        seed: The run's.
    """
    now = context.clock
    started: dict[int, tuple[float, int, bool]] = {}
    taken = dict.fromkeys(context.cohort, 0)
    masked: set[int] = set()  # a round's masks travel once

    def end(client: int, begun: float, steps: int, *, down: bool, up: bool) -> float:
        before, first = taken.get(client, 0), down and client not in masked
        masked.update([client] if first else [])
        taken[client] = before + steps
        leg = Leg(client=client, steps=steps, after=before, down=down, masked=first, up=up)
        return begun + leg_time(leg, context, costs, seed=seed).total_s

    for point in points:
        for job in point.start:
            started[job.client] = (max(now, job.not_before), job.steps, not job.resume)
        opened = now
        for client in point.attend:
            # Whoever has no job only sends what it did in earlier rounds.
            begun, steps, down = started.pop(client, (opened, 0, False))
            now = max(now, end(client, begun, steps, down=down, up=True))
    for client, (begun, steps, down) in started.items():
        now = max(now, end(client, begun, steps, down=down, up=False))
    return now
