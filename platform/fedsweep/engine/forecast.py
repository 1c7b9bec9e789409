"""Forecast a run: what it costs, which parts of its method will do nothing, whether clients can be stepped together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from fedsweep.client.lanes.grouping import one_by_one_note, why_alone
from fedsweep.client.messages import LaneSettings, Progress
from fedsweep.client.optimizer import state_slots
from fedsweep.components.base import Published
from fedsweep.engine.ahead.card_traffic import CardTraffic, PayloadSizes, jobs_begun, sized
from fedsweep.engine.ahead.spending import BudgetSpender, Chosen
from fedsweep.engine.clock import probed_samples
from fedsweep.engine.cost import CostModel, registration_bytes
from fedsweep.engine.engine import Engine
from fedsweep.engine.plan import Planner, RoundPlan, with_repeats
from fedsweep.engine.round_codecs import versions_made
from fedsweep.engine.row import RowMaker
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_batches, check_lengths, check_units
from fedsweep.experiment.clients import ClientColumns
from fedsweep.experiment.experiment import Experiment, StopLimits, client_side, server_context
from fedsweep.experiment.schedules import MOST_RATES
from fedsweep.experiment.unforeseen import plans_are_learned
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.guard import ask, guarded, hook_of
from fedsweep.records import State
from fedsweep.submodel import FULL_MODEL
from fedsweep.trees import sample_values

_NEVER = "no inner synchronisation in any round: clients are averaged once a round, as in FedAvg"
_ALONE = "one client at most in the group that synchronises inside rounds: averaged alone, it keeps its model"
_ONE_BY_ONE = (
    "runtime.executor: clients are stepped one by one on the GPU; auto steps many at once where that proves itself,"
    " small networks several times as fast"
)
_PLANNED = 50


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The costs of a run, before it.

    Attributes:
        rounds: Rounds of the run; fewer where a limit on bytes or virtual time ends it, which is an estimate beyond
            the rounds that were planned.
        local_steps: All clients', all rounds.
        turns: Clients with a job, added up over the rounds.
        total_bytes: From before round 1 on; beside the models what cards say of rounds with one aggregation.
        registration_bytes: Of them before round 1: registration and set-up.
        comm_ratio: Mean over rounds.
        flops: Training, all clients.
        sim_time_s: Virtual seconds, or None without devices.
        num_params: Trained scalars of the model.
        memory_mb: What a client actor holds beside the program itself: models, gradients, optimiser state, its
            clients' samples.
        exact: Every round was planned, and the training has no say in the plans, nor in what codecs send; otherwise
            figures are estimates.
        remarks: What will do nothing, in sentences.
    """

    rounds: int
    local_steps: int
    turns: int
    total_bytes: int
    registration_bytes: int
    comm_ratio: float
    flops: int
    sim_time_s: float | None
    num_params: int
    memory_mb: float
    exact: bool
    remarks: tuple[str, ...] = ()


@guarded(when="as its first round was planned", raises=ConfigError)
def check_first_round(experiment: Experiment) -> None:
    """Plan the first round: what only that brings to light, a budget below the low rate say, is wrong input, too.

    Where a policy judges whole rounds, the next ones are planned as well: a group may be empty at first, and a method
    synchronises several times only in a later round.

    Raises:
        ConfigError: The method can't be planned in this world.
    """
    _check_schedule(experiment)
    planner = Planner(experiment, CostModel(experiment))
    ahead = _PLANNED if experiment.world.stragglers.judges_rounds else 1
    for _ in islice(planned_rounds(experiment, planner), ahead):
        pass
    check_units(experiment)
    check_lengths(experiment)
    check_batches(experiment)


def _check_schedule(experiment: Experiment) -> None:
    schedule: Callable[[int], object] = experiment.training.schedule
    last = experiment.training.rounds
    for round in chain(range(1, min(last, MOST_RATES)), [last]):
        rate = schedule(round)
        if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
            raise ConfigError(
                f"training.schedule: {hook_of(schedule, '__call__')} must give a finite rate that is not below 0, but"
                f" gave {rate!r} for round {round}"
            )


