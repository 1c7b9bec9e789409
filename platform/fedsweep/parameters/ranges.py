"""Ranges of parameters, declared once: on the annotation.

``mu: NotNegative = 0.01`` is read by a configuration's binder (by pydantic, in these words), shown by ``fedsweep
show``, and checked by :class:`Checked` where somebody constructs the dataclass in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
import types
import typing
from collections.abc import Callable
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MultipleOf

from fedsweep.errors import ConfigError, InputError

INFINITE = "may be infinite"
"""In an annotation: infinity is in the range. Elsewhere it is only where it is the default."""

NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
InnerShare = Annotated[float, Gt(0), Lt(1)]
AtLeastOne = Annotated[float, Ge(1)]
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
PositiveOrInfinite = Annotated[float, Gt(0), INFINITE]

# The kinds of bounds, their words, the field that has the bound, and what must be true of a value and it.
_BOUNDS: tuple[tuple[type, str, str, Callable[[Any, Any], Any]], ...] = (
    (Ge, ">=", "ge", operator.ge),
    (Gt, ">", "gt", operator.gt),
    (Le, "<=", "le", operator.le),
    (Lt, "<", "lt", operator.lt),
    (MultipleOf, "a multiple of", "multiple_of", lambda value, unit: value % unit == 0),
)
_NOUNS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


class Checked:
    """Base of dataclasses that refuse values outside of their fields' annotations.

    Class attributes:
        section: Where a configuration has the fields, for messages.

    Raises:
        ConfigError: A number is outside its range, not finite or no number, or a word is none of a ``Literal``.
    """

    section: ClassVar[str] = "method"

    def __post_init__(self) -> None:
        for name, (annotation, default) in _fields(typing.cast(Any, type(self))).items():
            check_value(f"{self.section}.{name}", getattr(self, name), annotation, default=default)


def check_value(
    where: str, value: object, annotation: Any, *, default: object = None, error: type[InputError] = ConfigError
) -> None:
    """Refuse a value that its annotation does not admit.

    Args:
        where: The key, for the message.
        value: To be checked.
        annotation: Numbers, bool and ``Literal``, their ranges and unions are checked; any other type is not.
        default: The parameter's; where it is infinite, infinity is admitted.
        error: To be raised; ``DataError`` for the content of a file.

    Raises:
        ConfigError: (or ``error``) The message states the rule and the value.
    """
    if admits(annotation, value):
        if not isinstance(value, float) or math.isfinite(value):
            return
        if not math.isnan(value) and (default == math.inf or may_be_infinite(annotation)):
            return
        raise error(f"{where} must be finite, but got {value!r}")
    raise error(f"{where} must be {in_words(annotation)}, but got {value!r}")


def admits(annotation: Any, value: object) -> bool:
    """Return whether a value is of an annotation's type and in its range."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return admits(parts[0], value) and all(_holds(rule, value) for rule in parts[1:])
    if origin in (typing.Union, types.UnionType):
        return any(admits(part, value) for part in parts)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if origin is tuple and parts[-1:] == (...,):
        return isinstance(value, list | tuple) and all(admits(parts[0], item) for item in value)
    if annotation is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        return False  # it has no float, with which all is computed
    if annotation in (int, float):
        return isinstance(value, Integral if annotation is int else Real) and not isinstance(value, bool)
    if annotation in (bool, type(None)):
        return isinstance(value, annotation)
    return True


def in_words(annotation: Any) -> str:
    """Describe what an annotation admits: ``a number >= 0 and < 1 or null``."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return " ".join(filter(None, [in_words(parts[0]), range_text(annotation)]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, parts))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else repr(parts[0])
    if origin is tuple and parts[-1:] == (...,):
        return f"a list, each {in_words(parts[0])}"
    return _NOUNS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def range_text(annotation: Any) -> str:
    """Describe an ``Annotated``'s range alone: ``>= 0 and < 1``; empty where it has none."""
    rules = typing.get_args(annotation)[1:]
    texts = (
        f"{sign} {getattr(rule, key):g}" for kind, sign, key, _ in _BOUNDS for rule in rules if isinstance(rule, kind)
    )
    return " and ".join(texts)


def may_be_infinite(annotation: Any) -> bool:
    """Return whether an annotation, or one of a union's, is marked :data:`INFINITE`."""
    return annotation == INFINITE or any(may_be_infinite(part) for part in typing.get_args(annotation))


def _holds(rule: Any, value: Any) -> bool:
    """Return whether a value is on the right side of a bound; other annotations bound nothing."""
    return all(holds(value, getattr(rule, key)) for kind, _, key, holds in _BOUNDS if isinstance(rule, kind))


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, object]]:
    """Return annotation and default of each field that a constructor sets."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # a plug-in's import for type checking alone: the binder says so where a configuration is read
        return {}
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind) if field.init}
