"""The section ``communication``: what messages go through, the same for every method."""

from __future__ import annotations

from pydantic import Field, field_validator

from fedsweep.config.base import NamedComponent, Section


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
