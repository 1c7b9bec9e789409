"""DynamicFL with groups by similarity: what is sent, what is chosen, budgets, resuming, Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import resumed
from torch import nn

from fedsweep.algorithms.dynamicfl.chooser import GroupProblem
from fedsweep.algorithms.dynamicfl.select_group import select_group
from fedsweep.algorithms.dynamicfl.similarity import GradientSketch, SimilarityGroup, sketch
from fedsweep.algorithms.dynamicfl.two_speed import TwoSpeed, dynamicfl
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.probes import LocalClient
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.streams import stream
from fedsweep.testing import linear_model, local_engine, run_rounds, tiny_experiment
from fedsweep.world.budgets import BudgetPlan, DynamicBudget, FixedBudget

VALUES = 16


def by_similarity(**more: Any) -> FederatedMethod:
    return dynamicfl(group="similarity", sketch_values=VALUES, **more)


def one_class_each(method: FederatedMethod, **more: Any) -> Experiment:
    """Twelve clients of eight samples, three for each of four classes; six of them in a round."""
    return tiny_experiment(method, **{"num_clients": 12, "cohort_size": 6, "rounds": 8, "local_steps": 4, **more})


def test_the_sketches_are_in_the_work_before_round_1() -> None:
    """Three passes of 12 clients' 8 samples through 6 x 4 weights, two operations each."""
    state = local_engine(one_class_each(by_similarity())).start()
    assert state.setup_flops == 3 * 12 * 8 * 2 * 24


def test_the_sketch_is_that_of_the_gradient_over_all_samples() -> None:
    """The gradient by hand: softmax minus one-hot, times the inputs, over the number of samples."""
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 1, 1, 0, 1])
    model = nn.Linear(3, 2).double()
    params = {name: value.detach() for name, value in model.named_parameters()}
    client = LocalClient(
        client=0,
        round=0,
        inputs=inputs,
        targets=targets,
        num_classes=2,
        anchor=params,
        params=params,
        model=model,
        forward_with=lambda p, x: torch.func.functional_call(model, p, (x,)),
        stream=stream(0, "own"),
    )
    shared = stream(1, "shared")
    found = GradientSketch(num_features=4, shared=shared).measure(client)["sketch"]
    errors = torch.softmax(model(inputs), 1).detach() - nn.functional.one_hot(targets, 2)
    gradient = torch.cat([(errors.T @ inputs / 5).flatten(), errors.mean(0)])
    assert found.dtype == torch.float32 and found.shape == (4,)
    expected = sketch(gradient.numpy(), features=4, stream=shared)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-8)


def test_clients_send_one_sketch_each_before_round_1_and_no_label_counts() -> None:
    """Registration: the number of samples of 12 clients; the exchange: a model down, 16 values up; rounds: models."""
    engine = local_engine(one_class_each(by_similarity()))
    state = run_rounds(engine)
    assert engine.registration_bytes == 4 * 12
    assert state.setup_bytes == 4 * 12 * (engine.experiment.layout.num_params + VALUES)
    counting = local_engine(one_class_each(dynamicfl()))
    assert (counting.registration_bytes, counting.start().setup_bytes) == (4 * 12 * (1 + 4), 0)
    context = engine.planner.plan(engine.start()).context
    high, low = engine.experiment.method.pacing.costs(context)
    for record in state.records:
        assert record.high_frequency is not None
        members = len(record.high_frequency)
        assert record.values_up + record.values_down == record.comm_cost == members * high + (6 - members) * low


