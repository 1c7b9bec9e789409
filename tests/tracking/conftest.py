from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_server import MlflowServer, mlflow_server


@pytest.fixture
def server(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    """A server of the test's own, over ``store``."""
    with mlflow_server(store, tmp_path / "artifacts", monkeypatch) as seen:
        yield seen
