"""Conformance of costs, counted twice; of merging two methods; and of sub-models, which are cut and put back."""

from __future__ import annotations

import pickle
from functools import cache

import torch
from torch import Tensor, nn

from fedsweep.catalog import method_builder
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import SubModelPolicy
from fedsweep.engine.ahead.card_traffic import CardTraffic
from fedsweep.engine.cost import CostModel
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import forecast
from fedsweep.engine.plan import RoundPlan
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, MethodSettings, merge
from fedsweep.models.networks.chains import ChainNetwork
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing.fleets import FlopFleet, MeasuringFleet
from fedsweep.testing.subject import Subject, fedavg_with, subject_of
from fedsweep.testing.worlds import local_engine, play_round, run_rounds
from fedsweep.trees import FlatLayout
from fedsweep.world.topology import SERVER

_WIDTH, _DEPTH = 32, 6


def bytes_are_the_cards(subject: Subject) -> None:
    """The bytes that crossed to the clients and back, by ledger, card's formulas and forecast, are one number."""
    work = subject.world()
    fleet = MeasuringFleet(work)
    engine = Engine(work, fleet)
    state, traffic = engine.start(), CardTraffic(work, CostModel(work))
    _equal("set-up", fleet.setup, state.setup_bytes or 0, traffic.setup_bytes)
    seen: set[int] = set()
    while engine.finished_by(state) is None:
        before = (fleet.up, fleet.down)
        plan = engine.planner.plan(state)
        after = run_rounds(engine, state, rounds=1)
        record = after.records[-1]
        up, down = _expected(plan, engine.costs, traffic, seen)
        _equal(f"round {record.round}, up", fleet.up - before[0], record.bytes_up, up)
        _equal(f"round {record.round}, down", fleet.down - before[1], record.bytes_down, down)
        state = after
    estimated = forecast(work)
    # A forecast is as good as the first plan: what a policy learns on the way it can't know.
    method = subject.method
    learns = method.submodels.has_own("learn", "observe") or method.pacing.has_own("observe")
    steady = not learns and type(method.submodels).after_aggregate is SubModelPolicy.after_aggregate
    if steady and estimated.total_bytes != state.total_bytes:
        raise AssertionError(f"--dry-run says {estimated.total_bytes} bytes, but the run sent {state.total_bytes}")
    once = engine.registration_bytes + (state.setup_bytes or 0)
    if estimated.registration_bytes != once:
        raise AssertionError(f"--dry-run says {estimated.registration_bytes} bytes before round 1, but it was {once}")


def _expected(plan: RoundPlan, costs: CostModel, card_values: CardTraffic, seen: set[int]) -> tuple[int, int]:
    """Return bytes up and down of a round, from its plan and the card."""
    if any(point.merges for point in plan.points):
        return _expected_at_hubs(plan, costs)
    beside_up, beside_down = card_values.in_round(plan, seen)
    ups = sum(costs.num_bytes(plan.submodel(k), "up") for p in plan.points for k in p.attend)
    starts = [job.client for point in plan.points for job in point.start if not job.resume]
    downs = sum(costs.num_bytes(plan.submodel(k), "down") for k in starts)
    return int(ups + beside_up), int(downs + beside_down) + plan.index_bytes


def _expected_at_hubs(plan: RoundPlan, costs: CostModel) -> tuple[int, int]:
    """Return bytes up and down of a round whose models meet at other hubs: one message for each link that is used."""
    ups: list[int] = []
    downs = [job.client for point in plan.points for job in point.start if job.model != job.client]
    for meeting in (each for point in plan.points for each in point.merges if each.travels):
        ups += [client for client in meeting.clients if client != meeting.hub]
        for hub in meeting.hubs:
            (ups if hub >= 0 or meeting.hub == SERVER else downs).append(hub)
    return (
        sum(costs.num_bytes(plan.submodel(k), "up") + plan.submodel(k).index_bytes() for k in ups),
        sum(costs.num_bytes(plan.submodel(k), "down") + plan.submodel(k).index_bytes() for k in downs),
    )


def _equal(where: str, counted: int, ledger: int, card: int) -> None:
    if not counted == ledger == card:
        raise AssertionError(
            f"{where}: {counted} bytes crossed, the ledger has {ledger}, the card's formula gives {card}; correct the"
            " card's up, down, setup_up or setup_down, or what the method sends"
        )


class DeepNetwork(ChainNetwork):
    """Many layers alike, so that the first, whose inputs need no gradient, hardly counts."""

    def __init__(self) -> None:
        super().__init__(input_shape=(1, 1, 6), num_classes=4)
        sizes = [6, *[_WIDTH] * _DEPTH]
        for number in range(_DEPTH):
            self.add_layer(f"fc{number}", nn.Linear(sizes[number], _WIDTH))
        self.add_head(_WIDTH, None)


