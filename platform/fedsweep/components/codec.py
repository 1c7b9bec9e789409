"""Codec: what becomes of a client's model on its way to the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsweep.guard import named, returns
from fedsweep.parameters.ranges import Checked
from fedsweep.records import Payload
from fedsweep.streams import Stream


class Codec(Checked, ABC):
    """Encodes the move of a client's params since the model that it received.

    Only what travels is encoded: of a part of the model, the part. Float buffers and averaged optimiser state go beside
    it as they are. The message costs what its tensors are: 4 bytes a value of the model's own type, of all others the
    bytes that they have, a bit for a boolean; so what fewer bits would do for is to be packed. A concrete codec is a
    frozen dataclass.

    Class attributes:
        encodes: Messages are made; otherwise models are sent as they are.
    """

    encodes: ClassVar[bool] = True

    @property
    def error_feedback(self) -> bool:
        """Tell whether the client keeps what a message left out and adds it to its next move.

        Source: Seide et al. (2014), 1-bit stochastic gradient descent; Karimireddy et al. (2019), Error feedback fixes
        SignSGD and other gradient compression schemes.
        """
        return False

    @abstractmethod
    @returns(named(Tensor))
    def encode(self, move: Tensor, stream: Stream) -> Payload:
        """Return the message.

        Args:
            move: Of the params that travel, in their order [T], on the CPU; never changed in place.
            stream: Random numbers of this client at this sync point.
        """

    @abstractmethod
    def decode(self, message: Payload, size: int) -> Tensor:
        """Return the move as the server has it, from the message alone [T].

        Args:
            message: What :meth:`encode` made.
            size: T.
        """


@dataclass(frozen=True, kw_only=True)
class AsItIs(Codec):
    """Models are sent as they are."""

    encodes: ClassVar[bool] = False

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        return {"move": move}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["move"]
