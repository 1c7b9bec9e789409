"""The observers' interface."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tracking_imports_without_mlflow() -> None:
    modules = "fedsweep.driver.observers, fedsweep.tracking.loggers.registry, fedsweep.tracking.mlflow_view"
    unwanted = "{'mlflow', 'pyarrow', 'matplotlib'} & set(sys.modules)"
    code = f"import sys, {modules}; sys.exit(bool({unwanted}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
