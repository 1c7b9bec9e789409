"""A server of MLflow's own, in a thread of the tests' process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class MlflowServer:
    """What the tests know of it, and how long it takes for each request.

    Attributes:
        address: Where it answers.
        delay_s: What it waits before each answer.
        asked: The paths that it was asked for, in their order.
    """

    address: str = ""
    delay_s: float = 0.0
    asked: list[str] = field(default_factory=list)


@contextmanager
def mlflow_server(store: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    """Serve a store; the server keeps artifacts itself."""
    from mlflow import server
    from mlflow.server import handlers
    from werkzeug.serving import make_server

    monkeypatch.setenv(server.BACKEND_STORE_URI_ENV_VAR, f"sqlite:///{store}")
    monkeypatch.setenv(server.ARTIFACT_ROOT_ENV_VAR, "mlflow-artifacts:/")
    monkeypatch.setenv(server.ARTIFACTS_DESTINATION_ENV_VAR, str(artifacts))
    monkeypatch.setenv(server.SERVE_ARTIFACTS_ENV_VAR, "true")
    # Kept by the process, for which there may have been another server before.
    for kept_by_process in ("_tracking_store", "_artifact_repo"):
        monkeypatch.setattr(handlers, kept_by_process, None)
    seen = MlflowServer()

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        seen.asked.append(environment["PATH_INFO"])
        time.sleep(seen.delay_s)
        return server.app(environment, start)

    listening = make_server("127.0.0.1", 0, answer, threaded=True)
    seen.address = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        listening.shutdown()
        listening.server_close()
