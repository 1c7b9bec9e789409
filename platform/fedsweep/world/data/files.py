"""Official files on disk: where they lie, how they are fetched, and their checksums.

A file is read into memory once, its checksum compared, and only those very bytes are parsed afterwards; nothing is
unpacked to disk, so the folder may be read-only. What is fetched arrives under a temporary name, so that an
interrupted download never leaves half a file behind.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedsweep.bounded import read_regular
from fedsweep.errors import DataError
from fedsweep.world.data.torchvision_compat import import_torchvision

_DOWNLOAD_TIMEOUT_SECONDS = 60.0
# More than any official file has.
_LARGEST_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class OfficialFile:
    """A published file.

    Attributes:
        path: Below the data folder, with forward slashes.
        md5: Its published checksum, in hexadecimal.
        urls: Where to fetch it, mirrors in order of preference.
    """

    path: str
    md5: str
    urls: tuple[str, ...]


def default_root() -> Path:
    """Return the user's cache folder: ``$XDG_CACHE_HOME/fedsweep``, or ``~/.cache/fedsweep``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedsweep"


def read_checked(path: Path, md5: str) -> bytes:
    """Read a file's bytes, whose checksum was compared first.

    Raises:
        DataError: the file cannot be read, or its checksum differs.
    """
    try:
        content = read_regular(path, max_bytes=_LARGEST_BYTES, follow=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    check_md5(content, md5, name=str(path))
    return content


def check_md5(content: bytes, md5: str, *, name: str) -> None:
    """Compare a checksum.

    Raises:
        DataError: it differs; the message gives the file, the checksum found and the one expected.
    """
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise DataError(
            f"{name} is damaged or not the official file: its md5 is {digest}, expected {md5}; delete it and fetch it "
            "again"
        )


def fetch_missing(dataset: str, missing: Sequence[OfficialFile], *, root: Path, download: bool) -> None:
    """Fetch the files that are missing, or say what to put where.

    Args:
        dataset: The data set's name, for messages.
        missing: The files that are not under ``root``; nothing happens when there are none.
        root: The data folder; made where it is missing.
        download: Whether the network may be used.

    Raises:
        DataError: ``download`` is false, the network or the folder fails, or what arrived is not the official file.
    """
    if missing and not download:
        lines = "".join(f"\n  {root / file.path}  from {file.urls[0]} (md5 {file.md5})" for file in missing)
        raise DataError(
            f"data set {dataset!r} is not complete under {root}; set scenario.root to the folder that holds it, set "
            f"scenario.download=true, or put there:{lines}"
        )
    for file in missing:
        _fetch(dataset, file, root=root)


def _fetch(dataset: str, file: OfficialFile, *, root: Path) -> None:
    target = root / file.path
    import_torchvision()
    from torchvision.datasets.utils import download_url

    failures = []
    for url in file.urls:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder, _network_timeout():
                download_url(url, folder, filename=target.name, md5=file.md5)
                os.replace(Path(folder) / target.name, target)
            return
        # OSError covers urllib's errors, timeouts and a read-only folder; RuntimeError is torchvision's wrong checksum.
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            failures.append(f"{url}: {type(error).__name__}: {error}")
    raise DataError(
        f"data set {dataset!r} could not be downloaded ({'; '.join(failures)}); check the network, or put the file "
        f"(md5 {file.md5}) at {target} by hand and set scenario.download=false"
    )


@contextmanager
def _network_timeout() -> Iterator[None]:
    """Give up on a silent server; torchvision's downloader sets no limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
