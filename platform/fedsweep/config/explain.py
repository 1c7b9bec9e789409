"""One readable line from what pydantic found wrong: the dotted key, the value found, what is allowed.

Pydantic's own sentences are not used: they tell every branch of a union, each with half of what is allowed, and not the
value. What is allowed is read from the JSON Schema, which also says which keys there are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedsweep.config.schema import json_schema
from fedsweep.errors import unknown_name

Path = tuple[str | int, ...]
Schema = Mapping[str, Any]

_MISSING = object()


def explain(error: ValidationError, tree: Mapping[str, Any]) -> str:
    """Return one line on the first fault of a tree; an unknown key comes before all else."""
    entries = [(_key_path(details, tree), details) for details in error.errors()]
    unknown = [path for path, details in entries if details["type"] == "extra_forbidden"]
    if unknown:
        return _unknown_key(unknown[0], tree)
    first_path = entries[0][0]
    # The branches of a union fail side by side: the one that got furthest is the one that was meant.
    rivals = [item for item in entries if item[0][: len(first_path)] == first_path]
    path, details = max(rivals, key=lambda item: (len(item[0]), _says_more(item[1])))
    return _explain_one(path, details, tree=tree)


def _says_more(details: ErrorDetails) -> bool:
    is_tag = details["type"].startswith("union_tag") and isinstance(details["input"], dict)
    return is_tag or details["type"] == "value_error"


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as the user writes it."""
    return ".".join(map(str, path))


def _explain_one(path: Path, details: ErrorDetails, *, tree: Mapping[str, Any]) -> str:
    if details["type"] == "value_error":
        reason = str(details["ctx"]["error"])
        return f"{dotted(path)}: {reason}" if path else reason
    value = _value_at(tree, path)
    if value is _MISSING:
        return f"{dotted(path)} is missing; it must be {allowed(schema_at(path, tree))}"
    if details["type"].startswith("union_tag") and isinstance(value, dict):
        tag = str(details["ctx"]["discriminator"]).strip("'")
        path, value = (*path, tag), value.get(tag, _MISSING)
        if value is _MISSING:
            return f"{dotted(path)} is missing; it must be {allowed(schema_at(path, tree))}"
        if isinstance(value, str):
            return f"{dotted(path)}: {unknown_name(tag, value, words(schema_at(path, tree)))}"
    choices = words(schema_at(path, tree))
    if isinstance(value, str) and choices:
        return f"{dotted(path)}: {unknown_name('value', value, choices)}"
    return f"{dotted(path)} must be {allowed(schema_at(path, tree))}, but got {shown(value)}{_hint(path, value)}"


def _hint(path: Path, value: Any) -> str:
    """Return the right way to write a value, where its meaning can be guessed."""
    if isinstance(value, str) and path:
        keys = _properties(schema_at(path, {}))
        naming = "name" if path == ("method",) or "name" in keys else "kind" if "kind" in keys else None
        return f"; write {dotted(path)}={{{naming}: {value}}}" if naming else ""
    if path == ("seed",) and isinstance(value, list):
        return "; several seeds are run by fedsweep run --seeds, or by a sweep"
    return ""


def _key_path(details: ErrorDetails, tree: Mapping[str, Any]) -> Path:
    """Return the error's path, without the names of union branches that pydantic mixes in."""
    path: list[str | int] = []
    place: Any = tree
    location = details["loc"]
    for depth, part in enumerate(location):
        is_last = depth == len(location) - 1
        if isinstance(place, dict):
            inside = part in place or (is_last and details["type"] == "missing")
        else:
            inside = isinstance(place, list) and isinstance(part, int) and part < len(place)
        if inside:
            path.append(part)
            place = place.get(part) if isinstance(place, dict) else place[int(part)]
    return tuple(path)


def _value_at(tree: Any, path: Path) -> Any:
    for part in path:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return _MISSING
    return tree


def _unknown_key(path: Path, tree: Mapping[str, Any]) -> str:
    above, last = path[:-1], str(path[-1])
    siblings = [dotted((*above, key)) for key in _properties(schema_at(above, tree), _value_at(tree, above))]
    message = unknown_name("key", dotted(path), siblings)
    # The key itself may be there: of another variant, as adam's of sgd.
    elsewhere = [key for key in all_keys() if key.split(".")[-1] == last and key != dotted(path)]
    if elsewhere:
        start, listing = message.split(" (known: ", 1)
        start = start.split("; did you mean ", 1)[0]
        return f"{start}; did you mean {elsewhere[0]!r}? (known: {listing}"
    return message


