"""One run in an MLflow store: begun or gone on with, described, fed with metrics, ended.

It serves single runs and the trials of sweeps, through :mod:`~fedsweep.tracking.mlflow_sync`, and sweeps as the parent.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import os
import re
import socket
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedsweep.driver.phases import TIMING
from fedsweep.errors import ResourceError
from fedsweep.runs.background import check_wanted
from fedsweep.runs.files import TRACKING, atomic_write, read_note
from fedsweep.runs.run_folder import RESULT, ROUNDS
from fedsweep.tracking.mlflow_store import ARTIFACTS, OWN_STORES, has_tables, open_store, redacted, sqlite_path
from fedsweep.tracking.mlflow_view import save_view
from fedsweep.tracking.rows import Point

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking import MlflowClient

# A request takes 1000 metrics and tags; more would go in several, of which a store may take the first alone.
METRICS_PER_BATCH = 900
# Each comes with all that it has, and an answer must not be too long.
_RUNS_PER_ANSWER = 200
_VALUE_CHARACTERS = 6000
_KEY_CHARACTERS = 250
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_WRITER = "fedsweep.writer"
_MARK = "fedsweep.mark"
FOLDER = "fedsweep.folder"
# A tag: of which state of its folder the store has everything; empty as long as the run goes on.
SENT = "fedsweep.sent"
# A tag of MLflow's own: the run whose child this one is.
PARENT = "mlflow.parentRunId"
# A tag: the folder of the sweep that has the experiment to itself.
_SWEEP = "fedsweep.sweep"
# Every round has this figure, and comes with all of its figures in one batch, which a store takes whole or not at all.
_EVERY_ROUND = "local_steps"
# What a data set's content does not depend on.
_PLACES = ("scenario.root", "scenario.download")
_EXPERIMENT_ID = re.compile(r"[0-9]{1,18}")


@dataclass(kw_only=True)
class MlflowRun:
    """A run in a store; every method may raise whatever MLflow raises.

    Whoever begins a run takes it over: a tag says who writes, and an earlier writer that is still there, because no
    lock kept it off, is refused from then on. So no point is there twice.

    Attributes:
        client: A client of its store.
        entity: What the store said of it when it was begun, or gone on with.
        writer: The tag's value as long as this is the one who writes.
        rounds: Numbers of the rounds that it has.
    """

    client: MlflowClient
    entity: Run
    writer: str
    rounds: set[int]

    @property
    def run_id(self) -> str:
        """Its id."""
        return str(self.entity.info.run_id)

    @classmethod
    def begin(
        cls,
        uri: str,
        *,
        experiment: str | None,
        name: str,
        tags: Mapping[str, str],
        folder: Path,
        begun_ms: int | None = None,
    ) -> MlflowRun:
        """Go on with the run that the folder names, or make one and leave there how it is found.

        Args:
            uri: The store's address, absolute.
            experiment: The MLflow experiment, made where it is not there; None: one that the run has to itself.
            name: The run's name.
            tags: The run's tags; ``mlflow.parentRunId`` makes it the child of another.
            folder: The run's folder; ``mlflow.json`` in it keeps the ids, for each store.
            begun_ms: When the run began, as Unix time in milliseconds; None: now.
        """
        from mlflow.entities import RunTag

        client = open_store(uri)
        check_wanted()
        writer = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        own = _run_tags(tags, folder) | {_WRITER: writer, SENT: ""}
        run, rounds = _find(client, folder, uri), set[int]()
        if run is None:
            find, wanted = (_experiment, experiment) if experiment else (_own_experiment, name)
            entry = find(client, wanted, uri, folder)
            save_view(client, entry)
            check_wanted()
            # The mark is noted first: whoever dies before it hears of the run finds it.
            ids = {"experiment_id": entry.experiment_id, "mark": uuid.uuid4().hex}
            _save(folder, uri, ids)
            run = client.create_run(entry.experiment_id, begun_ms, {**own, _MARK: ids["mark"]}, name)
        else:
            # First: from now on nobody else adds to what is read. What goes on may have moved, and have more rounds.
            client.log_batch(run.info.run_id, tags=[RunTag(*tag) for tag in own.items()])
            client.update_run(run.info.run_id, status="RUNNING")
            note_sent(folder, uri, None)
            rounds = {metric.step for metric in client.get_metric_history(run.info.run_id, _EVERY_ROUND)}
        return cls(client=client, entity=run, writer=writer, rounds=rounds)

    def children(self) -> dict[str, str]:
        """Return by their marks what the store says of its children, see :data:`SENT`; not of deleted ones."""
        runs = each_run(self.client, self.entity.info.experiment_id, f"tags.`{PARENT}` = '{self.run_id}'")
        return {run.data.tags.get(_MARK, ""): run.data.tags.get(SENT, "") for run in runs}

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Log params that the run does not have yet; long values are cut and passwords blotted out."""
        from mlflow.entities import Param

        texts = {
            key_text(key): value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in config.items()
        }
        fresh = [
            Param(key, redacted(text)[:_VALUE_CHARACTERS])
            for key, text in texts.items()
            if key not in self.entity.data.params  # these can never change
        ]
        self.client.log_batch(self.run_id, params=fresh)

    def log_dataset(self, config: Mapping[str, Any]) -> None:
        """Log the scenario of a flat, resolved configuration as the run's input: the same world, the same digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        world = {k: v for k, v in sorted(config.items()) if k.startswith("scenario.") and k not in _PLACES}
        digest = blake2b(json.dumps(world, default=str).encode(), digest_size=8).hexdigest()
        name = str(config.get("scenario.dataset", "unknown"))
        source = json.dumps({"dataset": name, "root": config.get("scenario.root")}, default=str)
        dataset = Dataset(name=name, digest=digest, source_type="fedsweep", source=source)
        inputs = [DatasetInput(dataset, tags=[InputTag("mlflow.data.context", "training")])]
        self.client.log_inputs(self.run_id, inputs)

    def log_points(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Log metrics and tags in one batch.

        Args:
            points: At most :data:`METRICS_PER_BATCH`; of a round all or none.
            tags: At most 100.
        """
        from mlflow.entities import Metric, RunTag

        self._check_writer()
        # A round is known by the last of its figures: where MLflow cuts a batch in two, the first part is sent again.
        ordered = sorted(points, key=lambda point: point.key == _EVERY_ROUND)
        metrics = [Metric(key_text(point.key), *point[1:]) for point in ordered]
        self.client.log_batch(self.run_id, metrics=metrics, tags=[RunTag(*tag) for tag in tags.items()])
        self.rounds |= {point.step for point in points if point.key == _EVERY_ROUND}

    def log_file(self, path: Path, *, into: str | None = None) -> None:
        """Log a file as an artifact, in the artifact folder ``into`` where one is given."""
        self.client.log_artifact(self.run_id, str(path), into)

    def end(self, status: str, *, at_ms: int | None = None) -> None:
        """End the run: ``finished``, ``failed`` or ``killed``; at Unix time in milliseconds, None: now."""
        self._check_writer()
        self.client.set_terminated(self.run_id, _STATUSES[status], at_ms)

    def _check_writer(self) -> None:
        check_wanted()
        present = self.client.get_run(self.run_id).data.tags.get(_WRITER)
        if present != self.writer:
            raise ResourceError(f"another process writes the MLflow run {self.run_id} now ({present or 'unknown'})")


