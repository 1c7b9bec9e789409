"""A small table on digits, and run folders that need no run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from fedsweep.records import RoundRecord
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.runs.run_folder import RunFolder
from fedsweep.runs.tables.rounds import ROUND_COLUMNS

_NUMBERS = {"round": 1, "lr": 0.1, "bytes_up": 10, "bytes_down": 5, "cohort": (0,), "attendees": (0,), "extra": {}}
_MAY_LACK = {column.name for column in ROUND_COLUMNS if column.nullable}
_ROUND = RoundRecord(
    **{f.name: _NUMBERS.get(f.name, None if f.name in _MAY_LACK else 0) for f in fields(RoundRecord)}
    | {"aggregation_weights": (1.0,)}
)

TEXT = """
# Accuracy and cost of two methods on digits
name: tiny
scenario: {clients: 6, partition: {kind: iid}}
method: {name: fedavg}
training: {rounds: 3, cohort_size: 2, local_steps: 2}
tracking: {uri: none}
table:
  title: Two methods on digits
  source: Somebody 2024, Table 7
  measures:
    - {name: accuracy, label: Accuracy, of: test_accuracy, over: best, percent: true, tolerance: 2.0}
    - {name: cost, label: Cost, of: comm_ratio, over: mean, tolerance: 0.05, cost: true}
  rows:
    - {name: FedAvg}
    - {name: FedProx, set: {method: {name: fedprox, mu: 0.1}}, scales: {smoke: {method.mu: 0.2}}}
    - {name: SCAFFOLD, missing: scaffold is not there yet}
  columns:
    - {name: even}
    - name: K=2
      set: {scenario.partition: {kind: classes, classes_per_client: 2}}
      scales: {smoke: {training.rounds: 1}}
  seeds: [0, 1, 2]
  scales:
    smoke: {seeds: [0], set: {training.rounds: 2}}
    small: {seeds: [0, 1], rows: [FedAvg], columns: [even]}
  printed:
    FedAvg: {even: {accuracy: [70.0, 0.5], cost: 0.5}, K=2: {cost: 0.9}}
  notes:
    - The paper does not say which digits.
"""


@pytest.fixture
def table_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def table(table_path: Path) -> TableFile:
    return read_table(table_path)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str], Path]:
    """The table's file with one text in the place of another."""

    def change(old: str, new: str) -> Path:
        assert old in TEXT
        path = tmp_path / "changed.yaml"
        path.write_text(TEXT.replace(old, new, 1))
        return path

    return change


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Writes a run folder with the given columns."""

    def make(path: Path, *, columns: dict[str, list[Any]], status: str = "finished", **result: Any) -> Path:
        folder = RunFolder.create(path, overwrite=False)
        folder.write_config("name: made\n")
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        made = [replace(_ROUND, round=number, **row) for number, row in enumerate(rows, start=1)]
        sums = accumulate(record.bytes_up + record.bytes_down for record in made)
        folder.write_rounds([replace(record, total_bytes=total) for record, total in zip(made, sums, strict=True)])
        folder.write_result({"status": status, **result})
        return path

    return make
