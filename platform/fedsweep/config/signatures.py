"""Binds what a configuration gives to a builder's signature, so that nothing is declared twice."""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from fedsweep.config.explain import allowed, shown, words
from fedsweep.errors import ConfigError, unknown_name
from fedsweep.parameters.ranges import may_be_infinite, range_text
from fedsweep.parameters.signature import docs_of, once, signature_of

_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """A parameter of a builder, as ``fedsweep show`` lists it.

    Attributes:
        name: As it is written in a configuration.
        type: Its annotation, in short.
        default: As YAML would show it; None where the parameter must be given.
        doc: From the docstring; empty where that is silent.
    """

    name: str
    type: str
    default: str | None
    doc: str


def bind(
    kind: str,
    name: str,
    builder: Callable[..., Any],
    params: Mapping[str, Any],
    *,
    provided: Collection[str] = (),
    beside: Collection[str] = (),
) -> dict[str, Any]:
    """Return the parameters for a builder: those of the configuration, checked, and the defaults of the others.

    Args:
        kind: What is built, e.g. ``"method"``, or the key where that is plain; for messages.
        name: Its name in the configuration; empty where it has none, or the key says which one is meant.
        builder: A function or class; its keyword parameters, their annotations and defaults are the schema.
        params: What the configuration gives beside the name.
        provided: Parameters that the caller adds and a configuration cannot set.
        beside: Keys that may stand there, too; for the message on an unknown one.

    Returns:
        Parameter -> value in the signature's order, lists as tuples where the annotation says so. A default that is no
        plain data is left to the builder.

    Raises:
        ConfigError: A parameter is unknown or missing, or a value is of the wrong type or not finite (infinity is
            admitted where it is the default).
    """
    at, of = (f"{kind} {name}: ", f" (of {name})") if name else (f"{kind}.", "")
    parameters = _parameters(builder, provided)
    unknown = [key for key in params if key not in parameters]
    if unknown and not takes_any(builder):
        names = [*parameters, *beside]
        none = f"has no parameter {unknown[0]!r}" if name else "there is no such parameter"
        reason = unknown_name("parameter", unknown[0], names) if names else none
        raise ConfigError(f"{at}{reason}" if name else f"{at}{unknown[0]}: {reason}")
    bound: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if key in params:
            bound[key] = _checked(f"{kind}.{key}", params[key], parameter, of=of)
        elif parameter.default is inspect.Parameter.empty:
            beside = f" (beside {', '.join(provided)}, which are given to it)" if provided else ""
            raise ConfigError(f"{kind}.{key} is missing; it must be {_allowed(parameter.annotation)}{beside}{of}")
        elif _is_plain(parameter.default):
            bound[key] = parameter.default
    return bound | {key: params[key] for key in unknown}


def describe(builder: Callable[..., Any], *, provided: Collection[str] = ()) -> tuple[ParameterRow, ...]:
    """Return a builder's parameters with type, default and meaning, in the signature's order.

    Args:
        builder: A function or class with a docstring in Google's style.
        provided: Parameters that a configuration cannot set; left out.
    """
    docs = docs_of(builder)
    return tuple(
        ParameterRow(
            name=key,
            type=_type_text(parameter.annotation),
            default=None if parameter.default is inspect.Parameter.empty else _default_text(parameter.default),
            doc=docs.get(key, ""),
        )
        for key, parameter in _parameters(builder, provided).items()
    )


def first_paragraph(item: object) -> str:
    """Return the first paragraph of a docstring in one line, empty where there is none."""
    return " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split()).replace("``", "`")


def takes_any(builder: Callable[..., Any]) -> bool:
    """Return whether it takes parameters that it does not name."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature_of(builder).values())


def _parameters(builder: Callable[..., Any], provided: Collection[str]) -> dict[str, inspect.Parameter]:
    signature = signature_of(builder)
    return {key: value for key, value in signature.items() if value.kind in _KEYWORD and key not in provided}


def _checked(where: str, value: Any, parameter: inspect.Parameter, *, of: str) -> Any:
    annotation = parameter.annotation
    if parameter.default != math.inf and not may_be_infinite(annotation) and not _is_finite(value):
        raise ConfigError(f"{where} must be finite, but got {shown(value)}{of}")
    adapter = _adapter_of(annotation)
    if adapter is None:
        return value
    try:
        # Strict as JSON: a list may become a tuple, but "5" does not become 5.
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        details = error.errors()[0]
        if details["type"] == "value_error":
            raise ConfigError(f"{where}: {details['ctx']['error']}") from None
        choices = words(_schema(adapter))
        if isinstance(value, str) and choices:
            raise ConfigError(f"{where}: {unknown_name('value', value, choices)}") from None
        raise ConfigError(f"{where} must be {_allowed(annotation)}, but got {shown(value)}{of}") from None


@once
def _adapter_of(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return None


def _schema(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    try:
        schema = adapter.json_schema()
    except PydanticUserError:
        return {}
    # References would be looked up in the configuration's own schema.
    return {} if "$defs" in schema else schema


def _allowed(annotation: Any) -> str:
    adapter = _adapter_of(annotation)
    schema = _schema(adapter) if adapter is not None else {}
    return allowed(schema) if schema else _type_text(annotation)


def _type_text(annotation: Any) -> str:
    if annotation is Any:
        return "any value"
    if annotation is type(None):
        return "null"
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return " ".join(filter(None, [_type_text(typing.get_args(annotation)[0]), range_text(annotation)]))
    if origin is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if origin is typing.Union or type(annotation).__name__ == "UnionType":
        return " | ".join(map(_type_text, typing.get_args(annotation)))
    if isinstance(annotation, type) and origin is None:
        return annotation.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(annotation))


def _default_text(default: Any) -> str:
    if isinstance(default, tuple):
        default = list(default)
    if default == math.inf:
        return ".inf"
    return shown(default) if not isinstance(default, str) else default


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, bool, int, float)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
