"""Calls to what may be gone, locked, silent or hostile, for whoever can wait but not for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from fedsweep.errors import ResourceError

# How long anybody waits for a call that neither returns nor computes, and how long in all.
SILENT_S, AT_MOST_S = 10.0, 60.0
_POLL_S = 0.25
# The call that the present thread makes.
_present = threading.local()
_T = TypeVar("_T")


class NoAnswer(ResourceError):
    """A call was given up; whoever waited says for what."""


class BackgroundCall(Generic[_T]):
    """A call to a store in a thread that ends with its process: whoever waits for it may give it up.

    Args:
        call: What is to be done.
    """

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._result: list[_T] = []
        self._error: BaseException | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name="fedsweep-tracking", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        _present.call = self
        try:
            self._result.append(self._call())
        except BaseException as error:  # raised where it is waited for
            self._error = error

    def wait(self, *, silent_s: float = SILENT_S, at_most_s: float | None = AT_MOST_S) -> _T:
        """Return the call's result.

        Args:
            silent_s: How long it may wait for the store without computing anything. So a busy machine costs no
                patience: importing MLflow and making a store are work.
            at_most_s: How long it may take in all; None: for ever.

        Raises:
            NoAnswer: It took longer. It goes on, but for nobody: up to its next :func:`check_wanted`.
            Exception: What the call raised.
        """
        began, poll_s = time.monotonic(), min(_POLL_S, silent_s)
        # Its own looks are counted, not time that passed: a machine so busy that nobody gets to look costs no patience.
        worked, waited, silent = 0, 0.0, 0.0
        while self._thread.is_alive():
            self._thread.join(poll_s)
            ticks = self._ticks()
            waited, silent = waited + poll_s, 0.0 if ticks > worked else silent + poll_s
            worked = max(worked, ticks)
            if self._thread.is_alive() and (silent >= silent_s or (at_most_s is not None and waited >= at_most_s)):
                self._is_given_up = True
                raise NoAnswer(f"no answer within {time.monotonic() - began:.0f} s")
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _ticks(self) -> int:
        """Return CPU time of the thread, in the kernel's ticks; 0 once it has ended."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        return 0


def check_wanted() -> None:
    """Refuse to go on in a call that was given up: what it would do, somebody else may be doing by now.

    Raises:
        NoAnswer: Nobody waits for the call of this thread any more.
    """
    call = getattr(_present, "call", None)
    if call is not None and call._is_given_up:
        raise NoAnswer("it was given up")
