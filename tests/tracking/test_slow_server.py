"""A server of MLflow's own that takes its time for each request: it is waited for no longer than is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow_server import MlflowServer

import fedsweep
from fedsweep.config.load import load_config
from fedsweep.runs.background import BackgroundCall
from fedsweep.runs.run_folder import RunFolder
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_store import open_store, probe_store
from fedsweep.tracking.mlflow_sync import complete

TINY = {
    "scenario": {"clients": 4, "partition": {"kind": "iid"}},
    "training": {"rounds": 3, "cohort_size": 2, "local_steps": 1},
}
DELAY_S, AT_MOST_S = 0.1, 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:starlette")
def test_a_slow_server_is_waited_for_as_long_as_is_said_and_loses_nothing(
    server: MlflowServer, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.delay_s = DELAY_S
    probe_store(server.address, patience_s=DELAY_S / 4)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(
            MlflowObserver, "check", lambda observer: None
        )  # a busy machine takes as long for it as the limit
        patch.setattr(BackgroundCall.wait, "__kwdefaults__", {"silent_s": 10.0, "at_most_s": AT_MOST_S})
        result = fedsweep.run(TINY, overrides=[f"tracking.uri={server.address}"], out=folder)
    # What the wait itself takes beyond its end is one look at the thread.
    assert result.summary["timing"]["after"]["mlflow"] < AT_MOST_S + 1.5
    (line,) = [record.getMessage() for record in caplog.records if "fedsweep sync" in record.getMessage()]
    assert "lacks" in line and "(no answer within" in line and str(folder) in line
    assert complete(folder, load_config(folder / "config.yaml")) == "MLflow has everything of it now"
    client = open_store(f"sqlite:///{store}")  # the server's own
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train_loss")] == [1, 2, 3]
    assert {"model.safetensors", "rounds.parquet"} <= {path.name for path in (tmp_path / "artifacts").rglob("*")}
    assert RunFolder(folder).read_result()["status"] == "finished"
