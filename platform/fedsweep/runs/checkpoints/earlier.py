"""Which shorter configurations a run had before it was given more rounds: it may go on from their checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedsweep.errors import OutputError
from fedsweep.runs.files import EARLIER, read_json, write_file


def write_earlier(folder: Path, hashes: Sequence[str]) -> None:
    """Replace the list of the hashes that a run's shorter configurations had: it may go on from their checkpoints.

    Raises:
        OutputError: It can't be written.
    """
    write_file(folder / EARLIER, f"{json.dumps(list(dict.fromkeys(hashes)), indent=1)}\n".encode())


def read_earlier(folder: Path) -> tuple[str, ...]:
    """Read the hashes of :func:`write_earlier`; none where the run has the rounds that it was begun with.

    Raises:
        OutputError: The file is damaged.
    """
    path = folder / EARLIER
    if not os.path.lexists(path):
        return ()
    hashes = read_json(path)
    if not isinstance(hashes, list) or not all(isinstance(item, str) for item in hashes):
        raise OutputError(f"{path}: it must be a list of the configurations' hashes")
    return tuple(hashes)
