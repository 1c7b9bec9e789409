"""Writes docs/configuration.md from the schema and the registries, docs/methods.md from the methods' cards.

python scripts/make_config_docs.py          writes both pages
python scripts/make_config_docs.py --check  exit code 1 where one of them is out of date
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsweep.card import SYMBOLS
from fedsweep.catalog import built_in_card
from fedsweep.commands.listing.method_description import MethodFacts, method_facts
from fedsweep.config.base import Component, Section
from fedsweep.config.communication import Planner
from fedsweep.config.explain import allowed, schema_at
from fedsweep.config.schema import Config, Model
from fedsweep.config.signatures import ParameterRow, describe, first_paragraph
from fedsweep.config.sweep import SpaceEntry
from fedsweep.config.tables import TABLES
from fedsweep.config.training import Adam, Sgd
from fedsweep.models.registry import MODELS

_Kind = TypeVar("_Kind", bound=BaseModel)

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "configuration.md"
METHODS_PAGE = _ROOT / "docs" / "methods.md"

_TOP = """\
<!-- Made by scripts/make_config_docs.py from the schema; changes here are lost. -->

# Configuration

One YAML file is one experiment. Every key has a default, and the defaults together run: an empty mapping `{}` is a
valid configuration. `fedsweep run FILE --dry-run` prints the resolved one, and `fedsweep show --json-schema` the JSON
Schema of such files, with references and a `table`, which editors use to complete and check keys.

## Rules

- **Precedence:** `--set` on the command line, then the file, then the default. Of the same key given twice with
  `--set`, the last one wins. A method's explicit parameter beats what its `profile` would set.
- **`--set KEY=VALUE`** takes a dotted key and a YAML value: `--set training.rounds=50`,
  `--set 'method={name: fedprox, mu: 0.1}'`. Below `sweep.space`, a setting's `space`, a point and `planner.choices` a
  whole dotted key stands: `--set sweep.space.method.mu.grid=[0.1,1]`. Values of a space take the place of earlier ones.
- **A mapping with `name` or `kind` replaces the default** and takes that component's own defaults:
  `optimizer: {name: adam, lr: 1e-3}` has no momentum. Without `name` or `kind` it is laid over the default.
- **Keys that exclude each other:** giving one (`training.cohort_size`) displaces the other's default
  (`training.cohort_fraction`); giving both is an error. So it is with `local_epochs` and `local_steps`.
- **`null` beside a `profile`** (drift, availability, devices) is the profile's value. It stays `null` in a run's
  `config.yaml`: filled in, it would win over the profile that `--set scenario.drift.profile=program` names in a
  configuration made from that file. What it comes to is in the comments at the end of `config.yaml` and of `--dry-run`.
