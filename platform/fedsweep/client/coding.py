"""Models on their way through a codec: a client's to the server, and the server's to all clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedsweep.client.messages import ClientSide, Reply
from fedsweep.components.codec import Codec, Shapes
from fedsweep.errors import InvariantError
from fedsweep.guard import ask, wrong
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, all_finite, weighted_mean


@dataclass(frozen=True, kw_only=True, eq=False)
class Travelling:
    """The params of a part of the model that travel.

    Attributes:
        params: Params of the part, travelling or not.
        size: Those that travel.
        mask: Which they are (bool [params]); None: all.
        shapes: Of what travels: a tensor's own, or flat where only some of its values do.
        names: Of the tensors that travel whole.
    """

    params: int
    size: int
    mask: Tensor | None
    shapes: Shapes
    names: tuple[str, ...]

    def cut(self, values: Tensor) -> Tensor:
        """Return those of the part's params [params] that travel."""
        return values if self.mask is None else values[self.mask]

    def moved(self, values: Tensor, move: Tensor) -> Tensor:
        """Return the part's params [params], those that travel moved by so much [size]."""
        if self.mask is None:
            return values + move.to(values)
        values = values.clone()
        values[self.mask] += move.to(values)
        return values


# A part that is drawn anew in each round does not come back: few are kept, and of these the whole model is asked for.
@lru_cache(maxsize=8)
def travelling(submodel: SubModel, full: FlatLayout) -> Travelling:
    """Return the params of a part that travel."""
    part = submodel.layout(full)
    ends, mask = part.places(), None
    own = {n: s for (n, place), s in zip(ends.items(), part.shapes, strict=True) if place.start < part.num_params}
    if submodel != FULL_MODEL:
        cover = submodel.embed(torch.ones(part.num_values, dtype=full.dtype), full).cover
        if cover is not None:
            mask = submodel.extract(cover.to(full.dtype), full)[: part.num_params] > 0
    if mask is None or bool(mask.all()):
        size = part.num_params
        return Travelling(params=size, size=size, mask=None, shapes=tuple(own.values()), names=tuple(own))
    counts = {name: int(mask[ends[name]].sum()) for name in own}
    whole = tuple(name for name, shape in own.items() if counts[name] == torch.Size(shape).numel())
    shapes = tuple(own[name] if name in whole else (counts[name],) for name in own if counts[name])
    return Travelling(params=len(mask), size=int(mask.sum()), mask=mask, shapes=shapes, names=whole)


