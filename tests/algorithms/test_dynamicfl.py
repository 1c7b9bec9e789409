"""DynamicFL and DynamicSGD against closed forms, identities, and the numbers of their specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl import LEVELS, TwoSpeed, dynamicfl, dynamicsgd, interval_of
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.groups import GroupChooser, GroupProblem
from fedsweep.components.local import LocalStep, Objective
from fedsweep.components.pacing import FixedInterval, OncePerRound, due_steps
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, MethodSettings
from fedsweep.runtime.engine import Engine
from fedsweep.runtime.messages import OptimizerSettings
from fedsweep.runtime.playing import Played
from fedsweep.runtime.state import RunState
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.world.budgets import BudgetPlan, DynamicBudget, FixedBudget

MOMENTUM = OptimizerSettings(momentum=0.9, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class Chosen(GroupChooser):
    """A group that the test names, by row of the cohort."""

    rows: tuple[int, ...]

    def choose(self, problem: GroupProblem) -> tuple[int, ...]:
        return self.rows


def two_speed(*rows: int, high: int = 1, low: int = 10_000, **more: object) -> FederatedMethod:
    pacing = TwoSpeed(high=high, low=low, group=Chosen(rows=rows), **more)  # type: ignore[arg-type]
    return FederatedMethod(name="dynamicfl", source="", pacing=pacing, settings=MethodSettings(equal_steps=True))


def every(interval: int, sync_rule: str = "paper") -> FederatedMethod:
    return FederatedMethod(
        name="dynamicsgd",
        source="",
        pacing=FixedInterval(interval=interval, sync_rule=sync_rule),
        settings=MethodSettings(equal_steps=True),
    )


def played(engine: Engine, state: RunState | None = None) -> Played:
    """A round as it went, with the last attendees' models."""
    state = engine.start() if state is None else state
    return engine._player.play(engine.planner.plan(state), state, attempt=0, keep=lambda seam, tree: None)


# -- quadratics: theorem 1 and its neighbours ------------------------------------------------------------------------


class Point(nn.Module):
    """One parameter, x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([2.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x * torch.ones(len(inputs), 2, dtype=self.x.dtype)


@dataclass(frozen=True, kw_only=True)
class Quadratic(Objective):
    """``h / 2 (x - z)^2``; a sample's two features are z and h."""

    def loss(self, step: LocalStep) -> Tensor:
        z, h = step.inputs.flatten(1).unbind(1)
        return (0.5 * h * (step.model.x - z) ** 2).mean()


def point_after(
    method: FederatedMethod,
    *,
    curvatures: Sequence[float] = (1.0, 1.0, 1.0),
    learning_rate: float = 0.1,
    rounds: int = 4,
    optimizer: OptimizerSettings | None = None,
) -> float:
    """x after rounds of ten steps of three clients with zbar (1, -3, 7) and n (10, 20, 5), from x0 = 2."""
    centres, sizes = (1.0, -3.0, 7.0), (10, 20, 5)
    samples = np.repeat(np.column_stack([centres, curvatures]), sizes, axis=0)
    experiment = tiny_experiment(
        FederatedMethod(
            name=method.name, source="", objective=Quadratic(), pacing=method.pacing, settings=method.settings
        ),
        num_clients=3,
        cohort_size=3,
        rounds=rounds,
        local_steps=10,
        batch_size=5,
        learning_rate=learning_rate,
        optimizer=optimizer,
        build=Point,
        double=True,
        sizes=sizes,
        images=samples.reshape(-1, 1, 1, 2),
        labels=np.zeros(35, dtype=np.int64),
    )
    return float(run_rounds(local_engine(experiment)).vector[0])


