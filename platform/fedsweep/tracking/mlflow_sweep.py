"""A sweep in MLflow: a parent run, and a child for each trial. One process writes: the driver's.

The trials' processes never touch the store. Their folders are sent to it now and then, each whole when its trial has
ended, and what is left at the sweep's end or by ``fedsweep sweep --resume``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import FedsweepError, ResourceError
from fedsweep.runs.background import AT_MOST_S, BackgroundCall, NoAnswer
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.tracking.mlflow_run import MlflowRun, Point, is_complete, note_begun
from fedsweep.tracking.mlflow_store import PATIENCE_S, probe_store, reason_of
from fedsweep.tracking.mlflow_sync import FolderSync
from fedsweep.tracking.rows import telling

if TYPE_CHECKING:
    from fedsweep.driver.observers import RunInfo

PARENT_TAG = "mlflow.parentRunId"
# A store that is gone must not hold up the end of a sweep for each of its trials.
_SHORT_PATIENCE_S = 0.5
# At the end, for each trial of which the store may lack everything.
_TRIAL_S = 5.0
# After each pass the thread rests for this many times as long as it took.
_REST = 5.0
_LOGGER = logging.getLogger("fedsweep")


@dataclass(kw_only=True)
class SweepTracker:
    """Logs a sweep.

    Attributes:
        uri: The store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        experiment: The MLflow experiment; None: one that the sweep has to itself. One that goes on stays where it is.
        folder: The sweep's folder.
        warn: Takes what the user should know, in one line.
        every_s: The store is at least this far behind the folders.
    """

    uri: str
    experiment: str | None
    folder: Path
    warn: Callable[[str], None] = _LOGGER.warning
    every_s: float = 5.0
    _running: dict[str, RunInfo] = field(default_factory=dict, init=False)
    _ended: set[str] = field(default_factory=set, init=False)
    _syncs: dict[str, FolderSync] = field(default_factory=dict, init=False)
    _parent: MlflowRun | None = field(default=None, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _call: BackgroundCall[None] | None = field(default=None, init=False)
    _end: Callable[[], None] | None = field(default=None, init=False)
    _trouble: str = field(default="", init=False)

    def start(self, *, name: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin the parent run, or go on with it, and follow the trials from then on.

        Raises:
            ResourceError: The store can't be used, or does not answer.
        """
        own = {"fedsweep.kind": "sweep", **tags}
        try:
            BackgroundCall(lambda: self._begin(name, config, own)).wait()
        except Exception as error:  # MLflow's, SQLAlchemy's, requests'
            if isinstance(error, FedsweepError) and not isinstance(error, NoAnswer):
                raise
            raise ResourceError(f"tracking.uri: the store {self.uri} can't be used: {reason_of(error)}") from error
        self._call = BackgroundCall(self._follow)

    def round_done(self, trial: RunInfo) -> None:
        """Note that a trial gets on; returns at once."""
        if trial.folder.name not in self._running:
            note_begun(trial.folder)
            self._running[trial.folder.name] = trial

    def trial_done(self, trial: RunInfo) -> None:
        """Note that a trial's folder is complete; returns at once."""
        self._running[trial.folder.name] = trial
        self._ended.add(trial.folder.name)

    def finish(
        self,
        trials: Iterable[RunInfo],
        *,
        status: str,
        files: Iterable[Path] = (),
        figures: Mapping[str, float] | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        """Send what is left, then end the parent run; returns when all is sent or the store is given up.

        Args:
            trials: All trials; those without a folder are passed over.
            status: ``finished``, ``failed`` or ``killed``.
            files: The parent's artifacts.
            figures: The parent's metrics.
            timestamp_ms: Of these, Unix time in milliseconds.
        """
        parent, call, begun = self._parent, self._call, [one for one in trials if (one.folder / CONFIG).is_file()]
        if parent is None or call is None:
            return
        points = [Point(name, value, timestamp_ms, 0) for name, value in (figures or {}).items()]

        def end() -> None:
            self._send_all(begun, is_over=True)
            probe_store(self.uri, patience_s=_SHORT_PATIENCE_S if self._trouble else PATIENCE_S)
            parent.log_points([point for point in points if parent.metrics.get(point.key) != point.value], {})
            for path in files:
                if path.is_file():
                    parent.log_file(path)
            parent.end(status)

        self._end, incomplete = end, 0
        self._over.set()
        try:
            call.wait(at_most_s=AT_MOST_S + _TRIAL_S * len(begun))
        except Exception as error:  # the store's own, SQLAlchemy's, requests': none of them may end a sweep
            self._trouble, incomplete = reason_of(error), 1
        incomplete += sum(not is_complete(trial.folder, self.uri) for trial in begun)
        if incomplete:
            self.warn(
                f"MLflow: {incomplete} runs in {self.uri} are incomplete ({self._trouble}); the folders have"
                " everything, and sweep --resume logs what is missing"
            )

    # -- in a thread ------------------------------------------------------------------------------------------------

    def _begin(self, name: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        self._parent = MlflowRun.begin(self.uri, experiment=self.experiment, name=name, tags=tags, folder=self.folder)
        self.experiment = self._parent.experiment()
        self._parent.log_params(telling(config))

    def _follow(self) -> None:
        pause = self.every_s
        while not self._over.wait(pause):
            began = time.monotonic()
            running = list(self._running.values())
            try:
                self._send_all([trial for trial in running if trial.folder.name not in self._ended], is_over=False)
                self._send_all([trial for trial in running if trial.folder.name in self._ended], is_over=True)
            except Exception as error:
                self._trouble = reason_of(error)
            pause = max(self.every_s, _REST * (time.monotonic() - began))
        if self._end is not None:
            self._end()

    def _send_all(self, trials: Sequence[RunInfo], *, is_over: bool) -> None:
        """Send trials that have ended, or that run; one that can't be sent leaves the others be.

        Raises:
            ResourceError: The store can't be written; the others were not tried.
        """
        for trial in trials:
            if self._over.is_set() and not is_over:
                return
            try:
                self._send(trial, is_over=is_over)
            except Exception as error:
                self._trouble = reason_of(error)
                probe_store(self.uri, patience_s=_SHORT_PATIENCE_S)

    def _send(self, trial: RunInfo, *, is_over: bool) -> None:
        name, run = trial.folder.name, RunFolder(trial.folder)
        if not is_complete(trial.folder, self.uri):
            status = None
            if is_over:
                status = run.read_result()["status"] if run.has_result() else "killed"
            self._sync_of(trial).send(status, patience_s=_SHORT_PATIENCE_S if self._trouble else PATIENCE_S)
        if is_over:
            self._running.pop(name, None)
            self._syncs.pop(name, None)

    def _sync_of(self, trial: RunInfo) -> FolderSync:
        assert self._parent is not None and self.experiment is not None
        child = replace(trial, tags={**trial.tags, PARENT_TAG: self._parent.run_id})
        return self._syncs.setdefault(trial.folder.name, FolderSync(self.uri, experiment=self.experiment, info=child))
