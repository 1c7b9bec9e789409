"""The reading of a figure of the test: which way is better, in what unit, against what chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsweep.errors import ConfigError

SHARE = "share"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The reading of a metric: which way is better, in what unit, against what chance.

    Attributes:
        mode: ``max`` where more is better, ``min`` where less is.
        unit: ``share`` for what lies in 0..1 and is shown in percent; any other word stands beside the figure.
        chance: What guessing comes to; None where that is not known.
        parts: Names of the figures that the function returns as a mapping; empty where it returns one number.
    """

    mode: Literal["max", "min"] = "max"
    unit: str = ""
    chance: float | None = None
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses what can't be read later."""
        if self.mode not in ("max", "min"):
            raise ConfigError(f"a metric's mode must be max or min, but is {self.mode!r}")
        if not all(isinstance(part, str) and part.isidentifier() for part in self.parts):
            raise ConfigError(f"a metric's parts must be names like recall_0, but are {self.parts!r}")
