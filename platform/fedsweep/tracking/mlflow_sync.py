"""A store follows a run's folder: whatever it has not got of the folder's rounds and files is sent to it.

The folder is the truth, and sending is idempotent: a run does it now and then and at its end, a sweep for each of its
trials, and ``fedsweep sync`` afterwards. A round that the store has is not sent again, whoever sent it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedsweep.driver.observers import RunInfo, method_name, run_tags
from fedsweep.errors import OutputError, ResourceError
from fedsweep.runs.background import BackgroundCall
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.places import place_name
from fedsweep.runs.remote_folder import sweep_of
from fedsweep.runs.run_folder import (
    CLIENT_ACCURACY,
    CLIENTS,
    CONFIG,
    MODEL,
    PICTURES,
    RESULT,
    ROUNDS,
    SCENARIO,
    TRAFFIC,
    UNFINISHED,
    RunFolder,
)
from fedsweep.runs.targets import TargetWatch
from fedsweep.tracking.mlflow_run import (
    METRICS_PER_BATCH,
    SENT,
    MlflowRun,
    digest_of,
    is_complete,
    is_there,
    key_text,
    note_sent,
)
from fedsweep.tracking.mlflow_store import (
    PATIENCE_S,
    check_store,
    probe_store,
    quiet_mlflow,
    reason_of,
    resolve_uri,
    sqlite_path,
)
from fedsweep.tracking.rows import Point, TrackedRow, telling

if TYPE_CHECKING:
    from pathlib import Path

    from fedsweep.config.schema import Config

_FOLLOWED_EVERY_S = 5.0
_ARTIFACTS = (CONFIG, RESULT, MODEL, ROUNDS, CLIENTS, CLIENT_ACCURACY, TRAFFIC, SCENARIO)


class FolderSync:
    """Sends a run's folder to a store, as often as it is called.

    Args:
        uri: The store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        experiment: The MLflow experiment; None: one that the run has to itself.
        info: The run; its rounds are read from its folder.
    """

    def __init__(self, uri: str, *, experiment: str | None, info: RunInfo) -> None:
        self._uri, self._experiment, self._info = uri, experiment, info
        self._run: MlflowRun | None = None
        self._read_at: tuple[int, int] | None = None
        self._rows: list[TrackedRow] = []
        self._sent_rounds: set[int] = set()
        self._lacks = ["its files", "its status"]
        self.folder = info.folder
        self.run_id: str | None = None

    def send(self, status: str | None = None, *, patience_s: float = PATIENCE_S) -> MlflowRun:
        """Send what the store has not got.

        Args:
            status: How the run ended: its files are sent, too, and the run in the store is ended; None: it goes on.
            patience_s: How long to wait for a lock or an answer before anything is sent.

        Returns:
            The run in the store.

        Raises:
            Exception: Of MLflow, SQLAlchemy, requests or the system; what was not sent is sent by the next call.
        """
        try:
            probe_store(self._uri, patience_s=patience_s)
            with quiet_mlflow():
                if self._run is not None and not is_there(self._run.client, self.folder, self._uri):
                    # The store's file, or the run in it, was deleted, or a server came back without: all is lacking.
                    self._run, self._sent_rounds = None, set()
                return self._send(status)
        except BaseException:
            self._run = None  # what became of the last batch, only the store knows
            raise

    def _send(self, status: str | None) -> MlflowRun:
        digest = digest_of(self.folder)
        try:
            self._read_rows()
        except OutputError:  # the folder is damaged, and so it stays
            self._end(self._begun(), status)
            raise
        run = self._begun()
        self._send_figures(run)
        if status is None:
            return run
        try:
            for path in self._files():
                run.log_file(path, into=PICTURES if path.parent == self.folder / PICTURES else None)
            self._lacks = ["its status"]
            run.log_points([], {SENT: digest})
        finally:  # no file that can't be sent keeps the run open
            self._end(run, status)
            self._lacks = ["some of its files"] if "its files" in self._lacks else []
        note_sent(self.folder, self._uri, digest)
        return run

    def _end(self, run: MlflowRun, status: str | None) -> None:
        if status is not None:
            run.end(status, at_ms=self._rows[-1].record.timestamp_ms if self._rows else None)

    def lacking(self) -> str:
        """Name the run's parts that are not in the store, as far as it has answered."""
        try:
            self._read_rows()
        except Exception:  # the folder is gone or damaged
            return "some of its rounds, its files or its status"
        rounds = [row.record.round for row in self._rows if row.record.round not in self._sent_rounds]
        missing = [*self._lacks]
        if rounds:
            missing.insert(0, f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}")
        return ", ".join(missing)

    def _begun(self) -> MlflowRun:
        if self._run is None:
            info = self._info
            first = self._rows[0].record if self._rows else None
            run = MlflowRun.begin(
                self._uri,
                experiment=self._experiment,
                name=info.name,
                tags=info.tags,
                folder=self.folder,
                begun_ms=None if first is None else first.timestamp_ms - round(1000 * first.wall_time_s),
            )
            self.run_id, self._sent_rounds = run.run_id, run.rounds
            self._lacks = ["its files", "its status"]
            self._describe(run)
            self._run = run
        return self._run

    def _describe(self, run: MlflowRun) -> None:
        run.log_params(telling(self._info.config))
        run.log_dataset(self._info.config)

    def _send_figures(self, run: MlflowRun) -> None:
        """Send the rounds that the store has not got, in their order, at least a whole one at once."""
        infinite = {name: text for row in reversed(self._rows) for name, text in row.infinite().items()}
        tags = {key_text(f"infinite.{name}"): text for name, text in infinite.items()}
        batch: list[Point] = []
        for row in self._rows:
            if row.record.round in self._sent_rounds:
                continue
            points = row.points()
            if batch and len(batch) + len(points) > METRICS_PER_BATCH:
                run.log_points(batch, tags)
                batch = []
            batch += points
        if batch:
            run.log_points(batch, tags)

    def _read_rows(self) -> None:
        """Read the rounds again where they were written since."""
        folder = RunFolder(self.folder)
        if not folder.has_rounds():
            return
        at = (self.folder / ROUNDS).stat()
        if self._read_at != (at.st_mtime_ns, at.st_size):
            targets = TargetWatch(self._info.targets)
            self._rows = [TrackedRow(record=one, reached=targets.see(one)) for one in folder.read_rounds()]
            self._read_at = (at.st_mtime_ns, at.st_size)

    def _files(self) -> Iterator[Path]:
        """List the artifacts that are there; links in a foreign folder may lead to what is not the run's."""
        pictures = self.folder / PICTURES
        drawn = () if pictures.is_symlink() else sorted(pictures.glob("*.png"))
        for path in (*(self.folder / name for name in _ARTIFACTS), *drawn):
            if path.is_file() and not path.is_symlink():
                yield path