def passes_are_those_that_torch_counts(subject: Subject) -> None:
    """The clients' work beside FedAvg's steps is in the column `flops`, within 5 % of torch's count."""
    (by_card, counted), (plain_by_card, plain_counted) = (
        _flops(subject, subject.method),
        _plain_flops(subject.method.settings),
    )
    ratios = by_card / plain_by_card, counted / plain_counted
    if abs(ratios[0] - ratios[1]) > 0.05 * ratios[1]:
        raise AssertionError(
            f"from round 2 on clients compute {ratios[1]:.3f} times what FedAvg's do, but the column flops says"
            f" {ratios[0]:.3f}; correct the `passes` of its objective, terms or probes"
        )


def _flops(subject: Subject, method: FederatedMethod) -> tuple[float, float]:
    """Return operations of round 2 as the column has them, and as torch counts them."""
    work = subject.world(method, build=DeepNetwork, cohort_size=6, rounds=2, batch_size=16)
    fleet = FlopFleet(work)
    last = run_rounds(Engine(work, fleet)).records[-1]
    return last.flops - last.extra.get("server_flops", 0.0), fleet.flops[2]


@cache
def _plain_flops(settings: MethodSettings) -> tuple[float, float]:
    return _flops(subject_of("fedavg"), fedavg_with(settings))


# -- merges ------------------------------------------------------------------------------------------------------------

# One for each seam: a term, a term with a memory, weights, the server's step, intervals, parts of the model.
PARTNERS = ("fedprox", "moon", "fednova", "fedavgm", "dynamicfl", "federated_dropout")


def merges_run_or_are_refused(subject: Subject) -> None:
    """With one method for each seam: a pair is refused with both names, or runs the same in either order."""
    for name in PARTNERS:
        partner = subject_of(method_builder(name))
        if partner.builder is not subject.builder:
            _check_pair(subject, partner.method)


def _check_pair(subject: Subject, partner: FederatedMethod) -> None:
    pair = f"{subject.method.name} and {partner.name}"
    try:
        both = merge(subject.method, partner), merge(partner, subject.method)
        for method in both:
            check_experiment(subject.world(method))
    except ConfigError as error:
        if not (subject.method.name in str(error) and partner.name in str(error)):
            raise AssertionError(f"{pair} are refused without both names: {error}") from error
        return
    ends = [_end(subject, method, pair) for method in both]
    if not bool(torch.isfinite(ends[0].vector).all()):
        raise AssertionError(f"{pair} together: the model is not finite")
    ordered = len(subject.method.refinements) * len(partner.refinements) > 0
    if not ordered and not torch.allclose(ends[0].vector, ends[1].vector, rtol=0, atol=1e-6):
        raise AssertionError(f"{pair} give another model where they are merged in the other order")


def _end(subject: Subject, method: FederatedMethod, pair: str) -> RunState:
    try:
        return run_rounds(local_engine(subject.world(method, rounds=2, cohort_size=3, local_epochs=1)))
    except Exception as error:
        raise AssertionError(f"{pair} can be merged, but the run fails: {error}") from error


# -- sub-models --------------------------------------------------------------------------------------------------------


def parts_are_cut_and_put_back(subject: Subject) -> None:
    """For a method that gives clients parts of the model; others have nothing to show."""
    if not subject.method.submodels.cuts:
        return
    work = subject.world(subject.method, optimizer=OptimizerSettings(momentum=0.9, weight_decay=0.1), cohort_size=2)
    engine = local_engine(work)
    state, cut = engine.start(), 0
    while engine.finished_by(state) is None:
        played = play_round(engine, state)
        after = run_rounds(engine, state, rounds=1)
        covered = torch.zeros(engine.layout.num_values, dtype=torch.bool)
        for update in played.updates:
            cut += update.submodel != FULL_MODEL
            covered |= _checked(update.submodel, state.vector, engine.layout)
        settles = (
            type(subject.method.submodels).after_aggregate is not SubModelPolicy.after_aggregate
            or subject.method.refinements
            or subject.method.pacing.has_hubs
        )
        plain = subject.method.server_update.plain_mean and not settles
        if plain and not torch.equal(after.vector[~covered], state.vector[~covered]):
            raise AssertionError("values that no client held have moved")
        state = after
    if not cut:
        raise AssertionError("no client got less than the whole model; give the card parameters in `small` that cut")


def _checked(part: SubModel, vector: Tensor, full: FlatLayout) -> Tensor:
    """Mark the values [V] that the part holds, after its own promises were checked."""
    kind, own = type(part).__name__, part.layout(full)
    copy = pickle.loads(pickle.dumps(part))
    if copy.key() != part.key():
        raise AssertionError(f"{kind} has another key after pickling")
    cut = part.extract(vector, full)
    if len(cut) != own.num_values:
        raise AssertionError(f"{kind} cuts {len(cut)} values, but its layout has {own.num_values}")
    back = part.embed(cut, full)
    cover = torch.ones(full.num_values, dtype=torch.bool) if back.cover is None else back.cover
    if not torch.equal(back.vector[cover], vector[cover]):
        raise AssertionError(f"{kind} does not put values back where they were")
    again = part.extract(torch.where(cover, back.vector, vector), full)
    if not torch.equal(again, cut):
        raise AssertionError(f"{kind} cuts something else from what it put back")
    if sum(part.message(full, "up").values()) > full.num_values:
        raise AssertionError(f"{kind} sends more than the whole model")
    return cover
