"""A sweep in MLflow: a parent run, and a child for each trial. One process writes, in one thread: the driver's.

The trials' processes never touch the store. A child is fed with the rounds that the driver hears of; where some were
missed (before a resume, or while a trial's process was being replaced), they are read from the trial's folder, which
has them all in the end. A round goes by its number, so none is logged twice.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.driver.observers import RunInfo
from fedsweep.errors import FedsweepError
from fedsweep.runs.files import TRACKING
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_run import MlflowRun, Point, save_ids
from fedsweep.tracking.mlflow_store import probe_store, quiet_mlflow, reason_of, redacted
from fedsweep.tracking.rows import telling

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord

PARENT_TAG = "mlflow.parentRunId"
_FOLDER_TAG = "fedsweep.folder"
# A store that is gone must not hold up the end of a sweep for each of its trials.
_PATIENCE_S = 3.0
_SHORT_PATIENCE_S = 0.5
_LOGGER = logging.getLogger("fedsweep")


@dataclass
class _Child:
    trial: RunInfo
    observer: MlflowObserver
    logged_round: int = 0


@dataclass(kw_only=True)
class SweepTracker:
    """Logs a sweep.

    Attributes:
        uri: The store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        experiment: The MLflow experiment; None: one that the sweep has to itself. One that goes on stays where it is.
        folder: The sweep's folder.
        logged: Names of the trial folders that the store has completely, from before.
        keep_logged: Called with those names as they become more.
        warn: Takes what the user should know, in one line.
    """

    uri: str
    experiment: str | None
    folder: Path
    logged: set[str]
    keep_logged: Callable[[list[str]], None]
    warn: Callable[[str], None] = _LOGGER.warning
    _children: dict[str, _Child] = field(default_factory=dict, init=False)
    _events: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = field(
        default_factory=queue.Queue, init=False
    )
    _parent: MlflowRun | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _troubles: list[str] = field(default_factory=list, init=False)

    def start(self, *, name: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin the parent run, or go on with it, and the thread that writes."""
        own = {"fedsweep.kind": "sweep", **tags}
        self._parent = MlflowRun.begin(self.uri, experiment=self.experiment, name=name, tags=own, folder=self.folder)
        self.experiment = self._parent.experiment()
        self._parent.log_params(telling(config))
        self._adopt_orphans()
        self._thread = threading.Thread(target=self._work, name="fedsweep-mlflow", daemon=True)
        self._thread.start()

    def round_done(self, trial: RunInfo, record: RoundRecord) -> None:
        """The driver has heard of a round; returns at once."""
        self._events.put((self._log_round, (trial, record)))

    def trial_done(self, trial: RunInfo) -> None:
        """A trial's folder is complete; returns at once."""
        self._events.put((self._finish, (trial,)))

    def finish(
        self,
        trials: Iterable[RunInfo],
        *,
        status: str,
        files: Iterable[Path] = (),
        figures: Mapping[str, float] | None = None,
        timestamp_ms: int = 0,
    ) -> None:
        """Log what is left, then end the parent run; returns when all is written or the store is given up.

        Args:
            trials: All trials; those without a folder are passed over.
            status: ``finished``, ``failed`` or ``killed``.
            files: The parent's artifacts.
            figures: The parent's metrics.
            timestamp_ms: Of these, Unix time in milliseconds.
        """
        for trial in trials:
            self._events.put((self._finish, (trial,)))
        self._events.put((self._finish_parent, (status, list(files), dict(figures or {}), timestamp_ms)))
        self._events.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._troubles:
            self.warn(
                f"MLflow: {len(self._troubles)} runs in {redacted(self.uri)} are incomplete ({self._troubles[0]}); the"
                " folders have everything, and sweep --resume logs what is missing"
            )

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            call, arguments = event
            try:
                call(*arguments)
            except Exception as error:  # the store's own, SQLAlchemy's, requests': none of them may end a sweep
                self._troubles.append(reason_of(error))

    def _log_round(self, trial: RunInfo, record: RoundRecord) -> None:
        if trial.folder.name in self.logged:
            return
        child = self._begun(trial, before=record.round)
        if record.round <= child.logged_round:
            return
        if record.round > child.logged_round + 1:
            self._catch_up(child, before=record.round)
        child.observer.round_done(record)
        child.logged_round = record.round

    def _finish(self, trial: RunInfo) -> None:
        name = trial.folder.name
        run = RunFolder(trial.folder)
        if name in self.logged or not (trial.folder / CONFIG).is_file():
            return
        result: dict[str, Any] = run.read_result() if run.has_result() else {"status": "killed"}
        if self._troubles:
            probe_store(self.uri, patience_s=_SHORT_PATIENCE_S)  # one that is gone holds up no more than one trial
        child = self._begun(trial, before=None)
        self._catch_up(child, before=None)
        child.observer.finished(result["status"], result)
        del self._children[name]
        if result["status"] == "finished" and child.observer.is_complete:
            self.logged.add(name)
            self.keep_logged(sorted(self.logged))

    def _begun(self, trial: RunInfo, *, before: int | None) -> _Child:
        child = self._children.get(trial.folder.name)
        if child is None:
            assert self._parent is not None and self.experiment is not None
            observer = MlflowObserver(
                self.uri,
                experiment=self.experiment,
                final_patience_s=_PATIENCE_S,
                warn=self._troubles.append,
            )
            child = self._children[trial.folder.name] = _Child(trial, observer)
            records = self._records(trial, after=0, before=before)
            child.logged_round = records[-1].round if records else 0
            tags = {**trial.tags, PARENT_TAG: self._parent.run_id}
            observer.started(replace(trial, records=records, tags=tags))
        return child

    def _catch_up(self, child: _Child, *, before: int | None) -> None:
        for record in self._records(child.trial, after=child.logged_round, before=before):
            child.observer.round_done(record)
            child.logged_round = record.round

    @staticmethod
    def _records(trial: RunInfo, *, after: int, before: int | None) -> list[RoundRecord]:
        run = RunFolder(trial.folder)
        if not run.has_rounds() or before == after + 1:
            return []
        try:
            records = run.read_rounds()
        except FedsweepError:
            return []
        return [r for r in records if r.round > after and (before is None or r.round < before)]

    def _finish_parent(self, status: str, files: list[Path], figures: Mapping[str, float], timestamp_ms: int) -> None:
        if self._parent is None:
            return
        probe_store(self.uri, patience_s=_SHORT_PATIENCE_S)
        points = [Point(name, value, timestamp_ms, 0) for name, value in figures.items()]
        self._parent.log_points(points, {})
        for path in files:
            if path.is_file():
                self._parent.log_file(path)
        self._parent.end(status)

    def _adopt_orphans(self) -> None:
        """A driver that died between making a child and noting its id left one behind: note it now."""
        assert self._parent is not None
        client, parent = self._parent.client, self._parent.run_id
        with quiet_mlflow():
            where = client.get_run(parent).info.experiment_id
            token = None
            while True:
                found = client.search_runs([where], f"tags.`{PARENT_TAG}` = '{parent}'", page_token=token)
                for run in found:
                    self._note_id(Path(run.data.tags.get(_FOLDER_TAG, "")), run.info.run_id, where)
                token = found.token
                if not token:
                    return

    def _note_id(self, folder: Path, run_id: str, experiment_id: str) -> None:
        if folder.parent == self.folder.absolute() and folder.is_dir() and not (folder / TRACKING).exists():
            ids = {"uri": redacted(self.uri), "experiment": self.experiment, "experiment_id": experiment_id}
            save_ids(folder, {**ids, "run_id": run_id})
