"""A run for Weights & Biases, offline: nothing leaves this machine until ``wandb sync`` is called on the folder."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.runs.run_folder import ID_PREFIX, offline_runs
from fedsweep.runs.targets import TargetWatch
from fedsweep.tracking.loggers.library import imported
from fedsweep.tracking.rows import TrackedRow, telling

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord

_QUIET = {
    "mode": "offline",
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "host": "",
}


class WandbLogger(Observer):
    """Writes a run below ``wandb/`` of its folder; a row for each round, with ``round`` as the axis.

    A run that goes on is written anew from the first round under its old id, so each point is there once.

    Args:
        project: The project.
    """

    def __init__(self, *, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._targets = TargetWatch(())

    def check(self) -> None:
        imported("wandb", extra="wandb")

    def started(self, info: RunInfo) -> None:
        wandb = imported("wandb", extra="wandb")
        self._targets = TargetWatch(info.targets)
        self._run = wandb.init(
            project=self._project,
            id=_cleared(info.folder) or f"{ID_PREFIX}{uuid.uuid4().hex[:8]}",
            name=info.name,
            dir=str(info.folder),
            config={**telling(info.config), **info.tags},
            group=info.tags.get("fedsweep.sweep"),
            reinit="create_new",
            settings=wandb.Settings(root_dir=str(info.folder), **_QUIET),
        )
        self._run.define_metric("*", step_metric="round")
        for record in info.records:
            self.round_done(record)

    def round_done(self, record: RoundRecord) -> None:
        if self._run is None:
            return
        row = TrackedRow(record=record, reached=self._targets.see(record))
        crossed = {point.key: point.value for point in row.points() if point.key.startswith("target/")}
        row_time = {"round": record.round, "_timestamp": record.timestamp_ms / 1000}
        self._run.log({**row.figures(), **crossed, **row_time}, step=record.round)

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _cleared(folder: Path) -> str | None:
    """Remove files of the run's earlier part, and return the id that it had."""
    run_id = None
    for old in offline_runs(folder):
        run_id = old.name.rpartition("-")[2]
        shutil.rmtree(old)
    return run_id
