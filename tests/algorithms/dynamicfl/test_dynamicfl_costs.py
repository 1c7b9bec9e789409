"""What DynamicFL's rounds cost: synchronisations, messages and budgets, with the numbers of its paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny_groups import two_speed

from fedsweep.algorithms.dynamicfl.chooser import GroupProblem
from fedsweep.algorithms.dynamicfl.dynacomm import DynaComm
from fedsweep.algorithms.dynamicfl.two_speed import LEVELS, dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import due_steps
from fedsweep.engine.engine import Engine
from fedsweep.method import FederatedMethod
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.world.budgets import BudgetPlan, DynamicBudget, FixedBudget

MOMENTUM = OptimizerSettings(momentum=0.9, nesterov=True)


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
    round = play_round(engine)
    ledger, num_values = round.ledger, engine.layout.num_values
    moved = ledger.worth_by_client()  # 4 bytes a value
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


@pytest.mark.parametrize(("level", "expected"), [("a", 0.996), ("b", 0.252), ("c", 0.064)])
def test_starred_rounds_cost_the_groups_share_alone(level: str, expected: float) -> None:
    budget = FixedBudget(budget_fraction=0.3).assign(10, stream(0, "budgets"))
    method = dynamicfl(high_interval=level, group="random", high_only=True)
    engine = long_round(method, cohort_size=10, budgets=budget)
    plan = engine.planner.plan(engine.start())
    assert plan.values / (10 * 2 * engine.layout.num_values * 250) == pytest.approx(0.3 * expected, abs=1e-12)


def test_one_class_per_client_takes_as_many_as_there_are_classes_in_a_cohort() -> None:
    """Of 100 clients, 10 per class, 10 are drawn: E|z| = 10 (1 - C(90, 10) / C(100, 10)) = 6.695 under the cap 9."""
    expected = 10 * (1 - math.comb(90, 10) / math.comb(100, 10))
    assert expected == pytest.approx(6.695, abs=5e-4)
    classes, generator = np.repeat(np.arange(10), 10), np.random.default_rng(0)
    sizes = []
    for draw in range(400):
        cohort = generator.choice(100, size=10, replace=False)
        problem = GroupProblem(
            counts_AC=500 * np.eye(10, dtype=np.int64)[classes[cohort]],
            population_C=np.full(10, 0.1),
            eligible_A=np.ones(10, dtype=bool),
            max_size=9,
            stream=stream(draw, "test"),
        )
        sizes.append(len(DynaComm(orders=1).choose(problem)))
        assert sizes[-1] == min(9, len(set(classes[cohort])))
    assert np.mean(sizes) == pytest.approx(expected, abs=0.15)
    assert expected / 10 * RATIO_250["a"] + (1 - expected / 10) * RATIO_250["g"] == pytest.approx(0.668, abs=5e-4)
