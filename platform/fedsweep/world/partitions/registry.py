"""Partitions of the training samples among the clients: the kinds by name, and mixtures of kinds.

A partition is a frozen record of its parameters; :meth:`Partition.split` is a pure function of the labels and a
stream. All kinds here give every sample to exactly one client and every client at least one sample.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsweep.errors import ConfigError, DataError, InvariantError
from fedsweep.parameters.ranges import Positive, check_value
from fedsweep.streams import Stream
from fedsweep.world.partitions.base import Partition, check_parts
from fedsweep.world.partitions.drawn import DrawnClients
from fedsweep.world.partitions.draws import Indices, cut
from fedsweep.world.partitions.flower import FlowerDatasets
from fedsweep.world.partitions.kinds import IID, BalancedDirichlet, Classes, Dirichlet, Quantity, Writer


@dataclass(frozen=True, kw_only=True)
class Mixture(Partition):
    """Each client holds a part by one kind and a part by another: s % similarity, for one.

    The samples are dealt at random into one pile per kind, in proportion to the shares, and each pile is split by its
    kind; client n holds the n-th part of every pile.

    Attributes:
        of: The kinds, each ``{share: S, kind: NAME, parameters}``; shares are > 0 and need not sum to 1.
    """

    source: ClassVar[str] = "Karimireddy et al. 2020 (SCAFFOLD, similarity), for IID and classes"
    of: tuple[dict[str, Any], ...]  # the catalog puts each entry's partition in place of its kind and parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.of:
            raise ConfigError("scenario.partition.of must name at least one kind, but is empty")
        for number, part in enumerate(self.of):
            check_value(f"scenario.partition.of[{number}].share", part["share"], Positive)
            if part["kind"].draws_clients:
                raise ConfigError(
                    f"scenario.partition.of[{number}]: this kind lets clients share samples, which parts"
                    " of a mixture can't; take it alone, or name another kind"
                )

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        shares = np.array([part["share"] for part in self.of], dtype=np.float64)
        order = stream.child("piles").numpy().permutation(len(labels))
        piles = [np.sort(pile) for pile in np.split(order, np.cumsum(cut(shares, len(labels)))[:-1])]
        splits = []
        for number, (part, pile) in enumerate(zip(self.of, piles, strict=True)):
            own, of_pile = stream.child("pile", number), None if writers is None else writers[pile]
            with _said_of(f"scenario.partition.of[{number}]", f"share {part['share']:g}: {len(pile)} samples"):
                parts = part["kind"].split(labels[pile], num_clients, own, num_classes=num_classes, writers=of_pile)
                check_parts(parts, num_samples=len(pile), num_clients=num_clients)
                splits.append(parts)
        return [
            np.sort(np.concatenate([pile[parts[client]] for pile, parts in zip(piles, splits, strict=True)]))
            for client in range(num_clients)
        ]


@contextlib.contextmanager
def _said_of(key: str, pile: str) -> Iterator[None]:
    """Have an error name the part of a mixture that it is about, and that part's keys."""
    try:
        yield
    except (ConfigError, DataError, InvariantError) as error:
        text = re.sub(r"scenario\.partition\.(?!of\[)", f"{key}.", str(error))
        raise type(error)(f"{key} ({pile}): {text}") from error


PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "classes": Classes,
    "dirichlet": Dirichlet,
    "dirichlet_balanced": BalancedDirichlet,
    "quantity": Quantity,
    "mixture": Mixture,
    "writer": Writer,
    "drawn": DrawnClients,
    "flwr": FlowerDatasets,
}
