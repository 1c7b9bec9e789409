"""Starting MLflow's own pages over a local store."""

from __future__ import annotations

import sys

from fedsweep.errors import ConfigError, ResourceError
from fedsweep.tracking.mlflow_store import ARTIFACTS, redacted, sqlite_path


def ui_command(uri: str, port: int) -> tuple[list[str], dict[str, str]]:
    """How to serve a store's pages to this machine alone.

    Args:
        uri: A sqlite store, as :func:`~fedsweep.tracking.mlflow_store.resolve_uri` gives it.
        port: 1 to 65535.

    Returns:
        The command and the environment variables to add; ``GET /health`` answers once the pages are there.

    Raises:
        ConfigError: The store is no local file, or the port is none.
        ResourceError: There is no such file.
    """
    path = sqlite_path(uri)
    if path is None:
        raise ConfigError(f"the store {redacted(uri)} is no local file; open its own server's pages instead")
    if not 1 <= port <= 65535:
        raise ConfigError(f"a port must be from 1 to 65535, but got {port}")
    if not path.is_file():
        raise ResourceError(f"{path}: there is no such store yet; a run makes it, in the folder above its own")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", uri, "--artifacts-destination", str(path.parent / ARTIFACTS)]
    # Without --allowed-hosts the server also answers to names of private networks.
    command += ["--workers", "1", "--allowed-hosts", f"localhost:{port},127.0.0.1:{port}"]
    # A visit is 200 lines of access log otherwise.
    command += ["--uvicorn-opts", "--log-level warning --no-access-log"]
    # PYTHONSAFEPATH: Python would look for MLflow, and for all that it imports, in the working folder first. The job
    # runner would be eight more processes, for features that need a language model.
    return command, {
        "PYTHONSAFEPATH": "1",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }
