"""The parameters of a builder: its own, and those of the components that it hands parameters on to."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fedsweep.errors import ConfigError
from fedsweep.parameters.ranges import check_value

_Builder = TypeVar("_Builder", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components that a builder hands parameters on to.

    Attributes:
        kinds: Their dataclasses, or other builders.
        but: Fields that the builder makes itself.
    """

    kinds: tuple[Callable[..., Any], ...]
    but: Collection[str] = ()


def takes(*kinds: Callable[..., Any], but: Collection[str] = ()) -> Callable[[_Builder], _Builder]:
    """Give a method's builder the parameters of its components.

    A component's field is written once, there: type, range, default and meaning. A configuration, ``fedsweep show`` and
    Python see the builder's own parameters, then those; one without a default is null unless it is given, and the
    builder's to fill in. The builder is called with all of them by keyword; :func:`parameters_of` picks those of one
    component.

    Args:
        kinds: The components' dataclasses, or other builders.
        but: Fields that the builder makes itself.
    """

    def wrap(builder: _Builder) -> _Builder:
        @functools.wraps(builder)
        def built(**values: Any) -> Any:
            parameters = signature_of(built)
            if unknown := [name for name in values if name not in parameters]:
                raise TypeError(f"{builder.__name__}() got an unexpected keyword argument {unknown[0]!r}")
            return builder(**{name: parameter.default for name, parameter in parameters.items()} | values)

        built.parts = Parts(kinds=kinds, but=but)  # type: ignore[attr-defined]
        return built  # type: ignore[return-value]

    return wrap


def checked(section: str) -> Callable[[_Builder], _Builder]:
    """Let a builder refuse values outside of its parameters' annotations, whoever calls it.

    Args:
        section: Where a configuration has the parameters, for messages.
    """

    def wrap(builder: _Builder) -> _Builder:
        @functools.wraps(builder)
        def built(*args: Any, **values: Any) -> Any:
            parameters = signature_of(builder) if values else {}
            for name in values:
                if name in parameters:
                    annotation, default = parameters[name].annotation, parameters[name].default
                    check_value(f"{section}.{name}", values[name], annotation, default=default)
            return builder(*args, **values)

        return built  # type: ignore[return-value]

    return wrap


def parameters_of(kind: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Pick those of a builder's parameters that one of its components' dataclasses, or another builder, takes."""
    return {name: parameters[name] for name in signature_of(kind) if name in parameters}


def once(ask: _Builder) -> _Builder:
    """Remember the answer for a builder or annotation that has a hash; a table asks the same some hundred times."""
    remembered = functools.cache(ask)

    @functools.wraps(ask)
    def answer(item: Any) -> Any:
        return remembered(item) if isinstance(item, Hashable) else ask(item)

    return typing.cast(_Builder, answer)


@once
def signature_of(builder: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a builder's parameters by name, in their order, with annotations as types.

    Args:
        builder: A function or class; where it takes the parameters of components, theirs follow its own.

    Raises:
        ConfigError: An annotation can't be resolved, or there is no signature to be read.
    """
    try:
        own, hints = inspect.signature(builder).parameters, _hints(builder)
    except (TypeError, ValueError) as error:  # of a callable that is written in C
        raise ConfigError(f"{builder!r} can't be a builder: {error}; give a function or class of your own") from error
    listed = {name: each.replace(annotation=hints.get(name, Any)) for name, each in own.items()}
    parts: Parts | None = getattr(builder, "parts", None)
    if not isinstance(parts, Parts):
        return listed
    listed = {name: each for name, each in listed.items() if each.kind is each.KEYWORD_ONLY}
    for kind in parts.kinds:
        for name, each in signature_of(kind).items():
            if name not in parts.but and name not in listed:
                is_open = each.default is each.empty
                listed[name] = each.replace(default=None, annotation=each.annotation | None) if is_open else each
    return listed


def docs_of(builder: Callable[..., Any]) -> dict[str, str]:
    """Return texts on a builder's parameters, from docstrings in Google's style: its own, bases', and components'."""
    parts: Parts | None = getattr(builder, "parts", None)
    theirs = [docs_of(kind) for kind in parts.kinds] if isinstance(parts, Parts) else []
    # A class has fields of its bases, too.
    kinds = reversed(builder.__mro__) if inspect.isclass(builder) else [builder]
    own = [_documented(inspect.getdoc(kind) or "") for kind in kinds]
    return {name: text for texts in (*theirs, *own) for name, text in texts.items()}


def _hints(builder: Callable[..., Any]) -> dict[str, Any]:
    target = builder
    if inspect.isclass(builder):
        # A dataclass's fields carry the annotations; another class's constructor does.
        target = builder if "__dataclass_fields__" in vars(builder) else builder.__init__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{builder!r} has an annotation that can't be resolved: {error}") from error


def _documented(docstring: str) -> dict[str, str]:
    """Return parameter -> text, from the sections Args and Attributes of a docstring in Google's style."""
    texts: dict[str, list[str]] = {}
    inside, current = False, ""
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            inside = line.strip() in ("Args:", "Attributes:")
        elif inside and (start := re.match(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)):
            current = start[1]
            texts[current] = [start[2].strip()]
        elif inside and current and line.strip():
            texts[current].append(line.strip())
    return {key: " ".join(lines).replace("``", "`") for key, lines in texts.items()}