def forecast(experiment: Experiment, *, num_actors: int = 1, most_planned: int = _PLANNED) -> Forecast:
    """Plan the run's rounds and add up what they cost.

    Methods whose plans depend on training (measurements, accuracy) are forecast as they start.

    Args:
        experiment: The experiment.
        num_actors: Client actors that the clients are laid on.
        most_planned: Rounds that are planned one by one; longer runs are extrapolated.
    """
    costs = CostModel(experiment)
    planner, rows, layout = Planner(experiment, costs), RowMaker(experiment, costs), costs.layout
    traffic, seen = CardTraffic(experiment, costs), set[int]()
    once = registration_bytes(experiment) + traffic.setup_bytes
    rounds, stop = experiment.training.rounds, experiment.training.stop
    planned = rounds if experiment.options else min(rounds, most_planned)
    steps = turns = num_bytes = flops = 0
    clock = None if experiment.world.profiles[0].device is None else 0.0
    ratios, plans = list[float](), list[RoundPlan]()
    for plan, chosen in islice(_chosen_rounds(experiment, planner), planned):
        payloads = sum((chosen.traffic if chosen else traffic).sizes_in_round(plan, seen).values(), PayloadSizes())
        sent = plan.num_bytes + int(payloads.num_bytes)
        if stop.passed_by(once + num_bytes + sent, plan.clock) is not None:
            break
        plans.append(plan)
        taken = steps_by_client(plan)
        steps += sum(taken.values())
        turns += len({job.client for point in plan.points for job in point.start})
        num_bytes += sent
        clock = plan.clock
        flops += _flops(plan, taken)
        ratio = rows.group_figures(plan, plan.components, cost=plan.values + int(payloads.values))["comm_ratio"]
        ratios += [] if ratio is None else [ratio]
    is_whole, planned = len(plans) < planned or planned == rounds, len(plans)
    rounds = planned if is_whole else min(rounds, _rounds_within(stop, plans, num_bytes=num_bytes, before=once))
    scale = rounds / max(1, planned)
    return Forecast(
        rounds=rounds,
        local_steps=round(steps * scale),
        turns=round(turns * scale),
        total_bytes=once + round(num_bytes * scale),
        registration_bytes=once,
        comm_ratio=sum(ratios) / len(ratios) if ratios else 0.0,
        flops=round(flops * scale) + setup_flops(experiment, costs),
        sim_time_s=None if clock is None else clock * scale,
        num_params=layout.num_params,
        memory_mb=_memory_mb(experiment, num_values=layout.num_values, num_actors=num_actors),
        exact=is_whole and not _is_estimate(experiment, costs, plans),
        remarks=(*notes_before(experiment, plans), *_uncounted(costs)),
    )


def _rounds_within(stop: StopLimits, plans: Sequence[RoundPlan], *, num_bytes: int, before: int) -> int:
    """Return the rounds until one would pass a limit, if all cost what the planned ones do in the mean.

    Args:
        stop: The limits.
        plans: The planned rounds.
        num_bytes: Sent in all of them.
        before: Bytes sent before round 1.
    """
    most_bytes = None if stop.total_bytes is None else stop.total_bytes - before
    limits = ((most_bytes, num_bytes), (stop.sim_time_s, plans[-1].clock))
    # The slack keeps a whole number of rounds that comes out a hair below.
    rounds = [math.floor(len(plans) * most / spent + 1e-9) for most, spent in limits if most is not None and spent]
    return max(len(plans), min(rounds, default=sys.maxsize))


def _is_estimate(experiment: Experiment, costs: CostModel, plans: Sequence[RoundPlan]) -> bool:
    is_learned = plans_are_learned(experiment) or _content_is_learned(experiment, costs)
    return is_learned or _cards_count_less(experiment, plans) or _lengths_vary(experiment, costs)


def _lengths_vary(experiment: Experiment, costs: CostModel) -> bool:
    """Tell whether some codec's messages are as long as what is in them asks for: a plan takes one of noise."""
    return costs.up_varies or any(CostModel(option.experiment).up_varies for option in experiment.options)


def _cards_count_less(experiment: Experiment, plans: Sequence[RoundPlan]) -> bool:
    """Tell whether clients begin several jobs in a round: cards count what travels beside models for one."""
    if not any(card.up or card.down for card, _ in experiment.cards):
        return False
    return any(max(jobs_begun(plan).values(), default=0) > 1 for plan in plans)


def _content_is_learned(experiment: Experiment, costs: CostModel) -> bool:
    """Tell whether training says in which rounds a codec sends what travels beside the models.

    Cards say how much travels, not when it changes. Content that begins with zeros (SCAFFOLD's) is made anew in each
    round; another is a model of its own, as a cluster's (IFCA), which changes where somebody chose it.
    """
    states, contents = experiment.initial_states, dict[str, Published]()
    downs = [costs.codecs["down"], *(option.experiment.communication.down for option in experiment.options)]
    for seam, component in experiment.method.having["publish"] if any(codec.encodes for codec in downs) else ():
        contents |= ask(component, "publish", states[seam], when="for a forecast")
    # Content is encoded a round later than the model that it came with, perhaps by another codec.
    are_chosen = any(codec != downs[-1] for codec in downs[1:])
    return any(content.like and (are_chosen or bool(content.value.any())) for content in contents.values())


