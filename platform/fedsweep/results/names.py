"""What settings are called: by what differs, methods in their papers' words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fedsweep.catalog import merged_title

_NAMING = ("name", "kind", "merge")


def method_label(spec: Mapping[str, Any], *, among: Sequence[Mapping[str, Any]] = ()) -> str:
    """A method by its title, with the parameters in which it differs from others of the same title.

    Args:
        spec: ``{name: ..., parameters}`` or ``{merge: [...]}``.
        among: The methods that it stands beside.
    """
    parts = _parts(spec)
    others = [_parts(other) for other in among]
    same = [other for other in others if [p.get("name") for p in other] == [p.get("name") for p in parts]]
    words = [merged_title([str(part.get("name", "?")) for part in parts])]
    for place, part in enumerate(parts):
        for key, value in part.items():
            if key != "name" and any(_text(other[place].get(key)) != _text(value) for other in same):
                words.append(f"{key}={value_text(value)}")
    return " ".join(words)


def value_text(value: Any) -> str:
    """A value of a configuration in a few words; names come first and without their key."""
    if isinstance(value, Mapping):
        heads = [value_text(value[key]) for key in _NAMING if key in value]
        rest = [f"{key}={value_text(item)}" for key, item in value.items() if key not in _NAMING]
        return ",".join([*heads, *rest])
    if isinstance(value, list | tuple):
        return "+".join(map(value_text, value))
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def without_shared_start(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with, as the trials of a sweep do with its name.

    A single name, or one that would be left empty, stays whole.
    """
    if len(set(names)) < 2:
        return list(names)
    words = [name.split(" ") for name in names]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False)))
    cut = [" ".join(own[shared:]) for own in words]
    return cut if all(cut) else list(names)


def _parts(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = spec.get("merge", [spec])
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
