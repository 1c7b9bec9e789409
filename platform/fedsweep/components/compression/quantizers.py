"""Quantisers: every value travels, in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedsweep.components.compression.base import PackagedCodec, spread
from fedsweep.components.compression.packing import packed, unpacked
from fedsweep.parameters.ranges import Count
from fedsweep.records import Payload
from fedsweep.streams import Stream


@dataclass(frozen=True, kw_only=True)
class Halves(PackagedCodec):
    """Sends floating-point numbers of 16 bits, to the nearest; what is too large for them becomes the largest.

    Source: IEEE 754-2019, binary16; Kalamkar et al. (2019): A study of bfloat16 for deep learning training.

    Attributes:
        brain: bfloat16, with the range of 32 bits and 8 significant ones; otherwise binary16, with 11.
    """

    brain: bool

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        kind = torch.bfloat16 if self.brain else torch.float16
        most = torch.finfo(kind).max
        return {"halves": move.to(kind).clamp(-most, most).view(torch.int16)}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["halves"].view(torch.bfloat16 if self.brain else torch.float16).to(torch.float32)


def fp16(*, error_feedback: bool = False) -> Halves:
    """Send 16 bits a value, 11 of them significant, up to 65504.

    Args:
        error_feedback: The sender keeps what a message left out and adds it to the next.
    """
    return Halves(brain=False, error_feedback=error_feedback)


def bf16(*, error_feedback: bool = False) -> Halves:
    """Send 16 bits a value, 8 of them significant, with the range of 32 bits.

    Args:
        error_feedback: The sender keeps what a message left out and adds it to the next.
    """
    return Halves(brain=True, error_feedback=error_feedback)


@dataclass(frozen=True, kw_only=True)
class Int8(PackagedCodec):
    """A byte a value and one scale a tensor: its largest value over 127; rounded by chance, so that the mean is right.

    Source: Dettmers (2015): 8-bit approximations for parallelism in deep learning; rounding by chance as Gupta et al.
    (2015): Deep learning with limited numerical precision.
    """

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        move, sizes = _wide(move), self.sizes(len(move))
        parts = torch.split(move.abs(), sizes)
        largest = torch.stack([part.max() if len(part) else move.new_zeros(()) for part in parts])
        scales = largest / 127
        chance = torch.rand(len(move), generator=stream.torch(), dtype=move.dtype)
        levels = torch.floor(move / spread(scales, sizes).clamp(min=_tiny(move)) + chance).clamp(-127, 127)
        return {"levels": levels.to(torch.int8), "scales": scales}

    def decode(self, message: Payload, size: int) -> Tensor:
        scales = message["scales"]
        return message["levels"].to(scales.dtype) * spread(scales, self.sizes(size))


@dataclass(frozen=True, kw_only=True)
class Qsgd(PackagedCodec):
    """Whole numbers of a few bits, as parts of the length of so many values; rounded by chance to the right mean.

    Source: Alistarh et al. (2017): QSGD: communication-efficient SGD via gradient quantization and encoding. NeurIPS;
    section 3.1 and, for buckets, 4. Here levels have as many bits each, so that lengths follow from shapes, where the
    paper has Elias codes.

    Attributes:
        bits: Of a value, sign included, 2 to 8: ``2 ** (bits - 1) - 1`` levels.
        bucket: Values that share one length.
    """

    bits: Annotated[int, Ge(2), Le(8)] = 4
    bucket: Count = 128

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        move = _wide(move)
        rows = torch.nn.functional.pad(move, (0, -len(move) % self.bucket)).view(-1, self.bucket)
        lengths = torch.linalg.vector_norm(rows, dim=1)
        share = move.abs() / spread(lengths, self._buckets(len(move))).clamp(min=_tiny(move))
        chance = torch.rand(len(move), generator=stream.torch(), dtype=move.dtype)
        levels = torch.floor(share * self._levels + chance).clamp(max=self._levels)
        codes = (levels * move.sign()).to(torch.int64) + self._levels
        return {"levels": packed(codes, self.bits), "lengths": lengths}

    def decode(self, message: Payload, size: int) -> Tensor:
        lengths = message["lengths"]
        levels = unpacked(message["levels"], self.bits, size) - self._levels
        return levels.to(lengths.dtype) * (spread(lengths, self._buckets(size)) / self._levels)

    def _buckets(self, number: int) -> list[int]:
        return [min(self.bucket, number - start) for start in range(0, number, self.bucket)]


def _wide(move: Tensor) -> Tensor:
    # In 16 bits a level and its chance would be rounded together, to the nearest, and scales of small moves be none.
    return move if move.dtype.itemsize >= 4 else move.float()


def _tiny(like: Tensor) -> float:
    # Where all values are 0 some divisor must stand.
    return torch.finfo(like.dtype).tiny