@functools.cache
def _whole_schema() -> dict[str, Any]:
    return json_schema()


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Return every dotted key that the schema names, sections included, in its order."""
    return tuple(dict.fromkeys(_walk(_whole_schema(), "")))


def _walk(schema: Schema, prefix: str) -> Iterator[str]:
    for key, below in _properties(schema).items():
        yield prefix + key
        yield from _walk(below, f"{prefix}{key}.")


def schema_at(path: Sequence[str | int], tree: Any) -> Schema:
    """Return the part of the JSON Schema that governs a path; of a union's branches those that fit the tree."""
    schema: Schema = _whole_schema()
    for part in path:
        fitting = [branch for branch in branches(schema) if _fits(branch, tree)] or list(branches(schema))
        nexts = [below for branch in fitting if (below := _below(branch, part)) is not None]
        if not nexts:
            return {}
        schema = nexts[0] if len(nexts) == 1 else {"anyOf": nexts}
        tree = _value_at(tree, (part,))
    return schema


def _below(branch: Schema, part: str | int) -> Schema | None:
    if isinstance(part, int):
        prefix = branch.get("prefixItems", [])
        return prefix[part] if part < len(prefix) else branch.get("items")
    below = branch.get("properties", {}).get(part)
    more = branch.get("additionalProperties")
    return below if below is not None else (more if isinstance(more, dict) else None)


def _fits(branch: Schema, tree: Any) -> bool:
    constants = {key: below["const"] for key, below in branch.get("properties", {}).items() if "const" in below}
    is_object = branch.get("type") == "object" and isinstance(tree, dict)
    return is_object and all(tree.get(key) == value for key, value in constants.items())


def branches(schema: Schema) -> Iterator[Schema]:
    """Yield the alternatives of a JSON Schema, references followed."""
    if "$ref" in schema:
        yield from branches(_whole_schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    elif "anyOf" in schema or "oneOf" in schema:
        for branch in schema.get("anyOf", schema.get("oneOf", ())):
            yield from branches(branch)
    else:
        yield schema


def _properties(schema: Schema, tree: Any = None) -> dict[str, Schema]:
    properties: dict[str, Schema] = {}
    for branch in [branch for branch in branches(schema) if _fits(branch, tree)] or branches(schema):
        for key, below in branch.get("properties", {}).items():
            properties.setdefault(key, below)
    return properties


def words(schema: Schema) -> list[str]:
    """Return the words that are allowed where nothing but certain words and null is."""
    allowed_words: list[str] = []
    for branch in branches(schema):
        if "const" in branch or "enum" in branch:
            allowed_words += [str(word) for word in branch.get("enum", [branch.get("const")])]
        elif branch.get("type") != "null":
            return []
    return list(dict.fromkeys(allowed_words))


def allowed(schema: Schema) -> str:
    """Describe the values that a JSON Schema admits, in words."""
    phrases = [_phrase(branch) for branch in branches(schema)]
    return " or ".join(dict.fromkeys(phrases)) or "something else"


def _phrase(branch: Schema) -> str:
    if "enum" in branch:
        return f"one of {', '.join(map(str, branch['enum']))}"
    if "const" in branch:
        return repr(branch["const"])
    kind = branch.get("type")
    if kind in ("integer", "number"):
        return _number_phrase(branch)
    if kind == "array":
        inner = branch.get("prefixItems")
        if inner:
            return f"a list of {len(inner)}, each {allowed(inner[0])}"
        what = allowed(branch["items"]) if branch.get("items") else ""
        if branch.get("minItems"):
            return f"a list of at least {branch['minItems']}"
        return f"a list, each {what}" if what else "a list"
    if kind == "object":
        keys = list(branch.get("properties", {}))
        return f"a mapping with {', '.join(keys)}" if keys else "a mapping"
    if kind == "string":
        return "text that is not empty" if branch.get("minLength") else "text"
    return {"boolean": "true or false", "null": "null"}.get(str(kind), "any value")


def _number_phrase(branch: Schema) -> str:
    bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    limits = " and ".join(f"{sign} {branch[name]:g}" for name, sign in bounds if name in branch)
    noun = "an integer" if branch["type"] == "integer" else "a number"
    return f"{noun} {limits}" if limits else noun


def shown(value: Any) -> str:
    """Return a value as the user wrote it, cut where it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