class Encoder:
    """Encodes one client's moves in one round.

    Args:
        side: Says what clients' messages go through.
        submodel: The part that the client trains.
        full: The full model's layout.
        memory: What the client remembers; of it the residuals of error feedback, see :meth:`memory`.
    """

    def __init__(self, side: ClientSide, submodel: SubModel, full: FlatLayout, memory: Mapping[str, Any]) -> None:
        self._submodel, self._full, self._payloads = submodel, full, side.encodes_payloads
        self._travels = travelling(submodel, full)
        self._codec = side.codec.fitted(self._travels.shapes)
        self._residuals = {name: value for name, value in memory.items() if name.startswith("codec")}

    def encoded(self, reply: Reply, received: Tensor | None, stream: Stream) -> Reply:
        """Return the answer with its params encoded, and of what terms send all that has the params' form.

        Args:
            reply: With the client's model [V of its part], on the CPU.
            received: The server's model that it received [V of the full model].
            stream: Random numbers.
        """
        anchor, size = self._anchor(reply.client, received), self._travels.params
        message = self._message("codec", self._travels.cut(reply.vector[:size] - anchor), stream)[0]
        extras, encoded_extras = dict(reply.extras), {}
        for owner, values in self._alike(extras):
            encoded_extras[owner] = self._message(f"codec {owner}", values, stream.child(owner))[0]
            extras = {name: value for name, value in extras.items() if not name.startswith(f"{owner}/")}
        # A copy of the rest: as a view it would keep the whole model in memory.
        return replace(
            reply, vector=reply.vector[size:].clone(), encoded=message, extras=extras, encoded_extras=encoded_extras
        )

    def decoded(self, client: int, vector: Tensor, received: Tensor | None, stream: Stream) -> Tensor:
        """Return a client's model [V of its part] as its receiver decodes it; arguments as of :meth:`encoded`."""
        anchor, size = self._anchor(client, received), self._travels.params
        message, move = self._message("codec", self._travels.cut(vector[:size] - anchor), stream)
        if move is None:
            move = _decoded(self._codec, message, self._travels.size)
        params = self._travels.moved(anchor, move)
        return params if len(vector) == size else torch.cat([params, vector[size:]])

    def _anchor(self, client: int, received: Tensor | None) -> Tensor:
        """Return the params that a client received [params of its part]."""
        if received is None:
            raise InvariantError(f"client {client} has received no model that its move could be counted from")
        return self._submodel.extract(received, self._full)[: self._travels.params].cpu()

    def _alike(self, extras: Payload) -> list[tuple[str, Tensor]]:
        """Return by owner, as one vector [T], what has the form of the params that travel."""
        if not self._payloads or self._travels.mask is not None:
            return []
        shapes = dict(zip(self._travels.names, self._travels.shapes, strict=True))
        owners = dict.fromkeys(name.partition("/")[0] for name in extras)
        vectors = []
        for owner in owners:
            own = {name: value for name, value in extras.items() if name.startswith(f"{owner}/")}
            if {name.partition("/")[2]: tuple(value.shape) for name, value in own.items()} == shapes and all(
                value.dtype == self._full.dtype for value in own.values()
            ):
                vectors.append((owner, torch.cat([own[f"{owner}/{name}"].flatten() for name in shapes])))
        return vectors

    def _message(self, name: str, move: Tensor, stream: Stream) -> tuple[Payload, Tensor | None]:
        """Return the message of a move [size], and with error feedback the move as it will be decoded, else None."""
        if not self._codec.error_feedback:
            return self._asked(move, stream), None
        residual = self._residual(name)
        move = move + self._travels.cut(residual)
        message = self._asked(move, stream)
        # Against what will be decoded, not what was meant to be sent: so both agree on what is still owed.
        decoded = _decoded(self._codec, message, len(move))
        self._keep(name, residual, move - decoded.to(move))
        return message, decoded

    def _asked(self, move: Tensor, stream: Stream) -> Payload:
        # Of a model that its clients keep nothing travels.
        message: Payload = ask(self._codec, "encode", move, stream, when="on a client") if len(move) else {}
        return message

    def memory(self) -> dict[str, Tensor]:
        """Give the residuals of error feedback, what messages have left out, each [P of the full model]."""
        if not self._codec.error_feedback:
            return {}
        return {"codec": torch.zeros(self._full.num_params, dtype=self._full.dtype), **self._residuals}

    def _residual(self, name: str) -> Tensor:
        """Return what messages of this name have left out of the part's params [params]."""
        residual = self._residuals.get(name)
        if residual is None:
            return torch.zeros(self._travels.params, dtype=self._full.dtype)
        residual = torch.as_tensor(residual)
        if self._submodel == FULL_MODEL:
            return residual
        return self._submodel.extract(self._full.padded(residual), self._full)[: self._travels.params]

    def _keep(self, name: str, before: Tensor, owed: Tensor) -> None:
        """Keep what is owed of the values that travel [size]; of the part's others what was owed before [params]."""
        if self._submodel == FULL_MODEL:
            self._residuals[name] = owed
            return
        if self._travels.mask is not None:
            before = before.clone()
            before[self._travels.mask] = owed
            owed = before
        embedded = self._submodel.embed(self._submodel.layout(self._full).padded(owed), self._full)
        size = self._full.num_params
        values, cover = embedded.vector[:size], embedded.cover
        old = self._residuals.get(name)
        old = torch.zeros(size, dtype=self._full.dtype) if old is None else torch.as_tensor(old)
        self._residuals[name] = values.clone() if cover is None else torch.where(cover[:size], values, old)


