"""The one guard around components: an error names component, file, line and round, and what comes back is checked.

An exception is read where it comes out, once per round or segment, so a step costs nothing: of its frames, those of a
component are whose code is neither this package's core nor a library's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fedsweep.errors import ComponentError, FedsweepError, InvariantError

_CORE, _METHODS = "fedsweep.", "fedsweep.algorithms."
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "numpy", "scipy", "sklearn", "pandas", "pyarrow", "PIL", "ray", "mlflow", "cloudpickle"),
    *("datasets", "flwr_datasets", "huggingface_hub", "fsspec", "safetensors", "pydantic", "yaml", "optuna", "sko"),
    *("matplotlib", "plotly", "jinja2", "typer", "click", "rich", "psutil", "sqlalchemy"),
}


@dataclass(frozen=True)
class OnClient:
    """When something happened, put into words only where it matters."""

    client: int
    round: int

    def __str__(self) -> str:
        return f"on client {self.client} in round {self.round}"


@contextmanager
def guarded(*, when: str, raises: type[FedsweepError] = ComponentError) -> Iterator[None]:
    """Around whatever calls components: what one of them raises comes out as one line that says which, and where.

    Args:
        when: ``in round 3``, ``before round 1``.
        raises: What comes out; it takes a message.

    Raises:
        ComponentError: (or ``raises``) A component raised something. Errors of this package pass as they are, and so
            does what no component had a part in: that is the platform's own.
    """
    try:
        yield
    except (FedsweepError, MemoryError):
        raise
    except Exception as error:
        where = place_of(error)
        if where is None:
            raise
        raise raises(f"{where} failed {when}: {type(error).__name__}: {error}") from error


def place_of(error: BaseException) -> str | None:
    """``Sparse.apply (topk.py, line 44)``: the component in whose code an exception arose; None where in nobody's."""
    frames: list[tuple[FrameType, int]] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    own = [place for place, (frame, _) in enumerate(frames) if _is_component(frame)]
    if not own:
        return None
    # The hook is where the core went over to the component the last time; the line is where that stood in the end.
    entry = own[-1]
    while entry - 1 in own:
        entry -= 1
    hook, (inner, line) = frames[entry][0], frames[own[-1]]
    return f"{hook.f_code.co_qualname} ({Path(inner.f_code.co_filename).name}, line {line})"


def hook_of(component: object, hook: str) -> str:
    """``Sparse.apply (topk.py, line 40)``: where a component's hook begins; that of a function is ``__call__``."""
    found: Any = (
        getattr(component, hook, component) if hook != "__call__" or not inspect.isfunction(component) else component
    )
    function = inspect.unwrap(found) if callable(found) else found
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = type(component).__name__
    if code is None:
        return name if hook == "__call__" else f"{name}.{hook}"
    return f"{code.co_qualname} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def wrong(component: object, hook: str, *, must: str, given: object, when: object) -> InvariantError:
    """The error for what a component's hook should not have returned, ``in round 3``."""
    return InvariantError(f"{hook_of(component, hook)} must return {must}, but returned {_shown(given)} {when}")


def pair(given: object, component: object, hook: str, *, must: str, when: object) -> tuple[Any, Any]:
    """What a hook returned, where it must return two things.

    Raises:
        InvariantError: It did not.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        raise wrong(component, hook, must=f"({must})", given=given, when=when)
    return given


def new_state(given: Any, state: Any, component: object, hook: str, *, when: object) -> Any:
    """What a hook returned as its new state, which is not None where there was one: a ``return`` is easily forgotten.

    Raises:
        InvariantError: It returned None for a state.
    """
    if given is None and state is not None:
        raise wrong(component, hook, must="the new state (or the one that it was given)", given=given, when=when)
    return given


def check_items(given: object, of: type | tuple[type, ...], component: object, hook: str, *, when: object) -> None:
    """Check what must be a tuple of such things.

    Raises:
        InvariantError: It is something else.
    """
    if not isinstance(given, tuple | list) or not all(isinstance(item, of) for item in given):
        name = of[0].__name__ if isinstance(of, tuple) else of.__name__
        raise wrong(component, hook, must=f"a tuple of {name}", given=given, when=when)


def check_named(given: object, of: type, component: object, hook: str, *, when: object) -> None:
    """Check what must be such things by name, or by client.

    Raises:
        InvariantError: It is something else.
    """
    if not isinstance(given, Mapping) or not all(isinstance(item, of) for item in given.values()):
        raise wrong(component, hook, must=f"a mapping to {of.__name__}", given=given, when=when)


def vector_and_state(
    given: object, like: Tensor, component: object, hook: str, *, when: object, before: Tensor | None = None
) -> tuple[Tensor, Any]:
    """What a hook returned, where it must return a model [V] like the server's, and its state.

    The model ``before``, which the hook was given, is known to be right.

    Raises:
        InvariantError: It is something else, of another shape or type, or not finite.
    """
    vector, state = pair(given, component, hook, must=f"vector [{len(like)}], state", when=when)
    if not isinstance(vector, Tensor) or vector.shape != like.shape or vector.dtype != like.dtype:
        must = f"a vector of shape {list(like.shape)} and {like.dtype}, and its state"
        raise wrong(component, hook, must=must, given=vector, when=when)
    if vector is not before and not bool(torch.isfinite(vector).all()):
        count = int((~torch.isfinite(vector)).sum())
        raise InvariantError(
            f"{hook_of(component, hook)} returned a model with values that are not finite ({count} of {len(vector)})"
            f" {when}"
        )
    return vector, state


def check_scalar(given: object, component: object, hook: str, *, when: object) -> None:
    """Check what must be a differentiable scalar.

    Raises:
        InvariantError: It is something else.
    """
    if not isinstance(given, Tensor) or given.ndim:
        raise wrong(component, hook, must="a scalar tensor", given=given, when=when)


def check_tree(given: object, like: Mapping[str, Tensor], component: object, hook: str, *, when: object) -> None:
    """Check tensors by name, each of the shape of the one of that name; there may be fewer, or None.

    Raises:
        InvariantError: They are something else.
    """
    must = "a tensor for each parameter that it changes, by name, or None"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise wrong(component, hook, must=must, given=given, when=when)
    for name, value in given.items():
        if name not in like:
            known = ", ".join([*like][:3])
            raise wrong(component, hook, must=f"{must} ({known}, ...)", given=f"the name {name!r}", when=when)
        if not isinstance(value, Tensor) or value.shape != like[name].shape:
            shape = f"{list(like[name].shape)} for {name!r}"
            raise wrong(component, hook, must=f"a tensor of shape {shape}", given=value, when=when)


def _is_component(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    if module.startswith(_METHODS):
        return True
    return not module.startswith(_CORE) and module.partition(".")[0] not in _LIBRARIES and module != "fedsweep"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(_shown(item) for item in value[:3])})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(item)}" for key, item in [*value.items()][:3]) + "}"
    text = value if isinstance(value, str) else repr(value)
    return f"{text[:80]}" if isinstance(value, str) else f"{type(value).__name__} {text[:80]}"
