"""MLflow's own pages over a local store: how they are served, and that they open on the runs, by setting."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ConfigError, ResourceError
from fedsweep.tracking.mlflow_store import ARTIFACTS, redacted, sqlite_path

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_KEY = "fedsweep"
# Where MLflow's pages look for what "Share view" has saved in an experiment.
_TAG = f"mlflow.sharedViewState.{_KEY}"
_METRICS = ("test_accuracy", "best_test_accuracy", "total_bytes")
SETTING = "fedsweep.setting"
_TAGS = (SETTING, "fedsweep.method", "fedsweep.dataset", "fedsweep.seed")


def save_view(client: MlflowClient, experiment: Any) -> None:
    """Leave the view in an experiment, given as MLflow's record of it, where it is not there yet."""
    if experiment.tags.get(_TAG) != _view():
        client.set_experiment_tag(experiment.experiment_id, _TAG, _view())


def pages_address(port: int, path: Path) -> str:
    """Return the address, on this machine, that opens on the runs of the experiment that was written last."""
    home = f"http://127.0.0.1:{port}"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db,
    ):
        newest = """SELECT run.experiment_id, tag.key IS NOT NULL FROM runs AS run LEFT JOIN experiment_tags AS tag
            ON tag.experiment_id = run.experiment_id AND tag.key = ?
            WHERE run.lifecycle_stage = 'active' ORDER BY run.start_time DESC LIMIT 1"""
        for experiment, has_view in db.execute(newest, [_TAG]):
            view = f"&viewStateShareKey={_KEY}" if has_view else ""
            return f"{home}/#/experiments/{experiment}/runs?workflowType=machine_learning{view}"
    return home


def ui_command(uri: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment that serve a store's pages to this machine alone.

    Args:
        uri: A sqlite store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        port: 1 to 65535.

    Returns:
        The command and the environment variables to add; ``GET /health`` answers once the pages are there.

    Raises:
        ConfigError: The store is no local file, or the port is none.
        ResourceError: There is no such file.
    """
    path = sqlite_path(uri)
    if path is None:
        raise ConfigError(f"the store {redacted(uri)} is no local file; open its own server's pages instead")
    if not 1 <= port <= 65535:
        raise ConfigError(f"a port must be from 1 to 65535, but got {port}")
    if not path.is_file():
        raise ResourceError(f"{path}: there is no such store yet; a run makes it, in the folder above its own")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", uri, "--artifacts-destination", str(path.parent / ARTIFACTS)]
    # Without --allowed-hosts the server also answers to names of private networks.
    command += ["--workers", "1", "--allowed-hosts", f"localhost:{port},127.0.0.1:{port}"]
    # A visit is 200 lines of access log otherwise.
    command += ["--uvicorn-opts", "--log-level warning --no-access-log"]
    # PYTHONSAFEPATH: Python would look for MLflow, and for all that it imports, in the working folder first. The job
    # runner would be eight more processes, for features that need a language model.
    return command, {
        "PYTHONSAFEPATH": "1",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }


def _view() -> str:
    columns = [f"metrics.`{name}`" for name in _METRICS] + [f"tags.`{name}`" for name in _TAGS]
    by_setting = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": SETTING}]}
    return json.dumps({"selectedColumns": columns, "columnOrder": columns, "groupBy": by_setting})