@pytest.mark.parametrize(
    "method",
    [
        two_speed(0, 1, high=1, low=10, sync_rule="paper"),
        two_speed(0, 1, high=1, low=10, sync_rule="authors"),
        two_speed(2, high=3, low=4, sync_rule="paper"),
        every(1),
        every(4),
        every(10),
        fedavg(),
    ],
    ids=["1-1-k", "1-1-k authors", "3-3-4", "1", "4", "k", "fedavg"],
)
def test_equal_curvatures_give_the_closed_form_at_any_intervals(method: FederatedMethod) -> None:
    """x = x* + (1 - eta)^(k r) (x0 - x*), x* = (10 x 1 + 20 x -3 + 5 x 7) / 35 = -3/7, eta .1, k 10, r 4."""
    optimum = (10 * 1 + 20 * -3 + 5 * 7) / 35
    assert optimum + 0.9**40 * (2 - optimum) == pytest.approx(-0.3926749985708, abs=1e-12)
    assert point_after(method) == pytest.approx(-0.3926749985708, abs=1e-12)


@pytest.mark.parametrize(
    ("interval", "optimizer", "expected"),
    [
        (1, None, 2.0991868141163614),
        (10, None, 2.067544140925423),
        (1, MOMENTUM, 2.3024396877733815),
        (10, MOMENTUM, 2.042541259316483),
    ],
)
def test_different_curvatures_give_the_specifications_numbers(
    interval: int, optimizer: OptimizerSettings | None, expected: float
) -> None:
    found = point_after(every(interval), curvatures=(1.0, 0.3, 2.0), learning_rate=0.01, optimizer=optimizer)
    assert found == pytest.approx(expected, abs=1e-12)


# -- interval 1 is centralised SGD -----------------------------------------------------------------------------------


def centralised(rounds: int, steps: int, optimizer: OptimizerSettings, sizes: Sequence[int]) -> Tensor:
    """SGD on the size-weighted mean of the clients' full gradients; momentum is reset in each round."""
    experiment = whole_batches(fedavg(), sizes=sizes)
    images, labels = experiment.world.data.images, experiment.world.data.labels
    model = experiment.build_model()
    for _ in range(rounds):
        sgd = torch.optim.SGD(
            model.parameters(),
            lr=0.1,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
        )
        for _ in range(steps):
            sgd.zero_grad()
            loss = torch.zeros((), dtype=torch.float64)
            for part, size in zip(experiment.world.indices, sizes, strict=True):
                logits = model(torch.from_numpy(images[part]))
                loss = loss + size / sum(sizes) * nn.functional.cross_entropy(logits, torch.from_numpy(labels[part]))
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole_batches(method: FederatedMethod, *, sizes: Sequence[int] = (4, 4, 4), rounds: int = 2, **more: object):  # type: ignore[no-untyped-def]
    """Clients whose every batch holds the same multiple of each of their samples."""
    return tiny_experiment(
        method,
        num_clients=len(sizes),
        cohort_size=len(sizes),
        rounds=rounds,
        local_steps=6,
        batch_size=4,
        double=True,
        sizes=sizes,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "optimizer",
    [OptimizerSettings(), MOMENTUM, OptimizerSettings(momentum=0.9, weight_decay=0.1)],
    ids=["plain", "nesterov", "heavy ball and decay"],
)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 2, 1)])
def test_interval_one_is_centralised_sgd_on_the_weighted_gradients(
    optimizer: OptimizerSettings, sizes: tuple[int, ...]
) -> None:
    found = run_rounds(local_engine(whole_batches(every(1), sizes=sizes, optimizer=optimizer))).vector
    torch.testing.assert_close(found, centralised(2, 6, optimizer, sizes), rtol=0, atol=1e-12)


def test_interval_one_is_not_centralised_sgd_with_persistent_momentum_or_clipping() -> None:
    reference = {rounds: centralised(rounds, 6, MOMENTUM, (4, 4, 4)) for rounds in (1, 2)}
    kept = OptimizerSettings(momentum=0.9, nesterov=True, keep="persist")
    first = run_rounds(local_engine(whole_batches(every(1), rounds=1, optimizer=kept))).vector
    second = run_rounds(local_engine(whole_batches(every(1), rounds=2, optimizer=kept))).vector
    torch.testing.assert_close(first, reference[1], rtol=0, atol=1e-12)
    assert float((second - reference[2]).abs().max()) > 1e-4
    clipped = OptimizerSettings(momentum=0.9, nesterov=True, clip_norm=0.1)
    found = run_rounds(local_engine(whole_batches(every(1), rounds=1, optimizer=clipped))).vector
    assert float((found - reference[1]).abs().max()) > 1e-4


