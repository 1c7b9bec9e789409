"""Ranges of methods' parameters, refused in the same words everywhere.

Each function is given parameters under the names that a configuration has for them, and raises a ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedsweep.errors import ConfigError


def at_least(least: int, **values: float) -> None:
    """Refuse what is below ``least``."""
    _check(values, f"at least {least}", lambda value: not value < least)


def positive(**values: float) -> None:
    """Refuse what is not above 0, or infinite."""
    _check(values, "a number above 0", lambda value: 0 < value < math.inf)


def not_negative(**values: float) -> None:
    """Refuse what is below 0, or infinite."""
    _check(values, "a number of at least 0", lambda value: 0 <= value < math.inf)


def below_one(**values: float) -> None:
    """Refuse what is below 0, or not below 1."""
    _check(values, "at least 0 and below 1", lambda value: 0 <= value < 1)


def share(**values: float) -> None:
    """Refuse what is not above 0, or above 1."""
    _check(values, "above 0 and at most 1", lambda value: 0 < value <= 1)


def _check(values: Mapping[str, float], rule: str, holds: Callable[[float], bool]) -> None:
    for name, value in values.items():
        if not holds(value):
            raise ConfigError(f"method.{name} must be {rule}, but got {value}")
