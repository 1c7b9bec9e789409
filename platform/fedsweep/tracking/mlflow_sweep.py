"""A sweep in MLflow: a parent run, and a child for each trial. One process writes: the driver's.

The trials' processes never touch the store. Their folders are sent to it now and then, each whole when its trial has
ended, and what is left at the sweep's end or by ``fedsweep sweep --resume``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsweep.driver.observers import RunInfo
from fedsweep.errors import FedsweepError, ResourceError
from fedsweep.runs.background import AT_MOST_S, BackgroundCall, NoAnswer
from fedsweep.runs.run_folder import CONFIG
from fedsweep.tracking.mlflow_run import PARENT, MlflowRun, is_complete
from fedsweep.tracking.mlflow_store import PATIENCE_S, probe_store, quiet_mlflow, reason_of
from fedsweep.tracking.mlflow_sync import FolderSync, status_in
from fedsweep.tracking.rows import Point, telling

# A store that is gone must not hold up the end of a sweep for each of its trials.
_SHORT_PATIENCE_S = 0.5
# At the end, for each trial of which the store may lack everything.
_TRIAL_S = 5.0
# The store is at least so far behind the folders.
_EVERY_S = 5.0
# After each pass the thread rests for this many times as long as it took.
_REST = 5.0
_warn = logging.getLogger("fedsweep").warning


class _ParentSync(FolderSync):
    """Sends a sweep's own folder, which has no rounds: figures and files come at the sweep's end."""

    figures: Sequence[Point] = ()
    files: Iterable[Path] = ()

    def _describe(self, run: MlflowRun) -> None:
        run.log_params(telling(self._info.config))

    def _send_figures(self, run: MlflowRun) -> None:
        if fresh := [point for point in self.figures if run.entity.data.metrics.get(point.key) != point.value]:
            run.log_points(fresh, {})

    def _files(self) -> Iterator[Path]:
        return (path for path in self.files if path.is_file())


@dataclass(kw_only=True)
class SweepTracker:
    """Logs a sweep.

    Attributes:
        uri: The store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        experiment: The MLflow experiment; None: one that the sweep has to itself. One that goes on stays where it is.
        folder: The sweep's folder.
        rewrites: Until a trial has finished, another's rounds may take the place of its own: then none is sent before.
    """

    uri: str
    experiment: str | None
    folder: Path
    rewrites: bool = False
    _trials: dict[str, RunInfo] = field(default_factory=dict, init=False)
    _syncs: dict[str, FolderSync] = field(default_factory=dict, init=False)
    _ended: set[str] = field(default_factory=set, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _parent: _ParentSync = field(init=False)
    _parent_id: str | None = field(default=None, init=False)
    _call: BackgroundCall[None] | None = field(default=None, init=False)
    _end: Callable[[], None] = field(default=lambda: None, init=False)
    _trouble: str = field(default="", init=False)

    def start(self, *, name: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin the parent run, or go on with it, and follow the trials from then on.

        Raises:
            ResourceError: The store can't be used, or does not answer.
        """
        own = {"fedsweep.kind": "sweep", **tags}
        info = RunInfo(name=name, folder=self.folder, config=config, tags=own, planned_rounds=0)
        self._parent = _ParentSync(self.uri, experiment=self.experiment, info=info)
        try:
            BackgroundCall(self._keep_parent).wait()
        except Exception as error:  # MLflow's, SQLAlchemy's, requests'
            if isinstance(error, FedsweepError) and not isinstance(error, NoAnswer):
                raise
            raise ResourceError(f"tracking.uri: the store {self.uri} can't be used: {reason_of(error)}") from error
        self._call = BackgroundCall(self._follow)

    def round_done(self, trial: RunInfo) -> None:
        """Note that a trial gets on; returns at once."""
        self._trials.setdefault(trial.folder.name, trial)

    def trial_done(self, trial: RunInfo) -> None:
        """Note that a trial's folder is complete; returns at once."""
        if self.rewrites and status_in(trial.folder) != "finished":
            return  # a resumed sweep goes on with it
        self._trials.setdefault(trial.folder.name, trial)
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
        if self._call is None:
            return
        points = [Point(name, value, timestamp_ms, 0) for name, value in (figures or {}).items()]
        played = [trial for trial in trials if (trial.folder / CONFIG).is_file()]
        if self.rewrites:
            played = [trial for trial in played if status_in(trial.folder) == "finished"]

        def end() -> None:
            for trial in played:
                self.trial_done(trial)
            self._send_all()
            self._parent.figures, self._parent.files = points, files
            self._parent.send(status, patience_s=self._patience_s)

        self._end, incomplete = end, 0
        self._over.set()
        try:
            self._call.wait(at_most_s=AT_MOST_S + _TRIAL_S * len(played))
        except Exception as error:  # the store's own, SQLAlchemy's, requests': none of them may end a sweep
            self._trouble, incomplete = reason_of(error), 1
        incomplete += sum(one.folder.name in self._trials or not is_complete(one.folder, self.uri) for one in played)
        if incomplete:
            _warn(
                f"MLflow: {incomplete} runs in {self.uri} are incomplete ({self._trouble}); the folders have"
                " everything, and sweep --resume logs what is missing"
            )

    @property
    def _patience_s(self) -> float:
        return _SHORT_PATIENCE_S if self._trouble else PATIENCE_S

    def _follow(self) -> None:
        pause = _EVERY_S
        while not self._over.wait(pause):
            began = time.monotonic()
            with contextlib.suppress(Exception):  # it is noted
                self._send_all()
            pause = max(_EVERY_S, _REST * (time.monotonic() - began))
        self._end()

    @quiet_mlflow()
    def _send_all(self) -> None:
        """Send trials that run, or that have ended; one that can't be sent leaves the others be.

        Raises:
            ResourceError: The store can't be written; the others were not tried.
        """
        children: Callable[[], Mapping[str, str]] | None = None
        for name, trial in list(self._trials.items()):
            is_over, folder = name in self._ended, trial.folder
            if ((self._over.is_set() or self.rewrites) and not is_over) or not (folder / CONFIG).is_file():
                continue  # it is sent whole at its end; or it broke down before it began
            try:
                if children is None:
                    children = functools.cache(self._keep_parent().children)
                if not is_complete(folder, self.uri, children):
                    sync = self._syncs.setdefault(name, self._sync_of(trial))
                    sync.send(status_in(folder) if is_over else None, patience_s=self._patience_s)
                if is_over:
                    del self._trials[name]
                    self._syncs.pop(name, None)  # it keeps the trial's rounds
            except Exception as error:
                self._trouble = reason_of(error)
                probe_store(self.uri, patience_s=_SHORT_PATIENCE_S)

    @quiet_mlflow()
    def _keep_parent(self) -> MlflowRun:
        """Begin the parent where it, or the store's file, is not there; the children of an earlier one move to it."""
        run = self._parent.send(patience_s=self._patience_s)
        if run.run_id != self._parent_id:
            self.experiment = run.client.get_experiment(run.entity.info.experiment_id).name
            self._syncs, self._parent_id = {}, run.run_id
        return run

    def _sync_of(self, trial: RunInfo) -> FolderSync:
        child = replace(trial, tags={**trial.tags, PARENT: self._parent_id or ""})
        return FolderSync(self.uri, experiment=self.experiment, info=child)