# -- identities with FedAvg ------------------------------------------------------------------------------------------


def bits(method: FederatedMethod, **more: object) -> Tensor:
    options: dict[str, object] = {"cohort_size": 3, "rounds": 3, "local_steps": 7, "optimizer": MOMENTUM} | more
    return run_rounds(local_engine(tiny_experiment(method, **options))).vector  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
@pytest.mark.parametrize("method", [every(7), every(10_000, "authors"), two_speed(0, 2, high=9, low=256)])
def test_intervals_of_a_whole_round_are_fedavg_bit_for_bit(method: FederatedMethod, keep: str) -> None:
    optimizer = OptimizerSettings(momentum=0.9, keep=keep)
    assert torch.equal(bits(method, optimizer=optimizer), bits(fedavg(), optimizer=optimizer))


@pytest.mark.parametrize("rows", [(), (0,), (2,)])
@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_high_group_of_at_most_one_client_is_fedavg_bit_for_bit(rows: tuple[int, ...], keep: str) -> None:
    optimizer = OptimizerSettings(momentum=0.9, nesterov=True, keep=keep)
    assert torch.equal(bits(two_speed(*rows), optimizer=optimizer), bits(fedavg(), optimizer=optimizer))


def test_everybody_in_the_high_group_is_dynamicsgd_bit_for_bit() -> None:
    assert torch.equal(bits(two_speed(0, 1, 2)), bits(dynamicsgd()))


def test_two_clients_in_the_high_group_differ_from_fedavg() -> None:
    assert not torch.equal(bits(two_speed(0, 1)), bits(fedavg()))


@pytest.mark.parametrize("method", [every(1), every(3), two_speed(0, 2), two_speed(1, 2, high=2, low=3)])
def test_equal_data_on_all_clients_is_sgd_of_one_client(method: FederatedMethod) -> None:
    images, labels = tiny_data(num_samples=4, dtype=np.float64)
    runs = {}
    for num_clients in (1, 3):
        clients = {"num_clients": num_clients, "cohort_size": num_clients, "sizes": (4,) * num_clients}
        runs[num_clients] = bits(
            method if num_clients > 1 else fedavg(),
            images=np.tile(images, (num_clients, 1, 1, 1)),
            labels=np.tile(labels, num_clients),
            double=True,
            **clients,
        )
    torch.testing.assert_close(runs[3], runs[1], rtol=0, atol=1e-12)


# -- who receives what, and how it is averaged ------------------------------------------------------------------------


def test_only_members_receive_an_average_inside_a_round() -> None:
    """The low client's model at the round's end is the one that it would have without any other client."""
    dynamic = played(local_engine(tiny_experiment(two_speed(0, 1), local_steps=7)))
    plain = played(local_engine(tiny_experiment(fedavg(), local_steps=7)))
    assert dynamic.updates[2].client == plain.updates[2].client
    assert torch.equal(_vector(dynamic, 2), _vector(plain, 2))
    assert not torch.equal(_vector(dynamic, 0), _vector(plain, 0))


def _vector(round: Played, row: int) -> Tensor:
    vector = round.updates[row].vector
    assert vector is not None
    return vector


def test_union_average_is_the_mean_of_the_two_groups_means() -> None:
    sizes = (4, 8, 12, 6)
    round = played(
        local_engine(
            tiny_experiment(two_speed(0, 2), num_clients=4, cohort_size=4, sizes=sizes, local_steps=5, double=True)
        )
    )
    groups = [(0, 2), (1, 3)]
    means = [sum(sizes[k] * _vector(round, k) for k in g) / sum(sizes[k] for k in g) for g in groups]
    shares = [sum(sizes[k] for k in g) / sum(sizes) for g in groups]
    expected = shares[0] * means[0] + shares[1] * means[1]
    torch.testing.assert_close(round.vector, expected, rtol=0, atol=1e-14)


