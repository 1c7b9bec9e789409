"""A client's model on its way to the server through a codec: encoded on the client, decoded on the server."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsweep.client.messages import Reply
from fedsweep.components.codec import Codec
from fedsweep.errors import InvariantError
from fedsweep.guard import ask
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.submodel import SubModel
from fedsweep.trees import FlatLayout


class Encoder:
    """Encodes one client's moves in one round.

    Args:
        codec: The method's.
        submodel: The part that the client trains.
        full: The full model's layout.
        left: What its messages have left out so far [P of the full model]; None: nothing.
    """

    def __init__(self, codec: Codec, submodel: SubModel, full: FlatLayout, left: Tensor | None) -> None:
        self._codec, self._submodel, self._full = codec, submodel, full
        self._travels = travelling(submodel, full)
        self._left = torch.zeros(full.num_params, dtype=full.dtype) if left is None else left

    def encoded(self, reply: Reply, anchor: Tensor | None, stream: Stream) -> Reply:
        """Return the answer with its params encoded.

        Args:
            reply: With the client's model [V of its part], on the CPU.
            anchor: What it received [V of its part].
            stream: Random numbers.

        Raises:
            InvariantError: It received none.
        """
        if anchor is None:
            raise InvariantError(f"client {reply.client} has received no model that its move could be counted from")
        size = len(self._travels)
        move = (reply.vector[:size] - anchor[:size].cpu())[self._travels]
        # A copy of the rest: as a view it would keep the whole model in memory.
        return replace(reply, vector=reply.vector[size:].clone(), encoded=self._encode(move, stream))

    def _encode(self, move: Tensor, stream: Stream) -> Payload:
        if not self._codec.error_feedback:
            return self._asked(move, stream)
        left = self._submodel.extract(self._full.padded(self._left), self._full)[: len(self._travels)].clone()
        move = move + left[self._travels]
        message = self._asked(move, stream)
        # Against what the server will decode, not what was meant to be sent: so both agree on what is still owed.
        left[self._travels] = move - _decoded(self._codec, message, len(move))
        self._left = self._grown(left)
        return message

    def _asked(self, move: Tensor, stream: Stream) -> Payload:
        message: Payload = ask(self._codec, "encode", move, stream, when="on a client")
        return message

    def memory(self) -> dict[str, Tensor]:
        """Give what the client's messages have left out [P of the full model], where that is fed back."""
        return {"codec": self._left} if self._codec.error_feedback else {}

    def _grown(self, part: Tensor) -> Tensor:
        """Return a part's values [P] in full size; those that do not travel are as they were."""
        embedded = self._submodel.embed(self._submodel.layout(self._full).padded(part), self._full)
        values, params = embedded.vector[: self._full.num_params], slice(self._full.num_params)
        return values.clone() if embedded.cover is None else torch.where(embedded.cover[params], values, self._left)


def travelling(submodel: SubModel, full: FlatLayout) -> Tensor:
    """Mark a part's params that travel (bool [P of the part])."""
    part = submodel.layout(full)
    cover = submodel.embed(torch.ones(part.num_values, dtype=full.dtype), full).cover
    if cover is None:
        return torch.ones(part.num_params, dtype=torch.bool)
    return submodel.extract(cover.to(full.dtype), full)[: part.num_params] > 0


def decoded_model(codec: Codec, message: Payload, *, rest: Tensor, anchor: Tensor, travels: Tensor) -> Tensor:
    """Return the model [V of the part] as the server has it.

    Args:
        codec: The method's.
        message: What the client sent of its params.
        rest: Its buffers and optimiser state, as they are.
        anchor: The model that it received [V of the part].
        travels: Which of the part's params the message is of.
    """
    params = anchor[: len(travels)].clone()
    params[travels] += _decoded(codec, message, int(travels.sum())).to(params)
    return torch.cat([params, rest])


def _decoded(codec: Codec, message: Payload, size: int) -> Tensor:
    move = codec.decode(message, size)
    if move.shape != (size,) or not bool(torch.isfinite(move).all()):
        raise InvariantError(
            f"{type(codec).__name__} must decode {size} finite values, but gave a tensor of shape {tuple(move.shape)}"
            f" with {int((~torch.isfinite(move)).sum())} that are not finite"
        )
    return move
