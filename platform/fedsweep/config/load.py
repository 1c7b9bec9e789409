"""From a file, a preset's name or a mapping to a checked configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsweep.config.credentials import check_no_credentials
from fedsweep.config.explain import all_keys, branches, explain, schema_at
from fedsweep.config.includes import EXTENDS, FROM, SHARED, read_whole
from fedsweep.config.overrides import SELECTORS, apply_overrides
from fedsweep.config.presets import find_preset, list_presets
from fedsweep.config.schema import Config, json_schema
from fedsweep.config.training import EXCLUSIVE_KEYS, NO_NUMBER
from fedsweep.errors import ConfigError, unknown_name

# Where a given mapping without the selector joins the default, and one with it replaces the default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "scenario.partition": Config().tree()["scenario"]["partition"],
    "model": Config().tree()["model"],
    "method": Config().tree()["method"],
    "training.optimizer": {"name": "sgd"},
}
# What ``fedsweep reproduce`` reads in the same file; no part of an experiment's configuration.
_TABLE = "table"
# Beyond this a whole number can't be compared with others that were read as floats, or be printed.
_GREATEST = 10**40


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of a source and overrides, checked as far as it says by itself.

    Args:
        source: A YAML file, the name of a preset, or a mapping; a section ``table`` is left out.
        overrides: ``KEY=VALUE`` texts, dotted keys and YAML values; of the same key the last one wins.

    Raises:
        ConfigError: The source is not there or not a mapping, a key is unknown, or a value is not allowed; the message
            is one line that names the key or file, the value found and what is allowed.
    """
    source_tree = {key: value for key, value in _plain(_read(source), ()).items() if key != _TABLE}
    tree = apply_overrides(source_tree, overrides)
    check_no_credentials(tree)
    return _build(tree)


def file_schema() -> dict[str, Any]:
    """Return the JSON Schema of what may stand in a file, for editors: also references, what is shared, and a table.

    No key must be there: it may come from what a section extends, or from the default that it is laid over.
    """
    tree = json_schema()
    for section in (tree, *tree["$defs"].values()):
        section.pop("required", None)
        section["properties"] |= {EXTENDS: {"type": "string"}, FROM: {"type": "string"}}
    tree["properties"][_TABLE] = {"type": "object"}
    tree["patternProperties"] = {f"^{SHARED}": {}}
    for name in ("Stop", "StudyBudget"):
        tree["$defs"][name]["properties"]["total_bytes"]["anyOf"].append({"type": "string"})  # 2 GB
    # Without its name an optimizer may be either.
    optimizer = tree["$defs"]["Training"]["properties"]["optimizer"]
    optimizer["anyOf"] = optimizer.pop("oneOf")
    return tree


def with_sections(config: Config, sections: Mapping[str, Any]) -> Config:
    """Return the configuration with other values for some dotted keys; the user's tree and the bound builders stay.

    Args:
        config: What :func:`load_config` gave.
        sections: Dotted key -> what stands there; a key comes after those that hold it.
    """
    tree = config.tree()
    for key, value in sections.items():
        *above, last = key.split(".")
        place = tree
        for part in above:
            place = place[part]
        place[last] = _plain(value, (key,))
    changed = _validate(tree)
    changed._given, changed._bound = config.given, config.bound
    return changed


def check_key(key: str, *, kind: str = "key") -> None:
    """Check that a dotted key can be set at all.

    Below a component (the method, the partition) any parameter is admitted: its builder knows them.

    Raises:
        ConfigError: There is no such key; the message names the nearest one.
    """
    parts = key.split(".")
    keys = all_keys()
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        if prefix not in keys:
            raise ConfigError(unknown_name(kind, key, [name for name in keys if not name.startswith("sweep")]))
        if any(branch.get("additionalProperties") for branch in branches(schema_at(parts[:end], {}))):
            return


def _read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = _find(source)
    tree = read_whole(path)
    if not isinstance(tree, dict):
        what = "empty" if tree is None else f"a {type(tree).__name__}"
        raise ConfigError(f"{path}, line 1: a configuration is a mapping of keys to values, but this is {what}")
    return tree


def _find(source: Any) -> Path:
    if not isinstance(source, str | os.PathLike):
        what = type(source).__name__
        raise ConfigError(f"a configuration is a mapping of keys, a YAML file or a preset's name, but got a {what}")
    path = Path(source).expanduser()
    if os.path.isfile(path):  # not the path's own way to ask: that raises where the name is too long
        return path
    if os.path.isdir(path) and find_preset(str(source)) is None:
        raise ConfigError(f"{path} is a folder; give the YAML file in it, e.g. {path / 'config.yaml'}")
    preset = find_preset(str(source))
    if preset is None:
        names = [preset.name for preset in list_presets()]
        raise ConfigError(
            f"no file {str(source)!r} is there; {unknown_name('preset', str(source), names)};"
            " fedsweep list presets shows them"
        )
    return preset


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    """Return a copy of mappings, lists and scalars; paths become text, tuples lists, numpy's numbers Python's."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"keys are text, but {'.'.join(path) or 'the configuration'} has the key {key!r}")
        return {key: _plain(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, str(position))) for position, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if type(value) is int and abs(value) >= _GREATEST:
        raise ConfigError(f"{'.'.join(path)} is a number of {value.bit_length()} bits; give one below 10^40")
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Integral | Real):  # numpy's, as of arange and logspace
        return int(value) if isinstance(value, Integral) else float(value)
    raise ConfigError(f"{'.'.join(path)} must be text, number, true, false, null, list or mapping, but got {value!r}")


def _build(tree: dict[str, Any]) -> Config:
    config = _validate(_with_defaults(tree))
    varied: dict[str, Mapping[str, Any]] = {"sweep.space": config.sweep.space}
    for setting in config.sweep.settings:
        varied |= {f"sweep.settings {setting.name!r}": {**setting.set, **setting.space}}
    for place, keys in varied.items():
        for key in keys:
            if key.split(".")[0] == "sweep":
                raise ConfigError(f"{place}: a sweep can't vary its own section, but has {key!r}")
            check_key(key, kind=f"key of {place}")
    config._given = tree
    return config


def _validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, tree)) from None


def _with_defaults(source_tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree, completed where pydantic alone would not know how."""
    tree = apply_overrides(source_tree, ())
    for key, default in _DEFAULTS.items():
        *above, last = key.split(".")
        place: Any = tree
        for part in above:
            place = place.get(part) if isinstance(place, dict) else None
        section = place.get(last) if isinstance(place, dict) else None
        if isinstance(section, dict) and not SELECTORS & section.keys():
            place[last] = {**default, **section}
    training = tree.get("training")
    if isinstance(training, dict):
        for first, second in EXCLUSIVE_KEYS:
            for one, other in ((first, second), (second, first)):
                if training.get(one) not in NO_NUMBER and other not in training:
                    training[other] = None
    return tree
