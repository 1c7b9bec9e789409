from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.sweeps.fairness import TrialWorld, comparable, notes, world_of
from fedsweep.sweeps.prepared_trial import overlaid
from fedsweep.sweeps.space import Trial, list_trials

METHODS = {"grid": [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}]}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    return load_config(overlaid(config.given, values))


def said(space: dict[str, Any], **sweep: Any) -> list[str]:
    base = load_config({"sweep": {"space": space, **sweep}})
    trials = list_trials(base)
    configs = [with_values(base, trial.values) for trial in trials]
    return notes(base, trials, configs)


def test_methods_over_shared_seeds_need_no_note() -> None:
    assert said({"method": METHODS, "seed": {"grid": [0, 1, 2]}}) == []


def test_another_scenario_is_said_to_be_another_world() -> None:
    [note] = said({"scenario.partition.dirichlet_alpha": {"grid": [0.1, 1.0]}, "seed": {"grid": [0, 1]}})
    assert "scenario.partition.dirichlet_alpha" in note and "different worlds" in note


@pytest.mark.parametrize(
    ("key", "said_of_it"),
    [
        ({"scheduler": "asha"}, ", but sweep.scheduler=asha judges all of them alike"),
        ({"scheduler": "median"}, ", but sweep.scheduler=median judges all of them alike"),
        ({"scheduler": "front", "metric": ["test_accuracy", "total_bytes"], "mode": ["max", "min"]}, "with each other"),
        (
            {"space": {"training.rounds": {"rungs": [1, 3]}}},
            ", but the choice of the best third judges all of them alike",
        ),
    ],
)
def test_what_ends_trials_across_worlds_is_named(key: dict[str, Any], said_of_it: str) -> None:
    space = {
        "scenario.partition.dirichlet_alpha": {"grid": [0.1, 1.0]},
        "seed": {"grid": [0, 1]},
        **key.pop("space", {}),
    }
    note = said(space, **key)[0]
    assert "different worlds" in note and said_of_it in note


def test_training_keys_share_the_world_but_are_named() -> None:
    [note] = said({"training.optimizer.lr": {"grid": [0.1, 1.0]}, "seed": {"grid": [0, 1]}})
    assert "training.optimizer.lr" in note and "partition and initial model are shared" in note


def test_a_single_seed_is_said_to_be_no_comparison() -> None:
    [note] = said({"method": METHODS})
    assert "nothing can be said about chance" in note


@pytest.mark.parametrize("how", [{"search": "optuna"}, {"scheduler": "pbt"}])
def test_whoever_gives_seeds_out_is_told_nothing_of_them(how: dict[str, Any]) -> None:
    space = {"training.optimizer.lr": {"uniform": [0.1, 0.2]}}
    plain, own = (load_config({"sweep": {"space": space, "samples": 2, **more}}) for more in ({}, how))
    trials = list_trials(plain)
    assert len(notes(plain, trials, [plain, plain])) == 1 and notes(own, trials, [own, own]) == []


def test_seeds_that_differ_between_settings_are_named() -> None:
    base = load_config({})
    points = [{"method.name": "fedavg", "seed": 0}, {"method.name": "fedsgd", "seed": 1}]
    trials = [
        Trial(number=k, values=v, label=str(v["method.name"]), folder=f"{k}") for k, v in enumerate(points, start=1)
    ]
    [note] = notes(base, trials, [base, base])
    assert "different seeds (fedavg: 0; fedsgd: 1)" in note


def test_the_world_is_scenario_and_model_without_where_the_data_lie() -> None:
    base = load_config({})
    assert world_of(base) == world_of(with_values(base, {"seed": 3, "scenario.root": "/data", "training.rounds": 2}))
    assert world_of(base) != world_of(with_values(base, {"model": {"name": "cnn"}}))


def test_budgets_are_part_of_the_world_of_methods_alone_that_plan_with_them() -> None:
    dynamic = {"method": {"name": "dynamicfl"}}
    some, most = ({"scenario.budgets": {"kind": "fixed", "budget_fraction": share}} for share in (0.3, 0.6))
    settings = [{}, some, {**some, "method": {"name": "fedprox"}}, dynamic, {**dynamic, **some}, {**dynamic, **most}]
    configs = [load_config(overlaid({}, values)) for values in settings]
    assert comparable([world_of(config) for config in configs]) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    assert comparable([world_of(config) for config in configs[:3]]) == [[0, 1, 2]]
    trials = [Trial(number=k, values={"seed": 0, "x": k}, label=str(k), folder=str(k)) for k in range(6)]
    assert not any("different worlds" in note for note in notes(configs[0], trials[:3], configs[:3]))
    assert not any("different worlds" in note for note in notes(configs[0], trials[:5:4], configs[:5:4]))
    assert any(
        "scenario.budgets" in note and "different worlds" in note for note in notes(configs[0], trials[3:], configs[3:])
    )


def test_many_worlds_are_not_compared_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, equal = [], TrialWorld.__eq__
    monkeypatch.setattr(TrialWorld, "__eq__", lambda one, other: pairs.append(other) or equal(one, other))
    worlds = [TrialWorld(shared=str(number), budgets=None) for number in range(100)]
    assert comparable([*worlds, *worlds]) == [[place, place + 100] for place in range(100)]
    assert len(pairs) < 1000
