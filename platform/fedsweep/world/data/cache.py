"""Keeps what took minutes to decode (many small pictures, JSON) as plain ``.npy`` files in the user's cache.

The cache is named by the paths, sizes and times of all source files, so a change in any of them means a fresh decode.
It is only ever a saving: where it cannot be written or read, the sources are decoded again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsweep.world.data.files import default_root

Arrays = dict[str, NDArray[Any]]
_Item = TypeVar("_Item")


def cached_arrays(name: str, *, sources: Iterable[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that ``decode`` gives, from the cache where it holds them for these very source files.

    Args:
        name: The data set's name; the cache folder's name begins with it.
        sources: Every file that the result depends on.
        decode: Makes the arrays, by name.
    """
    folder = default_root() / "decoded" / f"{name}-{_fingerprint(sources)}"
    stored = _load(folder)
    if stored is not None:
        return stored
    arrays = decode()
    _store(folder, arrays)
    return arrays


def with_progress(items: Sequence[_Item], *, label: str) -> Iterator[_Item]:
    """Yield the items, with a progress bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(items, description=label, console=console, disable=not sys.stderr.isatty(), transient=True)


def _fingerprint(sources: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    resolved = functools.cache(os.path.realpath)  # of a hundred thousand pictures in few folders
    for path in sorted(sources):
        status = path.stat()
        folder, name = os.path.split(path)
        digest.update(f"{resolved(folder)}/{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _load(folder: Path) -> Arrays | None:
    files = sorted(folder.glob("*.npy"))
    try:
        return {file.stem: np.load(file, allow_pickle=False) for file in files} if files else None
    except (OSError, ValueError, EOFError):
        return None


def _store(folder: Path, arrays: Arrays) -> None:
    """Write all arrays under a temporary name first: a folder of the final name is always complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
            for key, array in arrays.items():
                np.save(Path(temporary) / f"{key}.npy", array, allow_pickle=False)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
    except OSError:
        return
