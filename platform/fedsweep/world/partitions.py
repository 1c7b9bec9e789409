"""How the training samples fall to the clients: the kinds by name.

A partition is a frozen record of its parameters; :meth:`Partition.split` is a pure function of the labels and a
stream. All kinds here give every sample to exactly one client and every client at least one sample.
"""

from __future__ import annotations

from fedsweep.world.partition_base import Partition, check_parts
from fedsweep.world.partition_kinds import IID, BalancedDirichlet, Classes, Dirichlet, Writer

__all__ = [
    "IID",
    "PARTITIONS",
    "BalancedDirichlet",
    "Classes",
    "Dirichlet",
    "Partition",
    "Writer",
    "check_parts",
]

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "classes": Classes,
    "dirichlet": Dirichlet,
    "dirichlet_balanced": BalancedDirichlet,
    "writer": Writer,
}
