"""Base of all sections of the configuration: strictness, and the types that several of them use."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

from fedsweep.parameters.ranges import Count, NotNegative

Text = Annotated[str, Field(min_length=1)]
Auto = Literal["auto"]


def is_empty(value: Any) -> bool:
    """Check for None or an empty list; such a field with ``exclude_if`` is not written: an option that is not used."""
    return value is None or value == []


class Section(BaseModel):
    """A mapping of the configuration: immutable, no unknown keys, and no silent change of type (``"5"`` is no 5)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Component(BaseModel):
    """A named component; its parameters stand beside the name and are checked against its builder's signature."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the keys beside the name: parameter -> value."""
        return dict(self.model_extra or {})


class KindComponent(Component):
    """A component of the world, named by its ``kind``."""

    kind: Text = Field(description="Which one; package.module:callable for one's own.")


class NamedComponent(Component):
    """A component named by its ``name``."""

    name: Text = Field(description="Which one; package.module:callable for one's own.")


class IntegerRange(Section):
    """An integer that is drawn once per client, uniformly, both ends included.

    Attributes:
        range: The ends, ``1 <= low <= high``.
    """

    range: Annotated[tuple[Count, Count], Strict(False)] = Field(description="Lowest and highest value, both possible.")

    @model_validator(mode="after")
    def _ordered(self) -> IntegerRange:
        low, high = self.range
        if low > high:
            raise ValueError(f"the first end must not exceed the second, but got [{low}, {high}]; swap them")
        return self


CountOrRange = Count | IntegerRange


def _check_gpu_share(share: float) -> float:
    if share == 0 or (share >= 1 and share.is_integer()):
        return share
    # Ray adds up what is left over on several GPUs, and then waits for ever for a GPU that has as much.
    fitting = math.floor(1 / max(share, 1e-4) + 1e-9) if share < 1 else 0  # Ray counts in parts of 1e-4
    if fitting and 1 - fitting * share <= 0.01 + 1e-9:
        return share
    # Rounded down: of 0.1667 five fit, of 0.1666 six.
    parts = [math.floor(1e4 / k) / 1e4 for k in (fitting + 1, fitting)] if fitting else []
    near = parts or [math.floor(share), math.ceil(share)]
    raise ValueError(
        f"a share of a GPU must be 0, 1/k or a whole number, or Ray may wait for ever for a GPU with room, but got"
        f" {share:g}; the nearest are {near[0]:g} and {near[1]:g}"
    )


GpuShare = Annotated[NotNegative, AfterValidator(_check_gpu_share)]


class MetricEntry(Section):
    """A metric of the test, and how its figures are to be read where its function does not say so."""

    name: Text = Field(
        description="macro_f1, balanced_accuracy, top5_accuracy, brier_score, or package.module:callable."
    )
    mode: Literal["max", "min"] | None = Field(
        default=None, description="Whether more is better; null: as the function declares, by default max."
    )
    unit: str | None = Field(
        default=None, description="share: 0..1, shown in percent; any other word; null: as the function declares."
    )
    chance: float | None = Field(default=None, description="What guessing comes to; null: as the function declares.")
