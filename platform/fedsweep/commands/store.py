"""``fedsweep ui`` and ``sync``: MLflow's pages over a local store, and what the store lacks of a run."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.terminal.options import examples, whole_number
from fedsweep.errors import ConfigError, ResourceError

UI_EXAMPLES = examples(
    "fedsweep ui",
    "fedsweep ui --uri sqlite:////home/me/study/mlflow.db --port 5001",
)
SYNC_EXAMPLES = examples(
    "fedsweep sync runs/my-experiment-20250102-030405",
    "fedsweep sync --follow --uri http://127.0.0.1:5000 runs/my-experiment-20250102-030405",
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
    from fedsweep.tracking.mlflow_store import local_store, resolve_uri, sqlite_path
    from fedsweep.tracking.mlflow_view import pages_address, ui_command

    store = resolve_uri(uri, out=local_store()) or "none"
    command, environment = ui_command(store, port)
    _check_free(port)
    path = sqlite_path(store)
    address = pages_address(port, path) if path is not None else f"http://127.0.0.1:{port}"
    print(f"MLflow over {store}, in a few seconds: {address} (Ctrl-C ends it)", flush=True)
    os.execvpe(command[0], command, {**os.environ, **environment})


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ResourceError(f"--port {port} can't be listened on ({reason}); choose another") from error


def sync(
    place: Annotated[str, typer.Argument(metavar="DIR", help="The folder of a run, or its address.")],
    uri: Annotated[
        str | None,
        typer.Option("--uri", metavar="URI", help="Another store than the run's [dim]tracking.uri[/dim]."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", metavar="", help="Go on until the run ends, of a run that does not log by itself."),
    ] = False,
) -> None:
    """Log to MLflow what it lacks of a run: its store was gone, locked or full, or another is wanted.

    Each point is logged once, however often this is called.
    """
    from fedsweep.catalog import resolve
    from fedsweep.driver.run import resumable
    from fedsweep.runs.places import is_address, place_name
    from fedsweep.runs.remote_folder import sweep_of, worked_on
    from fedsweep.tracking.mlflow_sync import complete, follow_run

    if follow and is_address(place):
        raise ConfigError(f"--follow: a run is followed where it is played; give its folder, not {place}")
    with worked_on(place, going_on=True) if is_address(place) else nullcontext(Path(place)) as where:
        folder = where.expanduser().absolute()
        config = resolve(resumable(folder)[0])
        if uri is not None:
            if sweep_of(folder) is not None:
                raise ConfigError(
                    f"--uri: {place_name(folder)} is a sweep's trial, which is logged in the sweep's own store alone"
                )
            config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})
        elif follow and config.tracking.uri != "none":
            raise ConfigError(
                f"--follow: {folder} logs itself (tracking.uri); give --uri for another store, or start the run with"
                " tracking.uri=none"
            )
        if follow:
            follow_run(folder, config)
        print(f"{place if is_address(place) else folder}: {complete(folder, config)}")
