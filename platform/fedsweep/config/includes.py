"""References between YAML files, so that what several share is written once: ``extends:`` and ``from:``.

    extends: _shared.yaml#setting        # a mapping, over which the one with this key is laid
    table:
      rows:
        - from: _shared.yaml#levels      # a list, whose entries stand here in the place of this one
        - {name: FedAvg}

A reference is ``FILE``, ``FILE#SECTION`` or, in the same file, ``#SECTION``; FILE is relative to the file that names
it, a section is a dotted key. What is referred to may refer further. A mapping joins the one below it key by key, and
replaces it where it has ``name``, ``kind`` or ``merge``, or where both are values of a space, as ``--set`` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedsweep.bounded import MOST_LEVELS
from fedsweep.config import yaml12
from fedsweep.config.overrides import join
from fedsweep.errors import ConfigError, unknown_name

# Keys of references, and the beginning of the user's own.
EXTENDS, FROM, SHARED = "extends", "from", "x-"
Place = tuple[Path, str]


def read_whole(path: Path) -> Any:
    """Read the value of a YAML file with everything that it refers to, and without keys ``x-...`` at its top.

    Those are the user's own, for what is shared.

    Raises:
        ConfigError: A file can't be read, a reference leads nowhere, to something of the wrong type or in a circle;
            the message names the file and the reference.
    """
    whole = _Reader().at((path, ""), asked_by=path)
    if isinstance(whole, dict):
        return {key: value for key, value in whole.items() if not key.startswith(SHARED)}
    return whole


class _Reader:
    """Follows references; each file is parsed once."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._under_way: list[Place] = []
        self._num_values = 0
        self._level = 0

    def at(self, place: Place, *, asked_by: Path) -> Any:
        """Return the value at a place, its own references followed."""
        path, section = place
        if place in self._under_way:
            circle = " -> ".join(f"{file.name}#{part}" for file, part in [*self._under_way, place])
            raise ConfigError(f"{asked_by}: the references go in a circle: {circle}")
        if path not in self._files:
            self._files[path] = yaml12.read(path)
        self._under_way.append(place)
        value = self._whole(_section(self._files[path], section, path=path, asked_by=asked_by), path)
        self._under_way.pop()
        return value

    def _whole(self, value: Any, path: Path) -> Any:
        self._num_values += 1
        self._level += 1
        if self._num_values > yaml12.MOST_NODES or self._level > MOST_LEVELS:
            rule = f"more than {yaml12.MOST_NODES} values once references are followed, or {MOST_LEVELS} levels"
            raise ConfigError(f"{path}: {rule}: too large to be a configuration")
        value = self._followed(value, path)
        self._level -= 1
        return value

    def _followed(self, value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [entry for item in value for entry in self._entries(item, path)]
        if not isinstance(value, dict):
            return value
        own = {key: self._whole(item, path) for key, item in value.items() if key != EXTENDS}
        if EXTENDS not in value:
            return own
        below = self._referred(value[EXTENDS], dict, key=EXTENDS, path=path)
        join(below, own)
        return below

    def _entries(self, item: Any, path: Path) -> list[Any]:
        if isinstance(item, dict) and item.keys() == {FROM}:
            entries: list[Any] = self._referred(item[FROM], list, key=FROM, path=path)
            return entries
        return [self._whole(item, path)]

    def _referred(self, reference: Any, wanted: type, *, key: str, path: Path) -> Any:
        if not isinstance(reference, str) or not reference:
            raise ConfigError(f"{path}: {key} takes FILE#SECTION, e.g. _shared.yaml#setting, but got {reference!r}")
        name, _, section = reference.partition("#")
        target = path.parent / name if name else path
        if not os.path.isfile(target):  # the path's own way to ask raises where the name is too long
            raise ConfigError(f"{path}: {key}: {reference}: no file {target} is there")
        value = self.at((target.resolve(), section), asked_by=path)
        if not isinstance(value, wanted):
            what = "mapping" if wanted is dict else "list"
            raise ConfigError(f"{path}: {key}: {reference} must be a {what}, but is a {type(value).__name__}")
        return value


def _section(tree: Any, section: str, *, path: Path, asked_by: Path) -> Any:
    for part in section.split(".") if section else ():
        if not isinstance(tree, dict) or part not in tree:
            names = list(tree) if isinstance(tree, dict) else []
            raise ConfigError(f"{asked_by}: {path.name}#{section}: {unknown_name('section', part, names)}")
        tree = tree[part]
    return tree