def _uncounted(costs: CostModel) -> list[str]:
    text = "FLOPs and MACs leave out what the network computes by {}: there is no formula for it"
    return [text.format(", ".join(costs.uncounted))] if costs.uncounted else []


def planned_rounds(experiment: Experiment, planner: Planner) -> Iterator[RoundPlan]:
    """Yield the plans of the run's rounds, one after another, as if nothing that is trained had a say in them."""
    yield from (plan for plan, _ in _chosen_rounds(experiment, planner))


def _chosen_rounds(experiment: Experiment, planner: Planner) -> Iterator[tuple[RoundPlan, Chosen | None]]:
    """Yield them with how they were chosen, where a budget is spent."""
    has_devices = experiment.world.profiles[0].device is not None
    components, clock = dict(experiment.initial_states), 0.0 if has_devices else None
    state = RunState(vector=experiment.initial_vector, components=components, clock=clock)
    spending = BudgetSpender(experiment) if experiment.options else None
    if spending is not None:
        state = replace(
            state, total_bytes=registration_bytes(experiment) + spending.options[0].card_traffic.setup_bytes
        )
    for _ in range(experiment.training.rounds):
        chosen = None if spending is None else spending.next(state)
        if isinstance(chosen, str):
            return
        plan = planner.plan(state) if chosen is None else chosen.plan
        yield plan, chosen
        delivered = {k for point in plan.points for k in point.attend} | set(plan.lost)
        # Whoever begins is sent what is published.
        begun = {job.client for point in plan.points for job in point.start if not job.resume}
        unfinished = {k: Progress() for k in sorted({*state.held, *steps_by_client(plan)} - delivered)}
        state = replace(
            state,
            round=state.round + 1,
            total_bytes=state.total_bytes + (0 if chosen is None else chosen.num_bytes),
            components=plan.components,
            clock=plan.clock,
            ready=plan.ready,
            hub_times=plan.hub_times,
            held=unfinished,
            published={**state.published, **{client: {} for client in begun}},
            version=state.version + versions_made(plan.points),
            **({} if (messages := plan.timing_inputs.server_messages) is None else messages.after(plan.points)),
        )


def steps_by_client(plan: RoundPlan) -> dict[int, int]:
    """Return local steps that each cohort member takes in a planned round."""
    taken = dict.fromkeys(plan.context.cohort, 0) | {k: work.steps for k, work in plan.lost.items()}
    for point, times in with_repeats(plan.points):
        for job in point.start:
            taken[job.client] += times * job.steps
    return taken


def setup_flops(experiment: Experiment, costs: CostModel) -> int:
    """Add up what clients compute in the set-up before round 1, at most."""
    total = 0
    for seam, component in experiment.method.server_components:
        context = server_context(experiment, seam)
        if probes := ask(component, "setup", experiment.initial_states[seam], context, when="before the run"):
            samples = probed_samples(experiment, probes).values()
            total += sum(costs.flops(FULL_MODEL, 0, probed=number) for number in samples)
    return total


def _flops(plan: RoundPlan, taken: Mapping[int, int]) -> int:
    """Add up the operations of clients' steps, and of the forward passes that they take outside these."""
    inputs, total = plan.timing_inputs, 0
    for client, count in taken.items():
        work, probed = plan.context.work[client], 0.0
        if inputs.probed(client, work.num_samples, last=True):
            jobs = sum(
                times for point, times in with_repeats(plan.points) for job in point.start if job.client == client
            )
            probed = inputs.probed_in(jobs, client, work.num_samples)
        total += inputs.costs.flops(plan.context.submodels[client], work.samples_in(count), work=work, probed=probed)
    return total


