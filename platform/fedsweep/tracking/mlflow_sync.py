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
        experiment: The MLflow experiment.
        info: The run; its rounds are read from its folder.
    """

    def __init__(self, uri: str, *, experiment: str, info: RunInfo) -> None:
        self._uri, self._experiment, self._info = uri, experiment, info
        self._run: MlflowRun | None = None
        self._read_at: tuple[int, int] | None = None
        self._rows: list[TrackedRow] = []
        self._sent_rounds: set[int] = set()
        self._has_files = self._has_status = False
        self.folder = info.folder
        self.run_id: str | None = None

    def send(self, status: str | None = None, *, patience_s: float = PATIENCE_S) -> None:
        """Send what the store has not got.

        Args:
            status: How the run ended: its files are sent, too, and the run in the store is ended; None: it goes on.
            patience_s: How long to wait for a lock or an answer before anything is sent.

        Raises:
            Exception: Of MLflow, SQLAlchemy, requests or the system; what was not sent is sent by the next call.
        """
        try:
            probe_store(self._uri, patience_s=patience_s)
            with quiet_mlflow():
                if not is_there(self.folder, self._uri, None if self._run is None else self._run.client):
                    # The store's file, or the run in it, was deleted, or a server came back without: all is lacking.
                    self._run, self._sent_rounds = None, set()
                self._send(status)
        except BaseException:
            self._run = None  # what became of the last batch, only the store knows
            raise

    def _send(self, status: str | None) -> None:
        digest, damage = digest_of(self.folder), None
        try:
            self._read_rows()
        except OutputError as error:  # the folder is damaged, and so it stays
            damage = error
        run = self._begun()
        ended_ms = self._rows[-1].record.timestamp_ms if self._rows else None
        if damage is not None:
            if status is not None:
                run.end(status, at_ms=ended_ms)
            raise damage
        infinite = {name: text for row in reversed(self._rows) for name, text in row.infinite().items()}
        tags = {key_text(f"infinite.{name}"): text for name, text in infinite.items()}
        for points in self._batches():
            run.log_points(points, tags)
            self._sent_rounds = {*run.rounds}
        if status is None:
            return
        try:
            self._send_files(run)
            run.log_points([], {SENT: digest})
        finally:  # no file that can't be sent keeps the run open
            run.end(status, at_ms=ended_ms)
            self._has_status = True
        note_sent(self.folder, self._uri, digest)

    def lacking(self) -> str:
        """Name the run's parts that are not in the store, as far as it has answered."""
        try:
            self._read_rows()
        except Exception:  # the folder is gone or damaged
            return "some of its rounds, its files or its status"
        rounds = [row.record.round for row in self._rows if row.record.round not in self._sent_rounds]
        missing = (
            [f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"] if rounds else []
        )
        if not self._has_files:
            missing.append("some of its files" if self._has_status else "its files")
        return ", ".join(missing if self._has_status else [*missing, "its status"])

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
            self.run_id, self._sent_rounds = run.run_id, {*run.rounds}
            self._has_files = self._has_status = False
            run.log_params(telling(info.config))
            run.log_dataset(info.config)
            self._run = run
        return self._run

    def _batches(self) -> Iterator[list[Point]]:
        """Yield the points of rounds that the store has not got, whole rounds in their order, at least one at once."""
        batch: list[Point] = []
        for row in self._rows:
            if row.record.round in self._sent_rounds:
                continue
            points = row.points()
            if batch and len(batch) + len(points) > METRICS_PER_BATCH:
                yield batch
                batch = []
            batch += points
        if batch:
            yield batch

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

    def _send_files(self, run: MlflowRun) -> None:
        # Links in a foreign folder may lead to what is not the run's.
        pictures = self.folder / PICTURES
        for path in (self.folder / name for name in _ARTIFACTS):
            if path.is_file() and not path.is_symlink():
                run.log_file(path)
        for path in () if pictures.is_symlink() else sorted(pictures.glob("*.png")):
            if path.is_file() and not path.is_symlink():
                run.log_file(path, into=PICTURES)
        self._has_files = True


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
    if (folder.parent / PLAN).exists():
        out = shlex.quote(str(folder.parent))
        raise OutputError(f"{folder}: fedsweep sweep --resume --out {out} logs what MLflow lacks of it")
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
    while _is_played(folder):
        with contextlib.suppress(Exception):  # the next time, or at the end, where trouble is said
            BackgroundCall(sync.send).wait(at_most_s=None)
        time.sleep(_FOLLOWED_EVERY_S)


def _is_played(folder: Path) -> bool:
    try:
        with sole_writer(folder):
            return False
    except OutputError:
        return True


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
