"""``--set KEY=VALUE``: dotted keys and YAML values, laid over what a file gives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedsweep.config import yaml12
from fedsweep.config.sweep import SPACE_KINDS
from fedsweep.errors import ConfigError

SELECTORS = frozenset({"name", "kind", "merge"})
# Mappings from a dotted key; below them a whole one is one part.
_BY_KEY = re.compile(r"(sweep(?:\.settings\.\d+)?\.space|sweep\.points\.\d+|planner\.choices)\.(.+)")


def parse_override(text: str) -> tuple[str, Any]:
    """Parse the dotted key and the value of ``KEY=VALUE``.

    Raises:
        ConfigError: There is no ``=``, the key is empty or has an empty part, or the value is not YAML.
    """
    key, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set takes KEY=VALUE with a dotted key, e.g. training.rounds=5, but got {text!r}")
    if any("\ud800" <= character <= "\udfff" for character in text):  # so Python reads bytes that it can't decode
        raise ConfigError(f"--set {key}: not text in this locale's encoding; set LC_ALL=C.UTF-8 and give it in UTF-8")
    return key, yaml12.parse(value, source=f"--set {key}")


def apply_overrides(base: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a tree with ``KEY=VALUE`` texts laid over it in order; of the same key the last one wins.

    Raises:
        ConfigError: A text is malformed, or a key lies below something that is no mapping; or there is one text alone.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of texts KEY=VALUE, but got one text; write [{overrides!r}]")
    if isinstance(overrides, Mapping):
        texts = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
        raise ConfigError(f"overrides are a list of texts KEY=VALUE, but got a mapping; write {texts}")
    tree: dict[str, Any] = yaml12.copied(dict(base))
    for text in overrides:
        key, value = parse_override(text)
        set_value(tree, key, value=value)
    return tree


def set_value(tree: dict[str, Any], key: str, *, value: Any) -> None:
    """Set one dotted key in place.

    A mapping without ``name`` or ``kind`` joins the mapping that is there; one with either replaces it, and so do
    values of a space other values, and anything else. Below a list, a part of the key is a position from 0.

    Raises:
        ConfigError: The key lies below something that is neither mapping nor null, or a position does not exist.
    """
    (*above, last), form = _split(key)
    value = value if form is None else {form: value}
    place: Any = tree
    for depth, part in enumerate(above):
        place = _step(place, part, key=key)
        if not isinstance(place, dict | list):
            parent = ".".join(above[: depth + 1])
            raise ConfigError(f"{key} can't be set: {parent} is {place!r}, which has nothing below it")
    if isinstance(place, list):
        place[_position(place, last, key=key)] = yaml12.copied(value)
    else:
        join(place, {last: value})


def _split(key: str) -> tuple[list[str], str | None]:
    """Return the parts of a dotted key, and behind a key of a space the form in which its values are given."""
    matched = _BY_KEY.fullmatch(key)
    if matched is None:
        return key.split("."), None
    above, below = matched[1].split("."), matched[2]
    varied, _, form = below.rpartition(".")
    has_form = varied and above[-1] == "space" and form in SPACE_KINDS
    return ([*above, varied], form) if has_form else ([*above, below], None)


def _step(place: Any, part: str, *, key: str) -> Any:
    if isinstance(place, list):
        return place[_position(place, part, key=key)]
    if place.get(part) is None:
        place[part] = {}
    elif isinstance(place[part], str) and key.startswith("training.schedule."):
        place[part] = {"kind": place[part]}  # a word stands for a schedule without parameters
    return place[part]


def _position(items: list[Any], part: str, *, key: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(f"{key} can't be set: {part!r} is no position in a list of {len(items)} (from 0)")
    return int(part)


def join(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Lay a new mapping over the old one, in place, by the rules of :func:`set_value`."""
    for name, value in new.items():
        before = old.get(name)
        if isinstance(before, dict) and isinstance(value, dict) and not _replaces(value, before):
            join(before, value)
        else:
            old[name] = yaml12.copied(value)


def _replaces(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Tell whether a mapping takes another one's place: it names something, or both are values of a space."""
    are_values = all(entry and entry.keys() <= {*SPACE_KINDS} for entry in (new, old))
    return are_values or not SELECTORS.isdisjoint(new)
