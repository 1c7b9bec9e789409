"""The virtual clock: how long a planned round takes on the scenario's devices.

Functions of the plan alone, so that a limit or a forecast knows the time before anything is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fedsweep.components.probes import Probe
from fedsweep.engine.cost import CostModel, Missed, registration_sizes
from fedsweep.engine.ledger import Ledger
from fedsweep.engine.round_codecs import ServerMessages
from fedsweep.errors import InvariantError
from fedsweep.experiment.experiment import Experiment
from fedsweep.records import LocalJob, RoundContext, SyncPoint
from fedsweep.submodel import FULL_MODEL, Direction
from fedsweep.world.devices import ClientTime, DeviceProfile, client_time, jittered

# Source: device time model of the scenario's profiles; what a server takes is small beside phones' work.
_SERVER_FLOPS_PER_S = 1e13


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A client's way from one sync point to the next.

    Attributes:
        client: Who.
        steps: Local steps on the way.
        after: Local steps of the round that it took before.
        down: Messages by which the server sends its model first, see ``CostModel.sizes``; None: it sends none.
        masked: With the sub-model's masks, which travel once a round.
        up: The client sends its model at the end.
        probes: Forward passes of one sample that measurements and terms' own work take on the way.
    """

    client: int
    steps: int
    after: int = 0
    down: Missed | None = ()
    masked: bool = True
    up: bool = True
    probes: float = 0


@dataclass(frozen=True, kw_only=True)
class TimingInputs:
    """Inputs by which, with the plan, the virtual clock times a round on the scenario's devices.

    Attributes:
        costs: FLOPs and message sizes of sub-models.
        seed: The run's; devices' jitter is drawn from it.
        probes: The round's measurements, whose forward passes take time.
        sends_at_once: See ``Pacing``.
        payload_bytes: All that is sent but models, for each message, by client and direction.
        server_messages: The server's messages before the round; None without a codec on the way down.
    """

    costs: CostModel
    seed: int
    probes: tuple[Probe, ...] = ()
    sends_at_once: bool = False
    payload_bytes: Mapping[tuple[int, Direction], float] = field(default_factory=dict)
    server_messages: ServerMessages | None = None

    def probed(self, client: int, num_samples: int, *, last: bool) -> float:
        """Return forward passes of one sample that a client's job takes outside its steps; ``last`` in the round."""
        asking = (probe for probe in self.probes if probe.asks(client) and (last or probe.when != "round_end"))
        return sum(probe.passes_over(num_samples) for probe in asking) + self.costs.job_passes * num_samples

    def probed_in(self, jobs: int, client: int, num_samples: int) -> float:
        """Return the same of all of a client's jobs in a round."""
        last, before = (self.probed(client, num_samples, last=last) for last in (True, False))
        return (jobs - 1) * before + last if jobs else 0.0


def device_of(client: int, context: RoundContext, inputs: TimingInputs) -> DeviceProfile:
    """Return a client's device, as fast as it is in this round."""
    device = context.profiles[client].device
    if device is None:
        raise InvariantError(f"client {client} has no device")
    return jittered(device, seed=inputs.seed, round=context.round, client=client)


def leg_time(leg: Leg, context: RoundContext, inputs: TimingInputs) -> ClientTime:
    """Return the virtual seconds of download, steps and upload, with jitter; who takes steps is of the cohort."""
    submodel = context.submodels.get(leg.client, FULL_MODEL)
    samples = 0
    if leg.steps:
        # Counted from the round's start, since the last batch of a pass may be small.
        work = context.work[leg.client]
        samples = work.samples_in(leg.after + leg.steps) - work.samples_in(leg.after)
    costs, payloads = inputs.costs, inputs.payload_bytes
    model = costs.num_bytes(submodel, "down", leg.down or ()) + submodel.index_bytes() * leg.masked
    down = model + payloads.get((leg.client, "down"), 0)
    up = costs.num_bytes(submodel, "up") + payloads.get((leg.client, "up"), 0)
    return client_time(
        device_of(leg.client, context, inputs),
        steps=leg.steps,
        flops=costs.flops(submodel, samples, work=context.work.get(leg.client), probed=leg.probes),
        bits_down=8 * down if leg.down is not None else 0,
        bits_up=8 * up if leg.up else 0,
    )


