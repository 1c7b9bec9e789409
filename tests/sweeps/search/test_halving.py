from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.errors import ConfigError
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.reuse import go_on_from
from fedsweep.sweeps.search.halving import Halving, check_rungs
from fedsweep.sweeps.search.proposals import Outcome
from fedsweep.sweeps.space import Trial, make_trial

RATES = [0.1, 0.2, 0.3, 0.4]


def config_of(key: str = "training.cohort_size", **sweep: Any) -> Config:
    space = {"training.optimizer.lr": {"grid": RATES}, "seed": {"grid": [0, 1]}, key: {"rungs": [2, 4, 8]}}
    return load_config({"sweep": {"space": space, **sweep}})


def played(config: Config, judge: Any, *, first: list[Trial] | None = None) -> list[Trial]:
    """All trials of the rungs, where each ends before the next begins."""
    halving, trials = Halving(config), list(first or [])
    while True:
        outcomes = {trial.number: Outcome(values=judge(trial)) for trial in trials}
        values = halving.next_values(trials, outcomes)
        if values is None:
            return trials
        trials.append(make_trial(config, len(trials) + 1, values))


def by_rate(trial: Trial) -> tuple[float, ...]:
    # Of seed 0 alone the rate 0.2 would be the best.
    lr, seed = trial.values["training.optimizer.lr"], trial.values["seed"]
    return (1.0,) if (lr, seed) == (0.2, 0) else (lr,)


def shown(trials: list[Trial]) -> list[tuple[int, float, int]]:
    return [(t.values["training.cohort_size"], t.values["training.optimizer.lr"], t.values["seed"]) for t in trials]


def test_the_best_third_by_the_mean_over_seeds_goes_on_with_all_its_seeds_to_each_rung() -> None:
    config = config_of()
    trials = played(config, by_rate)
    assert sorted(shown(trials[:8])) == [(2, lr, seed) for lr in RATES for seed in (0, 1)]
    assert sorted(shown(trials[8:])) == [
        *[(4, lr, seed) for lr in (0.2, 0.4) for seed in (0, 1)],
        *[(8, 0.2, seed) for seed in (0, 1)],
    ]
    assert len(trials) == Halving(config).most == 14
    least = played(config_of(mode="min", metric="test_loss"), by_rate)
    assert {lr for cohort, lr, _ in shown(least) if cohort == 8} == {0.1}


def test_a_sweep_that_was_killed_ends_with_the_unbroken_ones_trials_and_a_failed_setting_does_not_go_on() -> None:
    config = config_of()
    whole = played(config, by_rate)
    for kept in (3, 8, 9, 13):
        assert played(config, by_rate, first=whole[:kept]) == whole
    failed = played(config, lambda t: None if t.values["training.optimizer.lr"] == 0.4 else by_rate(t))
    assert {lr for cohort, lr, _ in shown(failed) if cohort > 2} == {0.2, 0.3}


def test_a_rung_waits_for_all_of_the_one_below() -> None:
    config = config_of()
    trials = played(config, by_rate)[:8]
    outcomes = {trial.number: Outcome(values=by_rate(trial)) for trial in trials[:-1]}
    assert Halving(config).next_values(trials, outcomes) is None


def test_only_of_rounds_the_run_below_may_be_the_same_run() -> None:
    rounds = config_of("training.rounds")
    trials = [
        make_trial(rounds, n, {"training.optimizer.lr": 0.1, "seed": 0, "training.rounds": r})
        for n, r in ((1, 2), (2, 4))
    ]
    assert Halving(rounds).lower(trials[1], trials[:1]) is trials[0] and Halving(rounds).lower(trials[0], []) is None
    cohorts = played(config_of(), by_rate)
    assert Halving(config_of()).lower(cohorts[-1], cohorts) is None


@pytest.mark.parametrize(
    ("sweep", "named"),
    [
        ({"search": "random"}, "sweep.search"),
        ({"scheduler": "asha"}, "sweep.scheduler"),
        ({"budget": {"trials": 4}}, "sweep.budget"),
        ({"metric": ["test_accuracy", "total_bytes"], "mode": ["max", "min"]}, "several metrics"),
        (
            {"settings": [{"name": "a", "space": {"training.cohort_size": {"grid": [4, 6]}}}]},
            "other values of that key in a named setting",
        ),
    ],
)
def test_what_does_not_go_with_rungs_is_named(sweep: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_rungs(config_of(**sweep))


def test_more_rounds_go_on_to_the_bits_of_an_unbroken_run_or_begin_anew_where_they_would_not(tmp_path: Path) -> None:
    def tree(rounds: int, schedule: Any) -> dict[str, Any]:
        training = {"rounds": rounds, "cohort_size": 2, "local_steps": 1, "schedule": schedule}
        scenario = {"clients": 4, "partition": {"kind": "iid"}}
        return {
            "scenario": scenario,
            "training": training,
            "tracking": {"uri": "none"},
            "runtime": {"backend": "local"},
        }

    fedsweep.run(tree(2, "constant"), out=tmp_path / "below")
    go_on_from(tmp_path / "below", tmp_path / "above", rounds=3)
    before = RunFolder(tmp_path / "below").read_rounds()
    assert RunFolder(tmp_path / "above").read_rounds() == before
    assert RunFolder(tmp_path / "below").read_result()["status"] == "finished"
    longer = run_plan(plan_run(load_config(tmp_path / "above" / "config.yaml")), tmp_path / "above", resume=True)
    unbroken = fedsweep.run(tree(3, "constant"), out=tmp_path / "unbroken")
    assert longer["model_sha256"] == unbroken.summary["model_sha256"]
    assert RunFolder(tmp_path / "above").read_rounds()[:2] == before
    fedsweep.run(tree(2, {"kind": "cosine"}), out=tmp_path / "cosine")
    go_on_from(tmp_path / "cosine", tmp_path / "anew", rounds=3)
    assert not (tmp_path / "anew").exists()
