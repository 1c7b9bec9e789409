"""Configurations laid side by side: flat keys, and the ones that differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsweep.errors import OutputError

# They change no result, have a column of their own, or follow from another key (what a task measures).
_ASIDE = (
    *("name", "seed", "runtime", "tracking", "checkpoint", "sweep"),
    *("scenario.root", "scenario.download", "scenario.task.metrics"),
)
_BUT = ("runtime.executor", "runtime.tf32")
_MOST_KEYS, _DEEPEST = 5000, 24


@dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """Some configurations side by side.

    Attributes:
        differing: The keys that do not have one value in all of them.
        cells: For each configuration the values of these keys, as text; empty where it has no such key.
        common: Keys and values that all of them share.
    """

    differing: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    common: tuple[tuple[str, str], ...]

    @property
    def telling(self) -> tuple[str, ...]:
        """Those of the differing keys that have several values; all where there is none.

        What a method or a partition has and another has not at all says no more than their names.
        """
        columns = zip(self.differing, zip(*self.cells, strict=True), strict=True)
        return tuple(key for key, texts in columns if len({*texts} - {""}) > 1) or self.differing


def flat_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> value as JSON text (strings without quotes).

    Raises:
        OutputError: It is no configuration: thousands of keys, or nested without end.
    """
    flat: dict[str, str] = {}
    _walk("", config, flat, depth=0)
    return flat


def aligned(flats: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the configurations so that a section that some have not is null by the kind, or first key, of the others'.

    ``drift: null`` beside ``drift: {kind: rotation}`` becomes ``drift.kind: null``: no key of both told them apart.
    """
    keys = dict.fromkeys(key for flat in flats for key in flat)
    firsts: dict[str, str] = {}
    for key in keys:
        section = key
        while section := section.rpartition(".")[0]:
            if section in keys:
                kinds = (kind for kind in (f"{section}.kind", f"{section}.name") if kind in keys)
                firsts.setdefault(section, next(kinds, key))
    return [{firsts.get(key, key) if value == "null" else key: value for key, value in flat.items()} for flat in flats]


def setting_key(flat: Mapping[str, str]) -> str:
    """Return one text for configurations that differ in their seed alone, or in what changes no result.

    A key that is not there is as one that is null.
    """
    setting = {key: value for key, value in flat.items() if value != "null" and not is_aside(key)}
    return json.dumps(setting, sort_keys=True)


def config_table(flats: Sequence[Mapping[str, str]]) -> ConfigTable:
    """Lay configurations side by side, as :func:`flat_config` gave them; what changes no result is left out."""
    keys = [key for key in dict.fromkeys(key for flat in flats for key in flat) if not is_aside(key)]
    is_common = {key: len({flat.get(key) for flat in flats}) == 1 for key in keys}
    differing = tuple(key for key in keys if not is_common[key])
    return ConfigTable(
        differing=differing,
        cells=tuple(tuple(flat.get(key, "") for key in differing) for flat in flats),
        common=tuple((key, flats[0][key]) for key in keys if is_common[key]),
    )


def as_numbers(cells: Sequence[str]) -> list[Any]:
    """Return a key's values as numbers, NaN where a configuration lacks it; as they are where one of them is none."""
    filled = [cell for cell in cells if cell not in ("", "null")]
    try:
        numbers = {cell: int(cell) if cell.lstrip("-").isdecimal() else float(cell) for cell in filled}
    except ValueError:
        return [*cells]
    return [numbers.get(cell, math.nan) for cell in cells] if filled else [*cells]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key where that tells them apart; ``method`` for ``method.name``."""
    lasts = [key.removesuffix(".name").removesuffix(".kind").rpartition(".")[2] for key in keys]
    return {key: last if lasts.count(last) == 1 else key for last, key in zip(lasts, keys, strict=True)}


def is_aside(key: str) -> bool:
    """Tell whether a key makes no other setting: it changes no result, is the seed, or what runs are called."""
    return any(key == name or key.startswith(f"{name}.") for name in _ASIDE) and key not in _BUT


def _walk(prefix: str, value: Any, flat: dict[str, str], *, depth: int) -> None:
    # YAML's references can make a tree of a few lines endless.
    if len(flat) > _MOST_KEYS or depth > _DEEPEST:
        raise OutputError("not a configuration: too many keys, or too deeply nested")
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            _walk(f"{prefix}.{key}" if prefix else str(key), item, flat, depth=depth + 1)
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for place, item in enumerate(value):
            _walk(f"{prefix}.{place}", item, flat, depth=depth + 1)
    else:
        flat[prefix] = value if isinstance(value, str) else json.dumps(value, default=str)
