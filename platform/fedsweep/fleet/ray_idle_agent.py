"""An idle process in the place of an agent of Ray's node; it ends with the raylet. Run by its path, without Ray."""

from __future__ import annotations

import os
import time

_PAUSE_S = 1.0


def wait_for_parent(pid: int) -> None:
    """Return when the parent is no longer that process."""
    while os.getppid() == pid:
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    wait_for_parent(int(os.environ["RAY_RAYLET_PID"]))
