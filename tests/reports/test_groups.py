"""The report's picture of the high-frequency group's labels: its figures, its size, and runs that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.reports import report_groups
from fedsweep.reports.client_maps import client_maps
from fedsweep.reports.report_groups import label_summary, size_of
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import RunFolder

COUNTS = np.array([[4, 0], [0, 4], [2, 2], [6, 2]])


def view(folder: Path = Path("/nowhere"), **columns: Any) -> RunView:
    whole = {"round": [1, 2], "cohort": [[0, 1, 2], [0, 3]], "high_frequency": [[2], [0, 3]], **columns}
    return RunView(folder=folder, config={}, result={}, columns=whole)


def test_the_groups_shares_are_summed_up_over_rounds() -> None:
    found = label_summary(view(), COUNTS)
    assert found is not None
    assert found["population"] == [0.6, 0.4]
    assert found["high"]["rounds"] == 2 and found["low"]["rounds"] == 1
    assert found["high"]["mean"] == [0.6667, 0.3333]  # of 1/2 and 10/12, 1/2 and 2/12
    assert found["high"]["spread"][0] == [0.5333, 0.2] and found["high"]["spread"][3] == [0.8, 0.4667]
    assert found["low"]["spread"] == [[0.5, 0.5]] * 4
    assert size_of(found) < 300


def test_runs_without_a_group_or_with_too_many_classes_have_no_picture() -> None:
    assert label_summary(view(high_frequency=[None, None]), COUNTS) is None
    assert label_summary(view(high_frequency=[[], []]), COUNTS) is None
    many = np.ones((4, report_groups._MOST_CLASSES + 1), dtype=np.int64)
    assert label_summary(view(), many) is None
    assert label_summary(view(), many[:, :-1]) is not None


def test_the_page_has_it_beside_the_maps_and_counts_its_size(tmp_path: Path) -> None:
    for name in ("with", "damaged"):
        RunFolder.create(tmp_path / name, overwrite=False).write_clients(
            num_samples=COUNTS.sum(axis=1).tolist(), label_counts=COUNTS.tolist()
        )
    damaged = view(tmp_path / "damaged", high_frequency=[[2], [9]], cohort=[[0, 1, 2], [0, 9]])
    maps = client_maps([view(tmp_path / "with"), damaged, view(high_frequency=[None, None])], [0, 1, 2])
    assert "labels" in maps.views[0] and "labels" not in maps.views[1] and "labels" not in maps.views[2]
    assert maps.size > size_of(maps.views[0]["labels"])
    assert len(maps.notes) == 1 and "round 2 names client 9" in maps.notes[0]
    assert json.loads(json.dumps(maps.tree()))["views"]["0"]["labels"]["population"] == [0.6, 0.4]


@pytest.mark.parametrize("part", ["labels.js", "page.js"])
def test_the_pages_script_draws_it(part: str) -> None:
    script = (Path(report_groups.__file__).parent / "html" / part).read_text()
    assert "drawLabels" in script
