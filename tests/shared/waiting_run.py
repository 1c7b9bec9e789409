"""A run in a process of its own that waits for a signal after one of its rounds, which take milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

_WAITS = """
import time
from fedsweep.tracking.terminal.run_progress import PlainProgress

shows_round = PlainProgress.shows_round

def waits(self, standing, row):
    shows_round(self, standing, row)
    if standing.done == {after_round}:
        time.sleep(100)  # a signal ends it

PlainProgress.shows_round = waits
"""


def waiting(folder: Path, *, after_round: int) -> dict[str, str]:
    """Return the environment of a process whose runs wait after that round; the folder is put on its path."""
    (folder / "sitecustomize.py").write_text(_WAITS.format(after_round=after_round))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
