"""Checks of what a scenario's mappings and files say, shared by devices, budgets, drift and availability.

Each check states the rule, the value seen and the way out, so that a wrong value never shows as a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from fedsweep.bounded import MOST_DOCUMENT_BYTES, parse_json, read_regular
from fedsweep.errors import ConfigError, DataError


def read_text(where: str, path: object) -> str:
    """Return the text of a file that a configuration names.

    Raises:
        ConfigError: The path is no string, or no file can be read there.
        DataError: The file is not UTF-8 text.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"`{where}` must be the path of a file, but got {path!r}; give a path")
    try:
        return read_regular(Path(path).expanduser(), max_bytes=MOST_DOCUMENT_BYTES, follow=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} (named by `{where}`) is no UTF-8 text ({error}); write the file anew") from error
    except OSError as error:
        raise ConfigError(f"`{where}` must name a readable file, but {path} gave: {error}; correct the path") from error


def parse_document(text: str, *, source: str, format: str, keys: Collection[str]) -> dict[str, object]:
    """Return a JSON object of a known format, version 1.

    Args:
        text: The document.
        source: Where it comes from, for messages.
        format: What its ``format`` must be.
        keys: Keys that must be there beside ``format`` and ``version``; others are refused.

    Raises:
        DataError: It is no JSON object, of another format or version, or a key is missing or unknown.
    """
    try:
        document = parse_json(text.encode())
    except ValueError as error:  # also numbers of thousands of digits
        raise DataError(f"{source} is no JSON document ({error}); write it anew") from error
    if not isinstance(document, dict) or document.get("format") != format or document.get("version") != 1:
        raise DataError(f"{source} must be a JSON object with format {format!r} and version 1; write it anew")
    expected = {"format", "version", *keys}
    if set(document) != expected:
        wrong = sorted(set(document) ^ expected)
        raise DataError(f"{source} must have the keys {sorted(expected)}, but these differ: {wrong}; write it anew")
    return document
