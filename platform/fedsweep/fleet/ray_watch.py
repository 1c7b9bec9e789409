"""Waiting for Ray with an eye on the processes of our own cluster.

A driver whose GCS server is gone waits for it in C++ for a minute and is then ended from there: no exception, no word
to the user. So what may wait for Ray is done in a thread of its own, and the caller goes on without it.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from fedsweep.errors import ClusterLost
from fedsweep.fleet.ray_leftovers import VITAL, lost_process

_LOOK_EVERY_S = 0.2
# What Ray says by itself, soon after it lost a process, says more than that it did.
_GRACE_S = 5.0
_Result = TypeVar("_Result")
_left_alone: list[threading.Thread] = []


# Waits for a word, and speaks where its driver goes without one.
_LAST_WORD = """
read -r said && exit
way_on="try again"
[ -f "$1/config.yaml" ] && way_on="go on with --resume (in $1)"
echo "error: this process was ended before its time; $way_on" >&2
"""


@contextlib.contextmanager
def last_word(folder: Path | None) -> Iterator[None]:
    """Where Ray or the system ends this process in the meantime, another one tells the user how to go on there.

    Without a folder, a run's or a sweep's, nobody does.
    """
    if folder is None:
        yield
        return
    command = ["/bin/sh", "-c", _LAST_WORD, "fedsweep", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as speaker:
        try:
            yield
        finally:
            speaker.communicate(b"done\n")


def has_left_work() -> bool:
    """Whether some of Ray's work was left to itself: it would still end the process, and keep it from ending well."""
    return any(thread.is_alive() for thread in _left_alone)


class Attempt(Generic[_Result]):
    """Some work with Ray, done in another thread from now on.

    Args:
        work: It.
        lost: Says which vital process is gone, in words; None: all live.
        starts_processes: Which end with the thread that started them, so that it has to stay.
    """

    def __init__(
        self,
        work: Callable[[], _Result],
        lost: Callable[[], str | None] = lost_process,
        *,
        starts_processes: bool = False,
    ) -> None:
        self._work, self._lost, self._stays = work, lost, starts_processes
        self._future: Future[_Result] = Future()
        self._thread = threading.Thread(target=self._attempt, name="fedsweep-ray", daemon=True)
        self._thread.start()

    def _attempt(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:
            self._future.set_exception(error)
        if self._stays:
            threading.Event().wait()

    def result(self, *, on_interrupt: Callable[[], None] | None = None) -> _Result:
        """What it gives, or raises.

        Args:
            on_interrupt: Asks the work to end soon.

        Raises:
            ClusterLost: A process is gone, and the work failed; or it did not end soon after, and is left to itself.
            KeyboardInterrupt: Once the work is done: a cluster that has half begun can't be put away.
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
        while not wait([self._future], _LOOK_EVERY_S).done:
            if (name := self._lost()) is not None and not wait([self._future], _GRACE_S).done:
                _left_alone.append(self._thread)
                raise ClusterLost(f"Ray lost {name}")


def unless_lost(
    work: Callable[[], _Result],
    lost: Callable[[], str | None] = lost_process,
    *,
    on_interrupt: Callable[[], None] | None = None,
) -> _Result:
    """What some work with Ray gives, or raises; see :class:`Attempt`."""
    return Attempt(work, lost).result(on_interrupt=on_interrupt)


class StartWatch:
    """Ray's processes while a cluster starts, when Ray itself cannot be asked yet for those that it has."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: dict[psutil.Process, str] = {}

    def lost(self) -> str | None:
        """What Ray can't do without and has lost, in words; None while all of it lives."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process not in self._before and process.name() in VITAL:
                    self._seen[process] = VITAL[process.name()]
        return next((words for process, words in self._seen.items() if not _lives(process)), None)

    def end(self) -> None:
        """End what has been started since."""
        for process in set(psutil.Process().children(recursive=True)) - self._before:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
