"""``fedsweep list`` and ``show``: what can be named in a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedsweep.commands.listing.entries import KINDS, Named
from fedsweep.commands.terminal.options import examples
from fedsweep.errors import ConfigError, unknown_name

LIST_EXAMPLES = examples("fedsweep list methods", "fedsweep list presets", "fedsweep list tables --scale full --costs")
SHOW_EXAMPLES = examples(
    "fedsweep show dynamicfl",
    "fedsweep show quickstart/dynamicfl",
    "fedsweep show dynamicfl/table9 --json",
    "fedsweep show scaffold --json",
    "fedsweep show --json-schema > fedsweep.schema.json",
)


def list_names(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}.")],
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            metavar="",
            help="With tables: the runs, steps, operations, bytes and core-hours of each, by a calibration here.",
        ),
    ] = False,
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="smoke|small|full", help="With --costs; [dim]full[/dim].")
    ] = None,
) -> None:
    """List what can be named, one line each with its source."""
    if costs or scale is not None:
        from fedsweep.commands.terminal.costs import print_list

        if kind != "tables" or not costs:
            raise ConfigError("--costs and --scale go with fedsweep list tables: fedsweep list tables --costs")
        print_list(scale)
        return
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
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            metavar="",
            help="Print a method's card, or a table's rows, columns, settings and printed figures, as JSON.",
        ),
    ] = False,
) -> None:
    """Show one of the things that can be named: its parameters, types, defaults and source."""
    if json_schema:
        if name is not None:
            raise ConfigError(f"NAME and --json-schema exclude each other, but got {name!r} with --json-schema")
        import json

        from fedsweep.config.load import file_schema

        print(json.dumps(file_schema(), indent=2))
        return
    if name is None:
        raise ConfigError("NAME is missing: give anything that fedsweep list lists, or --json-schema")
    if as_json:
        _print_json(name)
        return
    from fedsweep.plugins import is_reference, resolve_reference

    everything = {kind: _of_kind(kind) for kind in KINDS}
    entries_of_name = [(kind, entry) for kind, entries in everything.items() for entry in entries if entry.name == name]
    if not entries_of_name and is_reference(name):
        _print_own(name, resolve_reference("component", name))
        return
    if not entries_of_name:
        names = {entry.name for entries in everything.values() for entry in entries}
        message, _, _ = unknown_name("name", name, names).partition(" (known: ")
        raise ConfigError(f"{message} (all names: fedsweep list {' | '.join(KINDS)})")
    for kind, entry in entries_of_name:
        _print_entry(kind.removesuffix("s"), entry)


def _of_kind(kind: str) -> list[Named]:
    if kind not in KINDS:
        raise ConfigError(unknown_name("kind", kind, KINDS))
    return KINDS[kind]()


def _print_json(name: str) -> None:
    import json
    from dataclasses import asdict

    from fedsweep.catalog import is_method
    from fedsweep.commands.listing.method_description import method_facts
    from fedsweep.reproduce.definition.table_file import read_table
    from fedsweep.reproduce.formats import table_tree

    tree = asdict(method_facts(name)) if is_method(name) else table_tree(read_table(name))
    print(json.dumps(tree, indent=1, ensure_ascii=False))


def _print_entry(kind: str, entry: Named) -> None:
    print(f"{kind} {entry.name}: {entry.summary}")
    if entry.source:
        print(f"source: {entry.source}")
    if entry.key:
        from fedsweep.config.signatures import first_paragraph
        from fedsweep.config.tables import TABLES

        table = TABLES[entry.key]
        builder = table.builder(entry.name)
        _print_builder(builder, provided=table.provided, headed=first_paragraph(builder).rstrip(".") == entry.summary)
        if kind == "method":
            from fedsweep.commands.listing.method_description import executors

            print(f"executors: {executors(builder)}")
    if text := entry.text():
        print(text)


def _print_own(name: str, builder: Callable[..., Any]) -> None:
    """Print what there is to say of a component of one's own; of a method with a card, what is read off it, too."""
    from fedsweep.card import card_of
    from fedsweep.config.signatures import describe

    print(f"component {name}: your own")
    _print_builder(builder)
    if card_of(builder) is None or any(row.default is None for row in describe(builder)):
        return
    from fedsweep.commands.listing.method_description import executors, method_facts

    facts = method_facts(name)
    print(f"executors: {executors(builder)}")
    print(facts.text())


def _print_builder(builder: Callable[..., Any], *, provided: tuple[str, ...] = (), headed: bool = False) -> None:
    """Print a builder's docstring, without its first paragraph where that was the heading, and its parameters."""
    from fedsweep.commands.terminal.output import make_console, make_table
    from fedsweep.config.signatures import describe

    text = (inspect.getdoc(builder) or "").split("\n\nArgs:")[0].split("\n\nAttributes:")[0]
    if headed:
        text = text.partition("\n\n")[2]
    print(f"\n{text}\n" if text else "")
    rows = describe(builder, provided=provided)
    if not rows:
        print("no parameters")
        return
    table = make_table("parameter", "type", "default", "", left=4)
    table.columns[3].no_wrap = False
    for row in rows:
        table.add_row(row.name, row.type, "(must be given)" if row.default is None else row.default, row.doc)
    make_console().print(table, markup=False)
