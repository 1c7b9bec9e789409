"""The chart of a study's front over what the study sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedsweep.reports.volume_chart import volume_charts
from fedsweep.sweeps.space import Trial
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan


def sweep(folder: Path, *fronts: Any) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"fronts": list(fronts)}))
    return folder


def front(*, low: float | None = 0.1) -> dict[str, Any]:
    rows = [
        {"bytes": 100.0 * k, "mean": 0.2 * k, "low": low and low * k, "high": low and 0.3 * k, "count": 2, "sd": 0.1}
        for k in (1, 2)
    ]
    return {"among": ["FedAvg", "<b>two</b>"], "by_bytes": rows}


def test_a_front_is_a_line_from_nothing_sent_with_the_interval_as_a_band(tmp_path: Path) -> None:
    charts = volume_charts([sweep(tmp_path / "a", front())])
    assert list(charts) == ["volume"]
    low, high, mean = charts["volume"].data
    assert list(mean["x"]) == [0.0, 100.0, 200.0] and list(mean["y"]) == [0.0, 0.2, 0.4]
    assert list(low["y"]) == [0.0, 0.1, 0.2] and list(high["y"]) == pytest.approx([0.0, 0.3, 0.6])
    assert {trace["line"]["shape"] for trace in (low, high, mean)} == {"hv"}


def test_the_front_of_a_sweep_that_goes_on_is_not_drawn_beside_its_new_trials(tmp_path: Path) -> None:
    there = SweepFolder(tmp_path / "s")
    trials = tuple(Trial(number=n, values={"seed": n}, label="FedAvg", folder=f"000{n}") for n in (1, 2))
    there.create(SweepPlan(config_tree={}, trials=trials[:1]), config_yaml=None, overwrite=False)
    there.write_summary({"fronts": [front()], "trials": [{"folder": "0001", "status": "finished"}]})
    assert volume_charts([there.path])
    there.write_plan(SweepPlan(config_tree={}, trials=trials))
    assert not volume_charts([there.path])


def test_a_single_seed_has_no_band_and_several_fronts_have_a_panel_each(tmp_path: Path) -> None:
    charts = volume_charts([sweep(tmp_path / "a", front(low=None)), sweep(tmp_path / "b", front(), front())])
    assert [len(chart.data) for chart in charts.values()] == [1, 3, 3]
    assert [chart.title.split(":")[0] for chart in charts.values()] == ["a", "b", "b"]


@pytest.mark.parametrize(
    "fronts",
    ["x", [3], [{"among": 4}], [{"among": ["a"], "by_bytes": [{"bytes": "NaN", "mean": 1, "low": 0, "high": 1}] * 2}]],
)
def test_a_damaged_summary_draws_nothing(tmp_path: Path, fronts: Any) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"fronts": fronts}))
    assert volume_charts([tmp_path, tmp_path / "missing"]) == {}
