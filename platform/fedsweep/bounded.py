"""Reading what others may have prepared: how much of it there is, is known before it is read.

A link may lead anywhere, a pipe never ends, a device has no size, and a file of a terabyte may hold nothing but a hole.
Whoever is sent a file that is too large for its purpose learns it in one line, in milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Levels of a configuration, a result or a plan; what people write has less than ten.
MOST_LEVELS = 50
# Text for people, and what describes many clients or trials.
MOST_TEXT_BYTES = 10 * 2**20
MOST_DOCUMENT_BYTES = 50 * 2**20
# An empty list is three bytes in a file and eighty in memory.
_MOST_CONTAINERS = 2_000_000


@contextmanager
def open_regular(path: Path, *, follow: bool = False) -> Iterator[int]:
    """Yield a handle on a regular file.

    Args:
        path: The file.
        follow: Whether it may be a link to one: only where the user named it, never in a folder of somebody else's.

    Raises:
        OSError: It is missing, can't be read, or is something else; ``strerror`` says so in words.
    """
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can be called so", repr(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield handle
    finally:
        os.close(handle)


def read_regular(path: Path, *, max_bytes: int, follow: bool = False) -> bytes:
    """Read the bytes of a regular file that is not too large; for ``follow`` see :func:`open_regular`.

    Raises:
        OSError: As :func:`open_regular`; or it is larger.
    """
    with open_regular(path, follow=follow) as handle:
        size = os.fstat(handle).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {max_bytes}", str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read(max_bytes)


def parse_json(data: bytes) -> Any:
    """Parse a JSON document of bounded depth and with a bounded number of lists and objects.

    Args:
        data: At most some :data:`MOST_DOCUMENT_BYTES`.

    Raises:
        ValueError: It is no JSON in UTF-8, or is too large or too deep; in one line.
    """
    if data.count(b"[") + data.count(b"{") > _MOST_CONTAINERS:
        raise ValueError(f"more than {_MOST_CONTAINERS} lists and objects")
    try:
        tree = json.loads(data)
    except RecursionError:
        raise ValueError(f"more than {MOST_LEVELS} levels") from None
    level = [tree]
    for _ in range(MOST_LEVELS):
        below = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        level = [item for items in below for item in items]
    if level:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    return tree
