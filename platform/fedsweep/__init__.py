"""Federated-learning experiments: one method against one world, on a Ray cluster, swept with Ray Tune.

The names below are looked up when first used, so that importing the package costs next to nothing. They and those of
:mod:`fedsweep.components` are what programs and plug-ins import: they stay when modules move.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.api import Result, load, load_model, run
    from fedsweep.card import Card, Limit, with_card
    from fedsweep.driver.observers import Observer
    from fedsweep.errors import ConfigError, DataError, FedsweepError
    from fedsweep.method import FederatedMethod, merge
    from fedsweep.models.network import Network
    from fedsweep.models.unit_groups import unit_group
    from fedsweep.reproduce.reproduction import TableRequest
    from fedsweep.reproduce.task import reproduce_table
    from fedsweep.streams import Stream, stream
    from fedsweep.sweeps import sweep
    from fedsweep.world.data.record import Dataset
    from fedsweep.world.partition_base import Partition

__version__ = "0.1.0"
__all__ = [
    "Card",
    "ConfigError",
    "DataError",
    "Dataset",
    "FederatedMethod",
    "FedsweepError",
    "Limit",
    "Network",
    "Observer",
    "Partition",
    "Result",
    "Stream",
    "TableRequest",
    "__version__",
    "load",
    "load_model",
    "merge",
    "reproduce_table",
    "run",
    "stream",
    "sweep",
    "unit_group",
    "with_card",
]

_HOME = {
    "Card": "fedsweep.card",
    "ConfigError": "fedsweep.errors",
    "DataError": "fedsweep.errors",
    "Dataset": "fedsweep.world.data.record",
    "FederatedMethod": "fedsweep.method",
    "FedsweepError": "fedsweep.errors",
    "Limit": "fedsweep.card",
    "Network": "fedsweep.models.network",
    "Observer": "fedsweep.driver.observers",
    "Partition": "fedsweep.world.partition_base",
    "Result": "fedsweep.api",
    "Stream": "fedsweep.streams",
    "TableRequest": "fedsweep.reproduce.reproduction",
    "load": "fedsweep.api",
    "load_model": "fedsweep.api",
    "merge": "fedsweep.method",
    "reproduce_table": "fedsweep.reproduce.task",
    "run": "fedsweep.api",
    "stream": "fedsweep.streams",
    "sweep": "fedsweep.sweeps",
    "unit_group": "fedsweep.models.unit_groups",
    "with_card": "fedsweep.card",
}

# In a clone, algorithms/ lies beside platform/; with this, PYTHONPATH=platform is enough to find it.
_SOURCE_ROOT = Path(__file__).resolve().parent.parent
if _SOURCE_ROOT.name == "platform" and (_SOURCE_ROOT.parent / "algorithms" / "__init__.py").is_file():
    __path__.append(str(_SOURCE_ROOT.parent))


def __getattr__(name: str) -> object:
    """Imports an exported name's module when the name is first used.

    Raises:
        AttributeError: If the package exports no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The exported names, looked up or not."""
    return sorted({*globals(), *__all__})
