"""How MLflow's pages open: on the runs, by setting, with what tells them apart and how they did as columns."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_KEY = "fedsweep"
# Where MLflow's pages look for what "Share view" has saved in an experiment.
_TAG = f"mlflow.sharedViewState.{_KEY}"
_METRICS = ("test_accuracy", "best_test_accuracy", "total_bytes")
SETTING = "fedsweep.setting"
_TAGS = (SETTING, "fedsweep.method", "fedsweep.dataset", "fedsweep.seed")


def save_view(client: MlflowClient, experiment: Any) -> None:
    """Leave the view in an experiment where it is not there yet.

    Args:
        client: A client of its store.
        experiment: MLflow's record of it.
    """
    if experiment.tags.get(_TAG) != _view():
        client.set_experiment_tag(experiment.experiment_id, _TAG, _view())


def pages_address(port: int, path: Path) -> str:
    """The address that opens on the runs of the experiment that was written last.

    Args:
        port: Where the pages are served, on this machine.
        path: The store's file.
    """
    home = f"http://127.0.0.1:{port}"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db,
    ):
        newest = "SELECT experiment_id FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time DESC LIMIT 1"
        found = db.execute(newest).fetchone()
        if found is None:
            return home
        has_view = db.execute("SELECT 1 FROM experiment_tags WHERE experiment_id = ? AND key = ?", (found[0], _TAG))
        view = f"&viewStateShareKey={_KEY}" if has_view.fetchone() else ""
        return f"{home}/#/experiments/{found[0]}/runs?workflowType=machine_learning{view}"
    return home


def _view() -> str:
    columns = [f"metrics.`{name}`" for name in _METRICS] + [f"tags.`{name}`" for name in _TAGS]
    by_setting = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": SETTING}]}
    return json.dumps({"selectedColumns": columns, "columnOrder": columns, "groupBy": by_setting})
