"""The ledger: every value that travels, by client, direction and kind."""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.records import Payload, Traffic
from fedsweep.submodel import Direction
from fedsweep.world.topology import SERVER

# The kind of the one entry of a client that neither sends nor gets anything in a round.
NOTHING = "nothing"
_OF_MODELS = frozenset({"params", "buffers", "optimizer", "mask"})


class Size(NamedTuple):
    """The size of a part of a message.

    Attributes:
        values: Scalars; masks and index lists that are packed to bits are none.
        num_bytes: Its bytes.
    """

    values: int
    num_bytes: int


def whole_values(sizes: Mapping[str, int]) -> dict[str, Size]:
    """Return sizes of so many values of four bytes each, by kind."""
    return {kind: Size(values, BYTES_PER_VALUE * values) for kind, values in sizes.items()}


def payload_sizes(tensors: Payload, dtype: torch.dtype) -> dict[str, Size]:
    """Return tensors' sizes by name: booleans a bit each, packed; of narrow types their own bytes, of others four.

    A complex number is two.

    Args:
        tensors: By name.
        dtype: The model's, whose values are single-precision numbers, whatever an experiment computes with.
    """

    def width(tensor: Tensor) -> int:
        most = BYTES_PER_VALUE * (1 + tensor.is_complex())
        return most if tensor.dtype == dtype else min(tensor.element_size(), most)

    return {name: _size(tensor, width(tensor)) for name, tensor in tensors.items()}


def message_sizes(tensors: Payload, dtype: torch.dtype) -> dict[str, Size]:
    """Return sizes of a codec's message: as of payloads, but wide types have all of their bytes, since codecs pack.

    Args:
        tensors: The message.
        dtype: The model's.
    """
    return payload_sizes(tensors, dtype) | {
        name: _size(tensor, tensor.element_size())
        for name, tensor in tensors.items()
        if tensor.element_size() > BYTES_PER_VALUE and tensor.dtype != dtype
    }


