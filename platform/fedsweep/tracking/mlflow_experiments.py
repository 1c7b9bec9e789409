"""Experiments of an MLflow store: found by name, made, and, for sweeps, one that nobody else writes to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedsweep.tracking.mlflow_store import ARTIFACTS, OWN_STORES, sqlite_path
from fedsweep.tracking.mlflow_view import save_view

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# A tag: the folder of the sweep that has the experiment to itself.
_SWEEP = "fedsweep.sweep"


def experiment_id(client: MlflowClient, name: str, *, uri: str, folder: Path) -> str:
    """The experiment's id; it is created where it is not there yet.

    Args:
        client: A client of the store.
        name: The experiment's name.
        uri: The store's address.
        folder: The run's folder; artifacts of a database without a server go to the folder above it.
    """
    found = client.get_experiment_by_name(name) or _made(client, name, uri=uri, folder=folder)
    save_view(client, found)
    return str(found.experiment_id)


def own_experiment(client: MlflowClient, name: str, *, uri: str, folder: Path) -> str:
    """The name of the experiment that a sweep has to itself; it is created where it is not there yet.

    Args:
        client: A client of the store.
        name: The sweep's name, and so the experiment's. Where another sweep, single runs or a deleted experiment have
            that, the folder's name stands behind it.
        uri: The store's address.
        folder: The sweep's folder, by which it is known.
    """
    mark = str(folder.absolute())
    numbered = (f"{name} ({folder.name} {number})" for number in itertools.count(2))
    for wanted in itertools.chain((name, f"{name} ({folder.name})"), numbered):
        found = client.get_experiment_by_name(wanted)
        found = found or _made(client, wanted, uri=uri, folder=folder, tags={_SWEEP: mark})
        if found.lifecycle_stage == "active" and found.tags.get(_SWEEP) == mark:
            return wanted
    raise AssertionError("numbers never end")


def _made(client: MlflowClient, name: str, *, uri: str, folder: Path, tags: Mapping[str, str] | None = None) -> Any:
    from mlflow.exceptions import MlflowException

    location = _artifact_location(name, uri=uri, folder=folder)
    try:
        client.create_experiment(name, artifact_location=location, tags=dict(tags or {}))
    except MlflowException:
        # Another process may have been faster.
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found
    return client.get_experiment_by_name(name)


def _artifact_location(name: str, *, uri: str, folder: Path) -> str | None:
    if uri.startswith(("http://", "https://", *OWN_STORES)):
        return None  # the server decides
    path = sqlite_path(uri)
    parent = folder.absolute().parent if path is None else path.parent
    return str(parent / ARTIFACTS / quote(name, safe=" "))