- **YAML 1.2:** `1e-3` is a number; `no` and `on` are text; a key given twice is an error, and so is `<<`, which
  belongs to version 1.1. Keys `x-...` at the top are yours: what several places share, taken over by YAML's `*` or by
  [`extends: "#x-NAME"`](tables.md#what-files-share), which others of its own are laid over.
- **An unknown key is an error** that names the nearest known one. So is a value of the wrong type: `"5"` is no number.
- **A component of your own** is named `package.module:callable`, wherever a name is asked for. See
  [adding-a-method.md](adding-a-method.md) and [data.md](data.md).
"""

_METHODS_TOP = """\
<!-- Made by scripts/make_config_docs.py from the methods' cards; changes here are lost. -->

# Methods

One row for each method: what differs from FedAvg, what travels beside the model, what a world must have, the parameters
with their defaults. `fedsweep show NAME` prints the same with what each parameter means. Each method is held to what
stands here by the [conformance checks](adding-a-method.md#6-does-it-keep-its-promises).

What travels is counted in values of four bytes, for one client in a round with one aggregation.

"""

_METHOD = """\
`{name: ...}` with the method's parameters beside the name, or `{merge: [{name: ...}, ...]}` for several at once. A
method's parameters are its builder's keyword parameters; `fedsweep show NAME` prints the same."""


def page() -> str:
    """The whole page."""
    parts = [_TOP, "## Top level", _table(_rows(Config, "", top_level=True))]
    for name, field in Config.model_fields.items():
        model = _section(field)
        if model is not None:
            parts += [f"## `{name}`", _summary(model), _table(_rows(model, f"{name}."))]
            parts += _PARTS_BELOW.get(name, list)()
    options = [key for key in Model.model_fields if key != "name"]
    beside = ((f"model.{key}", _allowed(f"model.{key}"), _default(Model.model_fields[key])) for key in options)
    from_file = _table((*row, Model.model_fields[row[0][6:]].description or "") for row in beside)
    parts += ["## `planner`", _summary(Planner), _table(_rows(Planner, "planner.")), *_kinds("planner")]
    parts += ["## `model`", "The model's options stand beside its name.", from_file, *_kinds("model"), *_models()]
    parts += ["## `method`", _METHOD, *_methods()]
    text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    return re.sub(r"(?<!`)``(?!`)", "`", text)


# -- keys of the schema ------------------------------------------------------------------------------------------------


def _rows(model: type[BaseModel], prefix: str, *, top_level: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """Key, allowed values, default and meaning, sections below included (but not those of the top level)."""
    for name, field in model.model_fields.items():
        below = _section(field)
        if top_level and below is not None:
            continue
        key = f"{prefix}{name}"
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if below is None or (not field.is_required() and default in (None, [])):
            yield key, _allowed(key), _default(field), field.description or ""
        if below is not None:
            yield from _rows(below, f"{key}.")
        component = None if top_level else _only(field, Component)
        for beside, more in component.model_fields.items() if component is not None else ():
            if beside not in ("kind", "name"):
                yield f"{key}.{beside}", _allowed(f"{key}.{beside}"), _default(more), more.description or ""


def _section(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds, where it holds one."""
    return _only(field, Section)


def _only(field: FieldInfo, kind: type[_Kind]) -> type[_Kind] | None:
    """What a key holds, where it is of this kind and nothing else can stand there."""
    options = [option for option in typing.get_args(field.annotation) or [field.annotation] if option is not type(None)]
    only: Any = options[0] if len(options) == 1 else None
    return only if inspect.isclass(only) and issubclass(only, kind) else None


def _allowed(key: str) -> str:
    said = re.sub(r"a mapping with .*?(?= or |$)", "a mapping", allowed(schema_at(key.split("."), {})))
    return " or ".join(dict.fromkeys(said.split(" or ")))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(must be given)"
    value = field.get_default(call_default_factory=True)
    return f"`{_flow(value.model_dump(mode='json') if isinstance(value, BaseModel) else value)}`"


def _flow(value: Any) -> str:
    """A value as one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def _summary(item: Any) -> str:
    """A docstring's first paragraph."""
    return " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())


# -- what is named -----------------------------------------------------------------------------------------------------


def _kinds(section: str) -> list[str]:
    """What the keys of a section can name."""
    parts = []
    for key, table in TABLES.items():
        if not key.startswith(f"{section}.") or table.positional:
            continue
        names = [""] if table.selector is None else list(table.names())
        parts.append(f"### Kinds of `{key}`" if table.selector is not None else f"### `{key}`")
        for name in names:
            builder = table.builder(name)
            source = getattr(builder, "source", "")
            title = f"**`{name}`**: " if name else ""
            parts.append(f"{title}{_summary(builder)}{f' ({source})' if source else ''}")
            parts += _parameters(describe(builder, provided=table.provided))
    return parts


def _training() -> list[str]:
    parts = ["### Kinds of `training.optimizer`"]
    for model in (Sgd, Adam):
        parts += [_summary(model), _table(_component_rows(model, "training.optimizer"))]
    return [*parts, *_kinds("training")]


def _component_rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        said = allowed(properties[name])
        yield f"{prefix}.{name}", said, "" if field.is_required() else _default(field), field.description or ""


def _sweep() -> list[str]:
    rows = ((name, "a list", "", field.description or "") for name, field in SpaceEntry.model_fields.items())
    return ["### Entries of `sweep.space`", "Exactly one of these, for each dotted key:", _table(rows)]


def _models() -> Iterator[str]:
    for name, entry in MODELS.items():
        rows = describe(entry.builder, provided=("input_shape", "num_classes"))
        yield f"**`{name}`**: {entry.summary} ({entry.source})"
        yield from _parameters(rows)


def _methods() -> Iterator[str]:
    for name in TABLES["method"].names():
        builder = TABLES["method"].builder(name)
        yield f"**`{name}`**: {first_paragraph(builder).rstrip('.')} ({built_in_card(name).source})"
        yield from _parameters(describe(builder))


def _parameters(rows: tuple[ParameterRow, ...]) -> list[str]:
    cells = (
        (row.name, row.type, "(must be given)" if row.default is None else f"`{row.default}`", row.doc) for row in rows
    )
    return [_table(cells)] if rows else []


def _table(rows: typing.Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    for key, said, default, meaning in rows:
        cells = (f"`{key}`", said, default, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def methods_page() -> str:
    """The page of methods: a row each, and below what is long."""
    facts = [method_facts(name) for name in TABLES["method"].names()]
    legend = "\n".join(f"- `{symbol}`: {meaning}" for symbol, meaning in SYMBOLS.items())
    lines = ["| method | differs in | sends beside the model | needs | parameters |", "|---|---|---|---|---|"]
    for method in facts:
        cells = (
            f"[`{method.name}`](#{method.name})<br>{method.summary}",
            ", ".join(method.changes) or "nothing: it is FedAvg",
            "<br>".join(method.sends) or "nothing",
            "<br>".join(method.needs) or "nothing",
            ", ".join(f"`{row.name}: {row.default}`" for row in method.parameters) or "none",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    sections = [_method_section(method) for method in facts]
    return "\n\n".join([f"{_METHODS_TOP}{legend}", "\n".join(lines), *sections]) + "\n"


def _method_section(method: MethodFacts) -> str:
    """What a method changes, where it comes from, and in what it differs from there."""
    refused = [f"Can't be merged with {', '.join(names)}: {why}." for why, names in method.refuses.items()]
    items = [
        *(f"**{seam}**: {what}" for seam, what in method.changes.items()),
        *(f"In the source: {text}" for text in method.equations),
        *(f"Reading: {text}" for text in method.differs),
        *(f"With {text}" for text in method.limits),
        *([f"Figures that are not 0: {', '.join(f'`{name}`' for name in method.live)}."] if method.live else []),
        *refused,
    ]
    return "\n".join([f"## {method.name}", "", method.source, "", *(f"- {_sentence(item)}" for item in items)]).strip()


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


_PARTS_BELOW: dict[str, Callable[[], list[str]]] = {
    "scenario": partial(_kinds, "scenario"),
    "training": _training,
    "sweep": _sweep,
}


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md and docs/methods.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    is_check = parser.parse_args().check
    old = []
    for path, text in ((PAGE, page()), (METHODS_PAGE, methods_page())):
        if is_check and (not path.is_file() or path.read_text() != text):
            old.append(path.name)
        elif not is_check:
            path.write_text(text)
    if old:
        print(f"out of date: {', '.join(old)}; run: python scripts/make_config_docs.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
