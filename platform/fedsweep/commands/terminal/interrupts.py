r"""Signals that ask for the end: the first ends the run in good order, a second Ctrl-C, Ctrl-\ or SIGTERM at once.

SIGHUP comes when a terminal is closed, and often twice; SIGUSR1 is how Slurm announces the end of a job's time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
_SHOW_CURSOR = b"\x1b[?25h"
_AT_ONCE = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_SIGNALS = (*_AT_ONCE, signal.SIGHUP, signal.SIGUSR1)
_seen: list[int] = []


def is_interrupted() -> bool:
    """Check for a signal that has come, so that the run is being put away."""
    return bool(_seen)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Turn the first of the signals into a KeyboardInterrupt and let a second SIGINT, SIGQUIT or SIGTERM end it.

    A signal that the parent process had ignored (a job in the background of a script) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _seen.clear()
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _seen.clear()


def _handle(number: int, frame: FrameType | None) -> None:
    if _seen and number not in _AT_ONCE:
        return
    if _seen:
        # A live display hides the cursor, and nothing else will bring it back.
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, (_SHOW_CURSOR if sys.stderr.isatty() else b"") + b"\nstopped at once\n")
        os._exit(INTERRUPTED)
    _seen.append(number)
    raise KeyboardInterrupt
