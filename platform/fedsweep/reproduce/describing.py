"""A table in words, for ``fedsweep show``."""

from __future__ import annotations
