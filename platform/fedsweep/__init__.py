"""Federated-learning experiments: one method against one world, on a Ray cluster, swept with Ray Tune.

The names below are looked up when first used, so that importing the package costs next to nothing. They, those of
:mod:`fedsweep.components` and those of :mod:`fedsweep.testing` are what programs and plug-ins import: they stay when
modules move.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.api import TableStyle, compare, prepare, report, resume, run, sweep
    from fedsweep.card import Card, Limit, card_of, with_card
    from fedsweep.components.codec import Codec
    from fedsweep.components.metrics import metric
    from fedsweep.components.spending import SpendingPlanner
    from fedsweep.driver.observers import Observer
    from fedsweep.errors import (
        ConfigError,
        DataError,
        FedsweepError,
        InputError,
        InvariantError,
        ResourceError,
        RunError,
    )
    from fedsweep.finished.evaluated import Evaluated
    from fedsweep.finished.evaluation import evaluate
    from fedsweep.finished.saved_model import load_model
    from fedsweep.method import FederatedMethod, MethodSettings, merge
    from fedsweep.models.adapters import Adapter
    from fedsweep.models.attention import SelfAttention
    from fedsweep.models.network import Network
    from fedsweep.models.unit_groups import unit_group
    from fedsweep.reproduce.reproduction import TableRequest
    from fedsweep.reproduce.task import reproduce_table
    from fedsweep.streams import Stream, stream
    from fedsweep.study import Result, Results, Table, load
    from fedsweep.tasks.base import Task
    from fedsweep.tasks.declaration import Declaration
    from fedsweep.world.availability import Availability
    from fedsweep.world.budgets import Budget
    from fedsweep.world.data.record import Dataset, Samples
    from fedsweep.world.devices import DeviceFleet
    from fedsweep.world.drift import Drift
    from fedsweep.world.feature_skew import FeatureSkew
    from fedsweep.world.partitions.base import Partition
    from fedsweep.world.stragglers import StragglerPolicy
    from fedsweep.world.topology import Topology
    from fedsweep.world.transforms import Transform

__version__ = "0.1.0"
__all__ = [
    "Adapter",
    "Availability",
    "Budget",
    "Card",
    "Codec",
    "ConfigError",
    "DataError",
    "Dataset",
    "Declaration",
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
    "Samples",
    "SelfAttention",
    "SpendingPlanner",
    "StragglerPolicy",
    "Stream",
    "Table",
    "TableRequest",
    "TableStyle",
    "Task",
    "Topology",
    "Transform",
    "__version__",
    "card_of",
    "compare",
    "evaluate",
    "load",
    "load_model",
    "merge",
    "metric",
    "prepare",
    "report",
    "reproduce",
    "reproduce_table",
    "resume",
    "run",
    "stream",
    "sweep",
    "unit_group",
    "with_card",
]

_HOME = {
    name: module
    for module, names in {
        "fedsweep.api": ("TableStyle", "compare", "prepare", "report", "resume", "run", "sweep"),
        "fedsweep.card": ("Card", "Limit", "card_of", "with_card"),
        "fedsweep.finished.evaluated": ("Evaluated",),
        "fedsweep.finished.evaluation": ("evaluate",),
        "fedsweep.driver.observers": ("Observer",),
        "fedsweep.finished.saved_model": ("load_model",),
        "fedsweep.errors": (
            "ConfigError",
            "DataError",
            "FedsweepError",
            "InputError",
            "InvariantError",
            "ResourceError",
            "RunError",
        ),
        "fedsweep.method": ("FederatedMethod", "MethodSettings", "merge"),
        "fedsweep.components.metrics": ("metric",),
        "fedsweep.models.adapters": ("Adapter",),
        "fedsweep.models.attention": ("SelfAttention",),
        "fedsweep.models.network": ("Network",),
        "fedsweep.components.codec": ("Codec",),
        "fedsweep.components.spending": ("SpendingPlanner",),
        "fedsweep.models.unit_groups": ("unit_group",),
        "fedsweep.reproduce.reproduction": ("TableRequest",),
        "fedsweep.reproduce.task": ("reproduce_table",),
        "fedsweep.streams": ("Stream", "stream"),
        "fedsweep.study": ("Result", "Results", "Table", "load"),
        "fedsweep.world.availability": ("Availability",),
        "fedsweep.world.budgets": ("Budget",),
        "fedsweep.tasks.base": ("Task",),
        "fedsweep.tasks.declaration": ("Declaration",),
        "fedsweep.world.data.record": ("Dataset", "Samples"),
        "fedsweep.world.devices": ("DeviceFleet",),
        "fedsweep.world.drift": ("Drift",),
        "fedsweep.world.feature_skew": ("FeatureSkew",),
        "fedsweep.world.partitions.base": ("Partition",),
        "fedsweep.world.stragglers": ("StragglerPolicy",),
        "fedsweep.world.topology": ("Topology",),
        "fedsweep.world.transforms": ("Transform",),
    }.items()
    for name in names
}

# In a clone, algorithms/ lies beside platform/; with this, PYTHONPATH=platform is enough to find it.
_SOURCE_ROOT = Path(__file__).resolve().parent.parent
if _SOURCE_ROOT.name == "platform" and (_SOURCE_ROOT.parent / "algorithms" / "__init__.py").is_file():
    __path__.append(str(_SOURCE_ROOT.parent))


def __getattr__(name: str) -> object:
    """Import an exported name's module when the name is first used.

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
    """Return the exported names, looked up or not."""
    return sorted({*globals(), *__all__})
