"""Budgets that are spent round by round: never passed, used up, the same after a resume, and with reasons."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import net

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.catalog import built_in_card, resolve
from fedsweep.components.compression.registry import CODECS
from fedsweep.components.spending import Even, Gain, Offer, Outlook, SpendingPlanner, Spent, levels_of
from fedsweep.config import load_config
from fedsweep.engine.ahead.spending import landed
from fedsweep.engine.cost import CostModel
from fedsweep.engine.forecast import forecast, planned_rounds
from fedsweep.engine.plan import Planner
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import Experiment, Option, StopLimits
from fedsweep.method import FederatedMethod
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.testing import local_engine, run_rounds, tiny_device, tiny_experiment, with_devices


@dataclass(frozen=True, kw_only=True)
class AtRandom(SpendingPlanner):
    """Wants anything."""

    seed: int = 0

    def choose(self, outlook: Outlook) -> tuple[int, str]:
        generator = np.random.default_rng([self.seed, outlook.rounds_left])
        return int(generator.integers(len(outlook.offers))), "a whim"


def spending(
    method: FederatedMethod, planner: SpendingPlanner, *, total_bytes: int, cohorts: tuple[int, ...], **world: Any
) -> Experiment:
    """An experiment whose cohorts may be chosen; DynamicFL's interval, too."""
    stop = StopLimits(total_bytes=total_bytes)
    plain = tiny_experiment(method, build=net, stop=stop, **{"local_steps": 4, "cohort_size": max(cohorts), **world})
    intervals = (4, 1) if method.name == "dynamicfl" else (None,)
    options = tuple(
        Option(
            values={"training.cohort_size": size} | ({} if interval is None else {"method.high_interval": interval}),
            experiment=replace(
                plain,
                training=replace(plain.training, cohort_size=size),
                method=method if interval is None else dynamicfl(group_size=1, high_interval=interval, low_interval=4),
            ),
        )
        for size in cohorts
        for interval in intervals
    )
    parameters = {"server_learning_rate": 1.0, "rebuild": False, "group": "random", "sketch_values": 0}
    cards = ((built_in_card(method.name), parameters),)
    options = tuple(replace(o, experiment=replace(o.experiment, cards=cards)) for o in options)
    return replace(plain, spending=planner, options=options)


@pytest.mark.slow
def test_a_hundred_random_worlds_end_within_a_hundredth_below_their_budget() -> None:
    """Whatever the planner wants, a message being less than a hundredth of the budget."""
    generator = np.random.default_rng(0)
    for world in range(100):
        clients = int(generator.integers(4, 12))
        cohorts = tuple(range(1, 1 + int(generator.integers(2, min(clients, 6) + 1))))
        method = (fedavg(), dynamicfl(group_size=1, high_interval=4, low_interval=4))[world % 2]
        experiment = spending(
            method, AtRandom(seed=world), total_bytes=1, cohorts=cohorts, num_clients=clients, seed=world
        )
        costs = CostModel(experiment)
        pair = 2 * costs.message_values * 4
        budget = int(pair * generator.uniform(105, 160))
        rounds = int(np.ceil(1.2 * budget / pair / max(cohorts))) + int(generator.integers(0, 40))
        training = replace(experiment.training, rounds=rounds, stop=StopLimits(total_bytes=budget))
        options = tuple(
            replace(o, experiment=replace(o.experiment, training=replace(o.experiment.training, rounds=rounds)))
            for o in experiment.options
        )
        experiment = replace(experiment, training=training, options=options)
        sent = sum(plan.num_bytes for plan in planned_rounds(experiment, Planner(experiment, costs)))
        once = forecast(replace(experiment, options=()), most_planned=1).registration_bytes
        assert 0.99 * budget <= sent + once <= budget, (world, sent / budget)
        if world % 20 < 2:  # one in ten, half of them DynamicFL's
            assert run_rounds(local_engine(experiment)).total_bytes == sent + once


@pytest.mark.parametrize("planner", [Gain(window=2), Even()])
@pytest.mark.parametrize("method", [scaffold(), dynamicfl(group_size=1, high_interval=4, low_interval=4)])
def test_what_is_trained_ends_there_too(planner: SpendingPlanner, method: FederatedMethod) -> None:
    """With what travels beside models, which is counted as methods' cards say."""
    budget = 900 * 2 * 120
    experiment = spending(method, planner, total_bytes=budget, cohorts=(1, 2, 3), rounds=200)
    state = run_rounds(local_engine(experiment))
    assert 0.99 * budget <= state.total_bytes <= budget
    assert [decision.round for decision in state.decisions] == list(range(1, state.round + 1))
    sent = [record.bytes_up + record.bytes_down for record in state.records]
    assert [decision.cost for decision in state.decisions] == sent
    sizes = [experiment.options[decision.choice].values["training.cohort_size"] for decision in state.decisions]
    assert [len(record.cohort) for record in state.records] == sizes and all(d.reason for d in state.decisions)


