"""Codecs in a round, on the server: its own messages, and those of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsweep.client.coding import decoded_reply, decoded_sum, sent_down
from fedsweep.client.messages import Reply
from fedsweep.components.base import Published
from fedsweep.engine.cost import CostModel, Made, Missed, messages_after
from fedsweep.engine.state import RunState
from fedsweep.records import SyncPoint
from fedsweep.streams import Stream, stream
from fedsweep.submodel import SubModel


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerMessages:
    """The server's messages through a codec, and the newest one that each client has received.

    Each new server model is sent as one encoded move from the one before. A client that starts from the server's model
    downloads every message since the last one that it has; the initial model, version 0, follows from the seed.

    Attributes:
        version: Messages so far, the version of the server's model.
        last_models: Clients that have taken a model, ascending, and the version that each took last [2, K], int64;
            None: nobody has.
        made: The codecs of the messages so far.
        own_codec: Number of the codec of the round's own messages.
        num_codecs: How many codecs there are.

    Source: Sattler et al. (2019), Robust and communication-efficient federated learning from non-iid data: clients that
        missed rounds download the sum of what they missed, or the whole model where that is less.
    """

    version: int
    last_models: Tensor | None = None
    made: Made = ()
    own_codec: int = 0
    num_codecs: int = 1

    @classmethod
    def of(cls, state: RunState, costs: CostModel) -> ServerMessages:
        """Return them before a run's next round, which has such costs."""
        last, made = state.last_models, state.made
        return cls(
            version=state.version, last_models=last, made=made, own_codec=costs.own_down, num_codecs=len(costs.downs)
        )

    def missed(self, client: int) -> Missed:
        """Return messages since the model that a client took last."""
        return messages_after(self.made, self._last([client]).get(client, 0), self.num_codecs)

    def download(self, client: int) -> Missed:
        """Return what a client is sent as the round begins: what it missed, or one message of the round's own."""
        return _at_least_one(self.missed(client))

    def downloads(self, points: Sequence[SyncPoint], lost: Iterable[int] = ()) -> dict[int, tuple[Missed, ...]]:
        """Return the messages of each of a round's downloads, in their order by client, at least 1 each.

        Args:
            points: The round's sync points, without clients that drop out.
            lost: These clients, which download once, as the round begins.
        """
        begun, _, _ = self._played(points)
        sent = {client: tuple(missed) for client, missed in begun.items()}
        return sent | {client: (self.download(client),) for client in lost}

    def after(self, points: Sequence[SyncPoint]) -> dict[str, Any]:
        """Return the run state's fields ``last_models`` and ``made`` after a round with these points.

        Clients that dropped out are in none of them: they forget what they downloaded.
        """
        _, last, made = self._played(points)
        if not last:
            return {"last_models": self.last_models, "made": made}
        news = torch.tensor(sorted(last.items()), dtype=torch.int64).T.contiguous()
        if self.last_models is not None:
            others = self.last_models[:, ~torch.isin(self.last_models[0], news[0])]
            news = torch.cat([others, news], dim=1)
            news = news[:, news[0].argsort()].contiguous()
        return {"last_models": news, "made": made}

    def _last(self, clients: Sequence[int]) -> dict[int, int]:
        """Return the versions that clients took last, of those that have."""
        if self.last_models is None or not clients:
            return {}
        clients_K = torch.tensor(clients, dtype=torch.int64)
        places = torch.searchsorted(self.last_models[0], clients_K).clamp(max=self.last_models.shape[1] - 1)
        there = self.last_models[0, places] == clients_K
        return dict(zip(clients_K[there].tolist(), self.last_models[1, places[there]].tolist(), strict=True))

    def _played(self, points: Sequence[SyncPoint]) -> tuple[dict[int, list[Missed]], dict[int, int], Made]:
        """Return each download's messages by client, the versions taken last by these clients, and all codecs."""
        version, made, downloads = self.version, self.made, dict[int, list[Missed]]()
        clients = sorted({job.client for point in points for job in point.start if not job.resume})
        last = dict.fromkeys(clients, 0) | self._last(clients)
        for point in points:
            for job in point.start:
                if not job.resume:
                    missed = _at_least_one(messages_after(made, last[job.client], self.num_codecs))
                    downloads.setdefault(job.client, []).append(missed)
                    last[job.client] = version
            if versions_made([point]):
                version += 1
                made = with_message(made, self.own_codec)
        return downloads, last, made


def _at_least_one(missed: Missed) -> Missed:
    return missed if any(missed) else ()


def with_message(made: Made, codec: int) -> Made:
    """Return the codecs of the server's messages with one more by this codec."""
    upto = made[-1][0] + 1 if made else 1
    return (*(made[:-1] if made and made[-1][1] == codec else made), (upto, codec))


def versions_made(points: Iterable[SyncPoint]) -> int:
    """Return how many models the server makes in a round."""
    return sum(bool(point.attend) and not point.discard for point in points)


class RoundCodecs:
    """The codecs of a round.

    Args:
        costs: Knows the codecs and the model's layout.
        seed: The run's.
        state: The run's state before the round.

    Attributes:
        down_encodes: The server's messages go through a codec.
        up_sums: The mean of clients' messages is decoded, not each of them.
        residual: Of error feedback: what the server's messages have left out so far [P]; None: nothing.
        sent_contents: See ``RunState``.
    """

    def __init__(self, costs: CostModel, seed: int, state: RunState) -> None:
        self._up, self._down, self._full = costs.codecs["up"], costs.codecs["down"], costs.layout
        self.down_encodes, self.up_sums, self._number = self._down.encodes, self._up.decodes_sums, costs.own_down
        self._stream: Callable[[str, int], Stream] = lambda purpose, position: stream(
            seed, purpose, state.round + 1, position=position
        )
        self.residual, self.sent_contents = state.left, dict(state.sent_contents)

    def sent_model(self, target: Tensor, before: Tensor, position: int) -> Tensor:
        """Return the server's next model [V] as all clients have it: from now on it is the server's, too.

        Args:
            target: What the next model would be [V].
            before: What all clients have [V].
            position: The sync point's number within the round.
        """
        source = self._stream("codec down", position)
        vector, self.residual = sent_down(
            self._down, self._full, target=target, before=before, residual=self.residual, stream=source
        )
        return vector

    def sent(self, contents: Mapping[str, Published], position: int) -> dict[str, Published]:
        """Return what is published as clients have it: of what has the params' form the move is encoded."""
        return {
            name: self._as_sent(content, self._sent_content(name, content.value, position)) if content.like else content
            for name, content in contents.items()
        }

    @staticmethod
    def _as_sent(content: Published, sent: Mapping[str, Tensor]) -> Published:
        return replace(content, value=sent["sent"], made=tuple(map(tuple, sent["made"].tolist())))

    def _sent_content(self, name: str, value: Tensor, position: int) -> Mapping[str, Tensor]:
        last = self.sent_contents.get(name)
        if last is None or not torch.equal(last["given"], value):
            # What an earlier message left out is in the move since what clients have.
            before = torch.zeros_like(value) if last is None else last["sent"]
            made = with_message(() if last is None else tuple(map(tuple, last["made"].tolist())), self._number)
            if last is None and value.any():
                # Everybody has zeros: content that begins with them is announced, but not missed by who comes later.
                made = with_message(made, self._number)
            source = self._stream(f"codec down {name}", position)
            sent, _ = sent_down(self._down, self._full, target=value, before=before, residual=None, stream=source)
            last = self.sent_contents[name] = {"given": value, "sent": sent, "made": torch.tensor(made)}
        return last

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
