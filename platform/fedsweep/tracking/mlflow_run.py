"""One run in an MLflow store, by its id: begun or gone on with, described, fed with metrics, ended.

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
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from fedsweep.bounded import MOST_TEXT_BYTES, parse_json, read_regular
from fedsweep.errors import ResourceError
from fedsweep.runs.files import TRACKING, atomic_write
from fedsweep.tracking.mlflow_store import ARTIFACTS, OWN_STORES, open_store, quiet_mlflow, redacted, sqlite_path
from fedsweep.tracking.mlflow_view import save_view

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

METRICS_PER_BATCH = 1000
_ITEMS_PER_BATCH = 100
_VALUE_CHARACTERS = 6000
_KEY_CHARACTERS = 250
_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_GIT_COMMIT = "fedsweep.git_commit"
_WRITER = "fedsweep.writer"
_MARK = "fedsweep.mark"
_COMPLETE = "complete"
# Every round has this figure, and comes with all of its figures in one batch, which a store takes whole or not at all.
_EVERY_ROUND = "local_steps"
# What a data set's content does not depend on.
_PLACES = ("scenario.root", "scenario.download")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# A tag: the folder of the sweep that has the experiment to itself.
_SWEEP = "fedsweep.sweep"


class Point(NamedTuple):
    """One value of a metric; ``timestamp_ms`` is Unix time in milliseconds."""

    key: str
    value: float
    timestamp_ms: int
    step: int


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
    params: set[str] = field(default_factory=set)
    metrics: Mapping[str, float] = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)

    @classmethod
    def begin(cls, uri: str, *, experiment: str | None, name: str, tags: Mapping[str, str], folder: Path) -> MlflowRun:
        """Go on with the run that the folder names, or make one and leave its ids there.

        Args:
            uri: The store's address, absolute.
            experiment: The MLflow experiment, made where it is not there; None: one that the run has to itself.
            name: The run's name.
            tags: The run's tags; ``mlflow.parentRunId`` makes it the child of another.
            folder: The run's folder; ``mlflow.json`` in it keeps the ids.
        """
        client = open_store(uri)
        writer = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        with quiet_mlflow():
            present = _find(client, _saved(folder), uri)
            if present is None:
                experiment = experiment or _own_experiment(client, name, uri=uri, folder=folder)
                where = _experiment_id(client, experiment, uri=uri, folder=folder)
                # The mark is noted first: whoever dies before the run's id is noted, or hears nothing of it, finds it.
                ids = {"uri": uri, "experiment": experiment, "experiment_id": where, "mark": uuid.uuid4().hex}
                save_ids(folder, ids)
                own = _run_tags(tags, folder) | {_WRITER: writer, _MARK: ids["mark"]}
                run_id = str(client.create_run(where, run_name=name, tags=own).info.run_id)
                save_ids(folder, {**ids, "run_id": run_id})
                return cls(client=client, run_id=run_id, writer=writer)
            run_id = str(present.info.run_id)
            client.set_tag(run_id, _WRITER, writer)  # first: from now on nobody else adds to what is read
            client.update_run(run_id, status="RUNNING")
            save_ids(folder, {**_saved(folder), "run_id": run_id, _COMPLETE: False})
            rounds = {metric.step for metric in client.get_metric_history(run_id, _EVERY_ROUND)}
        params, metrics = set(present.data.params), present.data.metrics
        return cls(client=client, run_id=run_id, writer=writer, params=params, metrics=metrics, rounds=rounds)

    def experiment(self) -> str:
        """Return the name of the experiment that it is in."""
        with quiet_mlflow():
            where = self.client.get_run(self.run_id).info.experiment_id
            return str(self.client.get_experiment(where).name)

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Log params that the run does not have yet; long values are cut and passwords blotted out."""
        from mlflow.entities import Param

        texts = {key_text(key): redacted(_value_text(value))[:_VALUE_CHARACTERS] for key, value in config.items()}
        fresh = [Param(key, text) for key, text in texts.items() if key not in self.params]
        for start in range(0, len(fresh), _ITEMS_PER_BATCH):
            part = fresh[start : start + _ITEMS_PER_BATCH]
            with quiet_mlflow():
                self.client.log_batch(self.run_id, params=part)
            self.params.update(param.key for param in part)

    def log_dataset(self, config: Mapping[str, Any]) -> None:
        """Log the scenario of a flat, resolved configuration as the run's input: the same world, the same digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        world = {k: v for k, v in sorted(config.items()) if k.startswith("scenario.") and k not in _PLACES}
        digest = blake2b(json.dumps(world, default=str).encode(), digest_size=8).hexdigest()
        name = str(config.get("scenario.dataset", "unknown"))
        source = json.dumps({"dataset": name, "root": config.get("scenario.root")}, default=str)
        dataset = Dataset(name=name, digest=digest, source_type="fedsweep", source=source)
        with quiet_mlflow():
            tags = [InputTag("mlflow.data.context", "training")]
            self.client.log_inputs(self.run_id, [DatasetInput(dataset, tags=tags)])

    def log_points(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Log metrics and tags in one batch.

        Args:
            points: At most :data:`METRICS_PER_BATCH`; of a round all or none.
            tags: At most 100.
        """
        from mlflow.entities import Metric, RunTag

        self._check_writer()
        metrics = [Metric(key_text(point.key), *point[1:]) for point in points]
        with quiet_mlflow():
            self.client.log_batch(self.run_id, metrics=metrics, tags=[RunTag(*tag) for tag in tags.items()])
        self.rounds |= {point.step for point in points if point.key == _EVERY_ROUND}

    def log_file(self, path: Path, *, into: str | None = None) -> None:
        """Log a file as an artifact, in the artifact folder ``into`` where one is given."""
        with quiet_mlflow():
            self.client.log_artifact(self.run_id, str(path), into)

    def end(self, status: str) -> None:
        """End the run: ``finished``, ``failed`` or ``killed``."""
        self._check_writer()
        with quiet_mlflow():
            self.client.set_terminated(self.run_id, _STATUSES[status])

    def _check_writer(self) -> None:
        with quiet_mlflow():
            present = self.client.get_run(self.run_id).data.tags.get(_WRITER)
        if present != self.writer:
            raise ResourceError(f"another process writes the MLflow run {self.run_id} now ({present or 'unknown'})")


