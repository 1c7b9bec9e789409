"""What can be named in a configuration, kind by kind; modules are imported when their kind is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Named:
    """Something that can be named.

    Attributes:
        name: What a configuration calls it.
        summary: One line.
        source: Who proposed or published it.
        builder: Finds what its parameters are read from; None: it has none.
        provided: Parameters that a configuration can't set.
        text: Shown below everything else.
    """

    name: str
    summary: str
    source: str
    builder: Callable[[], Callable[..., Any]] | None = None
    provided: tuple[str, ...] = ()
    text: Callable[[], str] = field(default=str)


def _methods() -> list[Named]:
    from fedsweep.catalog import method_builder, method_names

    registry: Mapping[str, Any] = importlib.import_module("fedsweep.algorithms.registry").METHODS
    own = [name for name in method_names() if name not in registry]
    return [
        *(
            Named(
                name=name,
                summary=entry.summary,
                source=entry.source,
                builder=_bound(method_builder, name),
                text=_bound(_card, name),
            )
            for name, entry in registry.items()
        ),
        *(
            Named(
                name=name,
                summary="of an installed package",
                source="",
                builder=_bound(method_builder, name),
                text=_bound(_card, name),
            )
            for name in own
        ),
    ]


def _card(name: str) -> str:
    """What a method's card says; empty where a package's method has none."""
    from fedsweep.card import card_of
    from fedsweep.catalog import method_builder
    from fedsweep.commands.parts.described import method_facts

    return "" if card_of(method_builder(name)) is None else method_facts(name).text()


def _datasets() -> list[Named]:
    from fedsweep.world.data.datasets import DATASETS

    return [
        Named(name=name, summary=entry.summary, source=entry.source, text=_bound(_whereabouts, name))
        for name, entry in DATASETS.items()
    ]


def _whereabouts(name: str) -> str:
    from fedsweep.world.data.datasets import default_root, is_present

    where = f"in {default_root()}" if is_present(name, root=None) else f"not in {default_root()} (fetched when used)"
    return f"files: {where}; another folder is set as scenario.root"


def _models() -> list[Named]:
    from fedsweep.models.registry import MODELS

    return [
        Named(
            name=name,
            summary=entry.summary,
            source=entry.source,
            builder=_bound(_itself, entry.builder),
            provided=("input_shape", "num_classes"),
        )
        for name, entry in MODELS.items()
    ]


def _partitions() -> list[Named]:
    from fedsweep.world.partitions.registry import PARTITIONS

    return [
        Named(
            name=name,
            summary=(inspect.getdoc(kind) or "").partition("\n")[0].rstrip("."),
            source=kind.source,
            builder=_bound(_itself, kind),
        )
        for name, kind in PARTITIONS.items()
    ]


def _presets() -> list[Named]:
    from fedsweep.config.presets import list_presets

    return [
        Named(
            name=preset.name,
            summary=preset.summary,
            source=f"tune_configs/{preset.name}.yaml",
            text=_bound(preset.path.read_text, "utf-8"),
        )
        for preset in list_presets()
    ]


def _tables() -> list[Named]:
    from fedsweep.reproduce.definition.table_file import listed_tables

    return [
        Named(name=preset.name, summary=preset.summary, source=source, text=_bound(_table_text, preset.name))
        for preset, source in listed_tables()
    ]


def _table_text(name: str) -> str:
    from fedsweep.reproduce.definition.table_file import read_table
    from fedsweep.reproduce.formats import table_text

    return table_text(read_table(name))


def _bound(function: Callable[..., Any], argument: Any) -> Callable[[], Any]:
    return lambda: function(argument)


def _itself(value: Any) -> Any:
    return value


KINDS: Mapping[str, Callable[[], list[Named]]] = {
    "methods": _methods,
    "datasets": _datasets,
    "models": _models,
    "partitions": _partitions,
    "presets": _presets,
    "tables": _tables,
}
