"""Wait for Ray only while the processes of our own cluster live.

A driver whose GCS server is gone waits for it in C++ for a minute and is then ended from there: no exception, no word
to the user. So what may wait for Ray runs in a thread of its own, and the caller goes on without it.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from fedsweep.errors import ClusterLost

_POLL_EVERY_S = 0.2
# An error of Ray's own, soon after it lost a process, says more than that it did.
_GRACE_S = 5.0
# What a cluster can't do without, by the processes' names, in words.
_VITAL = {"gcs_server": "its GCS server", "raylet": "its raylet"}
_Result = TypeVar("_Result")
_abandoned: list[threading.Thread] = []

# Waits for a line, and tells the user how to go on where its driver ends without one.
_EXIT_NOTICE = """
read -r line && exit
way_on="try again"
[ -f "$1/config.yaml" ] && way_on="go on with --resume (in $1)"
echo "error: this process was ended before its time; $way_on" >&2
"""


@contextlib.contextmanager
def exit_notice(folder: Path | None) -> Iterator[None]:
    """Have another process tell the user how to go on, should Ray or the system end this one in the meantime.

    Args:
        folder: A run's or a sweep's; without one, nobody tells.
    """
    if folder is None:
        yield
        return
    command = ["/bin/sh", "-c", _EXIT_NOTICE, "fedsweep", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as notifier:
        try:
            yield
        finally:
            notifier.communicate(b"done\n")


class VitalProcesses:
    """The GCS server and the raylet that this process has started, as the system sees them.

    Ray itself can't be asked: not while it starts, and not by a public name later.

    Args:
        ignored: Processes that belong to something else.
    """

    def __init__(self, *, ignored: Collection[psutil.Process] = ()) -> None:
        self._ignored = set(ignored)
        self._vital: dict[psutil.Process, str] = {}

    @classmethod
    def yet_to_come(cls) -> VitalProcesses:
        """Return those of a cluster that is about to start."""
        return cls(ignored=psutil.Process().children(recursive=True))

    def lost(self) -> str | None:
        """Return in words which of them has died; None while all live."""
        if len(self._vital) < len(_VITAL):
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if process not in self._ignored and process.name() in _VITAL:
                        self._vital[process] = _VITAL[process.name()]
        return next((words for process, words in self._vital.items() if not _is_alive(process)), None)

    def kill_all_started(self) -> None:
        """Kill what this process has started since, vital or not."""
        for process in set(psutil.Process().children(recursive=True)) - self._ignored:
            with contextlib.suppress(psutil.Error):
                process.kill()


_connected: VitalProcesses | None = None


@contextlib.contextmanager
def watched_cluster() -> Iterator[None]:
    """Watch the cluster that this process has started and is connected to: :func:`lost_process` is about it."""
    global _connected
    dead = [process for process in psutil.Process().children() if not _is_alive(process)]  # an earlier cluster's
    before, _connected = _connected, VitalProcesses(ignored=dead)
    _connected.lost()
    try:
        yield
    finally:
        _connected = before


def lost_process() -> str | None:
    """Return in words which vital process of this process's own cluster has died.

    None where all live, or where the cluster is somebody else's.
    """
    return None if _connected is None else _connected.lost()


def has_abandoned_calls() -> bool:
    """Return whether a call was abandoned and still runs: Ray would end the process, and keep it from ending well."""
    return any(thread.is_alive() for thread in _abandoned)


class RayCall(Generic[_Result]):
    """A call into Ray that begins at once, in a thread of its own.

    Args:
        function: What is called.
        lost: Returns in words which vital process is gone; None: all live.
        starts_processes: They end with the thread that started them, so that it has to stay.
    """

    def __init__(
        self,
        function: Callable[[], _Result],
        lost: Callable[[], str | None] = lost_process,
        *,
        starts_processes: bool = False,
    ) -> None:
        self._function, self._lost, self._keeps_thread = function, lost, starts_processes
        self._future: Future[_Result] = Future()
        self._thread = threading.Thread(target=self._run, name="fedsweep-ray", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._function())
        except BaseException as error:
            self._future.set_exception(error)
        if self._keeps_thread:
            threading.Event().wait()

    def result(self, *, on_interrupt: Callable[[], None] | None = None) -> _Result:
        """Return what the function returns, or raise what it raises.

        Args:
            on_interrupt: Asks the function to return soon.

        Raises:
            ClusterLost: A process is gone, and the call failed; or it did not return soon after, and is abandoned.
            KeyboardInterrupt: Once the call is done: a cluster that has half begun can't be put away.
        """
        try:
            self._wait()
        except KeyboardInterrupt:
            if on_interrupt is not None:
                on_interrupt()
            self._wait()
            raise
        error = self._future.exception()
        if error is not None and (name := self._lost()) is not None:
            raise ClusterLost(f"Ray lost {name}") from error
        return self._future.result()

    def _wait(self) -> None:
        while not wait([self._future], _POLL_EVERY_S).done:
            if (name := self._lost()) is not None and not wait([self._future], _GRACE_S).done:
                _abandoned.append(self._thread)
                raise ClusterLost(f"Ray lost {name}")


def watched_call(
    function: Callable[[], _Result],
    lost: Callable[[], str | None] = lost_process,
    *,
    on_interrupt: Callable[[], None] | None = None,
) -> _Result:
    """Call a function that may wait for Ray, and return its result; see :class:`RayCall`."""
    return RayCall(function, lost).result(on_interrupt=on_interrupt)


def shut_down(lost: Callable[[], str | None] = lost_process) -> None:
    """Leave or end the cluster; where it is lost, Ray gets a few seconds for that.

    Args:
        lost: As of :class:`RayCall`.
    """
    import ray

    name = lost()  # not asked again: from now on Ray itself ends these processes
    with contextlib.suppress(ClusterLost):
        watched_call(ray.shutdown, lambda: name)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
