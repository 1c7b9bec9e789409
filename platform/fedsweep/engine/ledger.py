"""The ledger: every value that travels, by client, direction and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedsweep.trees import FlatLayout

Direction = Literal["up", "down"]

BYTES_PER_VALUE = 4


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

    def payload(self, client: int, direction: Direction, arrays: Mapping[str, np.ndarray]) -> None:
        """Named extra arrays; boolean ones are counted as packed bytes, one bit each."""
        for name, array in arrays.items():
            if array.dtype == np.bool_:
                self.packed_bytes[direction] += -(-array.size // 8)
            else:
                self.values[client, direction, name] += int(array.size)

    def packed(self, direction: Direction, size: int) -> None:
        """Bytes of masks or index lists."""
        self.packed_bytes[direction] += size

    def total(self, direction: Direction) -> int:
        """Scalars in one direction."""
        return sum(size for (_, way, _), size in self.values.items() if way == direction)

    def bytes(self, direction: Direction) -> int:
        """Bytes in one direction: 4 per scalar, masks and indices as packed."""
        return BYTES_PER_VALUE * self.total(direction) + self.packed_bytes[direction]

    def client_values(self, client: int) -> int:
        """Scalars of one client, both ways."""
        return sum(size for (who, _, _), size in self.values.items() if who == client)


def sizes(layout: FlatLayout) -> Mapping[str, int]:
    """Scalars of a message that carries a model, by kind."""
    return {"params": layout.num_params, "buffers": layout.num_buffers, "optimizer": layout.num_riders}
