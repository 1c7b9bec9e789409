"""A fresh MLflow store for each test; making one takes seconds, so it is made once and copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fedsweep.tracking.mlflow_store import open_store, sqlite_uri


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # made by the first of the processes; the others wait for it, as runs do
    path = place / "empty-mlflow.db"
    open_store(sqlite_uri(path))
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    """The file of a store of the test's own."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path / "mlflow.db"
