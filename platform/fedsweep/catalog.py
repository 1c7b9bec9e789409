"""Finds methods by name and builds them from a configuration.

The registry lies in ``fedsweep.algorithms``, which nothing here imports: it is looked up by name, when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fedsweep.config.signatures import bind
from fedsweep.errors import ConfigError
from fedsweep.plugins import find_plugin, resolve_reference

if TYPE_CHECKING:
    from fedsweep.method import FederatedMethod

_REGISTRY = "fedsweep.algorithms.registry"


def method_names() -> tuple[str, ...]:
    """The built-in methods' names and those of installed packages (entry points ``fedsweep.methods``), sorted."""
    installed = (point.name for point in entry_points(group="fedsweep.methods"))
    return tuple(sorted({*_registry(), *installed}))


def method_builder(name: str) -> Callable[..., FederatedMethod]:
    """The function that builds the method of that name.

    Args:
        name: A registered name, or ``package.module:callable``.

    Raises:
        ConfigError: There is no such method; the message names the nearest one.
    """
    known = _registry()
    if name in known:
        return resolve_reference("method", known[name].builder)
    return find_plugin("method", name, known)


def resolve_method(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``method`` with every parameter of what it names, checked and defaults filled in.

    Args:
        spec: ``{name: ..., parameters}`` or ``{merge: [{name: ..., parameters}, ...]}``.

    Raises:
        ConfigError: A name or a parameter is unknown, or a value is of the wrong type.
    """
    if "merge" in spec:
        return {"merge": [resolve_method(part) for part in spec["merge"]]}
    name = spec["name"]
    parameters = {key: value for key, value in spec.items() if key != "name"}
    return {"name": name, **bind("method", name, method_builder(name), parameters)}


def build_method(spec: Mapping[str, Any]) -> FederatedMethod:
    """The method that the section ``method`` describes.

    Args:
        spec: As for :func:`resolve_method`.

    Raises:
        ConfigError: A name, a parameter or a value is wrong, or methods can't be merged.
    """
    from fedsweep.method import FederatedMethod, merge

    if "merge" in spec:
        return merge(*(build_method(part) for part in spec["merge"]))
    resolved = resolve_method(spec)
    name = resolved.pop("name")
    method = method_builder(name)(**resolved)
    if not isinstance(method, FederatedMethod):
        raise ConfigError(f"method {name}: its builder must return a FederatedMethod, but returned {method!r}")
    return method


def _registry() -> Mapping[str, Any]:
    methods: Mapping[str, Any] = importlib.import_module(_REGISTRY).METHODS
    return methods
