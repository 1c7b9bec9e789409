"""The base of the package's codecs: shapes, and error feedback as an option."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedsweep.components.codec import Codec, Shapes


@dataclass(frozen=True, kw_only=True)
class PackagedCodec(Codec):
    """A codec whose messages are as long as the shapes say, whatever the values are.

    Attributes:
        error_feedback: The sender keeps what a message left out and adds it to the next.
        shapes: Of the tensors that it encodes; None: one flat tensor.
    """

    section: ClassVar[str] = "communication"

    error_feedback: bool = False
    shapes: Shapes | None = None

    def fitted(self, shapes: Shapes) -> Self:
        fitted: Self = _fitted(self, shapes)
        return fitted

    def varies(self, shapes: Shapes, dtype: torch.dtype) -> bool:
        return False

    def sizes(self, number: int) -> list[int]:
        """Return the numbers of values of the tensors; their sum is ``number``."""
        return [number] if self.shapes is None else [math.prod(shape) for shape in self.shapes]


# Asked for by each client in each round.
@lru_cache(maxsize=64)
def _fitted(codec: Any, shapes: Shapes) -> Any:
    return replace(codec, shapes=shapes)


def spread(scales: Tensor, sizes: list[int]) -> Tensor:
    """Repeat each tensor's scale for each of its values."""
    # Not by way of the scales' own type: from 2**24 on a single-precision number skips sizes.
    return scales.repeat_interleave(
        torch.tensor(sizes, dtype=torch.int64, device=scales.device), output_size=sum(sizes)
    )
