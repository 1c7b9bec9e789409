"""Finds what a user's configuration names: ``package.module:callable``, or an installed package's entry point.

So a data set, a partition or a transform of one's own needs no change in this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from fedsweep.errors import ConfigError, DataError, FedsweepError, unknown_name
from fedsweep.guard import is_failure, placed_error


def is_reference(name: str) -> bool:
    """Return whether a name has the form ``package.module:callable``."""
    return ":" in name


def resolve_reference(kind: str, reference: str) -> Callable[..., Any]:
    """Return the callable that ``package.module:callable`` names; messages say what ``kind`` is looked for.

    Raises:
        ConfigError: the form is wrong, the module cannot be imported, it has no such attribute, or that cannot be
            called.
    """
    module_name, _, attribute_path = reference.partition(":")
    if not module_name or not attribute_path:
        raise ConfigError(f"{kind} {reference!r} must have the form 'package.module:callable'")
    try:
        target: Any = importlib.import_module(module_name)
    except BaseException as error:
        if not is_failure(error):
            raise
        way_out = "; install it or put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(
            f"{kind} {reference!r}: the module {module_name!r} cannot be imported ({placed_error(error)}){way_out}"
        ) from error
    for attribute in attribute_path.split("."):
        if not hasattr(target, attribute):
            if module_name == "__main__":  # a run's folder names what a script or a notebook had
                raise ConfigError(
                    f"{kind} {reference!r}: this program defines no {attribute!r}; take up the run from the script or"
                    " notebook that does (fedsweep.resume), or put it into a module of its own and name that"
                )
            attributes = [name for name in dir(target) if not name.startswith("_")]
            raise ConfigError(f"{kind} {reference!r}: {unknown_name('attribute', attribute, attributes)}")
        target = getattr(target, attribute)
    if not callable(target):
        raise ConfigError(f"{kind} {reference!r} must be callable, but is a {type(target).__name__}")
    return target  # type: ignore[no-any-return]


def find_plugin(kind: str, name: str, builtin: Iterable[str]) -> Callable[..., Any]:
    """Find the callable of a name that is not built in: a reference, or an entry point ``fedsweep.<kind>s``.

    Raises:
        ConfigError: nothing of that name is there; the message gives the nearest name.
    """
    if is_reference(name):
        return resolve_reference(kind, name)
    installed = {point.name: point.value for point in entry_points(group=f"fedsweep.{kind}s")}
    if name in installed:
        return resolve_reference(kind, installed[name])
    raise ConfigError(
        f"{unknown_name(kind, name, [*builtin, *installed])}; your own is given as 'package.module:callable'"
    )


def call_builder(
    kind: str, name: str, builder: Callable[[], Any], *, gives: type, error: type[ConfigError | DataError] = ConfigError
) -> Any:
    """Call a builder, and raise its failures as errors that name it.

    Args:
        kind: What is built, e.g. ``"partition"``; for messages.
        name: Its name in the configuration.
        builder: Called without arguments.
        gives: What it must give.
        error: What to raise.

    Raises:
        ConfigError: (or ``error``) It failed, or gave something else. The package's own errors pass as they are.
    """
    try:
        made = builder()
    except FedsweepError:
        raise
    except BaseException as failure:
        if not is_failure(failure):
            raise
        raise error(f"{kind} {name!r} cannot be built ({placed_error(failure)})") from failure
    if not isinstance(made, gives):
        raise error(f"{kind} {name!r} must give a {gives.__name__}, but gives a {type(made).__name__}")
    return made
