"""Everything that a configuration can name: looked up, its parameters checked against its builder, and built.

Each key that names something has a :class:`Table`: where the builders with names of their own stand, and what the
program adds to a builder's parameters. The tables' modules are imported when a key is asked for, so that a command
that only lists names does not wait for the rest.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fedsweep.card import Card, card_of
from fedsweep.config.base import Component
from fedsweep.config.load import with_sections
from fedsweep.config.schema import Config
from fedsweep.config.signatures import bind
from fedsweep.errors import ConfigError
from fedsweep.plugins import call_builder, find_plugin, resolve_reference

if TYPE_CHECKING:
    from fedsweep.method import FederatedMethod

Builder = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a key of the configuration can name.

    Attributes:
        word: What is named, e.g. ``"partition"``; installed packages add to it by entry points ``fedsweep.<word>s``.
        builders: ``module:attribute`` of a mapping from name to builder, to an entry with a ``builder``, or of the only
            builder where there are no names.
        gives: ``module:attribute`` of what a builder gives.
        selector: The key beside the parameters that holds the name; None: there are no names.
        provided: Arguments that the program adds and a configuration can't set; a builder takes those that it names.
        null_is_default: Whether a parameter that is null keeps its default.
        positional: Whether builders take what the program adds by position, and have no parameters of their own.
    """

    word: str
    builders: str
    gives: str
    selector: str | None = "kind"
    provided: tuple[str, ...] = ()
    null_is_default: bool = False
    positional: bool = False

    def names(self) -> Mapping[str, Any]:
        """The built-in names."""
        found: Mapping[str, Any] = _attribute(self.builders)
        return found

    def builder(self, name: str) -> Builder:
        """The builder of that name.

        Args:
            name: A built-in name, ``package.module:callable``, or an installed package's entry point.

        Raises:
            ConfigError: There is none; the message gives the nearest name.
        """
        if self.selector is None:
            only: Builder = _attribute(self.builders)
            return only
        known = self.names()
        if name not in known:
            return find_plugin(self.word, name, known)
        found = getattr(known[name], "builder", known[name])
        return resolve_reference(self.word, found) if isinstance(found, str) else found


