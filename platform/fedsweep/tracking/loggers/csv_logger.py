"""``rounds.csv`` in a run's folder: a row for each round, for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.runs.files import atomic_write
from fedsweep.runs.run_folder import ROUNDS_CSV
from fedsweep.tracking.rows import TrackedRow

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord

# The file is written at least so many seconds apart, and at checkpoints.
_EVERY_S = 2.0


class CsvLogger(Observer):
    """Writes the figures of all rounds so far, the file as a whole each time; a figure that a round lacks is empty."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._rows: list[dict[str, float]] = []
        self._written = time.monotonic()

    def started(self, info: RunInfo) -> None:
        self._path = info.folder / ROUNDS_CSV
        self._rows = []
        for record in info.records:
            self._keep(record)
        self._write()

    def round_done(self, record: RoundRecord) -> None:
        self._keep(record)
        if time.monotonic() - self._written >= _EVERY_S:
            self._write()

    def checkpointed(self, round: int) -> None:
        self._write()

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        self._write()

    def _keep(self, record: RoundRecord) -> None:
        self._rows.append({"round": record.round, **TrackedRow(record=record).figures()})

    def _write(self) -> None:
        if self._path is None:
            return
        text = io.StringIO()
        columns = {name: None for row in self._rows for name in row}
        table = csv.DictWriter(text, fieldnames=[*columns] or ["round"], lineterminator="\n")
        table.writeheader()
        table.writerows(self._rows)
        atomic_write(self._path, text.getvalue().encode())
        self._written = time.monotonic()
