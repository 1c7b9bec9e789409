"""Figures, names of settings and foreign text as a person reads them; methods in their papers' words."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from fedsweep.catalog import merged_title
from fedsweep.tasks.declaration import SHARE, Declaration

_LONGEST_TEXT = 200
MISSING = "-"
_NAMING = ("name", "kind", "merge")


def canonical(value: Any) -> str:
    """Return one text for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def clean(value: Any, *, longest: int = _LONGEST_TEXT) -> str:
    """Return any value as one line of printable characters; what is too long is cut."""
    text = "".join(character if character.isprintable() else " " for character in str(value)[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def some_of(names: Sequence[str], most: int) -> str:
    """Return names with commas between; of more than ``most`` the first, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def metric_text(value: float | None, declaration: Declaration) -> str:
    """A metric's figure for people: in percent where it is a share; ``nan`` where it is no number."""
    if value is None:
        return MISSING
    return f"{100 * value:.2f}%" if declaration.unit == SHARE and math.isfinite(value) else f"{value:.4g}"


def is_accuracy(figure: str) -> bool:
    """Tell by its name whether a figure is an accuracy, also one of a worst or best tenth: 0..1, shown in percent."""
    return figure.removesuffix("_worst10").removesuffix("_best10").endswith("accuracy")


def metric_title(column: str, declaration: Declaration) -> str:
    """A metric's column with its unit, for headings: ``worst_loss (nats)``."""
    return clean(f"{column} ({declaration.unit})" if declaration.unit not in ("", SHARE) else column)


def bytes_text(count: float | None) -> str:
    """Return bytes for people, with decimal prefixes: ``1.5 MB``."""
    if count is None:
        return MISSING
    for prefix in ("", "k", "M", "G", "T"):
        if count < (999.5 if prefix else 1000):
            return f"{count:.0f} B" if not prefix else f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.4g} PB"


def seconds_text(seconds: float | None) -> str:
    """Return seconds for people, in the unit that keeps the number short: ``95s``, ``12.5m``, ``3.4h``, ``2.1d``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING if seconds is None else str(seconds)
    if seconds < 99.95:
        return f"{seconds:.3g}s"
    for size, unit in ((60.0, "m"), (3600.0, "h")):
        if seconds < 99.95 * size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds / 86400:{'.3g' if seconds < 999.5 * 86400 else ',.0f'}}d"


def method_label(spec: Mapping[str, Any], *, among: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a method by its title, with the parameters in which it differs from others of the same title.

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
    """Return a value of a configuration in a few words; names come first and without their key."""
    if isinstance(value, Mapping):
        heads = [value_text(value[key]) for key in _NAMING if key in value]
        rest = [f"{key}={value_text(item)}" for key, item in value.items() if key not in _NAMING]
        return ",".join([*heads, *rest])
    if isinstance(value, list | tuple):
        return "+".join(map(value_text, value))
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def told_apart(value: Any, text: Callable[[Any], str], *, among: Iterable[Any]) -> str:
    """Return a value's text; all of the value as JSON where another one among these has the same text."""
    short, whole = text(value), _text(value)
    return whole if any(text(other) == short and _text(other) != whole for other in among) else short


def without_shared_start(names: Sequence[str]) -> list[str]:
    """Return names without the words that all of them begin with, as the trials of a sweep do with its name.

    A single name, or one that would be left empty, stays whole.
    """
    if len(set(names)) < 2:
        return list(names)
    words = [name.split(" ") for name in names]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False)))
    cut = [" ".join(own[shared:]) for own in words]
    return cut if all(cut) else list(names)


def numbered(names: Sequence[str]) -> list[str]:
    """Return names of which no two are alike: those that several have are followed by their place, from 1 on."""
    counts, taken = Counter(names), {*names}
    unique = []
    for place, name in enumerate(names, 1):
        own = name
        while counts[name] > 1 and own in taken:
            own = f"{own} ({place})"
        taken.add(own)
        unique.append(own)
    return unique


def _parts(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = spec.get("merge", [spec])
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
