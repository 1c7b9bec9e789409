"""A study's budget: planned before anything is trained, and kept to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.config.sweep import StudyBudget
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError
from fedsweep.runs.files import TAKEN_OVER
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps import tuner
from fedsweep.sweeps.budget.study_clock import ELAPSED, StudyClock, elapsed_seconds
from fedsweep.sweeps.budget.trial_costs import TrialCosts
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared import PreparedSweep
from fedsweep.sweeps.schedulers import ListedTrials
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.trainable import Driver
from fedsweep.sweeps.trial import ActiveTrial, _limited
from fedsweep.tracking.terminal.sweep_progress import SweepProgress

TinySweep = Callable[..., dict[str, Any]]
SEEDS = {"seed": {"grid": [0, 1, 2, 3]}}
SKEWED = {"scenario": {"clients": 6, "devices": {"profile": "phone-lte"}}}


def prepared(tree: dict[str, Any], folder: Path, *, resume: bool = False) -> PreparedSweep:
    return prepare(load_config(tree), SweepFolder(folder), resume=resume)


def play(study: PreparedSweep, count: int | None = None) -> list[dict[str, Any]]:
    """Play trials that fit, in this process, as Ray Tune's would be."""
    assert study.allowance is not None
    for entry in study.allowance.affordable()[:count]:
        trial = ActiveTrial(study.describe(entry)["spec"])
        while not trial.step()["done"]:
            pass
    return [RunFolder(run).read_result() for run in find_runs(study.folder.path)]


@pytest.mark.slow
def test_plans_are_what_trials_come_to_spend(tmp_path: Path, tiny: TinySweep) -> None:
    methods = [{"name": "fedavg"}, {"name": "scaffold"}, {"name": "dynamicfl"}, {"name": "heterofl"}]
    scenario = {**SKEWED["scenario"], "budgets": {"kind": "fixed", "budget_fraction": 0.5}}
    tree = tiny(
        {"method": {"grid": methods}, "seed": {"grid": [0, 3]}},
        more={"scenario": scenario},
        budget={"total_bytes": "1 GB", "sim_time_s": 1e9},
    )
    study = prepared(tree, tmp_path / "s")
    assert study.allowance is not None
    planned = [study.allowance.planned(entry) for entry in study.entries]
    results = play(study)
    assert [cost.total_bytes for cost in planned] == [result["total_bytes"] for result in results]
    assert [cost.sim_time_s for cost in planned] == pytest.approx([result["sim_time_s"] for result in results])
    assert [cost.is_exact for cost in planned[::2]] == [True, False, True, True]  # SCAFFOLD sends more than models
    assert study.spent.total_bytes == sum(result["total_bytes"] for result in results)


def test_an_estimated_trial_is_held_to_what_the_study_limits_alone(tmp_path: Path, tiny: TinySweep) -> None:
    def stop_of(**budget: Any) -> tuple[int | None, float | None]:
        tree = tiny({"method": {"grid": [{"name": "scaffold"}]}}, more=SKEWED, budget=budget)
        study = prepared(tree, tmp_path / "s")
        spec = study.describe(study.entries[0])["spec"]
        stop = _limited(plan_run(study.entries[0].config), spec.most).experiment.training.stop
        return stop.total_bytes, stop.sim_time_s

    by_bytes, by_time = stop_of(total_bytes="1 GB"), stop_of(sim_time_s=1e9)
    assert by_bytes[0] and by_bytes[1] is None
    assert by_time[1] and by_time[0] is None


def test_a_limit_of_the_trial_itself_is_in_its_plan(tmp_path: Path, tiny: TinySweep) -> None:
    one = tiny({"seed": {"grid": [0]}}, rounds=5, budget={"total_bytes": "1 GB"})
    one["training"]["stop"] = {"total_bytes": 100_000}
    study = prepared(one, tmp_path / "s")
    assert study.allowance is not None
    planned = study.allowance.planned(study.entries[0])
    assert play(study)[0]["total_bytes"] == planned.total_bytes < 100_000 and planned.is_exact