def decoded_sum(codec: Codec, replies: Sequence[Reply], weights: Sequence[float], full: FlatLayout) -> Tensor:
    """Return a move [P] such that, if all had made it, their mean would be the decoded mean of their messages.

    Args:
        codec: What clients' messages go through; it decodes sums.
        replies: Of clients that train the whole model, each with its message.
        weights: Theirs in the mean, which others may have a part in.
        full: The model's layout.
    """
    messages = [reply.encoded or {} for reply in replies]
    mean: Payload = {}
    for name, first in messages[0].items():
        # Of whole numbers and bits the mean is none.
        mean[name] = torch.empty_like(first, dtype=torch.promote_types(first.dtype, full.dtype))
        weighted_mean([message[name].flatten() for message in messages], weights, mean[name].view(-1))
    travels = travelling(FULL_MODEL, full)
    return _decoded(codec.fitted(travels.shapes), mean, travels.size) / math.fsum(weights)


def decoded_reply(
    codec: Codec, reply: Reply, submodel: SubModel, *, anchor: Tensor, full: FlatLayout, move: Tensor | None = None
) -> Reply:
    """Return a client's answer as the server has it.

    Args:
        codec: What clients' messages go through.
        reply: With the message, and beside it the buffers and optimiser state as they are.
        submodel: The part of the model that it is of.
        anchor: The model that the client received [V of the part].
        full: The full model's layout.
        move: Of its params, see :func:`decoded_sum`; None: what its message says.
    """
    assert reply.encoded is not None
    travels = travelling(submodel, full)
    codec = codec.fitted(travels.shapes)
    move = _decoded(codec, reply.encoded, travels.size) if move is None else move
    params = travels.moved(anchor[: travels.params], move)
    extras, part = dict(reply.extras), submodel.layout(full)
    for owner, message in reply.encoded_extras.items():
        values = _decoded(codec, message, travels.size).to(params)
        extras |= {f"{owner}/{name}": value for name, value in part.params(values).items()}
    vector = torch.cat([params, reply.vector])
    return replace(reply, vector=vector, encoded=None, extras=extras, encoded_extras={})


def sent_down(
    codec: Codec, full: FlatLayout, *, target: Tensor, before: Tensor, residual: Tensor | None, stream: Stream
) -> tuple[Tensor, Tensor | None]:
    """Return the server's next model [V] as all clients have it, and the residual after its message [P].

    Args:
        codec: What the server's messages go through.
        full: The model's layout.
        target: What its next model would be [V].
        before: What all clients have [V].
        residual: Of error feedback: what its messages have left out so far [P]; None: nothing.
        stream: Random numbers.
    """
    travels = travelling(FULL_MODEL, full)
    params, size = travels.params, travels.size
    codec = codec.fitted(travels.shapes)
    move = (target[:params] - before[:params]).cpu()
    if residual is not None and codec.error_feedback:
        move += residual
    message: Payload = ask(codec, "encode", move, stream, when="on the server")
    decoded = _decoded(codec, message, size).to(move)
    vector = target.clone()
    vector[:params] = before[:params] + decoded.to(before.device)
    return vector, move - decoded if codec.error_feedback else None


def _decoded(codec: Codec, message: Payload, size: int) -> Tensor:
    move = codec.decode(message, size) if size else torch.zeros(0)
    if not isinstance(move, Tensor):
        raise wrong(codec, "decode", must=f"a tensor of {size} values", answer=move, when="for a message of its own")
    if move.shape != (size,) or not all_finite(move):
        raise InvariantError(
            f"{type(codec).__name__} must decode {size} finite values, but gave a tensor of shape {tuple(move.shape)}"
            f" with {int((~torch.isfinite(move)).sum())} that are not finite"
        )
    return move