def test_a_budget_of_virtual_seconds_is_never_passed() -> None:
    plain = spending(fedavg(), Gain(), total_bytes=1, cohorts=(1, 2, 3), rounds=100)
    devices = [tiny_device(1e6), tiny_device(3e6)]
    stop = StopLimits(sim_time_s=0.5)
    timed = with_devices(replace(plain, training=replace(plain.training, stop=stop)), devices)
    options = tuple(
        replace(
            o,
            experiment=with_devices(replace(o.experiment, training=replace(o.experiment.training, stop=stop)), devices),
        )
        for o in timed.options
    )
    state = run_rounds(local_engine(replace(timed, options=options)))
    assert state.clock is not None and 0.9 * 0.5 <= state.clock <= 0.5


def test_a_resumed_run_spends_as_the_unbroken_one(tmp_path: Path) -> None:
    """With codecs that are chosen round by round, whose error feedback clients keep."""
    plain = spending(fedavg(), AtRandom(seed=3), total_bytes=40_000, cohorts=(2, 3), rounds=60)
    codecs = [CODECS[name](error_feedback=True) for name in ("topk", "sign")]
    options = tuple(
        Option(
            values={**option.values, "communication.up": str(codec)},
            experiment=replace(option.experiment, communication=replace(plain.communication, up=codec)),
        )
        for option in plain.options
        for codec in codecs
    )
    experiment = replace(plain, options=options)
    whole, engine = run_rounds(local_engine(experiment)), local_engine(experiment)
    store = CheckpointStore(tmp_path, keep=1, config_hash="x")
    store.save(run_rounds(engine, rounds=5), fetch=engine.fleet.fetch)
    again = local_engine(experiment)
    state = CheckpointStore(tmp_path, keep=1, config_hash="x").newest(keep_handle=again.fleet.keep).state
    assert state is not None and len(state.decisions) == 5
    after = run_rounds(again, state)
    assert torch.equal(after.vector, whole.vector) and after.decisions == whole.decisions
    assert len({decision.choice for decision in whole.decisions}) > 2 and whole.total_bytes <= 40_000


def outlook(
    losses: list[float], *, costs: tuple[float, ...] = (1.0, 2.0, 4.0), taken: list[int] | None = None
) -> Outlook:
    offers = tuple(Offer(values={"method.interval": number}, cost=cost) for number, cost in enumerate(costs))
    past = tuple(Spent(offer=k, cost=costs[k], loss=x) for k, x in zip(taken or [0] * len(losses), losses, strict=True))
    return Outlook(offers=offers, left=1000.0, rounds_left=500, past=past)


def test_gain_goes_a_level_up_where_the_last_rounds_gained_little() -> None:
    gain = Gain(window=2, least=0.5)
    falls = [8.0, 8.0, 6.0, 6.0, 4.5, 4.5]  # 2 for 2, then 1.5 for 2: three quarters of the best
    assert gain.choose(outlook([]))[0] == gain.choose(outlook(falls))[0] == 0
    stalls = [*falls, 4.4, 4.4]
    number, reason = gain.choose(outlook(stalls))
    assert number == 1 and "gain" not in reason and "a level below" in reason
    # The level above is judged by its own windows alone, and is the last but one.
    taken = [0] * 8 + [1] * 6
    assert gain.choose(outlook([*stalls, 9.0, 9.0, 5.0, 5.0, 2.0, 2.0], taken=taken))[0] == 1
    assert gain.choose(outlook([*stalls, 9.0, 9.0, 5.0, 5.0, 5.0, 5.0], taken=taken))[0] == 2


def test_levels_are_settings_beside_the_cohort() -> None:
    offers = [
        Offer(values={"training.cohort_size": size, "method.interval": interval}, cost=size / interval)
        for interval in (1, 2)
        for size in (2, 1)
    ]
    assert levels_of(offers) == [[3, 2], [1, 0]]
    assert levels_of(offers[:2]) == [[1], [0]]


def test_even_takes_an_even_share() -> None:
    view = replace(outlook([]), left=1000.0, rounds_left=400)
    assert Even().choose(view)[0] == 1  # 2.5 a round
    assert Even().choose(replace(view, left=100.0))[0] == 0


