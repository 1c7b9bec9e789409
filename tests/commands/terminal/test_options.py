"""What options that several commands share take."""

from __future__ import annotations

import tracemalloc

import pytest

from fedsweep.commands.terminal.options import parse_seeds
from fedsweep.errors import ConfigError


def test_seeds_are_numbers_and_ranges_each_once() -> None:
    assert parse_seeds("0-2, 7 1") == [0, 1, 2, 7]
    for text in ("", "4-2", "-1", "a"):
        with pytest.raises(ConfigError, match="numbers and ranges from 0"):
            parse_seeds(text)


def test_too_many_seeds_are_refused_before_they_are_listed() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="at most 10000 seeds"):
            parse_seeds("0-299999")
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
