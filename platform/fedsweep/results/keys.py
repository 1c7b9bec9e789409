"""Keys of configurations by their short names: ``dirichlet_alpha`` for ``scenario.partition.dirichlet_alpha``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.results.texts import some_of

_SHOWN = 6


def listed(names: Sequence[str]) -> Sequence[str]:
    """Return names, or other texts, as they are; of one alone a list of it, since each letter of it would be one."""
    return [names] if isinstance(names, str) else names


def keys_below(sections: Sequence[str], keys: Iterable[str]) -> list[str]:
    """Return those of the keys that are one of the sections or stand below one, in their order."""
    return [key for key in keys if any(key == section or key.startswith(f"{section}.") for section in sections)]


def has_part(key: str, part: str) -> bool:
    """Tell whether some whole parts of a dotted key, one after the other, are these."""
    return f".{part}." in f".{key}."


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key; more of it where several keys share that."""
    names = {}
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        size = next(n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others))
        names[key] = ".".join(parts[-size:])
    return names


def resolved(name: str, keys: Sequence[str], *, what: str, candidates: Iterable[str]) -> list[str]:
    """Return the keys that a name stands for: itself, those below it, or those of which it is the end.

    Args:
        name: Whole, a section, or the end of a key.
        keys: All keys there are.
        what: The option that asks, for the message.
        candidates: Names that are worth asking for, for the message.

    Raises:
        ConfigError: There is none, or it is the end of several that lie in different places.
    """
    if below := keys_below([name], keys):
        return below
    ends = list(dict.fromkeys(key[: f".{key}.".index(f".{name}.") + len(name)] for key in keys if has_part(key, name)))
    if len(ends) > 1:
        raise ConfigError(f"{what} {name}: may be {some_of(ends, _SHOWN)}; write more of it")
    if not ends:
        raise ConfigError(f"{what}: {unknown_name('key', name, candidates)}")
    return keys_below(ends, keys)
