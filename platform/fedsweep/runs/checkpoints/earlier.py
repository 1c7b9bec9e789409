"""Which shorter configurations a run had before it was given more rounds: it may go on from their checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedsweep.bounded import MOST_TEXT_BYTES, parse_json, read_regular
from fedsweep.errors import OutputError
from fedsweep.runs.files import EARLIER, atomic_write


def write_earlier(folder: Path, hashes: Sequence[str]) -> None:
    """Replace the list of the hashes that a run's shorter configurations had: it may go on from their checkpoints.

    Raises:
        OutputError: It can't be written.
    """
    try:
        atomic_write(folder / EARLIER, f"{json.dumps(list(dict.fromkeys(hashes)), indent=1)}\n".encode())
    except OSError as error:
        raise OutputError(f"{folder / EARLIER}: cannot be written: {error.strerror or error}") from error


def read_earlier(folder: Path) -> tuple[str, ...]:
    """Read the hashes of :func:`write_earlier`; none where the run has the rounds that it was begun with.

    Raises:
        OutputError: The file is damaged.
    """
    path = folder / EARLIER
    if not os.path.lexists(path):
        return ()
    try:
        hashes = parse_json(read_regular(path, max_bytes=MOST_TEXT_BYTES))
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise OutputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(hashes, list) or not all(isinstance(item, str) for item in hashes):
        raise OutputError(f"{path}: it must be a list of the configurations' hashes")
    return tuple(hashes)