def whole_round(client: int, context: RoundContext, inputs: TimingInputs) -> ClientTime:
    """Time a member of the cohort: all of its steps with one message down and one up."""
    missed = () if inputs.server_messages is None else inputs.server_messages.download(client)
    work = context.work[client]
    probes = inputs.probed(client, work.num_samples, last=True)
    leg = Leg(client=client, steps=work.steps, down=missed, probes=probes)
    return leg_time(leg, context, inputs)


def steps_s(client: int, context: RoundContext, inputs: TimingInputs) -> float:
    """Time the local steps of a member of the cohort alone, without what its work takes outside them."""
    leg = Leg(client=client, steps=context.work[client].steps, down=None, up=False)
    return leg_time(leg, context, inputs).compute_s


def payload_s(
    points: tuple[SyncPoint, ...], context: RoundContext, inputs: TimingInputs, ledger: Ledger, *, end: float
) -> float:
    """Return by how many virtual seconds payloads delay the round's end; the clock itself times models alone.

    A client's payload bytes are spread evenly over its messages of the round. Who dropped out, and the order of
    arrivals, stay as the clock has them. Where the round waited for those who did (a deadline), its ``end`` is later
    than its last message, and payloads that arrive by then delay nothing.
    """
    total = ledger.payload_bytes()
    if not total or not points:
        return 0.0
    messages: Counter[tuple[int, Direction]] = Counter()
    for point in points:
        messages.update((job.client, "down") for job in point.start if not job.resume)
        messages.update((client, "up") for client in point.attend)
    shares = {key: size / messages[key] for key, size in total.items() if messages[key]}
    ends = [round_end(points, context, replace(inputs, payload_bytes=each))[0] for each in (shares, {})]
    return max(0.0, ends[0] - max(ends[1], end))


def server_s(flops: float) -> float:
    """Return virtual seconds of the server's work, at 10^13 FLOP/s."""
    return flops / _SERVER_FLOPS_PER_S


def probed_samples(
    experiment: Experiment, probes: tuple[Probe, ...], taken: Mapping[int, Mapping[str, float]] = MappingProxyType({})
) -> dict[int, float]:
    """Return forward passes of one sample that each client takes for these measurements, at most where none tells."""

    def passes(client: int, size: int) -> float:
        own, asking = taken.get(client, {}), [probe for probe in probes if probe.asks(client)]
        return sum(own[p.name] * size if p.name in own else p.passes_over(size) for p in asking)

    return {p.client: passes(p.client, p.num_samples) for p in experiment.world.profiles}


def setup_s(experiment: Experiment, ledger: Ledger, probed: Mapping[int, float], costs: CostModel) -> float | None:
    """Return virtual seconds of what goes before round 1, the slowest client's; None without devices.

    Args:
        experiment: With the clients' devices.
        ledger: What travelled in the set-up.
        probed: Forward passes of one sample that the set-up took, by client.
        costs: The sub-models' costs.
    """
    if experiment.world.profiles[0].device is None:
        return None  # known without a look at everybody
    registered = registration_sizes(experiment)
    bytes_of: Counter[tuple[int, str]] = Counter()
    for (client, direction, _), size in ledger.sizes.items():
        bytes_of[client, direction] += size
    return max(
        (
            client_time(
                profile.device,
                steps=0,
                flops=costs.flops(FULL_MODEL, 0, probed=probed.get(profile.client, 0.0)),
                bits_down=8 * (registered["down"] + bytes_of[profile.client, "down"]),
                bits_up=8 * (registered["up"] + bytes_of[profile.client, "up"]),
            ).total_s
            for profile in experiment.world.profiles
            if profile.device is not None
        ),
        default=None,
    )


