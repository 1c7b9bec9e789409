"""A range stands on the annotation: the binder, the constructor and ``fedsweep show`` say the same of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedsweep.components import BelowOne, Checked, Count, NotNegative, Positive
from fedsweep.config.signatures import bind, describe
from fedsweep.errors import ConfigError
from fedsweep.parameters.ranges import PositiveOrInfinite


@dataclass(frozen=True, kw_only=True)
class Part(Checked):
    """A component."""

    rate: Positive = 0.1
    share: BelowOne | None = None
    steps: Count = 1
    strength: NotNegative = math.inf
    speed: PositiveOrInfinite = 1.0
    word: Literal["a", "b"] = "a"
    shares: tuple[BelowOne, ...] = ()


WRONG = [("rate", 0.0), ("rate", "fast"), ("rate", True), ("share", 1.0), ("steps", 0), ("steps", 1.5), ("shares", [1])]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_binder_and_constructor_refuse_in_the_same_words(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as bound:
        bind("method", "", Part, {name: value})
    with pytest.raises(ConfigError) as built:
        Part(**{name: value})
    text = str(bound.value).replace("but got true", "but got True")
    assert text.replace("'", "") == str(built.value).replace("'", "") and text.startswith(f"method.{name} must be ")


def test_words_and_infinities_are_checked_too() -> None:
    assert Part(strength=math.inf, speed=math.inf).speed == math.inf
    for wrong in ({"rate": math.inf}, {"speed": math.nan}, {"strength": math.nan}, {"word": "c"}):
        with pytest.raises(ConfigError, match=f"method.{next(iter(wrong))} must be "):
            Part(**wrong)  # type: ignore[arg-type]


def test_show_lists_the_range() -> None:
    types = {row.name: row.type for row in describe(Part)}
    assert types["rate"] == "float > 0" and types["share"] == "float >= 0 and < 1 | null"
