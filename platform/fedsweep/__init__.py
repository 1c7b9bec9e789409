"""Federated-learning experiments: one method against one world, on a Ray cluster, swept with Ray Tune.

The names below are looked up when first used, so that importing the package costs next to nothing. They and those of
:mod:`fedsweep.components` are what programs and plug-ins import: they stay when modules move.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.api import compare, report, run, sweep
    from fedsweep.card import Card, Limit, with_card
    from fedsweep.driver.evaluation import Evaluated, evaluate
    from fedsweep.driver.observers import Observer
    from fedsweep.driver.saved_model import load_model
    from fedsweep.errors import (
        ConfigError,
        DataError,
        FedsweepError,
        InputError,
        InvariantError,
        ResourceError,
        RunError,
    )
    from fedsweep.method import FederatedMethod, MethodSettings, merge
    from fedsweep.models.network import Network
    from fedsweep.models.unit_groups import unit_group
    from fedsweep.reproduce.reproduction import TableRequest
    from fedsweep.reproduce.task import reproduce_table
    from fedsweep.streams import Stream, stream
    from fedsweep.study import Result, Results, Table, load
    from fedsweep.world.availability import Availability
    from fedsweep.world.budgets import Budget
    from fedsweep.world.data.record import Dataset
    from fedsweep.world.devices import DeviceFleet
    from fedsweep.world.drift import Drift
    from fedsweep.world.feature_skew import FeatureSkew
    from fedsweep.world.partitions.base import Partition
    from fedsweep.world.stragglers import StragglerPolicy
    from fedsweep.world.transforms import Transform

__version__ = "0.1.0"
__all__ = [
    "Availability",
    "Budget",
    "Card",
    "ConfigError",
    "DataError",
    "Dataset",
    "DeviceFleet",
    "Drift",
    "Evaluated",
    "FeatureSkew",
    "FederatedMethod",
    "FedsweepError",
    "InputError",
    "InvariantError",
    "Limit",
    "MethodSettings",
    "Network",
    "Observer",
    "Partition",
    "ResourceError",
    "Result",
    "Results",
    "RunError",
    "StragglerPolicy",
    "Stream",
    "Table",
    "TableRequest",
    "Transform",
    "__version__",
    "compare",
    "evaluate",
    "load",
    "load_model",
    "merge",
    "report",
    "reproduce",
    "reproduce_table",
    "run",
    "stream",
    "sweep",
    "unit_group",
    "with_card",
]

_HOME = {
    "Availability": "fedsweep.world.availability",
    "Budget": "fedsweep.world.budgets",
    "Card": "fedsweep.card",
    "ConfigError": "fedsweep.errors",
    "DataError": "fedsweep.errors",
    "Dataset": "fedsweep.world.data.record",
    "DeviceFleet": "fedsweep.world.devices",
    "Drift": "fedsweep.world.drift",
    "Evaluated": "fedsweep.driver.evaluation",
    "FeatureSkew": "fedsweep.world.feature_skew",
    "FederatedMethod": "fedsweep.method",
    "FedsweepError": "fedsweep.errors",
    "InputError": "fedsweep.errors",
    "InvariantError": "fedsweep.errors",
    "Limit": "fedsweep.card",
    "MethodSettings": "fedsweep.method",
    "Network": "fedsweep.models.network",
    "Observer": "fedsweep.driver.observers",
    "Partition": "fedsweep.world.partitions.base",
    "ResourceError": "fedsweep.errors",
    "Result": "fedsweep.study",
    "Results": "fedsweep.study",
    "RunError": "fedsweep.errors",
    "StragglerPolicy": "fedsweep.world.stragglers",
    "Stream": "fedsweep.streams",
    "Table": "fedsweep.study",
    "TableRequest": "fedsweep.reproduce.reproduction",
    "Transform": "fedsweep.world.transforms",
    "compare": "fedsweep.api",
    "evaluate": "fedsweep.driver.evaluation",
    "load": "fedsweep.study",
    "load_model": "fedsweep.driver.saved_model",
    "merge": "fedsweep.method",
    "report": "fedsweep.api",
    "reproduce_table": "fedsweep.reproduce.task",
    "run": "fedsweep.api",
    "stream": "fedsweep.streams",
    "sweep": "fedsweep.api",
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
    if name == "reproduce":
        return import_module("fedsweep.reproduce")  # the package itself can be called
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The exported names, looked up or not."""
    return sorted({*globals(), *__all__})
