"""Everything that a configuration can name: looked up, its parameters checked against its builder, and built.

What a key can name is in its :class:`~fedsweep.config.tables.Table`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fedsweep.card import Card, card_of
from fedsweep.components.metrics import TABLE_COLUMNS, Metric, column_of
from fedsweep.config.explain import shown
from fedsweep.config.load import with_sections
from fedsweep.config.schema import Config
from fedsweep.config.signatures import bind, takes_any
from fedsweep.config.tables import TABLES, Builder, Listing, attribute
from fedsweep.errors import ConfigError
from fedsweep.parameters.signature import signature_of
from fedsweep.plugins import call_builder
from fedsweep.records import RoundRecord
from fedsweep.tasks.declaration import Declaration

if TYPE_CHECKING:
    from fedsweep.method import FederatedMethod

# A column, a metric of MLflow's and a word of the command line.
_MEASURE = re.compile(r"[A-Za-z_]\w{0,59}")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A builder with its parameters, checked.

    Attributes:
        key: The configuration's.
        name: What is named there; empty where there are no names.
        builder: Its builder.
        parameters: Every parameter that a configuration can set, defaults filled in.
        listed: What the entries of a :class:`~fedsweep.config.tables.Listing` name.
    """

    key: str
    name: str
    builder: Builder
    parameters: Mapping[str, Any] = field(default_factory=dict)
    listed: tuple[Bound, ...] = ()

    def spec(self) -> dict[str, Any]:
        """Return the mapping as the configuration has it."""
        selector = TABLES[self.key].selector
        return {**({} if selector is None else {selector: self.name}), **self.parameters}

    def build(self, *args: Any, **provided: Any) -> Any:
        """Call the builder, and return the object that it makes.

        Args:
            args: Handed on as they are.
            provided: What the program adds; a builder gets what it names.

        Raises:
            ConfigError: The builder refuses a value, fails, or gives something else.
        """
        table = TABLES[self.key]
        takes_all, taken = takes_any(self.builder), signature_of(self.builder)
        program_arguments = {name: value for name, value in provided.items() if takes_all or name in taken}
        call = partial(self.builder, *args, **{**self.parameters, **self._built_list(provided)}, **program_arguments)
        return call_builder(table.word, self.name, call, gives=attribute(table.gives))

    def _built_list(self, provided: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameter that lists others, with what its entries name in place of their names."""
        table = TABLES[self.key]
        if not self.listed or table.selector is None:
            return {}
        listing, entries = table.listings[self.name], []
        for number, part in enumerate(self.listed):
            with _said_of_entry(self.key, f"{listing.parameter}[{number}]"):
                made = part.build(**provided)
            own = {key: self.parameters[listing.parameter][number][key] for key in listing.beside}
            entries.append({**own, table.selector: made})
        return {listing.parameter: tuple(entries)}


def bind_spec(key: str, spec: Mapping[str, Any], *, place: str | None = None) -> Bound:
    """Bind the builder that a mapping names, with every parameter checked.

    Args:
        key: One of :data:`~fedsweep.config.tables.TABLES`.
        spec: ``{name or kind: ..., parameters}``.
        place: Where it stands, for messages, where that is below the key.

    Raises:
        ConfigError: The name or a parameter is unknown, or a value is of the wrong type.
    """
    table = TABLES[key]
    name = "" if table.selector is None else spec[table.selector]
    try:
        builder = table.builder(name)
    except ConfigError as error:
        where = place or key
        raise ConfigError(f"{where if table.positional else f'{where}.{table.selector}'}: {error}") from error
    if table.positional:
        return Bound(key=key, name=name, builder=builder)
    raw = {k: v for k, v in spec.items() if k != table.selector and not (table.null_is_default and v is None)}
    beside = [other.rsplit(".", 1)[1] for other in TABLES if other.startswith(f"{key}.")]
    # Of several alike the place says which one is meant, and the name does not.
    label = (place, "") if place else (key, name)
    parameters = bind(*label, builder, raw, provided=table.provided, beside=beside)
    listing = table.listings.get(name)
    if listing is None:
        return Bound(key=key, name=name, builder=builder, parameters=parameters)
    entries = parameters[listing.parameter]
    listed = tuple(
        _bind_entry(key, listing, entry, place=f"{place or key}.{listing.parameter}[{number}]")
        for number, entry in enumerate(entries)
    )
    owned = [{name: entry[name] for name in listing.beside} for entry in entries]
    parameters[listing.parameter] = tuple({**own, **part.spec()} for own, part in zip(owned, listed, strict=True))
    return Bound(key=key, name=name, builder=builder, parameters=parameters, listed=listed)


def _bind_entry(key: str, listing: Listing, entry: Mapping[str, Any], *, place: str) -> Bound:
    """Bind the builder that an entry of a listing names."""
    needed = (*listing.beside, str(TABLES[key].selector))
    if missing := [name for name in needed if name not in entry]:
        raise ConfigError(f"{place} must have {' and '.join(needed)}, but {missing[0]} is missing")
    if not isinstance(entry[needed[-1]], str):
        raise ConfigError(f"{place}.{needed[-1]} must be text, but got {shown(entry[needed[-1]])}")
    return bind_spec(key, {name: value for name, value in entry.items() if name not in listing.beside}, place=place)


@contextlib.contextmanager
def _said_of_entry(key: str, entry: str) -> Iterator[None]:
    """Put an entry's place before what its builder refuses: it names its parameters as if it stood alone."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        alone, within = f"{key}.", f"{key}.{entry}."
        raise ConfigError(text.replace(alone, within) if alone in text else f"{key}.{entry}: {text}") from error


def bound(config: Config, key: str) -> Any:
    """Return the bound builder of a configuration's key: bound once, however often this is called.

    Args:
        config: A loaded configuration.
        key: One of :data:`~fedsweep.config.tables.TABLES`.

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
    """Return the configuration with every parameter of what it names; what a run keeps and repeats.

    Args:
        config: What :func:`~fedsweep.config.load_config` gave.

    Raises:
        ConfigError: A name or a parameter is unknown, or a value is of the wrong type.
        DataError: The file of the model's initial values can't be read.
    """
    keys = [key for key, table in TABLES.items() if not table.positional]
    items = {key: bound(config, key) for key in keys}
    changes = {
        key: {"merge": [part.spec() for part in item]} if isinstance(item, tuple) else item.spec()
        for key, item in items.items()
        if item is not None
    }
    # The adapter again: the model's own options have taken the section's place.
    changes["model"] |= _initial(config) | {"adapter": _adapter(changes.pop("model.adapter", None))}
    if config.planner is not None:
        changes["planner"] |= {"choices": config.planner.choices}
    if task := changes.pop("scenario.task", None):
        changes["scenario.task"] = task | {"metrics": task_metrics(config)}
    changes["evaluation.metrics"] = [metric.spec() for metric in build_metrics(config)]
    return with_sections(config, changes)


def build_metrics(config: Config) -> tuple[Metric, ...]:
    """The metrics of the test that a configuration names, in its order.

    Raises:
        ConfigError: There is none of a name, or its column would be another's.
    """
    key = "evaluation.metrics"
    if key not in config.bound:
        metrics = [
            Metric.of(
                entry.name,
                bind_spec(key, {"name": entry.name}).builder,
                changes={"mode": entry.mode, "unit": entry.unit, "chance": entry.chance},
            )
            for entry in config.evaluation.metrics
        ]
        tasks = [entry["name"] for entry in task_metrics(config)]
        own = [*(field.name for field in fields(RoundRecord)), *TABLE_COLUMNS]
        columns = [*own, *tasks, *(column_of(m.name) for m in metrics)]
        if twice := [column for place, column in enumerate(columns) if column in columns[:place]]:
            is_tasks = twice[0] in tasks and twice[0] in own
            key, whose = ("scenario.task", "measure") if is_tasks else (key, "function")
            raise ConfigError(f"{key}: the column {twice[0]!r} would be there twice; give the {whose} another name")
        config.bound[key] = tuple(metrics)
    bound: tuple[Metric, ...] = config.bound[key]
    return bound


def task_metrics(config: Config) -> list[dict[str, Any]]:
    """Return what a configuration's task measures, as a resolved configuration has it, the leading figure first."""
    item = bound(config, "scenario.task")
    measures = getattr(item.builder, "measures", None) if item is not None else {}
    if item is not None and measures is None:
        raise ConfigError(
            f"scenario.task {item.name}: a function does not say beforehand what its task measures; name the task's"
            " class, or give the function the class's measures"
        )
    if not isinstance(measures, Mapping) or not all(isinstance(read, Declaration) for read in measures.values()):
        raise ConfigError(
            f"scenario.task {item.name}: its measures must be a Declaration for each name, but are {measures!r}"
        )
    if wrong := [name for name in measures if not _MEASURE.fullmatch(str(name))]:
        raise ConfigError(f"scenario.task {item.name}: the measure {wrong[0]!r} must be a word of at most 60 letters")
    return [
        {"name": name, "mode": read.mode, "unit": read.unit, "chance": read.chance} for name, read in measures.items()
    ]


def _initial(config: Config) -> dict[str, str]:
    """Return the source of the model's initial values, and the hash of its file."""
    source = config.model.init_from
    if source is None:
        return {}
    from fedsweep.models.initial import weights_file, weights_sha256

    if config.model.init_sha256 is not None:
        return {"init_from": source, "init_sha256": config.model.init_sha256}
    file = weights_file(source)
    return {"init_from": str(file), "init_sha256": weights_sha256(file)}


def _adapter(spec: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return an adapter's mapping with the hash of its base's file."""
    if spec is None or spec.get("base") is None or spec.get("base_sha256") is not None:
        return spec
    from fedsweep.models.initial import weights_file, weights_sha256

    file = weights_file(spec["base"], key="model.adapter.base")
    return spec | {"base": str(file), "base_sha256": weights_sha256(file, key="model.adapter.base")}


def build_method(spec: Mapping[str, Any] | Config) -> FederatedMethod:
    """Build the method that the section ``method`` describes.

    Args:
        spec: ``{name: ..., parameters}``, ``{merge: [{name: ..., parameters}, ...]}``, or a whole configuration.

    Raises:
        ConfigError: A name, a parameter or a value is wrong, or methods can't be merged.
    """
    from fedsweep.method import merge

    item = bound(spec if isinstance(spec, Config) else Config(method=dict(spec)), "method")
    method: FederatedMethod = merge(*(part.build() for part in item)) if isinstance(item, tuple) else item.build()
    return method


def method_cards(config: Config) -> tuple[tuple[Card, Mapping[str, Any]], ...]:
    """Return the cards of a loaded configuration's methods, each with the method's parameters; those that have one."""
    item = bound(config, "method")
    parts = item if isinstance(item, tuple) else (item,)
    cards = ((card_of(part.builder), part.parameters) for part in parts)
    return tuple((card, parameters) for card, parameters in cards if card is not None)


def method_names() -> tuple[str, ...]:
    """Return the names of built-in and installed methods (entry points ``fedsweep.methods``), sorted."""
    installed = (point.name for point in entry_points(group="fedsweep.methods"))
    return tuple(sorted({*TABLES["method"].names(), *installed}))


@functools.cache
def built_in_card(name: str) -> Card:
    """Return a built-in method's card; one of nothing but the name for any other, whose module is not imported."""
    card = card_of(method_builder(name)) if name in TABLES["method"].names() else None
    return card or Card(title=name)


def method_title(name: str) -> str:
    """Return a built-in method's title in its paper; any other method has the name that it is called by."""
    return built_in_card(name).title


def method_titles() -> tuple[str, ...]:
    """Return the built-in methods' titles in their papers, in the registry's order."""
    return tuple(map(method_title, TABLES["method"].names()))


def merged_title(names: Sequence[str]) -> str:
    """Return the title of one method, or of several that are merged."""
    cards = map(built_in_card, TABLES["method"].names()) if len(names) > 1 else ()
    merges = (card.title for card in cards if card.merges and sorted(card.merges) == sorted(names))
    return next(merges, "+".join(map(method_title, names)))


def is_method(name: str) -> bool:
    """Return whether there is a method of that name; ``package.module:callable`` is taken on trust."""
    return ":" in name or name in TABLES["method"].names() or name in method_names()


def method_builder(name: str) -> Callable[..., FederatedMethod]:
    """Return the function that builds the method of that name.

    Raises:
        ConfigError: There is no such method; the message names the nearest one.
    """
    return TABLES["method"].builder(name)


def _section(config: Config, key: str) -> Mapping[str, Any] | None:
    """Return the mapping that stands under a key."""
    place: Any = config
    for part in key.split("."):
        place = None if place is None else getattr(place, part)
    if key == "scenario.task" and place is None:
        from fedsweep.world.data.datasets import DATASETS

        entry = DATASETS.get(config.scenario.dataset)
        place = None if entry is None else entry.task
    if place is None or isinstance(place, dict):
        return place
    if isinstance(place, str):
        return {"kind": place}
    selector = TABLES[key].selector
    return {**({} if selector is None else {selector: getattr(place, selector)}), **place.parameters}