def each_run(client: MlflowClient, experiment_id: str, condition: str = "") -> Iterator[Run]:
    """Yield an experiment's runs for which MLflow's condition holds, but for deleted ones."""
    token = None
    while token != "":
        runs = client.search_runs([experiment_id], condition, max_results=_RUNS_PER_ANSWER, page_token=token)
        yield from runs
        token = runs.token or ""


def digest_of(folder: Path) -> str:
    """Return a digest of a folder's rounds and result, by which it is known whether it has more than was sent."""
    # A run adds how long all of it took, its logging included, when all is sent.
    result = {name: value for name, value in read_note(folder / RESULT).items() if name != TIMING}
    digest = blake2b(json.dumps(result, sort_keys=True).encode(), digest_size=16)
    if (path := folder / ROUNDS).is_file():
        with path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def note_sent(folder: Path, uri: str, digest: str | None) -> None:
    """Note of which state of a run's folder a store has everything; what can't be noted is only sent again."""
    if saved := _saved(folder, uri):
        with contextlib.suppress(OSError):
            _save(folder, uri, {**saved, "sent": digest, "folder": str(folder.absolute())})


def is_complete(folder: Path, uri: str, children: Callable[[], Mapping[str, str]] | None = None) -> bool:
    """Check that a store has everything of a run, by the folder's note and by what the store itself says.

    A file of ours is always asked: one that was put back from a copy has the run as it was then, and a child is not
    complete below a parent that was deleted. Of any other store ``children`` tell, see :meth:`MlflowRun.children`;
    without them the note is believed. A folder that was copied or moved has the note of another: a copy's run is not
    in the store, and a moved folder's has the old place.
    """
    saved, path = _saved(folder, uri), sqlite_path(uri)
    sent, mark = str(saved.get("sent") or ""), str(saved.get("mark"))
    try:
        if not sent or sent != digest_of(folder) or not Path(str(saved.get("folder"))).samefile(folder):
            return False
    except (OSError, ValueError):
        return False
    if path is not None:
        return _sent_by(path, mark) == sent
    return children is None or children().get(mark) == sent


