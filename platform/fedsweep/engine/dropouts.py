"""Dropouts: clients that leave a round's cohort, their cost, and the rest of the round's plan.

A client that drops out is out for the whole round: it received the model at the round's start, it attends no sync
point, and it remembers nothing of the round. Its work is not computed, since nobody would see it; what it spent until
the round's end is metered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientWork, SyncPoint
from fedsweep.world.devices import ClientTime
from fedsweep.world.stragglers import ClientRun, RoundOutcome, StragglerPolicy


@dataclass(frozen=True, kw_only=True)
class LostWork:
    """Work that a client which dropped out had done when the round ended, beside the download.

    Attributes:
        steps: Local steps that it had taken.
        sends: Its upload had begun; it counts in full.
    """

    steps: int
    sends: bool


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """A client that drops out.

    Attributes:
        time: What it would need for its round.
        steps: Local steps that it would take.
        sends: It sends its model when it has trained; not where it vanishes, or trains only what is back in time.
    """

    time: ClientTime
    steps: int
    sends: bool

    def work_by(self, end_s: float) -> LostWork:
        """Return what it has done that many seconds after the round's start, its end."""
        trained_s, compute_s = max(0.0, end_s - self.time.download_s), self.time.compute_s
        if compute_s <= trained_s:
            return LostWork(steps=self.steps, sends=self.sends)
        # The slack keeps a step that ends with the round.
        return LostWork(steps=min(self.steps, math.floor(self.steps * trained_s / compute_s + 1e-9)), sends=False)


@dataclass(frozen=True, kw_only=True)
class Closing:
    """End of a round, by the policy for stragglers.

    Attributes:
        duration_s: Virtual seconds from its start to its end, where it has one sync point.
        lost: The clients that drop out.
        cut: Local steps of clients that are stopped early.
    """

    duration_s: float
    lost: Mapping[int, Dropout] = field(default_factory=dict)
    cut: Mapping[int, int] = field(default_factory=dict)

    def kept(self, points: tuple[SyncPoint, ...]) -> tuple[SyncPoint, ...]:
        """Return the sync points without those who drop out; a point that nobody is left for is left out."""
        remaining: dict[int, SyncPoint] = {}
        for point in points:
            if id(point) not in remaining:  # repeats stay one object, see `with_repeats` of planning
                remaining[id(point)] = self._without(point)
        left = [remaining[id(point)] for point in points]
        return tuple(point for point in left if point.start or point.attend)

    def _without(self, point: SyncPoint) -> SyncPoint:
        jobs = (job for job in point.start if job.client not in self.lost)
        return replace(
            point,
            start=tuple(replace(job, steps=min(job.steps, self.cut.get(job.client, job.steps))) for job in jobs),
            attend=tuple(k for k in point.attend if k not in self.lost),
            idle=tuple(k for k in point.idle if k not in self.lost),
        )


def close_round(
    policy: StragglerPolicy,
    times: Mapping[int, ClientTime],
    work: Mapping[int, ClientWork],
    *,
    steps_s: Mapping[int, float],
    fails: Callable[[int], bool],
    wanted: int,
) -> Closing:
    """End a round.

    Args:
        policy: When the server stops waiting.
        times: What each member of the cohort would need for its round, one message down and one up.
        work: What each would do.
        steps_s: What of that each client's local steps take; who stops early is spared those alone.
        fails: Whether a client vanishes in this round.
        wanted: Updates wanted.

    Reading: the sources say that discarded work counts as far as it is spent. Whoever drops out trains until the round
    ends; one that vanishes does so before it sends anything, and one that stops by itself in time has nothing to send.
    """
    failed = {client for client in times if fails(client)}
    runs = [
        ClientRun(
            client=client,
            duration_s=time.total_s,
            compute_s=steps_s[client],
            epochs=work[client].steps / steps_per_epoch(work[client]),
            failed=client in failed,
        )
        for client, time in times.items()
    ]
    outcome = policy.close(runs, wanted)
    return Closing(
        duration_s=outcome.duration_s,
        lost={
            client: Dropout(
                time=time, steps=work[client].steps, sends=policy.late_clients_send and client not in failed
            )
            for client, time in times.items()
            if client not in outcome.survivors
        },
        cut=_cut(outcome, work),
    )


def steps_per_epoch(work: ClientWork) -> int:
    """Return local steps of a pass over the client's data; the last batch may be small."""
    return math.ceil(work.num_samples / work.batch_size)


def check_points(policy: StragglerPolicy, method: FederatedMethod, points: tuple[SyncPoint, ...]) -> None:
    """Refuse rounds that a policy can't judge.

    Raises:
        ConfigError: The round has several sync points, or jobs that start later than the round.
    """
    later = any(job.not_before for point in points for job in point.start)
    if policy.judges_rounds and (len(points) > 1 or later):
        what = f"synchronises {len(points)} times in a round" if len(points) > 1 else "has clients begin when they will"
        raise ConfigError(
            f"method {method.name} {what}, but {type(policy).__name__} of scenario.devices.stragglers compares clients"
            " by their whole rounds, one message down and one up; use {kind: wait}, with drop_probability where clients"
            " should vanish, or a method that synchronises once, at the round's end"
        )


def _cut(outcome: RoundOutcome, work: Mapping[int, ClientWork]) -> dict[int, int]:
    cut: dict[int, int] = {}
    for client, epochs in zip(outcome.survivors, outcome.epochs, strict=True):
        per_epoch = steps_per_epoch(work[client])
        if epochs < work[client].steps / per_epoch:
            cut[client] = int(epochs) * per_epoch
    return cut