TABLES: Mapping[str, Table] = {
    "scenario.partition": Table(
        word="partition",
        builders="fedsweep.world.partitions.registry:PARTITIONS",
        gives="fedsweep.world.partitions.base:Partition",
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
    "model": Table(
        word="model",
        builders="fedsweep.models.registry:MODELS",
        gives="torch.nn:Module",
        selector="name",
        provided=("input_shape", "num_classes"),
    ),
    "method": Table(
        word="method",
        builders="fedsweep.algorithms.registry:METHODS",
        gives="fedsweep.method:FederatedMethod",
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
}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A builder with its parameters, checked.

    Attributes:
        key: The configuration's.
        name: What is named there; empty where there are no names.
        builder: Its builder.
        parameters: Every parameter that a configuration can set, defaults filled in.
    """

    key: str
    name: str
    builder: Builder
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """As the configuration has it."""
        selector = TABLES[self.key].selector
        return {**({} if selector is None else {selector: self.name}), **self.parameters}

    def build(self, *args: Any, **provided: Any) -> Any:
        """What the builder gives.

        Args:
            args: Handed on as they are.
            provided: What the program adds; a builder gets what it names.

        Raises:
            ConfigError: The builder refuses a value, fails, or gives something else.
        """
        table = TABLES[self.key]
        taken = inspect.signature(self.builder).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        given = {name: value for name, value in provided.items() if takes_any or name in taken}
        call = partial(self.builder, *args, **self.parameters, **given)
        return call_builder(table.word, self.name, call, gives=_attribute(table.gives))


def bind_spec(key: str, spec: Mapping[str, Any]) -> Bound:
    """What a mapping names, with every parameter checked.

    Args:
        key: One of :data:`TABLES`.
        spec: ``{name or kind: ..., parameters}``.

    Raises:
        ConfigError: The name or a parameter is unknown, or a value is of the wrong type.
    """
    table = TABLES[key]
    name = "" if table.selector is None else spec[table.selector]
    try:
        builder = table.builder(name)
    except ConfigError as error:
        raise ConfigError(f"{key if table.positional else f'{key}.{table.selector}'}: {error}") from error
    if table.positional:
        return Bound(key=key, name=name, builder=builder)
    given = {k: v for k, v in spec.items() if k != table.selector and not (table.null_is_default and v is None)}
    beside = [other.rsplit(".", 1)[1] for other in TABLES if other.startswith(f"{key}.")]
    parameters = bind(key, name, builder, given, provided=table.provided, beside=beside)
    return Bound(key=key, name=name, builder=builder, parameters=parameters)


def bound(config: Config, key: str) -> Any:
    """What a key of a configuration names: bound once, however often it is asked for.

    Args:
        config: A loaded configuration.
        key: One of :data:`TABLES`.

    Returns:
        A :class:`Bound`; for methods that are merged, a tuple of them; None where the key is null.

    Raises:
        ConfigError: The name or a parameter is unknown, or a value is of the wrong type.
    """
    if key not in config.bound:
        spec = _section(config, key)
        if spec is None:
            config.bound[key] = None
        elif "merge" in spec:
            config.bound[key] = tuple(bind_spec(key, part) for part in spec["merge"])
        else:
            config.bound[key] = bind_spec(key, spec)
    return config.bound[key]


def resolve(config: Config) -> Config:
    """The configuration with every parameter of what it names; what a run keeps and repeats.

    Args:
        config: What :func:`~fedsweep.config.load_config` gave.

    Raises:
        ConfigError: A name or a parameter is unknown, or a value is of the wrong type.
        DataError: The file of the model's initial values can't be read.
    """
    # A schedule and a transform have no parameters beside those that the schema knows.
    known = [key for key, table in TABLES.items() if table.word not in ("schedule", "transform")]
    found = {key: bound(config, key) for key in known}
    changes = {
        key: {"merge": [part.spec() for part in item]} if isinstance(item, tuple) else item.spec()
        for key, item in found.items()
        if item is not None
    }
    changes["model"] |= _initial(config)
    return with_sections(config, changes)


def _initial(config: Config) -> dict[str, str]:
    """Where the model's initial values come from, and which file that is."""
    given = config.model.init_from
    if given is None:
        return {}
    from fedsweep.models.initial import weights_file, weights_sha256

    if config.model.init_sha256 is not None:
        return {"init_from": given, "init_sha256": config.model.init_sha256}
    file = weights_file(given)
    return {"init_from": str(file), "init_sha256": weights_sha256(file)}


def build_method(spec: Mapping[str, Any] | Config) -> FederatedMethod:
    """The method that the section ``method`` describes.

    Args:
        spec: ``{name: ..., parameters}``, ``{merge: [{name: ..., parameters}, ...]}``, or a whole configuration.

    Raises:
        ConfigError: A name, a parameter or a value is wrong, or methods can't be merged.
    """
    from fedsweep.method import merge

    found = bound(spec if isinstance(spec, Config) else Config(method=dict(spec)), "method")
    method: FederatedMethod = merge(*(part.build() for part in found)) if isinstance(found, tuple) else found.build()
    return method


def method_cards(config: Config) -> tuple[tuple[Card, Mapping[str, Any]], ...]:
    """The cards of a loaded configuration's methods, each with the method's parameters; those that have one."""
    found = bound(config, "method")
    parts = found if isinstance(found, tuple) else (found,)
    cards = ((card_of(part.builder), part.parameters) for part in parts)
    return tuple((card, parameters) for card, parameters in cards if card is not None)


def method_names() -> tuple[str, ...]:
    """The built-in methods' names and those of installed packages (entry points ``fedsweep.methods``), sorted."""
    installed = (point.name for point in entry_points(group="fedsweep.methods"))
    return tuple(sorted({*TABLES["method"].names(), *installed}))


def method_title(name: str) -> str:
    """What a method's paper calls it; one's own methods have the name that they are called by."""
    return str(getattr(TABLES["method"].names().get(name), "title", name))


def method_titles() -> tuple[str, ...]:
    """What the built-in methods' papers call them, in the registry's order."""
    return tuple(str(entry.title) for entry in TABLES["method"].names().values())


def merged_title(names: Sequence[str]) -> str:
    """What one or more methods that are merged are called together."""
    for entry in TABLES["method"].names().values():
        if entry.merges and sorted(entry.merges) == sorted(names):
            return str(entry.title)
    return "+".join(map(method_title, names))


def is_method(name: str) -> bool:
    """Whether there is a method of that name; ``package.module:callable`` is taken on trust."""
    return ":" in name or name in TABLES["method"].names() or name in method_names()


def method_builder(name: str) -> Callable[..., FederatedMethod]:
    """The function that builds the method of that name.

    Raises:
        ConfigError: There is no such method; the message names the nearest one.
    """
    return TABLES["method"].builder(name)


def _section(config: Config, key: str) -> Mapping[str, Any] | None:
    """The mapping that stands under a key."""
    place: Any = config
    for part in key.split("."):
        place = None if place is None else getattr(place, part)
    if place is None or isinstance(place, dict):
        return place
    if isinstance(place, str):
        return {"kind": place}
    selector = TABLES[key].selector
    below = place.parameters if isinstance(place, Component) else place.model_dump(exclude={"kind"})
    return {**({} if selector is None else {selector: getattr(place, selector)}), **below}


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
