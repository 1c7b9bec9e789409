"""Trials as Ray Tune is given them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsweep.config.load import load_config
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.schedulers import ListedTrials
from fedsweep.sweeps.space import TRIAL
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
