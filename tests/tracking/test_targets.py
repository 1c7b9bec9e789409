"""Targets in MLflow: what they took, once, at the round that first reached them."""

from __future__ import annotations

from pathlib import Path

from fedsweep.driver.observers import RunInfo
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record
from fedsweep.tracking.mlflow_store import open_store, sqlite_uri
from fedsweep.tracking.mlflow_sync import FolderSync

SPENT = {"bytes_up": 10, "bytes_down": 5, "flops": 100}
RECORDS = [
    tiny_record(round, test_accuracy=accuracy, sim_time_s=2.0 * round, **SPENT)
    for round, accuracy in enumerate([0.2, 0.5, 0.9], start=1)
]


def log(store: Path, folder: Path, *, done: int) -> FolderSync:
    """A run of which ``done`` rounds came from a checkpoint."""
    info = RunInfo(name="run", folder=folder, config={"seed": 0}, planned_rounds=3, targets=(0.5, 0.95))
    sync = FolderSync(sqlite_uri(store), experiment="tests", info=info)
    for end in range(max(1, done), len(RECORDS) + 1):
        RunFolder(folder).write_rounds(RECORDS[:end])
        sync.send()
    sync.send("finished")
    return sync


def test_a_target_is_logged_at_its_first_crossing_also_after_a_resume(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RunFolder.create(folder, overwrite=False)
    syncs = [log(store, folder, done=0), log(store, folder, done=2)]
    assert syncs[0].run_id == syncs[1].run_id
    client, run_id = open_store(sqlite_uri(store)), syncs[0].run_id
    assert run_id is not None
    found = {
        key: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)]
        for key in client.get_run(run_id).data.metrics
        if key.startswith("target/")
    }
    assert found == {
        "target/0.5/round": [(2, 2.0)],
        "target/0.5/sim_time_s": [(2, 4.0)],
        "target/0.5/total_bytes": [(2, 30.0)],
        "target/0.5/flops": [(2, 200.0)],
    }