def test_rounds_that_could_not_spend_the_rest_are_not_taken() -> None:
    view = replace(outlook([]), left=39.0, rounds_left=10)
    assert landed(0, "wanted", view)[0] == 2  # nine more at 4 are 36
    assert landed(0, "wanted", replace(view, left=30.0)) == (0, "wanted")


def from_yaml(**planner: Any) -> Experiment:
    return build_experiment(
        load_config(
            {
                "scenario": {"dataset": "digits", "clients": 8, "budgets": {"total_bytes": "2 MB"}},
                "method": {"name": "dynamicfl", "group_size": 1, "high_interval": 4, "low_interval": 4},
                "training": {"rounds": 40, "cohort_size": 4, "local_steps": 4, "batch_size": 4},
                "planner": {"choices": {"training.cohort_size": [1, 2], "method.high_interval": [4, 1]}, **planner},
            }
        )
    )


def test_a_configuration_names_budget_planner_and_choices() -> None:
    experiment = from_yaml()
    assert experiment.training.stop.total_bytes == 2_000_000 and experiment.spending == Gain()
    assert [option.experiment.training.cohort_size for option in experiment.options] == [1, 1, 2, 2]
    assert forecast(experiment).total_bytes <= 2_000_000
    config = load_config({"scenario": {"budgets": {"total_bytes": 2e6}}, "planner": {"choices": {"method.x": [1, 2]}}})
    tree = resolve(config).tree()
    assert tree["planner"] == {"name": "gain", "choices": {"method.x": [1, 2]}, "window": 3, "least": 0.5}
    assert "planner" not in load_config({}).tree()
    # What the components of a round may read.
    engine = local_engine(experiment)
    start = engine.start()
    sent = start.total_bytes
    spending = engine.planner.meeting(start).spending
    assert spending is not None and (spending.left_bytes, spending.left_s) == (2_000_000 - sent, None)


WRONG = [
    ({"choices": {"training.rounds": [1, 2]}}, "can't change from round to round"),
    ({"choices": {}}, "a planner needs choices"),
    ({"choices": {"training.cohort_size": [2, 2]}}, "values that differ"),
    ({"choices": {"training.cohort_size": list(range(1, 9)), "training.local_steps": list(range(1, 10))}}, "72 comb"),
    (
        {"choices": {"method.group": ["random", "exact"], "method.name": ["fedavg", "scaffold"]}},
        "planner.choices|group",
    ),
    ({"choices": {"communication.up": [{"name": "fp16"}, {"name": "topk", "error_feedback": True}]}}, "error feedback"),
    ({"name": "gane", "choices": {"training.cohort_size": [1]}}, "gain"),
]


@pytest.mark.parametrize(("planner", "message"), WRONG)
def test_what_cant_be_chosen_is_refused(planner: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(**planner)


def test_a_planner_without_a_budget_is_refused() -> None:
    config = load_config({"scenario": {"dataset": "digits"}, "planner": {"choices": {"training.cohort_size": [1, 2]}}})
    with pytest.raises(ConfigError, match="planner needs a budget"):
        build_experiment(config)


@pytest.mark.parametrize("size", ["2 XB", "0", "lots"])
def test_sizes_that_are_none_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="total_bytes"):
        build_experiment(load_config({"scenario": {"dataset": "digits", "budgets": {"total_bytes": size}}}))


def test_a_planner_that_names_no_offer_is_told() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Astray(SpendingPlanner):
        def choose(self, outlook: Outlook) -> tuple[int, str]:
            return 99, "far"

    with pytest.raises(InvariantError, match="number of an offer"):
        run_rounds(local_engine(spending(fedavg(), Astray(), total_bytes=10_000, cohorts=(1, 2))))


def test_the_plan_stands_in_the_folder_and_its_reasons_in_the_remarks(tmp_path: Path) -> None:
    from fedsweep.api import run

    done = run(
        {
            "scenario": {"dataset": "digits", "clients": 8, "budgets": {"total_bytes": "3 MB"}},
            "training": {"rounds": 40, "local_steps": 2, "batch_size": 4},
            "planner": {"name": "even", "choices": {"training.cohort_size": [1, 2, 3]}},
            "runtime": {"backend": "local"},
        },
        out=tmp_path / "run",
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(plan) == result["rounds"] and done is not None
    assert {"round", "choice", "cost", "left", "reason", "set"} == plan[0].keys()
    assert any(remark.startswith("budget: rounds 1 to") for remark in result["remarks"])
    assert result["total_bytes"] <= 3_000_000 and result["stopped_by"] == "total_bytes"
