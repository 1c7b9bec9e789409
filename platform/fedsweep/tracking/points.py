"""What a metric's value is, for who makes it and for who writes it; the latter may be a process without torch."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """One value of a metric; ``timestamp_ms`` is Unix time in milliseconds."""

    key: str
    value: float
    timestamp_ms: int
    step: int
