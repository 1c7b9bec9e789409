"""``fedsweep list`` and ``show``: what can be named in a configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from fedsweep.commands.options import examples
from fedsweep.errors import ConfigError, unknown_name

LIST_EXAMPLES = examples("fedsweep list methods", "fedsweep list presets")
SHOW_EXAMPLES = examples(
    "fedsweep show dynamicfl",
    "fedsweep show quickstart/dynamicfl",
    "fedsweep show --json-schema > fedsweep.schema.json",
)


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


def list_names(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="methods, datasets, models, partitions, presets or tables.")
    ],
) -> None:
    """List what can be named, one line each with its source."""
    entries = _of_kind(kind)
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        source = f"  [{entry.source}]" if entry.source else ""
        print(f"{entry.name:{width}}  {entry.summary}{source}")


def show(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Anything that [b]fedsweep list[/b] lists.")
    ] = None,
    json_schema: Annotated[
        bool,
        typer.Option("--json-schema", metavar="", help="Print the JSON Schema of configuration files, for editors."),
    ] = False,
) -> None:
    """Show one of the things that can be named: its parameters, types, defaults and source."""
    if json_schema:
        if name is not None:
            raise ConfigError(f"NAME and --json-schema exclude each other, but got {name!r} with --json-schema")
        _print_schema()
        return
    if name is None:
        raise ConfigError("NAME is missing: give anything that fedsweep list lists, or --json-schema")
    from fedsweep.plugins import is_reference

    everything = {kind: _of_kind(kind) for kind in KINDS}
    found = [(kind, entry) for kind, entries in everything.items() for entry in entries if entry.name == name]
    if not found and is_reference(name):
        own = Named(name=name, summary="your own", source="", builder=_bound(_referenced, name))
        _print_entry("component", own)
        return
    if not found:
        names = {entry.name for entries in everything.values() for entry in entries}
        said, _, _ = unknown_name("name", name, names).partition(" (known: ")
        raise ConfigError(f"{said} (all names: fedsweep list {' | '.join(KINDS)})")
    for kind, entry in found:
        _print_entry(kind.removesuffix("s"), entry)


def _referenced(name: str) -> Callable[..., Any]:
    from fedsweep.plugins import resolve_reference

    return resolve_reference("component", name)


def _of_kind(kind: str) -> list[Named]:
    if kind not in KINDS:
        raise ConfigError(unknown_name("kind", kind, KINDS))
    return KINDS[kind]()


def _print_schema() -> None:
    import json

    from fedsweep.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def _print_entry(kind: str, entry: Named) -> None:
    print(f"{kind} {entry.name}: {entry.summary}")
    if entry.source:
        print(f"source: {entry.source}")
    if entry.builder is not None:
        _print_builder(entry.builder(), entry)
    if text := entry.text():
        print(text)


def _print_builder(builder: Callable[..., Any], entry: Named) -> None:
    from fedsweep.commands.output import make_console, make_table
    from fedsweep.config.signatures import describe

    said = (inspect.getdoc(builder) or "").split("\n\nArgs:")[0].split("\n\nAttributes:")[0]
    print(f"\n{said}\n")
    rows = describe(builder, provided=entry.provided)
    if not rows:
        print("no parameters")
        return
    table = make_table("parameter", "type", "default", "", left=4)
    table.columns[3].no_wrap = False
    for row in rows:
        table.add_row(row.name, row.type, "(must be given)" if row.default is None else row.default, row.doc)
    make_console().print(table, markup=False)


def _methods() -> list[Named]:
    from fedsweep.catalog import method_builder, method_names

    registry: Mapping[str, Any] = importlib.import_module("fedsweep.algorithms.registry").METHODS
    own = [name for name in method_names() if name not in registry]
    return [
        *(
            Named(name=name, summary=entry.summary, source=entry.source, builder=_bound(method_builder, name))
            for name, entry in registry.items()
        ),
        *(
            Named(name=name, summary="of an installed package", source="", builder=_bound(method_builder, name))
            for name in own
        ),
    ]


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
    from fedsweep.world.partitions import PARTITIONS

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
    from fedsweep.reproduce.table_file import listed_tables

    return [
        Named(name=preset.name, summary=preset.summary, source=source, text=_bound(_table_text, preset.name))
        for preset, source in listed_tables()
    ]


def _table_text(name: str) -> str:
    from fedsweep.reproduce.formats import table_text
    from fedsweep.reproduce.table_file import read_table

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
