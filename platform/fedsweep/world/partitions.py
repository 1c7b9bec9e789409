"""How the training samples fall to the clients: the kinds by name, and how a configuration becomes one.

A partition is a frozen record of its parameters; :meth:`Partition.split` is a pure function of the labels and a
stream. All kinds here give every sample to exactly one client and every client at least one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from fedsweep.errors import ConfigError, FedsweepError, unknown_name
from fedsweep.plugins import find_plugin
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
    "build_partition",
    "check_parts",
]

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "classes": Classes,
    "dirichlet": Dirichlet,
    "dirichlet_balanced": BalancedDirichlet,
    "writer": Writer,
}


def partition_builder(kind: str) -> Callable[..., Any]:
    """What builds the partition of that kind; its signature is the parameters.

    Raises:
        ConfigError: There is no such kind; the message names the nearest one.
    """
    return PARTITIONS[kind] if kind in PARTITIONS else find_plugin("partition", kind, PARTITIONS)


def build_partition(spec: Mapping[str, Any]) -> Partition:
    """The partition that a configuration describes.

    Args:
        spec: ``kind`` (a key of :data:`PARTITIONS`, ``package.module:callable``, or an entry point of
            ``fedsweep.partitions``), and the kind's parameters beside it.

    Raises:
        ConfigError: the kind or a parameter is unknown, missing, or out of range.
    """
    parameters = dict(spec)
    kind = parameters.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"scenario.partition needs a kind, one of {', '.join(PARTITIONS)}, but has kind={kind!r}")
    if kind not in PARTITIONS:
        return _build_plugin(kind, find_plugin("partition", kind, PARTITIONS), parameters)
    partition_type = PARTITIONS[kind]
    known = {field.name: field for field in fields(partition_type)}
    for name in parameters:
        if name not in known:
            if not known:
                raise ConfigError(f"scenario.partition of kind {kind!r} has no parameters, but {name!r} is given")
            raise ConfigError(unknown_name(f"parameter of partition {kind!r}", str(name), known))
    for name, field in known.items():
        if field.default is MISSING and name not in parameters:
            raise ConfigError(f"scenario.partition of kind {kind!r} needs {name}, which is not given")
    return partition_type(**parameters)


def _build_plugin(kind: str, factory: Callable[..., Any], parameters: dict[str, Any]) -> Partition:
    try:
        partition = factory(**parameters)
    except FedsweepError:
        raise
    except Exception as error:
        raise ConfigError(f"partition {kind!r} cannot be built ({type(error).__name__}: {error})") from error
    if not isinstance(partition, Partition):
        raise ConfigError(
            f"partition {kind!r} must give a fedsweep.world.partitions.Partition, but gives a "
            f"{type(partition).__name__}"
        )
    return partition
