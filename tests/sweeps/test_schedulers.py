"""Trials as Ray Tune is given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared_trial import PreparedTrial, make_entry
from fedsweep.sweeps.schedulers import ListedTrials, ProposedTrials
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
