"""Trials as Ray Tune is given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared_trial import PreparedTrial, make_entry
from fedsweep.sweeps.schedulers import ListedTrials, ProposedTrials, make_scheduler
from fedsweep.sweeps.search.proposals import Outcome
from fedsweep.sweeps.space import TRIAL, Trial, make_trial
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.trial import ActiveTrial


def test_listed_trials_come_one_by_one_those_first_that_have_finished(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    study = prepare(load_config(tiny({"seed": {"grid": [4, 5, 6]}})), SweepFolder(tmp_path / "s"), resume=False)
    done = ActiveTrial(study.describe(study.entries[2])["spec"])
    while not done.step()["done"]:
        pass
    feed = ListedTrials(study)
    given = [feed.suggest(name) for name in ("a", "b", "c")]
    assert [one[TRIAL]["values"] for one in given] == [{"seed": 6}, {"seed": 4}, {"seed": 5}]
    # All else is one value each for Tune, which copies a trial's description, flattens it and keeps it several times.
    assert {key for one in given for key, value in one[TRIAL].items() if isinstance(value, dict)} == {"values"}
    assert feed.suggest("d") == ListedTrials.FINISHED
    assert feed.set_search_properties("test_accuracy", "max", {})
    feed.on_trial_complete("b", {"total_bytes": 10})


def test_rounds_are_reported_together_where_no_scheduler_goes_by_them(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    space = {"seed": {"grid": [0]}}
    plain, raced = (
        prepare(load_config(tiny(space, **more)), SweepFolder(tmp_path / "s"), resume=False)
        for more in ({}, {"scheduler": "median"})
    )
    every_s = [study.describe(study.entries[0])["spec"].report_every_s for study in (plain, raced)]
    assert every_s[0] > 0 and every_s[1] == 0


def made(kind: str, tmp_path: Path, tiny: Callable[..., dict[str, Any]], **sweep: Any) -> Any:
    space = {"training.optimizer.lr": {"uniform": [0.1, 0.2]}, "training.local_steps": {"randint": [1, 4]}}
    config = load_config(tiny(space, scheduler=kind, samples=4, rounds=20, **sweep))
    scheduler = make_scheduler(prepare(config, SweepFolder(tmp_path / "s"), resume=False))
    assert scheduler is not None and scheduler.set_search_properties("test_accuracy", "max")
    return scheduler


@dataclass(frozen=True, kw_only=True)
class Named:
    trial_id: str
    status: str = "RUNNING"


def controller(*live: Named) -> Any:
    return SimpleNamespace(get_live_trials=lambda: list(live))


def ended(
    scheduler: Any, name: str, figures: Sequence[float], *, replayed: bool = False, each: float = 1.0
) -> int | None:
    """Report a trial's rounds, ``each`` of so much.

    Returns:
        The one after which the scheduler ends it, None where it comes to its end.
    """
    trial, beside = Named(trial_id=name), controller(*[Named(trial_id="next", status="PENDING")] * replayed)
    scheduler.on_trial_add(None, trial)
    for number, figure in enumerate(figures, 1):
        report = {"resource": number * each, "test_accuracy": figure} | ({"replayed": True} if replayed else {})
        if number < len(figures) and scheduler.on_trial_result(beside, trial, report) != "CONTINUE":
            return number
    scheduler.on_trial_complete(None, trial, report)
    return None


NAN = float("nan")
GOOD, POOR = [0.5] * 20, [0.1] * 20
# A round in five is tested; the others stand with the last figure.
TESTED_FIFTH = [NAN] * 4 + [0.9] * 16


@pytest.mark.parametrize("kind", ["median", "asha"])
def test_rounds_without_a_figure_are_not_compared(
    kind: str, tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    scheduler = made(kind, tmp_path, tiny)
    assert [ended(scheduler, name, GOOD) for name in "abcd"] == [None] * 4
    assert ended(scheduler, "best", TESTED_FIFTH) is None
    assert ended(scheduler, "poor", [NAN] * 4 + POOR[4:]) == 5


@pytest.mark.parametrize("kind", ["median", "asha"])
def test_a_trial_that_had_finished_is_compared_with_by_all_of_its_rounds_and_not_ended(
    kind: str, tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    rising = [number / 40 for number in range(1, 21)]
    scheduler = made(kind, tmp_path, tiny)
    assert [ended(scheduler, name, rising, replayed=True) for name in "abc"] == [None] * 3
    assert ended(scheduler, "late", POOR[:1] * 2 + [0.01] * 18, replayed=True) is None
    assert ended(scheduler, "better", [figure + 0.1 for figure in rising]) is None
    assert ended(scheduler, "worse", [0.001] * 20) in (1, 2)


@pytest.mark.parametrize("kind", ["median", "asha"])
def test_a_trial_of_few_virtual_seconds_is_ended_as_early_as_any(
    kind: str, tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    more = {"scenario": {"clients": 6, "devices": {"profile": "phone-lte"}}}
    tree = tiny({"seed": {"grid": [0, 1]}}, scheduler=kind, resource="sim_time_s", more=more)
    study = prepare(load_config(tree), SweepFolder(tmp_path / "s"), resume=False)
    scheduler = make_scheduler(replace(study, full=0.8))
    assert scheduler is not None and scheduler.set_search_properties("test_accuracy", "max")
    assert [ended(scheduler, name, GOOD, each=0.04) for name in "abcd"] == [None] * 4
    assert ended(scheduler, "poor", POOR, each=0.04) in (1, 2, 3)


def test_values_that_a_population_moves_stay_in_what_they_are_drawn_from(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    scheduler = made("pbt", tmp_path, tiny)
    clone = SimpleNamespace(config={TRIAL: {"values": {"training.optimizer.lr": 0.19, "training.local_steps": 3}}})
    for _ in range(100):
        clone.config, _ = scheduler._get_new_config(SimpleNamespace(config={}), clone)
        values = clone.config[TRIAL]["values"]
        assert 0.1 <= values["training.optimizer.lr"] < 0.2 and values["training.local_steps"] in (1, 2, 3)


@pytest.mark.parametrize(("scheduler", "numbers"), [("median", [2, 1]), (None, [1])])
def test_a_resumed_searchs_scheduler_goes_by_trials_that_had_finished(
    scheduler: str | None, numbers: list[int], tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    rate = "training.optimizer.lr"
    config = load_config(tiny({rate: {"uniform": [0.1, 0.9]}}, search="optuna", samples=2, scheduler=scheduler))
    study = prepare(config, SweepFolder(tmp_path / "s"), resume=False)
    for number in (1, 2):
        study.add(make_entry(config, make_trial(config, number, {rate: 0.1 * number, "seed": 0}), uri=None))
    done = ActiveTrial(study.describe(study.entries[1])["spec"])
    while not done.step()["done"]:
        pass
    feed = ProposedTrials(study.make_search(), study, lambda values: study.entries[0], 1)
    begun = [feed.suggest(f"{number}")[TRIAL]["values"][rate] for number in numbers]
    assert begun == [0.1 * number for number in numbers] and len(study.before) == len(numbers)
    assert feed.suggest("next") == ProposedTrials.FINISHED


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_a_search_fills_all_places_before_it_waits_for_an_end(
    at_once: int, tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    class Rates:
        """Proposes the next rate, whatever came of those before."""

        def next_values(self, trials: Sequence[Trial], outcomes: Mapping[int, Outcome], room: Any) -> dict[str, Any]:
            told.append(sorted(outcomes))
            return {rate: 0.1 + 0.01 * len(trials)}

        def write_study(self, *unused: Any) -> None:
            """Write nothing."""

    def make(values: Mapping[str, Any]) -> PreparedTrial:
        study.add(entry := make_entry(config, make_trial(config, len(study.entries) + 1, values), uri=None))
        return entry

    rate, told = "training.optimizer.lr", list[list[int]]()
    config = load_config(tiny({rate: {"uniform": [0.1, 0.9]}}, search="optuna", samples=20))
    study = prepare(config, SweepFolder(tmp_path / "s"), resume=False)
    feed = ProposedTrials(Rates(), study, make, at_once)  # type: ignore[arg-type]
    begun = [feed.suggest(f"{number}") for number in range(1, at_once + 2)]
    assert [one is None for one in begun] == [False] * at_once + [True]
    if at_once > 1:
        feed.on_trial_complete("2", {})
        assert feed.suggest("next") is None  # the first is what the next goes by
    feed.on_trial_complete("1", {})
    assert feed.suggest("next") is not None and told == [[]] * at_once + [[1]]
