"""What the field's methods share beyond the conformance checks: equal weights, whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedsweep
from fedsweep.testing import local_engine, run_rounds, subject_of

COUNT_ALIKE = (
    *("scaffold", "feddyn", "fednova", "fedavgm", "fedadagrad", "fedadam", "fedyogi"),
    *("fedensemble", "feddf", "fedbe", "fedgen", "fedmix", "moon"),
)


@pytest.mark.parametrize("name", COUNT_ALIKE)
def test_clients_of_equal_size_count_alike(name: str) -> None:
    record = run_rounds(local_engine(subject_of(name).world(rounds=1, sizes=(16,) * 6))).records[0]
    assert record.aggregation_weights == pytest.approx([0.25] * 4, abs=1e-15)


@pytest.mark.parametrize("name", [*COUNT_ALIKE, "abavg"])
def test_it_runs_from_a_configuration(name: str, tmp_path: Path) -> None:
    """Two rounds on digits: what a user gets."""
    config = {
        "name": name,
        "method": {"name": name, **subject_of(name).card.small},
        "scenario": {
            "clients": 8,
            "server_data": {"validation": 0.05, "proxy": {"per_class": 5, "labelled": False}},
        },
        "training": {"rounds": 2, "cohort_size": 4, "local_steps": 2},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    result = fedsweep.run(config, out=tmp_path / "run")
    assert result.summary["status"] == "finished"
    accuracies = result.rounds.column("test_accuracy").to_pylist()
    assert len(accuracies) == 2 and all(0 <= a <= 1 for a in accuracies)
    assert np.isfinite(result.rounds.column("test_loss").to_pylist()).all()
