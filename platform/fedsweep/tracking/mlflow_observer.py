"""An experiment in MLflow: its rounds as they come, its files in the end, and afterwards what the store lacks of it.

Nothing that happens to the store once a run has started ends the run: rounds are kept and tried again, the first
trouble is said once, and what is missing in the end is said in one line.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedsweep.driver.observers import Observer, RunInfo, run_tags
from fedsweep.errors import OutputError
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import (
    CLIENT_ACCURACY,
    CLIENTS,
    CONFIG,
    MODEL,
    PICTURES,
    PLAN,
    RESULT,
    ROUNDS,
    SCENARIO,
    TRAFFIC,
    RunFolder,
)
from fedsweep.tracking.mlflow_keeper import KeptRun, MlflowKeeper
from fedsweep.tracking.mlflow_run import METRICS_PER_BATCH, MlflowRun, is_complete, key_text, note_complete
from fedsweep.tracking.mlflow_store import (
    PATIENCE_S,
    check_store,
    needs_mlflow,
    probe_store,
    reason_of,
    redacted,
    resolve_uri,
)
from fedsweep.tracking.rows import TrackedRow, TrackedRows, telling

if TYPE_CHECKING:
    from pathlib import Path

    from fedsweep.config.schema import Config
    from fedsweep.records import RoundRecord

_ARTIFACTS = (CONFIG, RESULT, MODEL, ROUNDS, CLIENTS, CLIENT_ACCURACY, TRAFFIC, SCENARIO)
# After a failed try, training goes on for this many times as long as the try took.
_BACK_OFF = 10.0
_RETRY_S = 0.5
_LOGGER = logging.getLogger("fedsweep")


class MlflowObserver(Observer):
    """Logs a run to MLflow.

    Args:
        uri: The store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        experiment: The MLflow experiment.
        flush_s: Rounds are written at least this many seconds apart, and at checkpoints.
        final_patience_s: How long the end of a run may wait for a store that is gone or locked.
        warn: Takes what the user should know, in one line.
        clock: Seconds that only go up.
        keeper: A process that imports MLflow meanwhile and then writes; None: this process does.
    """

    phase = "mlflow"

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        keeper: MlflowKeeper | None = None,
        flush_s: float = 2.0,
        final_patience_s: float = 10.0,
        warn: Callable[[str], None] = _LOGGER.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uri, self._experiment = uri, experiment
        self._flush_s, self._final_patience_s = flush_s, final_patience_s
        self._warn, self._clock = warn, clock
        self._info: RunInfo | None = None
        self._keeper = keeper
        self._run: MlflowRun | KeptRun | None = None
        self._described = False
        self._pending: deque[TrackedRow] = deque()
        self._rows = TrackedRows()
        self._infinite: set[str] = set()
        self._next_try = -math.inf
        self._failing = False
        self._trouble = ""
        self._warned = False
        self._complete = False

    @property
    def run_id(self) -> str | None:
        """The run's id in MLflow; None as long as it could not be begun."""
        return self._run.run_id if self._run else None

    @property
    def is_complete(self) -> bool:
        """Whether the run was ended and the store has everything of it."""
        return self._complete

    def check(self) -> None:
        if self._keeper is None or not needs_mlflow(self._uri, experiment=self._experiment):
            check_store(self._uri, experiment=self._experiment)
        else:
            self._keeper.call("check_store", self._uri, self._experiment)

    def started(self, info: RunInfo) -> None:
        self._info = info
        self._rows = TrackedRows(info.targets)
        for record in info.records:
            self._keep(record)
        if self._keeper is None:
            self._flush(patience_s=PATIENCE_S)
        else:
            # What is wrong, the first flush finds out.
            self._tried(self._keeper.ask, "begin", self._uri, **self._description(info))

    def round_done(self, record: RoundRecord) -> None:
        self._keep(record)
        if self._clock() >= self._next_try and self._can_write:
            self._flush(patience_s=PATIENCE_S)

    def checkpointed(self, round: int) -> None:
        if (not self._failing or self._clock() >= self._next_try) and self._can_write:
            self._flush(patience_s=PATIENCE_S)

    @property
    def _can_write(self) -> bool:
        """Whether the store is open, so that a round's end waits for nothing but its own rows."""
        return self._keeper is None or self._keeper.has_answered

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        if self._info is None:
            return  # the run failed before it started
        deadline = self._clock() + self._final_patience_s
        while not self._flush(patience_s=max(_RETRY_S, deadline - self._clock())) and self._clock() < deadline:
            time.sleep(_RETRY_S)
        missing = self._missing_rounds()
        if self._run is None or self._failing:
            missing.append("its files and its status")
        else:
            missing += self._end(self._run, self._info, status)
        if not missing:
            self._complete = self._tried(note_complete, self._info.folder)
        if self._keeper is not None:
            self._keeper.close()
        if missing:
            where = f"the MLflow run {self.run_id or '(never begun)'} in {redacted(self._uri)}"
            # A run that failed may have done so at its folder.
            has = "" if status == "failed" else f" {self._info.folder} has everything, and"
            self._warn(
                f"{where} lacks {', '.join(missing)} ({self._trouble});{has}"
                f" fedsweep sync {self._info.folder} logs what is missing"
            )

    def _keep(self, record: RoundRecord) -> None:
        self._pending.append(self._rows.row(record))

    def _flush(self, *, patience_s: float) -> bool:
        """Writes what is pending; says whether that went well."""
        if self._info is None:
            return False
        began = self._clock()
        ok = self._tried(self._write, self._info, patience_s=patience_s)
        now = self._clock()
        self._failing = not ok
        self._next_try = now + (self._flush_s if ok else max(self._flush_s, _BACK_OFF * (now - began)))
        if not ok and not self._warned:
            self._warned = True
            self._warn(f"MLflow: {self._trouble}; training goes on, and logging is tried again")
        return ok

    def _write(self, info: RunInfo, *, patience_s: float) -> None:
        probe_store(self._uri, patience_s=patience_s)
        run = self._begun(info)
        if not self._described:
            run.log_params(telling(info.config))
            run.log_dataset(info.config)
            self._described = True
        while self._pending:
            rows = self._next_rows()
            tags = {
                key_text(f"infinite.{name}"): text for row in reversed(rows) for name, text in row.infinite().items()
            }
            fresh = {key: text for key, text in tags.items() if key not in self._infinite}
            run.log_points([point for row in rows for point in row.points()], fresh)
            self._infinite.update(fresh)
            for _ in rows:
                self._pending.popleft()

    def _begun(self, info: RunInfo) -> MlflowRun | KeptRun:
        if self._keeper is not None and self._keeper.is_lost:
            self._keeper, self._run = None, None  # a process that died is not tried again: this one writes
        if self._run is None and self._keeper is not None:
            begun = (
                self._keeper.answer()
                if self._keeper.owes
                else self._keeper.call("begin", self._uri, **self._description(info))
            )
            self._run = KeptRun(self._keeper, begun)
        elif self._run is None:
            self._run = MlflowRun.begin(self._uri, **self._description(info))
        return self._run

    def _description(self, info: RunInfo) -> dict[str, Any]:
        """What a run in the store is begun with."""
        return {"experiment": self._experiment, "name": info.name, "tags": dict(info.tags), "folder": info.folder}

    def _next_rows(self) -> list[TrackedRow]:
        """The oldest pending rounds that fit one batch, at least one."""
        rows: list[TrackedRow] = []
        size = 0
        for row in self._pending:
            size += len(row.points())
            if rows and size > METRICS_PER_BATCH:
                break
            rows.append(row)
        return rows

    def _end(self, run: MlflowRun | KeptRun, info: RunInfo, status: str) -> list[str]:
        """Logs the files and ends the run; returns what could not be done."""
        missing = [] if self._tried(_log_files, run, info.folder) else ["some of its files"]
        return missing if self._tried(run.end, status) else [*missing, "its status"]

    def _missing_rounds(self) -> list[str]:
        if not self._pending:
            return []
        first, last = self._pending[0].record.round, self._pending[-1].record.round
        return [f"round {first}" if first == last else f"rounds {first} to {last}"]

    def _tried(self, call: Callable[..., object], *arguments: Any, **options: Any) -> bool:
        """Whether a call went well; trouble (MLflow's own, SQLAlchemy's, requests', the system's) is remembered."""
        try:
            call(*arguments, **options)
        except Exception as error:
            self._trouble = reason_of(error)
            return False
        return True


