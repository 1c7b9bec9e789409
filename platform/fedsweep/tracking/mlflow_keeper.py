"""MLflow in a process of its own, so that importing it and making its store go on beside the run.

Importing MLflow takes longer than most first runs train, and in a thread it would hold up the other imports. The
process does one thing after another, in the order in which it is asked. It knows no torch, hears no Ctrl-C, and ends
with the process that started it, however that ends: then the pipe between them breaks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ResourceError
from fedsweep.processes import collect_seldom
from fedsweep.runs.folder_lock import write_along
from fedsweep.tracking.mlflow_run import MlflowRun
from fedsweep.tracking.mlflow_store import check_store, quiet_mlflow, reason_of, resolve_uri

if TYPE_CHECKING:
    from pathlib import Path

    from fedsweep.config.schema import Config

_END_S = 5.0
# The import path is the parent's, or the working folder would come first.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from fedsweep.tracking.mlflow_keeper import serve; serve(int(sys.argv[2]))"
)


class MlflowKeeper:
    """The process, from the side of the run. What is asked of it raises what MLflow raised, as one line."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._owed = 0
        self._is_closed = False

    def __enter__(self) -> MlflowKeeper:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone."""
        return self._is_closed or self._process.poll() is not None

    @property
    def owes(self) -> bool:
        """Whether answers are to be taken."""
        return self._owed > 0

    @property
    def has_answered(self) -> bool:
        """Whether nothing that was asked is under way, so that the next answer comes at once."""
        with contextlib.suppress(OSError):
            return not self._owed or (self._owed == 1 and self._pipe.poll())
        return True

    def ask(self, name: str, /, *arguments: Any, **options: Any) -> None:
        """Ask for something whose :meth:`answer` is taken later, in this order.

        Args:
            name: One of the functions of :class:`_Served`.
            arguments: Its arguments; plain values.
            options: Its keyword arguments.

        Raises:
            ResourceError: The process is gone.
        """
        try:
            self._pipe.send((name, arguments, options))
        except OSError as error:
            raise self._gone() from error
        self._owed += 1

    def answer(self) -> Any:
        """What the oldest question brought.

        Raises:
            ResourceError: It failed; or the process is gone.
        """
        try:
            is_well, value = self._pipe.recv()
        except (OSError, EOFError) as error:
            raise self._gone() from error
        self._owed -= 1
        if not is_well:
            raise ResourceError(value)
        return value

    def call(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Ask and wait; answers that nobody took before are dropped."""
        while self._owed and not self.is_lost:
            with contextlib.suppress(ResourceError):
                self.answer()
        self.ask(name, *arguments, **options)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _gone(self) -> ResourceError:
        self.close()
        return ResourceError(f"the process that writes to MLflow is gone (exit code {self._process.returncode})")


def kept(config: Config, folder: Path) -> AbstractContextManager[MlflowKeeper | None]:
    """A keeper for a run that is to begin, ended afterwards; None where nothing is tracked, or MLflow is here already.

    Raises:
        ConfigError: ``tracking.uri`` names no usable store.
    """
    if resolve_uri(config.tracking.uri, out=folder) is None or "mlflow" in sys.modules:
        return contextlib.nullcontext()
    return MlflowKeeper()


class KeptRun:
    """A run in a store, as :class:`~fedsweep.tracking.mlflow_run.MlflowRun`, but written by a keeper."""

    def __init__(self, keeper: MlflowKeeper, run_id: str) -> None:
        self._keeper, self.run_id = keeper, run_id

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._keeper.call, name)


class _Served:
    """What the process does when it is asked."""

    def __init__(self) -> None:
        self._run: MlflowRun | None = None

    def load(self) -> None:
        with quiet_mlflow():
            import mlflow.store.tracking.sqlalchemy_store
            import mlflow.tracking  # noqa: F401

    def check_store(self, uri: str, experiment: str) -> None:
        check_store(uri, experiment=experiment)

    def begin(self, uri: str, **options: Any) -> str:
        write_along(options["folder"])  # until this process ends: whoever goes on with the run waits for it
        self._run = MlflowRun.begin(uri, **options)
        return self._run.run_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def serve(handle: int) -> None:
    """The process's own side; the handle is its end of the pipe."""
    warnings.simplefilter("ignore")
    collect_seldom()
    pipe = Connection(handle)
    asked: queue.SimpleQueue[tuple[str, tuple[Any, ...], dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, asked), daemon=True).start()
    served = _Served()
    with contextlib.suppress(Exception):  # whoever asks next for something that needs it is told why it failed
        served.load()
    while True:
        name, arguments, options = asked.get()
        try:
            answer = (True, getattr(served, name)(*arguments, **options))
        except Exception as error:  # MLflow's own, SQLAlchemy's, requests'
            answer = (False, reason_of(error))
        with contextlib.suppress(OSError):  # the listener ends the process
            pipe.send(answer)


def _listen(pipe: Connection, asked: queue.SimpleQueue[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Takes what is asked for until the run is gone; then nothing here matters any more."""
    while True:
        try:
            asked.put(pipe.recv())
        except (OSError, EOFError):
            os._exit(0)
