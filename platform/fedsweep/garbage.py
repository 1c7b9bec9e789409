"""How often Python looks for unreachable cycles: libraries of some hundred thousand objects are no place to look."""

from __future__ import annotations

import gc

# New objects between two searches; by default 700. Importing torch takes a tenth less time so.
_NEW_OBJECTS = 50_000


def collect_seldom() -> None:
    """For a process of our own, before it imports anything large."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
