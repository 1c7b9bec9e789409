"""The sections ``communication`` and ``planner``: what messages go through, and who spends a budget."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from pydantic import Field, field_validator

from fedsweep.config.base import NamedComponent, Section, Text


class Communication(Section):
    """The codecs of both ways; ``fedsweep show topk`` says what one takes."""

    up: NamedComponent | None = Field(
        default=None,
        description="What clients send: {name: topk, share: 0.1, error_feedback: true}; fp16, bf16, int8, qsgd, topk,"
        " randomk, sign, ternary, count_sketch, powersgd, or package.module:callable; null or none: as it is.",
    )
    down: NamedComponent | None = Field(
        default=None, description="What the server sends; likewise, but for count_sketch."
    )

    @field_validator("up", "down")
    @classmethod
    def _no_codec(cls, codec: NamedComponent | None) -> NamedComponent | None:
        # Two names for one thing would be two settings of a sweep, and two hashes.
        return None if codec is not None and codec.name == "none" and not codec.parameters else codec


class Planner(NamedComponent):
    """Spends the run's budget round by round: the name of a planner, and its parameters."""

    name: Text = Field(default="gain", description="gain, even, or package.module:callable.")
    choices: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Dotted key -> values that a round may have: training.cohort_size, local_epochs or local_steps,"
        " communication.up and down, and parameters of the method that only plan its rounds (method.interval:"
        " [20, 5, 1]).",
    )

    @field_validator("choices")
    @classmethod
    def _may_change(cls, choices: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if not choices:
            raise ValueError("a planner needs choices, e.g. {training.cohort_size: [2, 3, 4, 5]}")
        for key, values in choices.items():
            if key not in _CHOSEN and not key.startswith("method."):
                raise ValueError(f"{key} can't change from round to round; these can: {', '.join(_CHOSEN)}, method.*")
            if not values or any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"{key} needs a list of values that differ, but got {values!r}")
        if (number := prod(map(len, choices.values()))) > _MOST_OPTIONS:
            raise ValueError(f"{number} combinations, at most {_MOST_OPTIONS}: each is planned in each round")
        return choices

    @property
    def options(self) -> list[dict[str, Any]]:
        """Return all combinations of the choices, by dotted key."""
        return [dict(zip(self.choices, values, strict=True)) for values in product(*self.choices.values())]


_MOST_OPTIONS = 64
_CHOSEN = (
    "training.cohort_size",
    "training.local_epochs",
    "training.local_steps",
    "communication.up",
    "communication.down",
)
