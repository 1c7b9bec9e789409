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
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedsweep.errors import ResourceError
from fedsweep.runs.background import check_wanted
from fedsweep.runs.files import TRACKING, atomic_write, read_note
from fedsweep.tracking.mlflow_store import ARTIFACTS, OWN_STORES, open_store, redacted, sqlite_path
from fedsweep.tracking.mlflow_view import save_view
from fedsweep.tracking.rows import Point

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking import MlflowClient

METRICS_PER_BATCH = 1000
_VALUE_CHARACTERS = 6000
_KEY_CHARACTERS = 250
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_WRITER = "fedsweep.writer"
_MARK = "fedsweep.mark"
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
        run_id: Its id.
        writer: The tag's value as long as this is the one who writes.
        params: Keys of the params that it has; these can never change.
        metrics: The newest value of each metric that it has had from the start.
        rounds: Numbers of the rounds that it has.
    """

    client: MlflowClient
    run_id: str
    writer: str
    params: set[str]
    metrics: Mapping[str, float]
    rounds: set[int]

    @classmethod
    def begin(cls, uri: str, *, experiment: str | None, name: str, tags: Mapping[str, str], folder: Path) -> MlflowRun:
        """Go on with the run that the folder names, or make one and leave there how it is found.

        Args:
            uri: The store's address, absolute.
            experiment: The MLflow experiment, made where it is not there; None: one that the run has to itself.
            name: The run's name.
            tags: The run's tags; ``mlflow.parentRunId`` makes it the child of another.
            folder: The run's folder; ``mlflow.json`` in it keeps the ids.
        """
        client = open_store(uri)
        check_wanted()
        writer = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        run, rounds = _find(client, folder, uri), set[int]()
        if run is None:
            find, wanted = (_experiment, experiment) if experiment else (_own_experiment, name)
            entry = find(client, wanted, uri, folder)
            save_view(client, entry)
            check_wanted()
            # The mark is noted first: whoever dies before it hears of the run finds it.
            ids = {"uri": uri, "experiment_id": entry.experiment_id, "mark": uuid.uuid4().hex}
            _save(folder, ids)
            own = _run_tags(tags, folder) | {_WRITER: writer, _MARK: ids["mark"]}
            run = client.create_run(entry.experiment_id, run_name=name, tags=own)
        else:
            client.set_tag(run.info.run_id, _WRITER, writer)  # first: from now on nobody else adds to what is read
            client.update_run(run.info.run_id, status="RUNNING")
            note_complete(folder, complete=False)
            rounds = {metric.step for metric in client.get_metric_history(run.info.run_id, _EVERY_ROUND)}
        run_id, data = str(run.info.run_id), run.data
        return cls(
            client=client, run_id=run_id, writer=writer, params={*data.params}, metrics=data.metrics, rounds=rounds
        )

    def experiment(self) -> str:
        """Return the name of the experiment that it is in."""
        return str(self.client.get_experiment(self.client.get_run(self.run_id).info.experiment_id).name)

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Log params that the run does not have yet; long values are cut and passwords blotted out."""
        from mlflow.entities import Param

        texts = {
            key_text(key): value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in config.items()
        }
        fresh = [
            Param(key, redacted(text)[:_VALUE_CHARACTERS]) for key, text in texts.items() if key not in self.params
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
        metrics = [Metric(key_text(point.key), *point[1:]) for point in points]
        self.client.log_batch(self.run_id, metrics=metrics, tags=[RunTag(*tag) for tag in tags.items()])
        self.rounds |= {point.step for point in points if point.key == _EVERY_ROUND}

    def log_file(self, path: Path, *, into: str | None = None) -> None:
        """Log a file as an artifact, in the artifact folder ``into`` where one is given."""
        self.client.log_artifact(self.run_id, str(path), into)

    def end(self, status: str) -> None:
        """End the run: ``finished``, ``failed`` or ``killed``."""
        self._check_writer()
        self.client.set_terminated(self.run_id, _STATUSES[status])

    def _check_writer(self) -> None:
        check_wanted()
        present = self.client.get_run(self.run_id).data.tags.get(_WRITER)
        if present != self.writer:
            raise ResourceError(f"another process writes the MLflow run {self.run_id} now ({present or 'unknown'})")


def note_complete(folder: Path, *, complete: bool) -> None:
    """Note in a run's folder whether its store has everything of it; what can't be noted is only sent again."""
    if saved := read_note(folder / TRACKING):
        with contextlib.suppress(OSError):
            _save(folder, {**saved, "complete": complete})


def is_complete(folder: Path, uri: str) -> bool:
    """Check that, by the folder's note, this store has everything of the run, and was not removed since."""
    saved, file = read_note(folder / TRACKING), sqlite_path(uri)
    is_there = file is None or file.is_file()
    return is_there and saved.get("uri") == uri and saved.get("complete") is True


def key_text(text: str) -> str:
    """Return the text as a name that MLflow admits: maybe a file's, so no part may be empty or lead elsewhere."""
    parts = re.sub(r"[^A-Za-z0-9_.\-/: ]", "_", text)[:_KEY_CHARACTERS].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _run_tags(tags: Mapping[str, str], folder: Path) -> dict[str, str]:
    own = {"fedsweep.folder": str(folder.absolute()), "mlflow.source.name": "fedsweep", "mlflow.source.type": "LOCAL"}
    own["mlflow.user"] = "unknown"
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        own["mlflow.user"] = getpass.getuser()
    if commit := tags.get("fedsweep.git_commit"):
        own["mlflow.source.git.commit"] = commit
    return own | {key_text(key): value[:_VALUE_CHARACTERS] for key, value in tags.items()}


def _save(folder: Path, ids: Mapping[str, Any]) -> None:
    atomic_write(folder / TRACKING, f"{json.dumps(ids, indent=2)}\n".encode())


def _find(client: MlflowClient, folder: Path, uri: str) -> Run | None:
    """Return the run that a folder names in this store; None where there is none, or its note is of no use."""
    saved = read_note(folder / TRACKING)
    where, mark = (str(saved.get(name)) for name in ("experiment_id", "mark"))
    if saved.get("uri") != uri or not (_EXPERIMENT_ID.fullmatch(where) and mark.isalnum()):
        return None
    return next(iter(client.search_runs([where], f"tags.`{_MARK}` = '{mark}'", max_results=1)), None)


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
