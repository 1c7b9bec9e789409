"""Figures and foreign text as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LONGEST_TEXT = 200
MISSING = "-"


def clean(value: Any, *, longest: int = _LONGEST_TEXT) -> str:
    """Any value as one line of printable characters; what is too long is cut."""
    text = "".join(character if character.isprintable() else " " for character in str(value)[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def some_of(names: Sequence[str], most: int) -> str:
    """Names with commas between; of more than ``most`` the first, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bytes_text(count: float | None) -> str:
    """Bytes for people, with decimal prefixes: ``1.5 MB``."""
    if count is None:
        return MISSING
    for prefix in ("", "k", "M", "G", "T"):
        if count < (999.5 if prefix else 1000):
            return f"{count:.0f} B" if not prefix else f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.4g} PB"


def seconds_text(seconds: float | None) -> str:
    """Seconds for people, in the unit that keeps the number short: ``95s``, ``12.5m``, ``3.4h``, ``2.1d``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING if seconds is None else str(seconds)
    if seconds < 99.95:
        return f"{seconds:.3g}s"
    for size, unit in ((60.0, "m"), (3600.0, "h")):
        if seconds < 99.95 * size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds / 86400:.3g}d"
