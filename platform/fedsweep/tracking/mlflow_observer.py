"""A run in MLflow: its folder is sent to the store now and then, and whole at its end.

MLflow is imported and written to in a thread that ends with its process, and some seconds after the run began: a run
waits for its store at its beginning and at its end alone, and never for long. Nothing that happens to the store once a
run has started ends the run: the first trouble is said once, and what is missing in the end is said in one line.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Mapping
from typing import Any

from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.runs.background import BackgroundCall
from fedsweep.tracking.mlflow_store import check_store, reason_of
from fedsweep.tracking.mlflow_sync import FolderSync

# The store is at least so far behind the folder, which itself is rewritten every few seconds.
_EVERY_S = 5.0
# After each try the thread rests for this many times as long as it took, so that the run has the machine.
_REST = 20.0
# How long the end of a run waits for a store that is locked.
_PATIENCE_S = 5.0
_warn = logging.getLogger("fedsweep").warning


class MlflowObserver(Observer):
    """Logs a run to MLflow.

    Args:
        uri: The store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        experiment: The MLflow experiment.
    """

    phase = "mlflow"

    def __init__(self, uri: str, *, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        self._status, self._over = "", threading.Event()
        self._begun: tuple[FolderSync, BackgroundCall[None]] | None = None

    @property
    def run_id(self) -> str | None:
        """The run's id in MLflow; None as long as it could not be begun."""
        return self._begun[0].run_id if self._begun else None

    def check(self) -> None:
        check_store(self._uri, experiment=self._experiment)

    def started(self, info: RunInfo) -> None:
        sync = FolderSync(self._uri, experiment=self._experiment, info=info)
        self._begun = sync, BackgroundCall(lambda: self._follow(sync))

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        if self._begun is None:
            return  # the run failed before it started
        (sync, call), self._status = self._begun, status
        self._over.set()
        try:
            call.wait()
        except Exception as error:  # MLflow's, SQLAlchemy's, requests' and the system's
            folder = sync.folder
            # A run that failed may have done so at its folder.
            has = "" if status == "failed" else f" {folder} has everything, and"
            _warn(
                f"the MLflow run {sync.run_id or '(never begun)'} in {self._uri} lacks {sync.lacking()}"
                f" ({reason_of(error)});{has} fedsweep sync {shlex.quote(str(folder))} logs what is missing"
            )

    def _follow(self, sync: FolderSync) -> None:
        """Send what there is, again and again, and everything at the end."""
        pause, warned = _EVERY_S, False
        while not self._over.wait(pause):
            began = time.monotonic()
            try:
                sync.send()
            except Exception as error:
                if not (warned or self._over.is_set()):
                    _warn(f"MLflow: {reason_of(error)}; training goes on, and logging is tried again")
                warned = True
            pause = max(_EVERY_S, _REST * (time.monotonic() - began))
        status = ""
        while status != self._status:  # whoever is interrupted while this goes on has ended otherwise
            status = self._status
            sync.send(status, patience_s=_PATIENCE_S)