def _size(tensor: Tensor, width: int) -> Size:
    number = tensor.numel()
    if tensor.dtype == torch.bool:
        return Size(0, -(-number // 8))
    return Size(number * max(1, width // BYTES_PER_VALUE), number * width)


@dataclass(frozen=True, kw_only=True)
class ClientTotals:
    """A client's work in a round.

    Attributes:
        steps: Local steps.
        syncs: Sync points that it attended.
        macs: Multiply-accumulates of all of its work.
    """

    steps: int = 0
    syncs: int = 0
    macs: int = 0


_IDLE = ClientTotals()


@dataclass(kw_only=True)
class Ledger:
    """All that was sent in a round.

    Attributes:
        values: Scalars by (client, direction, kind); kinds are ``"params"`` (through a codec ``"update/<tensor>"``),
            ``"buffers"``, ``"optimizer"`` and the names of payloads.
        sizes: Bytes by the same; masks and index lists of sub-models are of the kind ``"mask"``.
        links: Those of them that went to or came from another hub than the server, by the same and by that hub. An edge
            stands in a client's place where it talks with the server.
        dtype: The model's.
    """

    dtype: torch.dtype
    values: Counter[tuple[int, Direction, str]] = field(default_factory=Counter)
    sizes: Counter[tuple[int, Direction, str]] = field(default_factory=Counter)
    links: Counter[tuple[int, Direction, str, int]] = field(default_factory=Counter)

    def message(self, client: int, direction: Direction, parts: Mapping[str, Size], *, peer: int = SERVER) -> None:
        """Count a message by kind of content; the peer is the hub at its other end."""
        for kind, size in parts.items():
            if size.values:
                self.values[client, direction, kind] += size.values
            if size.num_bytes:
                self.sizes[client, direction, kind] += size.num_bytes
                if peer != SERVER:
                    self.links[client, direction, kind, peer] += size.num_bytes

    def payload(self, client: int, direction: Direction, tensors: Payload) -> None:
        """Count tensors that travel beside the model, each by its name as kind."""
        self.message(client, direction, payload_sizes(tensors, self.dtype))

    def total(self, direction: Direction) -> int:
        """Return scalars in one direction."""
        return sum(size for (_, which, _), size in self.values.items() if which == direction)

    def bytes(self, direction: Direction) -> int:
        """Return bytes in one direction."""
        return sum(size for (_, which, _), size in self.sizes.items() if which == direction)

    @property
    def total_bytes(self) -> int:
        """Bytes both ways."""
        return self.bytes("up") + self.bytes("down")

    def traffic(self, done: Mapping[int, ClientTotals]) -> Traffic:
        """Return all of it, by client, direction and kind, with what clients did.

        Who did something, but neither sent nor got anything, has an entry of no bytes.
        """
        sizes = Counter({(*key, SERVER): size for key, size in self.sizes.items()})
        for (client, direction, kind, peer), size in self.links.items():
            sizes[client, direction, kind, peer] += size
            sizes[client, direction, kind, SERVER] -= size
        # Sorted, since messages are charged in another order where a round folds: first all that go down.
        entries = sorted((key, size) for key, size in sizes.items() if size)
        seen = {client for (client, _, _, _), _ in entries}
        for client in sorted(done.keys() - seen):
            insort(entries, ((client, "up", NOTHING, SERVER), 0))
        clients = [client for (client, _, _, _), _ in entries]
        names = sorted({kind for (_, _, kind, _), _ in entries})
        places, totals = {name: place for place, name in enumerate(names)}, [done.get(k, _IDLE) for k in clients]
        return Traffic(
            clients=torch.tensor(clients, dtype=torch.int32),
            up=torch.tensor([direction == "up" for (_, direction, _, _), _ in entries], dtype=torch.bool),
            kinds=torch.tensor([places[kind] for (_, _, kind, _), _ in entries], dtype=torch.int16),
            num_bytes=torch.tensor([size for _, size in entries], dtype=torch.int64),
            steps=torch.tensor([total.steps for total in totals], dtype=torch.int32),
            names=tuple(names),
            peers=torch.tensor([peer for (_, _, _, peer), _ in entries], dtype=torch.int32) if self.links else None,
            syncs=torch.tensor([total.syncs for total in totals], dtype=torch.int32),
            macs=torch.tensor([total.macs for total in totals], dtype=torch.int64),
        )

    def payload_bytes(self) -> Counter[tuple[int, Direction]]:
        """Return bytes of all but models, masks and codecs' messages, by client and direction."""
        payloads: Counter[tuple[int, Direction]] = Counter()
        for (client, direction, kind), size in self.sizes.items():
            if kind not in _OF_MODELS and not kind.startswith("update/"):
                payloads[client, direction] += size
        return payloads

    def worth_by_client(self) -> dict[int, float]:
        """Return values of four bytes that clients' messages are worth, both ways; sub-models' masks are none."""
        sizes: Counter[int] = Counter()
        for (client, _, kind), size in self.sizes.items():
            sizes[client] += size if kind != "mask" else 0
        return {client: size / BYTES_PER_VALUE for client, size in sizes.items()}


class ContentHashes:
    """Names tensors by a hash of their content: what is sent again only once it is another."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, str]] = {}

    def of(self, value: Tensor) -> str:
        """Return a short name; a tensor named before is not read again, since content is never changed in place."""
        if id(value) not in self._known:
            content = value.detach().cpu().contiguous()
            # As bytes: numpy has no bfloat16.
            digest = hashlib.blake2b(content.reshape(-1).view(torch.uint8).numpy().data, digest_size=16)
            # The same bytes of another type or shape are another content.
            digest.update(f"{content.dtype} {tuple(content.shape)}".encode())
            self._known[id(value)] = (value, digest.hexdigest())  # held, so that no other tensor gets its id
        return self._known[id(value)][1]
