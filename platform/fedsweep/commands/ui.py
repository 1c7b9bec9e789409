"""``fedsweep ui``: MLflow's pages over a local store."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.options import examples, whole_number
from fedsweep.errors import ResourceError

EXAMPLES = examples(
    "fedsweep ui",
    "fedsweep ui --uri sqlite:////home/me/study/mlflow.db --port 5001",
)


def ui(
    uri: Annotated[
        str | None,
        typer.Option("--uri", metavar="URI", help="The store. [dim]runs/mlflow.db or mlflow.db, in this folder[/dim]"),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", parser=whole_number, help="Where to listen, on 127.0.0.1.")
    ] = 5000,
) -> None:
    """Open the MLflow pages on 127.0.0.1 over a local store; Ctrl-C ends them."""
    from fedsweep.tracking.mlflow_store import resolve_uri
    from fedsweep.tracking.ui import ui_command

    store = resolve_uri(uri, out=local_store()) or "none"
    command, environment = ui_command(store, port)
    _check_free(port)
    print(f"MLflow over {store}: http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    os.execvpe(command[0], command, {**os.environ, **environment})


def local_store() -> Path:
    """A folder as a run of this place would have it; the store is looked for above it."""
    runs = Path("runs") / "run"
    return Path("run") if not (runs.parent / "mlflow.db").is_file() and Path("mlflow.db").is_file() else runs


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ResourceError(f"--port {port} can't be listened on ({reason}); choose another") from error