def test_trials_begin_as_long_as_all_of_them_fits(tmp_path: Path, tiny: TinySweep) -> None:
    study = prepared(tiny(SEEDS, budget={"total_bytes": "1 GB"}), tmp_path / "a")
    assert study.allowance is not None
    each = study.allowance.planned(study.entries[0]).total_bytes
    for count in (1, 2, 4):
        for more in (0, each // 2):
            few = prepared(tiny(SEEDS, budget={"total_bytes": count * each + more}), tmp_path / "b")
            assert few.allowance is not None and few.total == count
            assert [e.trial.number for e in few.allowance.affordable()] == [1, 2, 3, 4][:count]
    assert prepared(tiny(SEEDS, budget={"trials": 3}), tmp_path / "b").total == 3


def test_a_dear_trial_is_passed_over_for_cheap_ones(tmp_path: Path, tiny: TinySweep) -> None:
    space = {"training.rounds": {"grid": [2, 9, 3]}}
    each = prepared(tiny(space, budget={"total_bytes": "1 GB"}), tmp_path / "a").allowance
    assert each is not None
    costs = [each.planned(entry).total_bytes for entry in each.entries]
    few = prepared(tiny(space, budget={"total_bytes": costs[0] + costs[2]}), tmp_path / "b").allowance
    assert few is not None and [entry.trial.number for entry in few.affordable()] == [1, 3]


def test_a_resumed_study_counts_what_was_spent_and_may_get_more(tmp_path: Path, tiny: TinySweep) -> None:
    tree = tiny(SEEDS, budget={"total_bytes": "1 GB"})
    study = prepared(tree, tmp_path / "s")
    study.folder.create(study.plan, config_yaml=None, overwrite=False)
    spent = play(study, 1)[0]["total_bytes"]
    tree["sweep"]["budget"] = {"total_bytes": 2 * spent}
    study.folder.check_same(load_config(tree).given)
    again = prepared(tree, tmp_path / "s", resume=True)
    assert again.total == 2 and not again.is_done and len(again.left_out) == 3
    play(again)
    done = prepared(tree, tmp_path / "s", resume=True)
    assert done.is_done and done.spent.total_bytes == 2 * spent and len(done.left_out) == 2
    tree["training"]["rounds"] = 4
    with pytest.raises(ConfigError, match="differs in training"):
        study.folder.check_same(load_config(tree).given)


def test_what_a_failed_trial_has_spent_counts_whether_it_goes_on_or_not(tmp_path: Path, tiny: TinySweep) -> None:
    each = prepared(tiny(SEEDS, rounds=4, budget={"total_bytes": "1 GB"}), tmp_path / "a").allowance
    assert each is not None
    whole = each.planned(each.entries[0]).total_bytes
    tree = tiny(SEEDS, rounds=4, budget={"total_bytes": 3 * whole})
    study = prepared(tree, tmp_path / "s")
    study.folder.create(study.plan, config_yaml=None, overwrite=False)
    for entry, rounds in zip(study.entries, (4, 1, 1, 4), strict=True):
        trial = ActiveTrial(replace(study.describe(entry)["spec"], report_every_s=0.0))
        reports = [trial.step() for _ in range(rounds)]
        if not reports[-1]["done"]:
            trial._end("failed", "its data ended")
    again = prepared(tree, tmp_path / "s", resume=True)
    assert again.allowance is not None and 2.5 * whole < again.spent.total_bytes < 2.6 * whole
    assert [entry.trial.number for entry in again.allowance.affordable()] == [1, 4] and again.is_done
    feed = ListedTrials(again)
    for trial_id in ("a", "b"):
        feed.suggest(trial_id)
    assert feed.suggest("c") == "FINISHED"
    tree["sweep"]["budget"] = {"total_bytes": again.spent.total_bytes + whole}
    more = prepared(tree, tmp_path / "s", resume=True)
    assert more.allowance is not None and [e.trial.number for e in more.allowance.affordable()] == [1, 4, 2]
    play(more)
    assert more.spent.total_bytes <= tree["sweep"]["budget"]["total_bytes"]


def test_runs_taken_over_cost_the_study_nothing(tmp_path: Path, tiny: TinySweep) -> None:
    study = prepared(tiny(SEEDS, budget={"trials": 1}), tmp_path / "s")
    study.folder.create(study.plan, config_yaml=None, overwrite=False)
    play(study)
    (study.folder.trial_path(study.entries[0].trial) / TAKEN_OVER).write_text('{"from": "elsewhere"}')
    assert prepared(tiny(SEEDS, budget={"trials": 1}), tmp_path / "s", resume=True).total == 2


def test_what_an_overwritten_sweep_has_spent_is_not_the_new_ones(tmp_path: Path, tiny: TinySweep) -> None:
    old = prepared(tiny(SEEDS, rounds=4), tmp_path / "s")
    old.create_folder(overwrite=False)
    for entry in old.entries:
        trial = ActiveTrial(old.describe(entry)["spec"])
        while not trial.step()["done"]:
            pass
    study = prepared(tiny(SEEDS, rounds=2, budget={"total_bytes": old.spent.total_bytes * 6 // 10}), tmp_path / "s")
    study.create_folder(overwrite=True)
    feed = ListedTrials(study)
    assert [isinstance(feed.suggest(name), dict) for name in "abcd"] == [True] * 4


def test_where_costs_follow_from_training_a_trial_ends_at_its_share(tmp_path: Path, tiny: TinySweep) -> None:
    tree = tiny({"seed": {"grid": [0]}}, rounds=5, budget={"total_bytes": "1 GB"})
    tree["training"]["stop"] = {"target_accuracy": 0.99}
    study = prepared(tree, tmp_path / "s")
    entry = study.entries[0]
    assert study.allowance is not None and not study.allowance.planned(entry).is_exact
    described = study.describe(entry)["spec"]
    share = described.most.total_bytes * 7 // 10
    trial = ActiveTrial(replace(described, most=TrialCosts(total_bytes=share)))
    while not trial.step()["done"]:
        pass
    result = RunFolder(entry_folder := study.folder.trial_path(entry.trial)).read_result()
    assert result["rounds"] == 3 and result["stopped_by"] == "total_bytes" and result["total_bytes"] <= share
    assert "99" in (entry_folder / "config.yaml").read_text()  # its own, and nothing of the share


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"total_bytes": 1000}, "no room for a single trial: .* alone would spend .* of 1 kB; raise the budget"),
        ({"sim_time_s": 5.0}, r"trial 1 .*sweep.budget.sim_time_s .* without scenario.devices"),
        ({}, "sweep.budget: a budget limits one of total_bytes, sim_time_s, hours, trials"),
        ({"total_bytes": "5 mb"}, "sweep.budget.total_bytes: an amount is .* 50 MB, but got '5 mb'"),
        ({"hours": -1.0}, "sweep.budget.hours"),
    ],
)
def test_bad_budgets_are_one_clear_error(tmp_path: Path, tiny: TinySweep, budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tiny(SEEDS, budget=budget), tmp_path / "s")


