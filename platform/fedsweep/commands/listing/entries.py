"""The things that can be named in a configuration, kind by kind; modules are imported when their kind is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points

_INSTALLED = "of an installed package"


@dataclass(frozen=True, kw_only=True)
class Named:
    """Something that can be named.

    Attributes:
        name: What a configuration calls it.
        summary: One line.
        source: Who proposed or published it.
        key: Where a configuration names it, if it has parameters: one of :data:`fedsweep.config.tables.TABLES`.
        text: Shown below everything else.
    """

    name: str
    summary: str
    source: str
    key: str = ""
    text: Callable[[], str] = field(default=str)


def _methods() -> list[Named]:
    from fedsweep.catalog import built_in_card, method_builder, method_names
    from fedsweep.config.signatures import first_paragraph
    from fedsweep.config.tables import TABLES

    built_in = TABLES["method"].names()
    lines = [(name, first_paragraph(method_builder(name)), built_in_card(name).source) for name in built_in]
    lines += [(name, _INSTALLED, "") for name in method_names() if name not in built_in]
    return [
        Named(name=name, summary=summary.rstrip("."), source=source, key="method", text=partial(_card, name))
        for name, summary, source in lines
    ]


def _card(name: str) -> str:
    """Put a method's card in words; empty where a package's method has none."""
    from fedsweep.card import card_of
    from fedsweep.catalog import method_builder
    from fedsweep.commands.listing.method_description import method_facts

    return "" if card_of(method_builder(name)) is None else method_facts(name).text()


def _installed(kind: str, key: str) -> list[Named]:
    """List what installed packages add to a kind by entry points."""
    points = entry_points(group=f"fedsweep.{kind}")
    return [Named(name=point.name, summary=_INSTALLED, source="", key=key) for point in points]


def _datasets() -> list[Named]:
    from fedsweep.world.data.datasets import DATASETS

    built_in = [
        Named(name=name, summary=entry.summary, source=entry.source, text=partial(_whereabouts, name))
        for name, entry in DATASETS.items()
    ]
    return built_in + _installed("datasets", "")


def _whereabouts(name: str) -> str:
    from fedsweep.world.data.datasets import default_root, is_present

    where = f"in {default_root()}" if is_present(name, root=None) else f"not in {default_root()} (fetched when used)"
    return f"files: {where}; another folder is set as scenario.root"


def _models() -> list[Named]:
    from fedsweep.models.registry import MODELS

    built_in = [Named(name=k, summary=entry.summary, source=entry.source, key="model") for k, entry in MODELS.items()]
    return built_in + _installed("models", "model")


def _partitions() -> list[Named]:
    return _builders("scenario.partition") + _installed("partitions", "scenario.partition")


def _builders(key: str) -> list[Named]:
    """List the built-in names of a key by their builders' docstrings, and by who proposed what they build."""
    from fedsweep.config.signatures import first_paragraph
    from fedsweep.config.tables import TABLES

    return [
        Named(name=name, summary=first_paragraph(builder).rstrip("."), source=getattr(builder, "source", ""), key=key)
        for name, builder in TABLES[key].names().items()
    ]


def _presets() -> list[Named]:
    from fedsweep.config.presets import list_presets

    return [
        Named(
            name=preset.name,
            summary=preset.summary,
            source=f"tune_configs/{preset.name}.yaml",
            text=partial(preset.path.read_text, "utf-8"),
        )
        for preset in list_presets()
    ]


def _tables() -> list[Named]:
    from fedsweep.reproduce.definition.table_file import listed_tables

    return [
        Named(name=preset.name, summary=preset.summary, source=source, text=partial(_table_text, preset.name))
        for preset, source in listed_tables()
    ]


def _table_text(name: str) -> str:
    from fedsweep.reproduce.definition.table_file import read_table
    from fedsweep.reproduce.formats import table_text

    return table_text(read_table(name))


KINDS: Mapping[str, Callable[[], list[Named]]] = {
    "methods": _methods,
    "datasets": _datasets,
    "models": _models,
    "partitions": _partitions,
    "codecs": partial(_builders, "communication.up"),  # the two ways have one table
    "planners": partial(_builders, "planner"),
    "presets": _presets,
    "tables": _tables,
}
