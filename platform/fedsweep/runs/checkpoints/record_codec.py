"""Frozen records as state trees, field by field, and back with every field's type checked.

Not by pydantic, which makes no adapter for a dataclass that holds tensors unless that carries pydantic's settings.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from fedsweep.errors import DataError, InvariantError
from fedsweep.records import State

_PLAIN: dict[Any, tuple[type, ...]] = {
    int: (int, np.integer),
    float: (float, int, np.floating),
    str: (str,),
    torch.Tensor: (torch.Tensor,),
}


def pack(hint: Any, value: Any) -> State:
    """Return a value as a state tree: records become dicts by field, mappings become dicts.

    Args:
        hint: The value's declared type: a dataclass, ``Mapping[K, V]``, ``tuple[X, ...]``, ``X | None``, a plain type,
            or ``Any`` (kept as it is).
        value: Of that type.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {name: pack(inner, getattr(value, name)) for name, inner in _hints(hint).items()}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Mapping:
        return {key: pack(arguments[1], item) for key, item in value.items()}
    if origin is tuple:
        return tuple(pack(arguments[0], item) for item in value)
    if origin in (Union, types.UnionType):
        return None if value is None else pack(_given(arguments), value)
    return value


def unpack(hint: Any, tree: State, *, path: str) -> Any:
    """Return the value that :func:`pack` made a tree of.

    Args:
        hint: See :func:`pack`.
        tree: From anywhere.
        path: What the tree is called in errors.

    Raises:
        DataError: A field is missing or unknown, or of another type.
    """
    if hint is Any:
        return tree
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints, fields = _hints(hint), _dict(tree, path)
        if set(fields) != set(hints):
            raise DataError(f"{path} must have the fields {sorted(hints)}, but has {sorted(map(str, fields))}")
        return hint(**{name: unpack(hints[name], item, path=f"{path}.{name}") for name, item in fields.items()})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Mapping:
        items = _dict(tree, path)
        if any(type(key) is not arguments[0] for key in items):
            raise DataError(f"the keys of {path} must be of type {arguments[0].__name__}")
        return {key: unpack(arguments[1], item, path=f"{path}[{key!r}]") for key, item in items.items()}
    if origin is tuple:
        if not isinstance(tree, tuple):
            raise DataError(f"{path} must be a tuple, but is a {type(tree).__name__}")
        return tuple(unpack(arguments[0], item, path=f"{path}[{i}]") for i, item in enumerate(tree))
    if origin in (Union, types.UnionType):
        return None if tree is None else unpack(_given(arguments), tree, path=path)
    return _plain(hint, tree, path)


@cache
def _hints(record: Hashable) -> dict[str, Any]:
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}  # type: ignore[arg-type]


def _given(arguments: tuple[Any, ...]) -> Any:
    """Return X of ``X | None``."""
    rest = [argument for argument in arguments if argument is not type(None)]
    if len(rest) != 1:
        raise InvariantError(f"a field that is kept may be X or None, but not one of {arguments}")
    return rest[0]


def _dict(tree: State, path: str) -> dict[Any, State]:
    if not isinstance(tree, dict):
        raise DataError(f"{path} must be a dict, but is a {type(tree).__name__}")
    return tree


def _plain(hint: Any, tree: State, path: str) -> Any:
    if hint not in _PLAIN:
        raise InvariantError(f"{path} has a declared type that can't be kept: {hint}")
    # To Python a bool is an int.
    if not isinstance(tree, _PLAIN[hint]) or isinstance(tree, bool):
        raise DataError(f"{path} must be of type {hint.__name__}, but is a {type(tree).__name__}")
    return tree
