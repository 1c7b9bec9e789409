"""The ledger: every value that travels, by client, direction and kind."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.records import Payload
from fedsweep.submodel import Direction


@dataclass(kw_only=True)
class Ledger:
    """What was sent in a round.

    Attributes:
        values: Scalars by (client, direction, kind); kinds are ``"params"``, ``"buffers"``, ``"optimizer"`` and the
            names of payloads.
        packed_bytes: Bytes of masks and index lists by direction; they are not values.
    """

    values: Counter[tuple[int, Direction, str]] = field(default_factory=Counter)
    packed_bytes: Counter[Direction] = field(default_factory=Counter)

    def model(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """A message that carries a model: scalars by kind."""
        for kind, size in sizes.items():
            if size:
                self.values[client, direction, kind] += size

    def payload(self, client: int, direction: Direction, tensors: Payload) -> None:
        """Named extra tensors; boolean ones are counted as packed bytes, one bit each."""
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bool:
                self.packed_bytes[direction] += -(-tensor.numel() // 8)
            else:
                self.values[client, direction, name] += tensor.numel()

    def packed(self, direction: Direction, size: int) -> None:
        """Bytes of masks or index lists."""
        self.packed_bytes[direction] += size

    def total(self, direction: Direction) -> int:
        """Scalars in one direction."""
        return sum(size for (_, way, _), size in self.values.items() if way == direction)

    def bytes(self, direction: Direction) -> int:
        """Bytes in one direction: 4 per scalar, masks and indices as packed."""
        return BYTES_PER_VALUE * self.total(direction) + self.packed_bytes[direction]

    @property
    def total_bytes(self) -> int:
        """Bytes both ways."""
        return self.bytes("up") + self.bytes("down")

    def client_values(self, client: int) -> int:
        """Scalars of one client, both ways."""
        return sum(size for (who, _, _), size in self.values.items() if who == client)


class Versions:
    """Names tensors by their content: what is sent again only once it is another."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, str]] = {}

    def of(self, value: Tensor) -> str:
        """A short name; a tensor that was named before is not read again, since content is never changed in place."""
        if id(value) not in self._known:
            content = value.detach().cpu().contiguous()
            digest = hashlib.blake2b(content.numpy().tobytes(), digest_size=16)
            digest.update(f"{content.dtype} {tuple(content.shape)}".encode())
            self._known[id(value)] = (value, digest.hexdigest())  # held, so that no other tensor gets its id
        return self._known[id(value)][1]
