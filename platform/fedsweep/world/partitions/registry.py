"""How the training samples fall to the clients: the kinds by name, and mixtures of kinds.

A partition is a frozen record of its parameters; :meth:`Partition.split` is a pure function of the labels and a
stream. All kinds here give every sample to exactly one client and every client at least one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fedsweep.errors import ConfigError
from fedsweep.plugins import call_builder, find_plugin
from fedsweep.streams import Stream
from fedsweep.world.partitions.base import Partition, check_positive
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
    of: tuple[dict[str, Any], ...]

    def __post_init__(self) -> None:
        if not self.of:
            raise ConfigError("scenario.partition.of must name at least one kind, but is empty")
        self._kinds()

    def split(
        self,
        labels: Indices,
        num_clients: int,
        stream: Stream,
        *,
        num_classes: int,
        writers: Indices | None = None,
    ) -> list[Indices]:
        shares = np.array([part["share"] for part in self.of], dtype=np.float64)
        order = stream.child("piles").numpy().permutation(len(labels))
        piles = [np.sort(pile) for pile in np.split(order, np.cumsum(cut(shares, len(labels)))[:-1])]
        held = [
            kind.split(
                labels[pile],
                num_clients,
                stream.child("pile", number),
                num_classes=num_classes,
                writers=None if writers is None else writers[pile],
            )
            for number, (kind, pile) in enumerate(zip(self._kinds(), piles, strict=True))
        ]
        return [
            np.sort(np.concatenate([pile[parts[client]] for pile, parts in zip(piles, held, strict=True)]))
            for client in range(num_clients)
        ]

    def _kinds(self) -> tuple[Partition, ...]:
        return tuple(_kind(number, spec) for number, spec in enumerate(self.of))


def _kind(number: int, spec: Mapping[str, Any]) -> Partition:
    where = f"of[{number}]"
    if missing := [key for key in ("share", "kind") if key not in spec]:
        raise ConfigError(f"scenario.partition.{where} must have share and kind, but {missing[0]} is missing")
    check_positive(f"{where}.share", spec["share"])
    name, parameters = spec["kind"], {key: value for key, value in spec.items() if key not in ("share", "kind")}
    builder = PARTITIONS[name] if name in PARTITIONS else find_plugin("partition", str(name), PARTITIONS)
    made: Partition = call_builder("partition", name, partial(builder, **parameters), gives=Partition)
    return made


PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "classes": Classes,
    "dirichlet": Dirichlet,
    "dirichlet_balanced": BalancedDirichlet,
    "quantity": Quantity,
    "mixture": Mixture,
    "writer": Writer,
    "flwr": FlowerDatasets,
}
