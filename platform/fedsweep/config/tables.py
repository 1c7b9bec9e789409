"""Tables of the builders that each key of a configuration can name, and of the parameters that the program adds.

The builders' modules are imported when a key is asked for, so that a command that only lists names does not wait for
the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsweep.plugins import find_plugin, resolve_reference

Builder = Callable[..., Any]


def attribute(path: str) -> Any:
    """Import and return the object that ``module:attribute`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A parameter that lists more of what its own key names: each entry a name, its parameters, and what stands beside.

    Attributes:
        parameter: The builder's; it gets the entries with what they name, built, under the selector.
        beside: Keys of an entry that are the listing builder's own; it checks them.
    """

    parameter: str
    beside: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Builders that a key of the configuration can name.

    Attributes:
        word: What is named, e.g. ``"partition"``; installed packages add to it by entry points ``fedsweep.<word>s``.
        builders: ``module:attribute`` of a mapping from name to builder, to an entry with a ``builder``, or of the only
            builder where there are no names.
        gives: ``module:attribute`` of what a builder gives.
        selector: The key beside the parameters that holds the name; None: there are no names.
        provided: Arguments that the program adds and a configuration can't set; a builder takes those that it names.
        null_is_default: Whether a parameter that is null keeps its default.
        positional: Whether builders take what the program adds by position, and have no parameters of their own.
        listings: By name, the builders that are made of several others.
        doors: By a name's beginning, ``module:attribute`` of a function that returns the builder of what follows.
    """

    word: str
    builders: str
    gives: str
    selector: str | None = "kind"
    provided: tuple[str, ...] = ()
    null_is_default: bool = False
    positional: bool = False
    listings: Mapping[str, Listing] = field(default_factory=dict)
    doors: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> Mapping[str, Any]:
        """Return the built-in names."""
        builders: Mapping[str, Any] = attribute(self.builders)
        return builders

    def builder(self, name: str) -> Builder:
        """Return the builder of that name.

        Args:
            name: A built-in one, ``package.module:callable``, an installed package's entry point, or what a door opens.

        Raises:
            ConfigError: There is none; the message gives the nearest name.
        """
        if self.selector is None:
            only: Builder = attribute(self.builders)
            return only
        builders = self.names()
        for beginning, door in self.doors.items():
            if name.startswith(beginning):
                opened: Builder = attribute(door)(name.removeprefix(beginning))
                return opened
        if name not in builders:
            return find_plugin(self.word, name, builders)
        entry = getattr(builders[name], "builder", builders[name])
        return resolve_reference(self.word, entry) if isinstance(entry, str) else entry


_CODECS = Table(
    word="codec",
    builders="fedsweep.components.compression.registry:CODECS",
    gives="fedsweep.components.codec:Codec",
    selector="name",
    provided=("shapes",),
)

TABLES: Mapping[str, Table] = {
    "scenario.task": Table(
        word="task",
        builders="fedsweep.tasks.kinds:TASKS",
        gives="fedsweep.tasks.base:Task",
        provided=("num_classes", "target_shape"),
    ),
    "scenario.partition": Table(
        word="partition",
        builders="fedsweep.world.partitions.registry:PARTITIONS",
        gives="fedsweep.world.partitions.base:Partition",
        listings={"mixture": Listing(parameter="of", beside=("share",))},
    ),
    "scenario.feature_skew": Table(
        word="skew",
        builders="fedsweep.world.feature_skew:FEATURE_SKEWS",
        gives="fedsweep.world.feature_skew:FeatureSkew",
        null_is_default=True,
    ),
    "scenario.drift": Table(
        word="drift",
        builders="fedsweep.world.drift:DRIFTS",
        gives="fedsweep.world.drift:Drift",
        provided=("num_classes", "num_rounds", "num_clients"),
        null_is_default=True,
    ),
    "scenario.availability": Table(
        word="availability",
        builders="fedsweep.world.availability:AVAILABILITIES",
        gives="fedsweep.world.availability:Availability",
        provided=("num_rounds", "num_clients"),
        null_is_default=True,
    ),
    "scenario.budgets": Table(
        word="budget",
        builders="fedsweep.world.budgets:BUDGETS",
        gives="fedsweep.world.budgets:Budget",
        null_is_default=True,
    ),
    "scenario.devices": Table(
        word="devices",
        builders="fedsweep.world.devices:build_devices",
        gives="fedsweep.world.devices:DeviceFleet",
        selector=None,
        provided=("num_clients", "run_seed"),
        null_is_default=True,
    ),
    "scenario.devices.stragglers": Table(
        word="straggler",
        builders="fedsweep.world.stragglers:STRAGGLERS",
        gives="fedsweep.world.stragglers:StragglerPolicy",
        null_is_default=True,
    ),
    "scenario.topology": Table(
        word="topology",
        builders="fedsweep.world.topology:TOPOLOGIES",
        gives="fedsweep.world.topology:Topology",
        provided=("num_clients", "run_seed"),
        null_is_default=True,
    ),
    "model": Table(
        word="model",
        builders="fedsweep.models.registry:MODELS",
        gives="torch.nn:Module",
        selector="name",
        provided=("input_shape", "num_classes", "outputs"),
        doors={"hf:": "fedsweep.models.huggingface:pretrained"},
    ),
    "model.adapter": Table(
        word="adapter",
        builders="fedsweep.models.adapters:ADAPTERS",
        gives="fedsweep.models.adapters:Adapter",
    ),
    "method": Table(
        word="method",
        builders="fedsweep.algorithms.registry:METHODS",
        gives="fedsweep.method:FederatedMethod",
        selector="name",
    ),
    "communication.up": _CODECS,
    "communication.down": _CODECS,
    "planner": Table(
        word="planner",
        builders="fedsweep.components.spending:PLANNERS",
        gives="fedsweep.components.spending:SpendingPlanner",
        selector="name",
    ),
    "training.schedule": Table(
        word="schedule",
        builders="fedsweep.experiment.schedules:SCHEDULES",
        gives="collections.abc:Callable",
        provided=("rate", "num_rounds"),
    ),
    "scenario.transform": Table(
        word="transform",
        builders="fedsweep.world.transforms:TRANSFORMS",
        gives="fedsweep.world.transforms:Transform",
        positional=True,
    ),
    "evaluation.metrics": Table(
        word="metric",
        builders="fedsweep.components.metrics:METRICS",
        gives="builtins:object",
        selector="name",
        positional=True,
    ),
}