def test_the_chooser_is_given_no_label_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GroupProblem] = []
    choose = SimilarityGroup.choose

    def spy(self: SimilarityGroup, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        seen.append(problem)
        return choose(self, problem, size=size)

    monkeypatch.setattr(SimilarityGroup, "choose", spy)
    run_rounds(local_engine(one_class_each(by_similarity(), rounds=2)))
    assert len(seen) == 2
    for problem in seen:
        assert problem.counts_AC.shape == (6, 0) and problem.population_C.shape == (0,)
        assert problem.features_AD is not None and problem.features_AD.shape == (6, VALUES)


@pytest.mark.slow
def test_groups_by_similarity_have_nearly_the_labels_that_counts_would_give() -> None:
    """Without labels the groups' mean divergence lies much nearer to DynaComm's than to the random groups'."""
    budget = DynamicBudget(budget_fraction=0.7).assign(12, stream(0, "budgets"))
    mean = {}
    for group in ("dynacomm", "similarity", "random"):
        runs = [
            run_rounds(local_engine(one_class_each(dynamicfl(group=group), seed=seed, budgets=budget, rounds=10)))
            for seed in range(3)
        ]
        mean[group] = float(np.mean([record.kl_divergence for run in runs for record in run.records]))
    assert mean["dynacomm"] <= mean["similarity"] < mean["dynacomm"] + 0.25 * (mean["random"] - mean["dynacomm"])


@pytest.mark.parametrize(
    "budget", [FixedBudget(budget_fraction=0.4), DynamicBudget(budget_fraction=0.34)], ids=["fixed", "dynamic"]
)
@pytest.mark.parametrize("group_size", [None, 3])
def test_budgets_are_kept(budget: FixedBudget | DynamicBudget, group_size: int | None) -> None:
    plan: BudgetPlan = budget.assign(12, stream(0, "budgets"))
    engine = local_engine(one_class_each(by_similarity(group_size=group_size), budgets=plan))
    high, _ = engine.experiment.method.pacing.costs(engine.planner.plan(engine.start()).context)
    for record in run_rounds(engine).records:
        assert record.over_budget == 0 and record.high_frequency is not None
        able = [k for k, yes in zip(record.cohort, plan.eligible(record.cohort, high), strict=True) if yes]
        assert set(record.high_frequency) <= set(able)
        limit = min(plan.max_high(6, cost_high=high, cost_low=0), len(able))
        assert len(record.high_frequency) <= limit
        if group_size is not None:
            assert len(record.high_frequency) == min(group_size, limit)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    experiment = one_class_each(by_similarity(), optimizer=OptimizerSettings(momentum=0.9, keep="persist"))
    whole, other = run_rounds(local_engine(experiment)), resumed(experiment, tmp_path, rounds=3)
    assert torch.equal(other.vector, whole.vector)
    assert [r.high_frequency for r in other.records] == [r.high_frequency for r in whole.records]


def test_a_forecast_takes_as_many_as_the_budgets_admit() -> None:
    plan = DynamicBudget(budget_fraction=0.5).assign(12, stream(0, "budgets"))
    experiment = one_class_each(by_similarity(sync_rule="paper"), budgets=plan)
    assert forecast(experiment).comm_ratio == pytest.approx((3 * 1 + 3 / 4) / 6)
    assert all(
        len(record.high_frequency or ()) <= 3 and record.comm_ratio is not None and record.comm_ratio <= 3.75 / 6
        for record in run_rounds(local_engine(experiment)).records
    )


def test_wrong_options_and_places_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.sketch_values must be an integer >= 1, but got 0"):
        dynamicfl(group="similarity", sketch_values=0)
    with pytest.raises(ConfigError, match="orders must be an integer >= 1 and <= 100000, but got 0"):
        SimilarityGroup(orders=0)
    with pytest.raises(ConfigError, match="'similarity' needs what clients measure on a model"):
        select_group(np.array([[3, 0], [0, 3]]), method="similarity")
    problem = GroupProblem(
        counts_AC=np.zeros((2, 0), dtype=np.int64),
        population_C=np.zeros(0),
        eligible_A=np.ones(2, dtype=bool),
        max_size=2,
        stream=stream(0, "test"),
    )
    with pytest.raises(InvariantError, match="needs the clients' sketches"):
        SimilarityGroup().choose(problem)


@pytest.mark.exhaustive
@pytest.mark.ray
def test_two_actors_give_the_bits_of_one_process(pool: Any) -> None:
    import ray_pool

    experiment = one_class_each(by_similarity(), rounds=4, build=linear_model)
    expected, (found, _) = run_rounds(local_engine(experiment)), ray_pool.play(pool, experiment)
    assert isinstance(experiment.method.pacing, TwoSpeed)
    assert found.vector.numpy().tobytes() == expected.vector.numpy().tobytes()
    sketches = [state.components["pacing"]["features"].tobytes() for state in (found, expected)]
    assert sketches[0] == sketches[1]
    assert [r.high_frequency for r in found.records] == [r.high_frequency for r in expected.records]
