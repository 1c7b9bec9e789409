"""Folders as users name them, by paths or addresses; and how those here are called that stand for addresses."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from fedsweep.errors import ConfigError, FedsweepError

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# What pathlib makes of an address: as a path it would be a folder here.
_ONE_SLASH = re.compile(r"(s3|gs|gcs|hdfs|viewfs|abfss?|file):/(?!/)")
WAYS_IN = (
    "for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile in ~/.aws say who asks, and"
    " ?region=NAME or ?endpoint_override=HOST:PORT&scheme=http behind the address where else"
)
_SECRETS = ("access_key", "secret", "password", "token", "credential")
# Folders that stand for addresses -> these; to the end of this process, for what is said when they are gone.
_ADDRESSES: dict[str, str] = {}


def is_address(place: object) -> bool:
    """Return whether a place is an address and no path."""
    return isinstance(place, str) and _ADDRESS.match(place) is not None


def check_named(place: object) -> None:
    """Refuse what names no folder.

    Raises:
        ConfigError: It is neither path nor address, or an address that lacks a slash.
    """
    if not isinstance(place, str | os.PathLike):
        raise ConfigError(f"a folder is named by a path or an address, but got {place!r}")
    if not os.fspath(place):
        raise ConfigError("a folder's name is empty, as of a variable that is not set; name this folder itself by .")
    if cut := _ONE_SLASH.match(os.fsdecode(place)):
        way_out = f"write {cut[1]}://, in Python as a str: pathlib takes a slash away"
        raise ConfigError(f"{cut[0]}... has one slash where an address has two; {way_out}")


def check_address(address: str) -> None:
    """Refuse an address that says more than which folder.

    Raises:
        ConfigError: It has a password in it, or a #, or names no folder.
    """
    parts = urlsplit(address)
    if "@" in parts.netloc or any(word in key.lower() for key, _ in parse_qsl(parts.query) for word in _SECRETS):
        raise ConfigError(f"{parts.scheme}://...: the address has a user or password in it; leave it out: {WAYS_IN}")
    if parts.fragment:  # the file system would pass over it, and over the options behind it
        raise ConfigError(f"{address.partition('?')[0]}: an address ends at its #; write %23 for one in a name")
    if not parts.path.strip("/"):
        place, mark, options = address.partition("?")
        raise ConfigError(f"{address}: it names no folder; write {place.rstrip('/')}/NAME{mark}{options}")


def stand_for(folder: Path, address: str) -> None:
    """Have :func:`place_name` call a folder, and what is in it, by an address."""
    _ADDRESSES[os.path.abspath(folder)] = address


def place_name(text: object) -> str:
    """Return a path, or a text with paths in it, with addresses for the folders that stand for them.

    What is in such a folder is called without the address's options.
    """
    named = str(text)
    for folder in _ADDRESSES:
        named = _by_address(named, folder)
    return named


def name_in(error: FedsweepError, folder: Path) -> None:
    """Have an error name a folder by the address that it stands for: the folder will be gone when the error is read."""
    place = os.path.abspath(folder)
    error.args = tuple(_by_address(arg, place) if isinstance(arg, str) else arg for arg in error.args)


def _by_address(text: str, folder: str) -> str:
    address = _ADDRESSES.get(folder, folder)
    base = address.partition("?")[0].rstrip("/")
    text = text.replace(f"{folder}/", f"{base}/")
    return re.sub(rf"{re.escape(folder)}(?![\w.-]*[\w-])", lambda _: address, text)  # and no folder of a longer name