def status_in(folder: Path) -> str:
    """Return how a run ended, by its folder: whoever was killed could not write it."""
    status = RunFolder(folder).status
    return "killed" if status == UNFINISHED else status


def complete(folder: Path, config: Config) -> str:
    """Send what the store lacks of a run that nobody plays now, given its resolved configuration.

    Returns:
        What was done, in words.

    Raises:
        ResourceError: The store can't be used, or does not answer.
        OutputError: The folder is a trial's, or damaged; or another process writes it.
    """
    uri = resolve_uri(config.tracking.uri, out=folder)
    if uri is None:
        return "nothing is tracked (tracking.uri is none)"
    if sqlite_path(uri) is not None and is_complete(folder, uri):  # of a server only itself knows what it still has
        return "MLflow has everything of it"
    if (sweep := sweep_of(folder)) is not None:
        way_out = f"fedsweep sweep --resume --out {shlex.quote(sweep)} logs what MLflow lacks of it"
        raise OutputError(f"{place_name(folder)}: {way_out}")
    with sole_writer(folder):
        sync, status = _sync_of(folder, config, uri), status_in(folder)
        check_store(uri, experiment=config.tracking.experiment)
        try:
            BackgroundCall(lambda: sync.send(status)).wait(at_most_s=None)
        except Exception as error:
            raise ResourceError(f"{folder}: MLflow still lacks {sync.lacking()} ({reason_of(error)})") from error
    return "MLflow has everything of it now"


def follow_run(folder: Path, config: Config) -> None:
    """Send the folder of a run that another process plays, again and again until that one ends.

    Raises:
        ResourceError: The store can't be used at the beginning.
    """
    uri = resolve_uri(config.tracking.uri, out=folder)
    if uri is None:
        return
    check_store(uri, experiment=config.tracking.experiment)
    sync = _sync_of(folder, config, uri)
    while True:
        with contextlib.suppress(OutputError), sole_writer(folder):
            return  # nobody plays it any more
        with contextlib.suppress(Exception):  # the next time, or at the end, where trouble is said
            BackgroundCall(sync.send).wait(at_most_s=None)
        time.sleep(_FOLLOWED_EVERY_S)


def _sync_of(folder: Path, config: Config, uri: str) -> FolderSync:
    result = RunFolder(folder).result_if_any()
    method = str(result.get("method") or method_name(config))
    info = RunInfo(
        name=config.name,
        folder=folder,
        config=config.flat(),
        tags=run_tags(config, method=method, git_commit=result.get("git_commit")),
        planned_rounds=config.training.rounds,
        targets=config.evaluation.targets,
    )
    return FolderSync(uri, experiment=config.tracking.experiment, info=info)