def _log_files(run: MlflowRun | KeptRun, folder: Path) -> None:
    for path in (folder / name for name in _ARTIFACTS):
        if path.is_file():
            run.log_file(path)
    for path in sorted((folder / PICTURES).glob("*.png")):
        run.log_file(path, into=PICTURES)


def catch_up(folder: Path, config: Config) -> tuple[str, bool]:
    """Log what the store lacks of a run that has ended, given its resolved configuration.

    Returns:
        What was done, in words, and whether nothing is missing now.

    Raises:
        ResourceError: The store cannot be used.
        OutputError: The folder has no result, or a damaged one; or another process writes it.
    """
    uri = resolve_uri(config.tracking.uri, out=folder)
    if uri is None:
        return "nothing is tracked (tracking.uri is none)", True
    if is_complete(folder, uri):
        return "MLflow has everything of it", True
    if (folder.parent / PLAN).exists():
        return f"fedsweep sweep --resume --out {folder.parent} logs what MLflow lacks of it", False
    with sole_writer(folder):
        observer = MlflowObserver(uri, experiment=config.tracking.experiment)
        _log_ended(folder, config, observer)
    if not observer.is_complete:
        return "MLflow still lacks some of it", False
    return "MLflow has everything of it now", True


def _log_ended(folder: Path, config: Config, observer: MlflowObserver) -> None:
    run = RunFolder(folder)
    if not run.has_result():
        raise OutputError(f"{folder}: the run has not ended; go on with fedsweep run --resume {folder}")
    result = run.read_result()
    records = run.read_rounds() if run.has_rounds() else []
    observer.check()
    observer.started(
        RunInfo(
            name=config.name,
            folder=folder,
            config=config.flat(),
            tags=run_tags(config, method=str(result.get("method", "unknown")), git_commit=result.get("git_commit")),
            planned_rounds=config.training.rounds,
            records=records,
            targets=config.evaluation.targets,
        )
    )
    observer.finished(result["status"], result)