def test_weights_are_the_shares_of_samples() -> None:
    sizes = (4, 8, 12)
    state = run_rounds(
        local_engine(tiny_experiment(two_speed(0, 1), num_clients=3, sizes=sizes, local_steps=4, rounds=1))
    )
    assert state.records[0].aggregation_weights == pytest.approx([n / 24 for n in sizes], abs=1e-15)


def test_the_round_s_model_lies_between_its_clients_models() -> None:
    round = played(local_engine(tiny_experiment(two_speed(0, 1, high=2, low=3), local_steps=7)))
    models = torch.stack([_vector(round, row) for row in range(3)])
    assert bool((round.vector >= models.min(0).values - 1e-7).all())
    assert bool((round.vector <= models.max(0).values + 1e-7).all())


# -- the starred runs ------------------------------------------------------------------------------------------------


def starred(idle_clients: str) -> Played:
    method = two_speed(0, 2, high_only=True, idle_clients=idle_clients)
    sizes = (4, 8, 12, 6)
    return played(
        local_engine(tiny_experiment(method, num_clients=4, cohort_size=4, sizes=sizes, local_steps=5, double=True))
    )


def test_idle_clients_take_no_part_unless_asked_for() -> None:
    round = starred("exclude")
    assert round.attendees == (0, 2)
    assert {client for client, _, _ in round.ledger.values} == {0, 2}
    assert round.weights == pytest.approx([4 / 16, 12 / 16])


def test_authors_idle_clients_damp_the_update_by_the_groups_share() -> None:
    """The result is h W_high + (1 - h) W_g with h = (4 + 12) / 30."""
    alone, damped = starred("exclude"), starred("authors")
    start = local_engine(
        tiny_experiment(fedavg(), num_clients=4, cohort_size=4, sizes=(4, 8, 12, 6), double=True)
    ).start()
    share = 16 / 30
    torch.testing.assert_close(damped.vector, share * alone.vector + (1 - share) * start.vector, rtol=0, atol=1e-14)
    assert damped.ledger.values == alone.ledger.values
    assert damped.attendees == (0, 1, 2, 3)
    idle = damped.updates[1]
    assert (idle.steps, idle.anchor_version) == (0, start.version)


def test_a_starred_round_with_an_empty_group_changes_nothing() -> None:
    state = run_rounds(local_engine(tiny_experiment(two_speed(high_only=True), local_steps=4, rounds=1)))
    start = local_engine(tiny_experiment(fedavg())).start()
    record = state.records[0]
    assert torch.equal(state.vector, start.vector)
    assert (record.comm_cost, record.local_steps, record.attendees, record.high_frequency) == (0, 0, (), ())


# -- synchronisations and costs --------------------------------------------------------------------------------------

NU_250 = {"a": 249, "b": 63, "c": 16, "d": 8, "e": 4, "f": 2, "g": 1}
RATIO_250 = {"a": 0.996, "b": 0.252, "c": 0.064, "d": 0.032, "e": 0.016, "f": 0.008, "g": 0.004}