def note_complete(folder: Path, *, complete: bool = True) -> None:
    """Note in a run's folder whether its store has everything of it."""
    save_ids(folder, {**_saved(folder), _COMPLETE: complete})


def note_begun(folder: Path) -> None:
    """Note that more is to come, where a store has some of the run."""
    if saved := _saved(folder):
        with contextlib.suppress(OSError):
            save_ids(folder, {**saved, _COMPLETE: False})


def save_ids(folder: Path, ids: Mapping[str, Any]) -> None:
    """Note in a run's folder where the store has it."""
    atomic_write(folder / TRACKING, f"{json.dumps(ids, indent=2)}\n".encode())


def is_complete(folder: Path, uri: str) -> bool:
    """Check that, by the folder's note, this store has everything of the run, and was not removed since."""
    saved, file = _saved(folder), sqlite_path(uri)
    is_there = file is None or file.is_file()
    return is_there and saved.get("uri") == uri and saved.get(_COMPLETE) is True


def key_text(text: str) -> str:
    """Return the text as a name that MLflow admits: maybe a file's, so no part may be empty or lead elsewhere."""
    parts = re.sub(r"[^A-Za-z0-9_.\-/: ]", "_", text)[:_KEY_CHARACTERS].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _run_tags(tags: Mapping[str, str], folder: Path) -> dict[str, str]:
    own = {"fedsweep.folder": str(folder.absolute()), "mlflow.source.name": "fedsweep", "mlflow.source.type": "LOCAL"}
    try:
        own["mlflow.user"] = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        own["mlflow.user"] = "unknown"
    if _GIT_COMMIT in tags:
        own["mlflow.source.git.commit"] = tags[_GIT_COMMIT]
    return own | {key_text(key): value[:_VALUE_CHARACTERS] for key, value in tags.items()}


def _saved(folder: Path) -> dict[str, Any]:
    try:
        saved = parse_json(read_regular(folder / TRACKING, max_bytes=MOST_TEXT_BYTES))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _find(client: MlflowClient, saved: Mapping[str, Any], uri: str) -> Run | None:
    """Return the run that a folder names in this store; None where there is none, or its ids are of no use."""
    from mlflow.exceptions import MlflowException

    run_id, mark, where = (saved.get(name) for name in ("run_id", "mark", "experiment_id"))
    if saved.get("uri") != uri:
        return None
    if run_id is None and all(isinstance(value, str) and _ID.fullmatch(value) for value in (mark, where)):
        runs = client.search_runs([str(where)], f"tags.`{_MARK}` = '{mark}'", max_results=1)
        return runs[0] if runs else None
    if not isinstance(run_id, str) or not _ID.fullmatch(run_id):
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _experiment_id(client: MlflowClient, name: str, *, uri: str, folder: Path) -> str:
    """Return the experiment's id; it is created where it is not there yet."""
    experiment = client.get_experiment_by_name(name) or _made(client, name, uri=uri, folder=folder)
    save_view(client, experiment)
    return str(experiment.experiment_id)


def _own_experiment(client: MlflowClient, name: str, *, uri: str, folder: Path) -> str:
    """Return the name of the experiment that a sweep, known by its folder, has to itself; it is created if need be.

    It has the sweep's name. Where another sweep, single runs or a deleted experiment have that, the folder's name
    stands behind it.
    """
    mark = str(folder.absolute())
    numbered = (f"{name} ({folder.name} {number})" for number in itertools.count(2))
    for wanted in itertools.chain((name, f"{name} ({folder.name})"), numbered):
        experiment = client.get_experiment_by_name(wanted)
        experiment = experiment or _made(client, wanted, uri=uri, folder=folder, tags={_SWEEP: mark})
        if experiment.lifecycle_stage == "active" and experiment.tags.get(_SWEEP) == mark:
            return wanted
    raise AssertionError("numbers never end")


def _made(client: MlflowClient, name: str, *, uri: str, folder: Path, tags: Mapping[str, str] | None = None) -> Any:
    from mlflow.exceptions import MlflowException

    location = _artifact_location(name, uri=uri, folder=folder)
    try:
        client.create_experiment(name, artifact_location=location, tags=dict(tags or {}))
    except MlflowException:
        # Another process may have been faster.
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return experiment
    return client.get_experiment_by_name(name)


def _artifact_location(name: str, *, uri: str, folder: Path) -> str | None:
    if uri.startswith(("http://", "https://", *OWN_STORES)):
        return None  # the server decides
    path = sqlite_path(uri)
    parent = folder.absolute().parent if path is None else path.parent
    return str(parent / ARTIFACTS / quote(name, safe=" "))