def _memory_mb(experiment: Experiment, *, num_values: int, num_actors: int) -> float:
    """Add up models, gradient and samples of the clients that are on one actor at a time."""
    clients = -(-experiment.most_in_cohort // num_actors)
    slots = sum(whole for _, whole in state_slots(experiment.training.optimizer))
    anchors = 1 if experiment.method.terms else 0
    models = num_values * (clients * (1 + slots + anchors) + 4)
    sample = sample_values(experiment.world.data.images)
    samples = sum(sorted((p.num_samples for p in sized(experiment)), reverse=True)[:clients]) * sample
    return 4 * (models + samples) / 2**20


# -- methods that turn into something simpler without a word -----------------------------------------------------------


def notes_before(experiment: Experiment, plans: Sequence[RoundPlan]) -> list[str]:
    """Collect what the user should know before a run, from its first plans: which parts of the method do nothing."""
    with guarded(when="before the run", raises=ConfigError):
        notes = _components_notes(experiment, {})
    if experiment.method.pacing.syncs_inside and plans:
        inner = [point for plan in plans for point in plan.points[:-1]]
        if not inner:
            notes.append(_NEVER)
        elif all(len(point.attend) <= 1 for point in inner):
            notes.append(_ALONE)
    return [*_of_method(experiment, notes), *_of_the_run(experiment)]


def notes_after(experiment: Experiment, state: RunState) -> list[str]:
    """Collect what the user should know after a run: which parts of the method did nothing."""
    with guarded(when="at the run's end"):
        notes = _components_notes(experiment, state.components)
    if experiment.method.pacing.syncs_inside and state.records:
        groups = [record.high_frequency for record in state.records]
        if all(record.sync_points <= 1 for record in state.records):
            notes.append(_NEVER)
        elif all(group is not None and len(group) <= 1 for group in groups):
            notes.append(_ALONE)
    return [*_of_method(experiment, notes), *_of_the_run(experiment)]


def _components_notes(experiment: Experiment, states: Mapping[str, State]) -> list[str]:
    return [
        note
        for seam, component in experiment.method.server_components
        if component.has_own("notes")
        for note in component.notes(server_context(experiment, seam), states.get(seam))
    ]


def _of_the_run(experiment: Experiment) -> list[str]:
    """Collect what the user should know of a run whatever its method is."""
    one_by_one = experiment.device == "cuda" and experiment.lanes is None
    return [*_filled_batches(experiment), *experiment.world.notes, *([_ONE_BY_ONE] if one_by_one else [])]


def _filled_batches(experiment: Experiment) -> list[str]:
    """Say where a client's samples come several times in one batch."""
    # Of a drawn population nobody is asked who is not chosen.
    sizes = (
        []
        if experiment.world.is_drawn
        else [int(size) for size in ClientColumns.of(experiment.world.profiles).num_samples]
    )
    jobs = [(size, *experiment.local_steps(client, size)[1:]) for client, size in enumerate(sizes) if size]
    if not (filled := [(size, batch) for size, batch, whole in jobs if whole and batch > size]):
        return []
    return [
        f"training.batch_size: {len(filled)} of {len(sizes)} clients have fewer samples than a batch (the smallest"
        f" {min(filled)[0]}, for batches of {min(filled)[1]}); with a fixed number of steps batches are whole, so they"
        " are filled with repeats, and their FLOPs are counted"
    ]


def _of_method(experiment: Experiment, notes: Sequence[str]) -> list[str]:
    return [f"{experiment.method.name}: {text}" for text in dict.fromkeys(notes) if text]


# -- whether clients can be stepped together: tried on a step of two, nothing is kept of it ----------------------------


def executor_in_words(experiment: Experiment) -> str:
    """Return how clients will be stepped; tried where it is not one by one."""
    if experiment.lanes is None:
        return "loop, clients one by one"
    tried = ", where a first tile proves them" if experiment.lanes.proves else ""
    return "; ".join([f"lanes, {experiment.lanes.width} clients at once{tried}", *lanes_refused(experiment)])


def lanes_refused(experiment: Experiment) -> tuple[str, ...]:
    """Return a run's notes on clients that can't be stepped together, as far as its first round shows."""
    tried = replace(experiment, lanes=LaneSettings(width=2))
    engine = Engine(tried, LocalFleet(tried))
    state = engine.start()
    plan = engine.planner.plan(state)
    side, reasons = client_side(tried), dict[str, None]()
    for client in plan.context.cohort:
        work, submodel = plan.context.work[client], plan.submodel(client)
        is_padded = not work.whole_batches and work.num_samples % work.batch_size > 0
        reason = why_alone(side, submodel, tried.template, is_padded=is_padded)
        if reason is not None:
            reasons[one_by_one_note(reason)] = None
    point = next((point for point in plan.points if point.start), None)
    if point is None:
        return ()  # nobody is there in it
    jobs = tuple(replace(job, steps=1) for job in point.start[:2])
    once = replace(point, start=jobs, attend=tuple(sorted(job.client for job in jobs)), idle=(), discard=True)
    engine.round_class(replace(plan, points=(once,)), state, engine.tools).play()
    return tuple(dict.fromkeys([*reasons, *engine.notes]))
