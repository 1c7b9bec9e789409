"""DynaFed beside other methods by ``method: {merge: [...]}``, from the configuration to the run folder, on digits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedsweep

DYNAFED: Mapping[str, Any] = {
    "name": "dynafed",
    "snapshots": 4,
    "horizon_rounds": 2,
    "inner_steps": 3,
    "iterations": 5,
    "images_per_class": 2,
    "finetune_epochs": 2,
    "finetune_learning_rate": 0.01,
    "augment": False,
    "weights": "size",
}
FEDPROX = {"name": "fedprox", "mu": 0.5}
INTERVALS = {"name": "dynamicfl", "high_interval": 1, "low_interval": 4, "group": "random"}


def run(folder: Path, *parts: Mapping[str, Any]) -> fedsweep.Result:
    tree = {
        "name": "merged",
        "scenario": {
            "clients": 8,
            "partition": {"kind": "classes", "classes_per_client": 2},
            "budgets": {"kind": "fixed", "budget_fraction": 0.5},
        },
        "model": {"name": "mlp", "hidden_width": 16},
        "method": {"merge": list(parts)} if len(parts) > 1 else dict(parts[0]),
        "training": {"rounds": 5, "cohort_size": 4, "local_steps": 8, "optimizer": {"name": "sgd", "lr": 0.2}},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    return fedsweep.run(tree, out=folder)


def losses(result: fedsweep.Result) -> list[float]:
    return list(result.rounds.column("test_loss").to_pylist())


@pytest.mark.parametrize("other", [FEDPROX, INTERVALS], ids=["fedprox", "dynamicfl"])
def test_merged_run_is_the_other_method_up_to_the_synthesis_and_fine_tuned_after_it(
    other: Mapping[str, Any], tmp_path: Path
) -> None:
    merged = run(tmp_path / "merged", DYNAFED, other)
    alone = run(tmp_path / "alone", other)
    dynafed = run(tmp_path / "dynafed", DYNAFED)
    assert merged.summary["status"] == "finished"
    assert losses(merged)[:3] == losses(alone)[:3]
    assert losses(merged)[0] != losses(dynafed)[0]
    assert losses(merged)[3] != losses(alone)[3]
    # Nothing more travels, and the other method's sync points stay as they are.
    for name in ("values_up", "values_down", "sync_points", "high_frequency", "comm_ratio"):
        assert merged.rounds.column(name).to_pylist() == alone.rounds.column(name).to_pylist()
    told = merged.rounds.column("synthesis_objective").to_pylist()
    assert told[:2] == [None, None] and all(0 < value < 2 for value in told[2:])
    assert (tmp_path / "merged" / "pictures").is_dir()


def test_order_of_the_merge_changes_nothing(tmp_path: Path) -> None:
    first = run(tmp_path / "first", DYNAFED, FEDPROX)
    second = run(tmp_path / "second", FEDPROX, DYNAFED)
    assert first.summary["model_sha256"] == second.summary["model_sha256"]


def test_two_intervals_are_fine_tuned_once_a_round(tmp_path: Path) -> None:
    result = run(tmp_path / "run", DYNAFED, INTERVALS)
    assert min(result.rounds.column("sync_points").to_pylist()) > 1
    tuned = result.rounds.column("finetune_loss").to_pylist()
    assert tuned[:3] == [None] * 3 and all(value > 0 for value in tuned[3:])