def durations(context: RoundContext, inputs: TimingInputs, *, in_full: bool = True) -> dict[int, float]:
    """Return virtual seconds that each member of the cohort would need for its whole round; empty without devices.

    Args:
        context: The round.
        inputs: Of its work.
        in_full: With its messages; otherwise of the training alone, where it is not planned yet who sends to whom.
    """
    if not context.cohort or context.profiles[context.cohort[0]].device is None:
        return {}
    times = {k: whole_round(k, context, inputs) for k in context.cohort}
    return {k: time.total_s if in_full else time.compute_s for k, time in times.items()}


class _ClientTimes:
    """When clients are through with what they do in a round.

    Attributes:
        ready: When a client is through with work of earlier rounds, in virtual seconds.
        at_work: Jobs that were begun and not ended, by client: when they were, and what takes time of them.
    """

    def __init__(self, points: tuple[SyncPoint, ...], context: RoundContext, inputs: TimingInputs) -> None:
        self._context, self._inputs = context, inputs
        self.ready = dict(context.ready)
        self.at_work: dict[int, tuple[float, Leg]] = {}
        downloads = {} if inputs.server_messages is None else inputs.server_messages.downloads(points)
        self._downloads = {client: iter(missed) for client, missed in downloads.items()}
        self._jobs_left = Counter(job.client for point in points for job in point.start)
        self._steps_taken: Counter[int] = Counter()
        self._masked: set[int] = set()  # a round's masks travel once

    def begin(self, job: LocalJob, now: float) -> None:
        """Begin a job as soon as the device is through with the one before."""
        client = job.client
        at = max(now, job.not_before, self.ready.pop(client, 0.0))
        down = None if job.resume else next(self._downloads[client]) if self._downloads else ()
        self._jobs_left[client] -= 1
        samples, is_last = self._context.work[client].num_samples, not self._jobs_left[client]
        leg = Leg(
            client=client,
            steps=job.steps,
            after=self._steps_taken[client],
            down=down,
            masked=down is not None and client not in self._masked,
            probes=self._inputs.probed(client, samples, last=is_last),
        )
        self._steps_taken[client] += job.steps
        self._masked.update([client] if leg.masked else [])
        self.at_work[client] = at, leg

    def end(self, client: int, opened: float, *, up: bool) -> float:
        """Return when a client is through with its job, and with the upload if there is one.

        Whoever has no job only sends what it did in earlier rounds, once the sync point is ``opened``.
        """
        nothing = max(opened, self.ready.get(client, 0.0)), Leg(client=client, steps=0, down=None)
        begun, leg = self.at_work.pop(client, nothing)
        return begun + leg_time(replace(leg, up=up), self._context, self._inputs).total_s


def round_end(
    points: tuple[SyncPoint, ...], context: RoundContext, inputs: TimingInputs
) -> tuple[float, dict[int, float]]:
    """Return the clock at the round's end: every sync point waits for its attendees.

    Work that nobody waits for goes on after the round, unless the whole round waits for nobody: then it lasts as long
    as its jobs.

    Returns:
        Virtual seconds, and for each client whose work goes on when it will be done; where work is sent at once, when
        the server will have it.
    """
    clients, now = _ClientTimes(points, context, inputs), context.clock
    for point in points:
        for job in point.start:
            clients.begin(job, now)
        opened = now
        for client in point.attend:
            up = client in clients.at_work or not inputs.sends_at_once
            now = max(now, clients.end(client, opened, up=up))
            clients.ready.pop(client, None)
    going_on = {client: clients.end(client, now, up=inputs.sends_at_once) for client in list(clients.at_work)}
    if not any(point.attend for point in points):
        now = max([now, *going_on.values()])
    return now, dict(sorted((clients.ready | going_on).items()))
