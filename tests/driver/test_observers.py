"""The observers' interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedsweep.driver.observers import InMemory, RunInfo


def test_what_is_told_is_kept(tmp_path: Path) -> None:
    observer = InMemory()
    observer.check()
    info = RunInfo(name="run", folder=tmp_path, config={}, planned_rounds=2)
    observer.started(info)
    observer.message("an actor was replaced")
    observer.checkpointed(1)
    observer.finished("killed", {"status": "killed"})
    assert observer.info is info and observer.checkpoints == [1] and observer.messages == ["an actor was replaced"]
    assert observer.status == "killed" and observer.result == {"status": "killed"}


def test_tracking_imports_without_mlflow() -> None:
    modules = (
        "fedsweep.driver.observers, fedsweep.tracking.factory, fedsweep.tracking.mlflow_observer, fedsweep.tracking.ui"
    )
    unwanted = "{'mlflow', 'pyarrow', 'matplotlib'} & set(sys.modules)"
    code = f"import sys, {modules}; sys.exit(bool({unwanted}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