def is_there(client: MlflowClient, folder: Path, uri: str) -> bool:
    """Check that a store still has the run that a folder names, undeleted."""
    path = sqlite_path(uri)
    return (path is None or has_tables(path)) and _find(client, folder, uri) is not None


def _sent_by(path: Path, mark: str) -> str | None:
    """Return what a sqlite store says of a run, see :data:`SENT`; None: it lacks the run, or the one that is above."""
    # By primary keys, which are tags' (key, run) and runs' ids.
    query = f"""SELECT sent.value FROM tags AS own
        JOIN runs AS run ON run.run_uuid = own.run_uuid AND run.lifecycle_stage = 'active'
        JOIN tags AS sent ON sent.key = ? AND sent.run_uuid = own.run_uuid
        LEFT JOIN tags AS parent ON parent.key = '{PARENT}' AND parent.run_uuid = own.run_uuid
        LEFT JOIN runs AS above ON above.run_uuid = parent.value AND above.lifecycle_stage = 'active'
        WHERE own.key = ? AND own.value = ? AND (parent.value IS NULL OR above.run_uuid IS NOT NULL)"""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db,
    ):
        return next((value for (value,) in db.execute(query, (SENT, _MARK, mark))), None)
    return None


def key_text(text: str) -> str:
    """Return the text as a name that MLflow admits: maybe a file's, so no part may be empty or lead elsewhere."""
    parts = re.sub(r"[^\w.\-/: ]", "_", text)[:_KEY_CHARACTERS].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _run_tags(tags: Mapping[str, str], folder: Path) -> dict[str, str]:
    own = {FOLDER: str(folder.absolute()), "mlflow.source.name": "fedsweep", "mlflow.source.type": "LOCAL"}
    own["mlflow.user"] = "unknown"
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        own["mlflow.user"] = getpass.getuser()
    if commit := tags.get("fedsweep.git_commit"):
        own["mlflow.source.git.commit"] = commit
    return own | {key_text(key): value[:_VALUE_CHARACTERS] for key, value in tags.items()}


def _saved(folder: Path, uri: str) -> dict[str, Any]:
    """Return what a folder's note says of a store; empty where it says nothing of use."""
    saved = read_note(folder / TRACKING).get(uri)
    return saved if isinstance(saved, dict) else {}


def _save(folder: Path, uri: str, ids: Mapping[str, Any]) -> None:
    note = {**read_note(folder / TRACKING), uri: ids}
    atomic_write(folder / TRACKING, f"{json.dumps(note, indent=2)}\n".encode())


def _find(client: MlflowClient, folder: Path, uri: str) -> Run | None:
    """Return the run that a folder names in this store; None where there is none, or its note is of no use.

    A copy of a folder has the original's note, too: as long as that is there, the run is the original's.
    """
    saved = _saved(folder, uri)
    where, mark = (str(saved.get(name)) for name in ("experiment_id", "mark"))
    if not (_EXPERIMENT_ID.fullmatch(where) and mark.isalnum()):
        return None
    run = next(iter(client.search_runs([where], f"tags.`{_MARK}` = '{mark}'", max_results=1)), None)
    if run is None:
        return None
    other = Path(run.data.tags.get(FOLDER, folder))
    is_copy = _saved(other, uri).get("mark") == mark and not other.samefile(folder)
    return None if is_copy else run


def _own_experiment(client: MlflowClient, name: str, uri: str, folder: Path) -> Experiment:
    """Return the experiment that a sweep, known by its folder, has to itself; it is created if need be.

    It has the sweep's name. Where another sweep, single runs or a deleted experiment have that, the folder's name
    stands behind it.
    """
    mark = str(folder.absolute())
    numbered = (f"{name} ({folder.name} {number})" for number in itertools.count(2))
    for wanted in itertools.chain((name, f"{name} ({folder.name})"), numbered):
        experiment = _experiment(client, wanted, uri, folder, tags={_SWEEP: mark})
        if experiment.lifecycle_stage == "active" and experiment.tags.get(_SWEEP) == mark:
            return experiment
    raise AssertionError("numbers never end")


def _experiment(
    client: MlflowClient, name: str, uri: str, folder: Path, *, tags: Mapping[str, str] | None = None
) -> Experiment:
    """Return the experiment of this name, which is made where it is not there yet."""
    from mlflow.exceptions import MlflowException

    location = None  # a server decides itself
    if not uri.startswith(("http://", "https://", *OWN_STORES)):
        parent = (sqlite_path(uri) or folder.absolute()).parent
        location = str(parent / ARTIFACTS / quote(name, safe=" "))
    present = client.get_experiment_by_name(name)
    if present is None:
        try:
            client.create_experiment(name, artifact_location=location, tags=dict(tags or {}))
        except MlflowException:  # another process may have been faster
            if client.get_experiment_by_name(name) is None:
                raise
        present = client.get_experiment_by_name(name)
    assert present is not None
    return present
