"""A finished sweep that is resumed: what its store lost is logged again, and nothing is run."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import mlflow_server

from fedsweep.api import run
from fedsweep.config.load import load_config
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.tuner import log_rest


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:starlette")
def test_what_a_server_lost_of_a_finished_sweep_is_logged_when_it_is_resumed(
    tiny: Callable[..., dict[str, Any]], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow_server(store, tmp_path / "artifacts", monkeypatch) as server:
        given = tiny({"seed": {"grid": [0, 1]}}, rounds=1, more={"tracking": {"uri": server.address}})
        config, folder = load_config(given), SweepFolder(tmp_path / "sweep")
        prepared = prepare(config, folder, resume=False)
        folder.create(prepared.plan, config_yaml=config.to_yaml(), overwrite=False)
        for entry in prepared.entries:
            run(entry.config, overrides=["tracking.uri=none"], out=folder.trial_path(entry.trial))
        for lost in ("", "trial"):
            with sqlite3.connect(store) as base:
                base.execute(
                    "UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid IN"
                    " (SELECT run_uuid FROM tags WHERE key = 'fedsweep.kind' AND value = ?)",
                    (lost,),
                )
            log_rest(prepare(config, folder, resume=True))
            with sqlite3.connect(store) as base:
                (parent,), *others = base.execute(
                    "SELECT run_uuid FROM tags JOIN runs USING (run_uuid)"
                    " WHERE lifecycle_stage = 'active' AND key = 'fedsweep.kind' AND value = 'sweep'"
                ).fetchall()
                children = base.execute(
                    "SELECT status, value FROM tags JOIN runs USING (run_uuid)"
                    " WHERE lifecycle_stage = 'active' AND key = 'mlflow.parentRunId'"
                ).fetchall()
            assert others == [] and children == [("FINISHED", parent)] * 2
