"""Codecs in a round, on the server: its own messages, and those of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsweep.client.coding import decoded_reply, decoded_sum, sent_down
from fedsweep.client.messages import Reply
from fedsweep.components.base import Published
from fedsweep.engine.cost import CostModel
from fedsweep.engine.state import RunState
from fedsweep.streams import Stream, stream
from fedsweep.submodel import SubModel


class RoundCodecs:
    """The codecs of a round.

    Args:
        costs: Knows the codecs and the model's layout.
        seed: The run's.
        state: The run before the round.

    Attributes:
        down_encodes: The server's messages go through a codec.
        up_sums: The mean of clients' messages is decoded, not each of them.
        left: What the server's messages have left out [P]; None: nothing.
        sent_contents: See ``RunState``.
    """

    def __init__(self, costs: CostModel, seed: int, state: RunState) -> None:
        self._up, self._down, self._full = costs.codecs["up"], costs.codecs["down"], costs.layout
        self.down_encodes, self.up_sums = self._down.encodes, self._up.decodes_sums
        self._stream: Callable[[str, int], Stream] = lambda purpose, position: stream(
            seed, purpose, state.round + 1, position=position
        )
        self.left, self.sent_contents = state.left, dict(state.sent_contents)

    def sent_model(self, target: Tensor, before: Tensor, position: int) -> Tensor:
        """Return the server's next model [V] as all clients have it: from now on it is the server's, too.

        Args:
            target: What the next model would be [V].
            before: What all clients have [V].
            position: The sync point's number within the round.
        """
        source = self._stream("codec down", position)
        vector, self.left = sent_down(
            self._down, self._full, target=target, before=before, left=self.left, stream=source
        )
        return vector

    def sent(self, contents: Mapping[str, Published], position: int) -> dict[str, Published]:
        """Return what is published as clients have it: of what has the params' form the move is encoded."""
        return {
            name: replace(content, value=self._sent_content(name, content.value, position)) if content.like else content
            for name, content in contents.items()
        }

    def _sent_content(self, name: str, value: Tensor, position: int) -> Tensor:
        last = self.sent_contents.get(name)
        if last is None or not torch.equal(last["given"], value):
            # What an earlier message left out is in the move since what clients have.
            before = torch.zeros_like(value) if last is None else last["sent"]
            source = self._stream(f"codec down {name}", position)
            sent, _ = sent_down(self._down, self._full, target=value, before=before, left=None, stream=source)
            last = self.sent_contents[name] = {"given": value, "sent": sent}
        return last["sent"]

    def received(self, reply: Reply, submodel: SubModel, anchor: Tensor, move: Tensor | None = None) -> Reply:
        """Return a client's answer as the server has it; arguments as of :func:`~fedsweep.client.coding.decoded_reply`.

        Args:
            reply: With its message.
            submodel: The part of the model that it is of.
            anchor: The server's model that the client started from [V], which the server may have left behind since.
            move: Of its params; None: what its message says.
        """
        anchor = submodel.extract(anchor, self._full)
        return decoded_reply(self._up, reply, submodel, anchor=anchor, full=self._full, move=move)

    def received_sum(self, replies: Sequence[Reply], weights: Sequence[float]) -> Tensor:
        """Return the move that the mean of clients' messages says [P], see ``decoded_sum``."""
        return decoded_sum(self._up, replies, weights, self._full)