def test_a_population_that_is_played_side_by_side_has_no_budget(tmp_path: Path, tiny: TinySweep) -> None:
    space = {"training.optimizer.lr": {"uniform": [0.1, 0.2]}}
    with pytest.raises(ConfigError, match=r"goes with no sweep\.budget"):
        prepared(tiny(space, samples=3, scheduler="pbt", budget={"trials": 2}), tmp_path / "s")


def test_a_search_without_samples_goes_on_until_the_budget_is_spent(tmp_path: Path, tiny: TinySweep) -> None:
    pytest.importorskip("optuna")
    space = {"training.optimizer.lr": {"uniform": [0.1, 0.2]}, "training.rounds": {"choice": [2, 4]}}
    each = prepared(tiny({"seed": {"grid": [0]}}, rounds=2, budget={"total_bytes": "1 GB"}), tmp_path / "a").allowance
    assert each is not None
    two_rounds = each.planned(each.entries[0]).total_bytes
    study = prepared(tiny(space, search="optuna", budget={"total_bytes": 3 * two_rounds}), tmp_path / "b")
    assert study.most == float("inf") and study.total in (1, 2, 3)
    has_room, rate = study.room(()), {"training.optimizer.lr": 0.15}
    assert has_room({**rate, "training.rounds": 2}) and not has_room({**rate, "training.rounds": 40})


def test_hours_are_counted_over_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fedsweep.sweeps.budget.study_clock.time.monotonic", lambda: now[0])
    clock = StudyClock(tmp_path, 0.01)
    now[0] += 20
    assert not clock.is_over() and elapsed_seconds(tmp_path) == 20
    again = StudyClock(tmp_path, 0.01)
    now[0] += 15.9
    assert not again.is_over()
    now[0] += 0.1
    assert again.is_over() and elapsed_seconds(tmp_path) == 36
    assert StudyClock(tmp_path, 0.01).is_over() and not StudyClock(tmp_path, 0.02).is_over()
    for text in ("", "[]", '{"seconds": NaN}', '{"seconds": -4}', '{"seconds": "x"}'):
        (tmp_path / ELAPSED).write_text(text)
        assert elapsed_seconds(tmp_path) == 0


def test_the_hours_of_a_study_are_those_to_its_end(
    tmp_path: Path, tiny: TinySweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("fedsweep.sweeps.budget.study_clock.time.monotonic", lambda: now[0])

    def fit() -> None:
        now[0] += 3.6
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "_make_tuner", lambda *args, **kwargs: SimpleNamespace(fit=fit))
    monkeypatch.setattr(tuner, "watched_call", lambda call, **kwargs: call())
    study = prepared(tiny(SEEDS, budget={"hours": 1}), tmp_path / "s")
    study.folder.create(study.plan, config_yaml=None, overwrite=False)
    for seconds in (3.6, 7.2):
        with pytest.raises(KeyboardInterrupt):
            tuner._tune(study, SweepProgress(), None, Driver())
        assert elapsed_seconds(study.folder.path) == pytest.approx(seconds)


def test_spending_says_what_is_limited() -> None:
    budget = StudyBudget(total_bytes=10_000_000, sim_time_s=60.0)
    spent = TrialCosts(total_bytes=9_900_000, sim_time_s=61.0, trials=5)
    assert not spent.fits(budget)
    assert spent.in_words(budget) == "9.9 MB of 10 MB, 61s of virtual time of 60s of virtual time"
