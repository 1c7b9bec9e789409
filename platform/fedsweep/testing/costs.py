"""Conformance of costs: bytes and floating-point operations, counted twice."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from torch import nn

from fedsweep.components.submodels import SubModelPolicy
from fedsweep.engine.cost import CostModel
from fedsweep.engine.engine import Engine
from fedsweep.engine.foresight.beside import Beside
from fedsweep.engine.foresight.forecast import forecast
from fedsweep.engine.plan import RoundPlan
from fedsweep.method import FederatedMethod, MethodSettings
from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.models.networks.chains import ChainNetwork
from fedsweep.testing.fleets import FlopFleet, MeasuringFleet
from fedsweep.testing.subject import Subject, fedavg_with, subject_of
from fedsweep.testing.worlds import run_rounds

_WIDTH, _DEPTH = 32, 6


def bytes_are_the_cards(subject: Subject) -> None:
    """What crossed to the clients and back, the ledger, the card's formulas and the forecast are one number."""
    work = subject.world()
    fleet = MeasuringFleet(work)
    engine = Engine(work, fleet)
    state, said = engine.start(), Beside(work, CostModel(work))
    _equal("set-up", fleet.setup, state.setup_bytes or 0, said.setup_bytes)
    seen: set[int] = set()
    while engine.finished_by(state) is None:
        before = (fleet.up, fleet.down)
        plan = engine.planner.plan(state)
        after = run_rounds(engine, state, rounds=1)
        record = after.records[-1]
        up, down = _expected(plan, engine.costs, said, seen)
        _equal(f"round {record.round}, up", fleet.up - before[0], record.bytes_up, up)
        _equal(f"round {record.round}, down", fleet.down - before[1], record.bytes_down, down)
        state = after
    told = forecast(work)
    # A forecast is as good as the first plan: what a policy learns on the way it can't know.
    method = subject.method
    learns = method.submodels.has_own("learn", "observe") or method.pacing.has_own("observe")
    steady = not learns and type(method.submodels).settle is SubModelPolicy.settle
    if steady and told.total_bytes != state.total_bytes:
        raise AssertionError(f"--dry-run says {told.total_bytes} bytes, but the run sent {state.total_bytes}")
    once = engine.registration_bytes + (state.setup_bytes or 0)
    if told.registration_bytes != once:
        raise AssertionError(f"--dry-run says {told.registration_bytes} bytes before round 1, but it was {once}")


def _expected(plan: RoundPlan, costs: CostModel, said: Beside, seen: set[int]) -> tuple[int, int]:
    """Bytes up and down of a round, from its plan and the card."""
    beside = {"up": Fraction(0), "down": Fraction(0)}
    started = {job.client for point in plan.points for job in point.start if not job.resume}
    sending = {client for point in plan.points for client in point.attend}
    for client in sorted(started):
        part, first = plan.submodel(client), client not in seen
        beside["down"] += said.values("down", client, part, round=plan.context.round, first=first)
        if client in sending:
            beside["up"] += said.values("up", client, part, round=plan.context.round, first=first)
    seen |= started
    ups = sum(costs.num_bytes(plan.submodel(k), "up") for p in plan.points for k in p.attend)
    starts = [job.client for point in plan.points for job in point.start if not job.resume]
    downs = sum(costs.num_bytes(plan.submodel(k), "down") for k in starts)
    return int(ups + BYTES_PER_VALUE * beside["up"]), int(downs + BYTES_PER_VALUE * beside["down"]) + plan.index_bytes


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
    """What clients compute beside FedAvg's steps is in the column `flops`, within 5 % of what torch counts."""
    (told, counted), (plain_told, plain_counted) = (
        _flops(subject, subject.method),
        _plain_flops(subject.method.settings),
    )
    ratios = told / plain_told, counted / plain_counted
    if abs(ratios[0] - ratios[1]) > 0.05 * ratios[1]:
        raise AssertionError(
            f"from round 2 on clients compute {ratios[1]:.3f} times what FedAvg's do, but the column flops says"
            f" {ratios[0]:.3f}; correct the `passes` of its objective, terms or probes"
        )


def _flops(subject: Subject, method: FederatedMethod) -> tuple[float, float]:
    """Operations of round 2 as the column has them, and as torch counts them."""
    work = subject.world(method, build=DeepNetwork, cohort_size=6, rounds=2, batch_size=16)
    fleet = FlopFleet(work)
    last = run_rounds(Engine(work, fleet)).records[-1]
    return last.flops - last.extra.get("server_flops", 0.0), fleet.flops[2]


@cache
def _plain_flops(settings: MethodSettings) -> tuple[float, float]:
    return _flops(subject_of("fedavg"), fedavg_with(settings))
