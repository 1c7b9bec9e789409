"""What a sweep is checked for before its trials begin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared_trial import dataset_key
from fedsweep.sweeps.sweep_folder import SweepFolder

RATE = "training.optimizer.lr"


def number(**sweep: Any) -> dict[str, Any]:
    """A sweep of a task that classifies nothing."""
    return {
        "scenario": {"dataset": "diabetes", "clients": 4, "partition": {"kind": "iid"}},
        "training": {"rounds": 2, "cohort_size": 2, "local_steps": 1},
        "tracking": {"uri": "none"},
        "sweep": {"space": {RATE: {"choice": [0.1, 0.2]}}, **sweep},
    }


@pytest.mark.parametrize(
    "how",
    [
        {"scheduler": "asha"},
        {"space": {RATE: {"grid": [0.1, 0.2]}, "training.rounds": {"rungs": [1, 2]}}},
        {"scheduler": "front", "metric": ["test_accuracy", "total_bytes"], "mode": ["max", "min"]},
    ],
)
def test_trials_are_not_chosen_by_an_accuracy_that_none_has(how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no test_accuracy, .* set sweep.metric to extra/rmse and sweep.mode to min"):
        prepare(load_config(number(**how)), SweepFolder(tmp_path / "sweep"), resume=False)


def test_trials_that_nothing_chooses_may_be_of_any_task(tmp_path: Path) -> None:
    assert prepare(load_config(number()), SweepFolder(tmp_path / "sweep"), resume=False).entries
    by_error = number(scheduler="asha", metric="extra/rmse", mode="min")
    assert prepare(load_config(by_error), SweepFolder(tmp_path / "sweep"), resume=False).entries


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        ({"space": {"seed": {"grid": [0, 1, 2]}, RATE: {"grid": [0.1, 0.2]}}}, True),
        ({"metric": ["extra/rmse", "best_test_accuracy"], "mode": ["min", "max"]}, True),
        ({"metric": "extra/rmse", "mode": "min"}, False),
        ({"space": {"scenario.dataset": {"grid": ["diabetes", "digits"]}}}, False),
    ],
)
def test_a_sweep_whose_trials_lack_what_it_compares_says_so(how: dict[str, Any], is_told: bool, tmp_path: Path) -> None:
    notes = prepare(load_config(number(**how)), SweepFolder(tmp_path / "sweep"), resume=False).notes
    text = "since task regression classifies nothing, so settings are neither ordered nor compared; set sweep.metric"
    assert [f"{text} to extra/rmse and sweep.mode to min" in note for note in notes].count(True) == is_told


@pytest.mark.parametrize(
    ("aim", "note"),
    [
        ({"metric": "test_loss"}, "sweep.mode=max looks for the maximum of test_loss, of which less is better"),
        ({"metric": "extra/rmse"}, "sweep.mode=max looks for the maximum of extra/rmse, of which less is better"),
        ({"metric": ["extra/r2", "total_bytes"], "mode": ["min", "min"]}, "the minimum of extra/r2, of which more is"),
        ({"metric": "extra/my_own"}, "sweep.metric: extra/my_own is no figure of the task's or of .* are extra/.*rmse"),
        (
            {"metric": "extra/client_rmse_worst10", "mode": "min"},
            "client_rmse_worst10 is no figure of the task's",
        ),
        ({"constraints": ["extra/nope <= 3"]}, "sweep.constraints: extra/nope is no figure of the task's"),
        ({"metric": "extra/mean_staleness", "mode": "min"}, None),
        ({"metric": "extra/rmse", "mode": "min"}, None),
    ],
)
def test_a_sweep_that_looks_for_the_worst_or_what_may_not_be_there_says_so(
    aim: dict[str, Any], note: str | None, tmp_path: Path
) -> None:
    sweep = {"space": {RATE: {"grid": [0.1, 0.2]}, "seed": {"grid": [0, 1]}}, **aim}
    notes = prepare(load_config(number(**sweep)), SweepFolder(tmp_path / "sweep"), resume=False).notes
    turned = [text for text in notes if text.startswith(("sweep.mode", "sweep.metric", "sweep.constraints"))]
    assert [bool(re.search(note, text)) for text in turned] == [True] if note else not turned


def test_pbt_is_not_told_to_take_seeds_into_its_space(tmp_path: Path) -> None:
    how = {"metric": "extra/rmse", "mode": "min", "space": {RATE: {"uniform": [0.1, 0.2]}}, "samples": 2}
    plain, pbt = (
        prepare(load_config(number(**how, **more)), SweepFolder(tmp_path / "sweep"), resume=False).notes
        for more in ({}, {"scheduler": "pbt"})
    )
    assert any("to sweep.space" in note for note in plain) and not any("to sweep.space" in note for note in pbt)
    (said,) = [note for note in pbt if "nothing can be said about chance" in note]
    assert "run the values that the best one ended with in a sweep with seed: {grid: " in said


@pytest.mark.parametrize(
    ("figure", "better"), [("client_accuracy_worst10", "max"), ("client_accuracy_sd", "min"), ("class_accuracy", "max")]
)
def test_figures_over_clients_are_looked_for_at_their_best(figure: str, better: str, tmp_path: Path) -> None:
    tree = number(metric=f"extra/{figure}", mode="min" if better == "max" else "max")
    tree |= {"scenario": {"clients": 4}, "evaluation": {"per_client": True}}
    notes = prepare(load_config(tree), SweepFolder(tmp_path / "sweep"), resume=False).notes
    assert any(f"set sweep.mode to {better} unless you mean that" in text for text in notes)
    tree["sweep"]["mode"] = better
    notes = prepare(load_config(tree), SweepFolder(tmp_path / "sweep"), resume=False).notes
    assert not any(text.startswith(("sweep.mode", "sweep.metric")) for text in notes)


def test_a_data_set_in_the_cache_is_another_than_one_in_a_folder_called_none() -> None:
    nowhere, null, word = (load_config({"scenario": part}) for part in ({}, {"root": None}, {"root": "None"}))
    assert dataset_key(nowhere) == dataset_key(null) != dataset_key(word)
