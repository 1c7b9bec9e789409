"""A fresh MLflow store for each test; making one takes seconds, so it is made once and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedsweep.tracking.mlflow_store import open_store, sqlite_uri


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_store(sqlite_uri(path))
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    """The file of a store of the test's own."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path / "mlflow.db"