@pytest.mark.parametrize("level", LEVELS)
def test_synchronisations_of_250_steps_are_the_papers(level: str) -> None:
    interval = LEVELS[level]
    dues = due_steps(interval, 250, sync_rule="authors")
    assert len(dues) == NU_250[level] == -(-249 // min(interval, 250))
    assert len(due_steps(interval, 250, sync_rule="paper")) == -(-250 // min(interval, 250))
    assert 249 not in dues and dues[-1] == 250


@pytest.mark.parametrize(("level", "expected"), [("a", 1.0), ("b", 0.25), ("c", 0.063), ("d", 0.031), ("g", 13 / 3221)])
def test_synchronisations_of_3221_steps_are_the_papers(level: str, expected: float) -> None:
    assert len(due_steps(LEVELS[level], 3221, sync_rule="authors")) / 3221 == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("interval", range(1, 10))
def test_the_rules_differ_only_where_the_interval_divides_all_steps_but_one(interval: int, steps: int) -> None:
    clipped = min(interval, steps)
    authors, paper = (due_steps(interval, steps, sync_rule=rule) for rule in ("authors", "paper"))
    assert paper == tuple(s for s in range(1, steps + 1) if s % clipped == 0 or s == steps)
    assert authors == tuple(s for s in range(1, steps + 1) if (s % clipped == 0 and s <= steps - 2) or s == steps)
    assert (authors != paper) == (steps > 1 and (steps - 1) % clipped == 0 and clipped < steps)


def long_round(method: FederatedMethod, *, cohort_size: int = 2, **world: object) -> Engine:
    """250 steps a round: 12 samples of each of the clients, batches of 12."""
    return local_engine(
        tiny_experiment(
            method,
            num_clients=cohort_size,
            cohort_size=cohort_size,
            sizes=(4,) * cohort_size,
            rounds=1,
            local_epochs=250,
            **world,  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_round_of_250_steps_costs_what_the_paper_prints(level: str) -> None:
    engine = long_round(two_speed(0, 1, high=LEVELS[level], low=256))
    record = run_rounds(engine).records[0]
    num_values = engine.layout.num_values
    assert record.local_steps == 500
    assert record.sync_points == NU_250[level]
    assert record.comm_ratio == pytest.approx(RATIO_250[level], abs=1e-12)
    assert record.values_up == record.values_down == 2 * NU_250[level] * num_values
    assert record.comm_cost == record.values_up + record.values_down
    assert record.bytes_up == 4 * record.values_up


def test_messages_of_each_client_are_two_per_synchronisation_and_sum_to_the_cost() -> None:
    engine = long_round(two_speed(0, 2, high=4, low=64), cohort_size=3)
    round = played(engine)
    ledger, num_values = round.ledger, engine.layout.num_values
    moved = {client: ledger.client_values(client) for client in range(3)}
    assert moved == {0: 2 * 63 * num_values, 1: 2 * 4 * num_values, 2: 2 * 63 * num_values}
    assert sum(moved.values()) == ledger.total("up") + ledger.total("down")
    for client in range(3):
        assert ledger.values[client, "up", "params"] == ledger.values[client, "down", "params"]


@pytest.mark.parametrize(
    ("levels", "budget", "expected"),
    [
        (("a", "g"), DynamicBudget(budget_fraction=0.3), 0.3 * 0.996 + 0.7 * 0.004),
        (("b", "g"), DynamicBudget(budget_fraction=0.3), 0.3 * 0.252 + 0.7 * 0.004),
        (("c", "g"), DynamicBudget(budget_fraction=0.3), 0.3 * 0.064 + 0.7 * 0.004),
        (("a", "b"), FixedBudget(budget_fraction=0.6), 0.6 * 0.996 + 0.4 * 0.252),
    ],
)
def test_mixed_rounds_cost_the_mean_over_both_groups(
    levels: tuple[str, str], budget: FixedBudget | DynamicBudget, expected: float
) -> None:
    method = dynamicfl(high_interval=levels[0], low_interval=levels[1], group="random")
    engine = long_round(method, cohort_size=10, budgets=budget.assign(10, stream(0, "budgets")))
    plan = engine.planner.plan(engine.start())
    assert plan.values / (10 * 2 * engine.layout.num_values * 250) == pytest.approx(expected, abs=1e-12)


def test_no_client_exceeds_its_budget_and_other_methods_report_who_does() -> None:
    plan: BudgetPlan = FixedBudget(budget_fraction=0.5).assign(6, stream(0, "budgets"))
    world = {"num_clients": 6, "cohort_size": 6, "local_steps": 8, "rounds": 2, "budgets": plan}
    kept = run_rounds(local_engine(tiny_experiment(dynamicfl(group="random"), **world))).records  # type: ignore[arg-type]
    affords = np.flatnonzero(plan.eligible(range(6), 1.0))
    assert all(set(record.high_frequency or ()) <= set(affords.tolist()) for record in kept)
    assert [record.over_budget for record in kept] == [0, 0]
    sgd = run_rounds(local_engine(tiny_experiment(dynamicsgd(), **world))).records  # type: ignore[arg-type]
    assert [record.over_budget for record in sgd] == [3, 3]
    averaged = run_rounds(local_engine(tiny_experiment(fedavg(), **world))).records  # type: ignore[arg-type]
    assert [record.over_budget for record in averaged] == [0, 0]


def test_averaged_momentum_is_charged_on_top_of_the_models_values() -> None:
    """The ratio's reference is 2 |W| L, and |W| has no momentum in it: moving it costs twice as much."""
    averaged = OptimizerSettings(momentum=0.9, keep="average")
    ratios = {}
    for name, optimizer in (("plain", MOMENTUM), ("averaged", averaged)):
        experiment = tiny_experiment(two_speed(0, 1), local_steps=5, rounds=1, optimizer=optimizer)
        ratios[name] = run_rounds(local_engine(experiment)).records[0].comm_ratio
    assert ratios["plain"] is not None
    assert ratios["averaged"] == pytest.approx(2 * ratios["plain"])


# -- who is in the high group ------------------------------------------------------------------------------------------


def test_the_server_admits_at_most_its_share_of_the_cohort() -> None:
    plan = DynamicBudget(budget_fraction=0.57).assign(100, stream(0, "budgets"))
    experiment = tiny_experiment(
        dynamicfl(group="random"),
        num_clients=100,
        cohort_size=100,
        sizes=(1,) * 96 + (0,) * 4,
        local_steps=2,
        budgets=plan,
    )
    engine = local_engine(experiment)
    context = engine.planner.plan(engine.start()).context
    assert len(context.cohort) == 96
    group = engine.planner.plan(engine.start()).components["pacing"]["group"]
    assert len(group) == 54  # floor(0.57 x 96 = 54.72)


def test_records_name_the_group_and_its_divergence() -> None:
    state = run_rounds(local_engine(tiny_experiment(two_speed(0, 2), rounds=1)))
    record, profiles = state.records[0], local_engine(tiny_experiment(fedavg())).experiment.world.profiles
    assert record.high_frequency == (record.cohort[0], record.cohort[2])
    counts = sum(profiles[k].label_counts for k in record.high_frequency)
    shares, everybody = counts / counts.sum(), sum(p.label_counts for p in profiles)
    target = everybody / everybody.sum()
    expected = sum(p * np.log(p / q) for p, q in zip(shares, target, strict=True) if p > 0)
    assert record.kl_divergence == pytest.approx(expected, abs=1e-12)


# -- parameters ------------------------------------------------------------------------------------------------------


def test_levels_are_the_papers_and_numbers_are_taken_as_they_are() -> None:
    assert [interval_of(level, key="k") for level in "abcdefg"] == [1, 4, 16, 32, 64, 128, 256]
    assert interval_of(7, key="k") == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"high_interval": "h"}, r"method\.high_interval: unknown level 'h'"),
        ({"low_interval": 0}, r"method\.low_interval must be a level a-g or at least 1 local step, but got 0"),
        ({"high_interval": True}, r"method\.high_interval must be"),
        ({"high_interval": "e", "low_interval": "c"}, r"high_interval=64, low_interval=16; swap them"),
        ({"sync_rule": "both"}, "sync_rule must be 'authors' or 'paper', but got 'both'"),
        ({"idle_clients": "include"}, "idle_clients must be 'exclude' or 'authors', but got 'include'"),
    ],
)
def test_wrong_parameters_are_refused_with_rule_value_and_way_out(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dynamicfl(group="random", **options)  # type: ignore[arg-type]


def test_the_interval_of_dynamicsgd_is_one_step_under_either_rule() -> None:
    assert dynamicsgd().pacing == FixedInterval(interval=1, sync_rule="authors")
    assert dynamicsgd(sync_rule="paper").pacing == FixedInterval(interval=1, sync_rule="paper")
    assert fedavg().pacing == OncePerRound()
    with pytest.raises(ConfigError, match="at least 1 local step, but got 0"):
        FixedInterval(interval=0)
