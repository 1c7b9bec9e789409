"""Codec: what becomes of values on their way between clients and server."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep.guard import ask, named, returns
from fedsweep.parameters.ranges import Checked
from fedsweep.records import Payload
from fedsweep.streams import Stream

Shapes = tuple[tuple[int, ...], ...]


class Codec(Checked, ABC):
    """Encodes a move: a client's params since the model that it received, or the server's since its last one.

    Only what travels is encoded: of a part of the model, the part. Float buffers and averaged optimiser state go beside
    it as they are. The message costs what its tensors are: 4 bytes a value of the model's own type, of all others the
    bytes that they have, a bit for a boolean; so what fewer bits would do for is to be packed. A concrete codec is a
    frozen dataclass.

    Class attributes:
        encodes: Messages are made; otherwise models are sent as they are.
        decodes_sums: Messages add up as moves do, so of clients that are averaged the mean of their messages is
            decoded, once, in floating-point numbers whatever the messages are of.
    """

    encodes: ClassVar[bool] = True
    decodes_sums: ClassVar[bool] = False

    @property
    def error_feedback(self) -> bool:
        """Tell whether the sender keeps what a message left out and adds it to its next move.

        Source: Seide et al. (2014), 1-bit stochastic gradient descent; Karimireddy et al. (2019), Error feedback fixes
        SignSGD and other gradient compression schemes.
        """
        return False

    def fitted(self, shapes: Shapes) -> Codec:
        """Return the codec for a move of tensors of these shapes, one after another; itself where it needs none.

        Args:
            shapes: Of what travels; a tensor of which only some values travel is flat.
        """
        return self

    def varies(self, shapes: Shapes, dtype: torch.dtype) -> bool:
        """Tell whether messages may be of other lengths; tried on noise, once more with other draws, and on one value.

        Args:
            shapes: Of what travels.
            dtype: Of its values.
        """
        codec, size, source = self.fitted(shapes), sum(map(math.prod, shapes)), Stream(("codec", "length"))
        noise = torch.randn(size, generator=source.torch(), dtype=dtype)
        sparse = torch.zeros_like(noise)
        sparse[:1] = 100
        tries = [(noise, source), (noise, source.child(1)), (sparse, source)] if size else []
        messages = [ask(codec, "encode", move, stream, when="for a plan") for move, stream in tries]
        lengths = [{name: (part.dtype, part.numel()) for name, part in message.items()} for message in messages]
        return any(length != lengths[0] for length in lengths)

    @abstractmethod
    @returns(named(Tensor))
    def encode(self, move: Tensor, stream: Stream) -> Payload:
        """Return the message.

        Args:
            move: Of the params that travel, in their order [T], on the CPU; never changed in place.
            stream: Random numbers of this sender at this sync point.
        """

    @abstractmethod
    def decode(self, message: Payload, size: int) -> Tensor:
        """Return the move as the receiver has it, from the message alone [T].

        Args:
            message: What :meth:`encode` made.
            size: T.
        """


@dataclass(frozen=True, kw_only=True)
class AsItIs(Codec):
    """Sends values as they are."""

    encodes: ClassVar[bool] = False

    def varies(self, shapes: Shapes, dtype: torch.dtype) -> bool:
        return False

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        return {"move": move}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["move"]


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The codecs of both ways.

    Attributes:
        up: Of what clients send.
        down: Of what the server sends.
    """

    up: Codec = AsItIs()
    down: Codec = AsItIs()

    @classmethod
    def of(cls, up: Codec | None, down: Codec | None) -> Communication:
        """Return the codecs; None: as it is."""
        return cls(up=up or AsItIs(), down=down or AsItIs())
