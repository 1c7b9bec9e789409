"""The one guard around components: an error names component, file, line and round, and what comes back is checked.

An exception is read where it comes out, once per round or segment, so a step costs nothing: of its frames, those of a
component are whose code is neither this package's core nor a library's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fedsweep.errors import ComponentError, FedsweepError, InvariantError

_CORE, _METHODS = "fedsweep.", "fedsweep.algorithms."
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    *("torch", "torchvision", "numpy", "scipy", "sklearn", "pandas", "pyarrow", "PIL", "ray", "mlflow", "cloudpickle"),
    *("datasets", "flwr_datasets", "huggingface_hub", "fsspec", "safetensors", "pydantic", "yaml", "optuna", "sko"),
    *("matplotlib", "plotly", "jinja2", "typer", "click", "rich", "psutil", "sqlalchemy"),
    *("tensorboard", "wandb"),  # the latter puts its own in the place of sys.exit
}


@dataclass(frozen=True)
class OnClient:
    """A moment on a client, put into words only where it matters."""

    client: int
    round: int

    def __str__(self) -> str:
        return f"on client {self.client} in round {self.round}"


@contextmanager
def guarded(*, when: str, raises: type[FedsweepError] = ComponentError) -> Iterator[None]:
    """Turn what a component raises inside into one line that says which component, and where.

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
    except BaseException as error:
        where = place_of(error)
        if where is None or not is_failure(error):
            raise
        raise raises(f"{where} failed {when}: {named_error(error)}") from cause_of(error)


def is_failure(error: BaseException) -> bool:
    """Check for a failure of the code that raised it, and no end that was asked for from outside.

    Those are Ctrl-C, a generator's, and Ray's of this process: its handler of SIGTERM calls ``sys.exit`` wherever the
    code is. A ``sys.exit`` of the code's own would end a run without a word, with any exit code, and an actor as if it
    had died; a class of its own beside ``Exception`` would be no error that anybody tells.
    """
    if not isinstance(error, SystemExit):
        return not isinstance(error, KeyboardInterrupt | GeneratorExit)
    trace, module = error.__traceback__, ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.partition(".")[0] != "ray"


def cause_of(error: BaseException) -> BaseException | None:
    """Return an error as the cause of another that a context manager raises in its place.

    It can't be a ``StopIteration``: ``contextlib`` would take what comes of it for the manager's own end, and raise it
    again.
    """
    return None if isinstance(error, StopIteration) else error


def named_error(error: BaseException) -> str:
    """Return an error's kind and text: ``ValueError: too few``, and ``AssertionError`` where it has none."""
    try:
        text = str(error)
    except BaseException as failure:  # a method of its class
        if not is_failure(failure):
            raise
        text = f"its text can't be had ({type(failure).__name__} in {type(error).__name__}.__str__)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def placed_error(error: BaseException) -> str:
    """Return an error's kind and text, after the place in a component's code where it arose, if it did in one."""
    where = place_of(error)
    return f"{'' if where is None else f'{where}: '}{named_error(error)}"


def reason_of(error: BaseException) -> str:
    """Return why a run failed, for its folder: this package's errors say it themselves."""
    return str(error) if isinstance(error, FedsweepError) else placed_error(error)


def place_of(error: BaseException) -> str | None:
    """Return the component in whose code an exception arose, ``Sparse.apply (topk.py, line 44)``; None: in nobody's."""
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
    """Return a hook's place, ``Sparse.apply (topk.py, line 40)``; a function's hook is ``__call__``."""
    target: Any = (
        getattr(component, hook, component) if hook != "__call__" or not inspect.isfunction(component) else component
    )
    function = inspect.unwrap(target) if callable(target) else target
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = type(component).__name__
    if code is None:
        return name if hook == "__call__" else f"{name}.{hook}"
    return f"{code.co_qualname} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def wrong(component: object, hook: str, *, must: str, answer: object, when: object) -> InvariantError:
    """Return the error for what a component's hook should not have returned, ``in round 3``."""
    return InvariantError(f"{hook_of(component, hook)} must return {must}, but returned {_shown(answer)} {when}")


# -- what hooks must return -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a component's hook.

    Attributes:
        component: Whose.
        hook: Its name.
        args: What it was given.
        like: What the answer is compared with, see the rules.
        when: ``in round 3``, for messages.
    """

    component: object
    hook: str
    args: tuple[Any, ...]
    like: Any
    when: object

    def wrong(self, must: str, answer: object) -> InvariantError:
        """Return the error for this answer."""
        return wrong(self.component, self.hook, must=must, answer=answer, when=self.when)


# Raises an InvariantError for an answer that breaks it.
Rule = Callable[[Any, Call], None]
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def returns(rule: Rule) -> Callable[[_Hook], _Hook]:
    """Declare on a seam what its hook must return; :func:`ask` checks the answers of all components by it."""

    def declare(hook: _Hook) -> _Hook:
        hook.__returns__ = rule  # type: ignore[attr-defined]
        return hook

    return declare


def ask(component: object, hook: str, *args: Any, when: object, like: Any = None, **more: Any) -> Any:
    """Call a component's hook and check the answer: the one way in which the core goes over to a component.

    Args:
        component: Whom.
        hook: What.
        args: Handed to the hook.
        when: ``in round 3``, for messages.
        like: What the answer must be like, where the hook's rule asks for it.
        more: Handed to the hook, too.

    Raises:
        InvariantError: The answer is not what the seam declares.
    """
    answer = getattr(component, hook)(*args, **more)
    kind: Any = type(component)
    _rule_of(kind, hook)(answer, Call(component, hook, args, like, when))
    return answer


@cache
def _rule_of(kind: Any, hook: str) -> Rule:
    # A component's own hook has no rule on it; that of the seam which it overrides holds.
    hooks = (vars(base).get(hook) for base in kind.__mro__)
    return next(cast(Rule, rule) for rule in (getattr(each, "__returns__", None) for each in hooks) if rule)


def pair(must: str, first: Rule, second: Rule | None = None) -> Rule:
    """Return the rule for a tuple of two, often with the new state; ``{n}`` in ``must`` is the length of ``like``."""

    def check_pair(answer: Any, call: Call) -> None:
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise call.wrong(f"({must.format(n=len(call.like))})" if "{n}" in must else f"({must})", answer)
        first(answer[0], call)
        if second is not None:
            second(answer[1], call)

    return check_pair


def items(*of: type) -> Rule:
    """Return the rule for a tuple of such things."""

    def check_items(answer: Any, call: Call) -> None:
        # A bool is an int in Python, but no client's number.
        fits = isinstance(answer, tuple | list) and all(
            isinstance(item, of) and item.__class__ is not bool for item in answer
        )
        if not fits:
            raise call.wrong(f"a tuple of {of[0].__name__}", answer)

    return check_items


def named(of: type) -> Rule:
    """Return the rule for such things by name, or by client."""

    def check_named(answer: Any, call: Call) -> None:
        if not isinstance(answer, Mapping) or not all(isinstance(item, of) for item in answer.values()):
            raise call.wrong(f"a mapping to {of.__name__}", answer)

    return check_named


def sums(answer: Any, call: Call) -> None:
    """Check a test's sums: the loss, the count, and where samples are classified the confusion."""
    if not isinstance(answer, Mapping) or not {"loss", "count"} <= {*answer}:
        raise call.wrong("a mapping with the sums loss and count, and others by name", answer)
    shape = tuple(getattr(answer.get("confusion"), "shape", ()))
    if cast(Any, call.component).has_classes and not (len(shape) == 2 and shape[0] == shape[1]):
        raise call.wrong("with has_classes also confusion [C, C], samples by true class and predicted class", answer)


def new_state(answer: Any, call: Call) -> None:
    """Check a state, which is not None where there was one: a ``return`` is easily forgotten."""
    if answer is None and call.args[0] is not None:
        raise call.wrong("the new state (or the one that it was given)", answer)


def finite_vector(answer: Any, call: Call) -> None:
    """Check a model [V] of finite values, of the shape and type of ``like``."""
    like = call.like
    if not isinstance(answer, Tensor) or answer.shape != like.shape or answer.dtype != like.dtype:
        raise call.wrong(f"a vector of shape {list(like.shape)} and {like.dtype}, and its state", answer)
    if answer.requires_grad:
        raise call.wrong("a vector without a gradient (detach it, or compute under torch.no_grad())", answer)
    # The model that the hook was given, if any, has been looked at before.
    if answer is not call.args[1] and not bool(torch.isfinite(answer).all()):
        count = int((~torch.isfinite(answer)).sum())
        raise InvariantError(
            f"{hook_of(call.component, call.hook)} returned a model with values that are not finite ({count} of"
            f" {len(answer)}) {call.when}"
        )


def as_number(value: Any) -> float | None:
    """Return a number as a float, also where it is a tensor or numpy's without a dimension; None: it is none."""
    is_number = isinstance(value, int | float) or getattr(value, "ndim", None) == 0
    try:
        return float(value) if is_number and not isinstance(value, bool) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def scalar(answer: Any, call: Call) -> None:
    """Check a differentiable scalar."""
    if not isinstance(answer, Tensor) or answer.ndim:
        raise call.wrong("a scalar tensor", answer)


def optional(rule: Rule) -> Rule:
    """Return the rule for None, or what keeps another rule."""
    return lambda answer, call: None if answer is None else rule(answer, call)


def params_tree(answer: Any, call: Call) -> None:
    """Check None, or tensors by name, each of the shape of the one in ``like``; not looked at where that is None."""
    must = "a tensor for each parameter that it changes, by name, or None"
    if answer is None or call.like is None:
        return
    if not isinstance(answer, Mapping):
        raise call.wrong(must, answer)
    for name, value in answer.items():
        if name not in call.like:
            names = ", ".join([*call.like][:3])
            raise call.wrong(f"{must} ({names}, ...)", f"the name {name!r}")
        if not isinstance(value, Tensor) or value.shape != call.like[name].shape:
            raise call.wrong(f"a tensor of shape {list(call.like[name].shape)} for {name!r}", value)


def term_memory(answer: Any, call: Call) -> None:
    """Check a term's memory, and only of one that is declared to have any."""
    term: Any = call.component
    if not isinstance(answer, Mapping):
        raise call.wrong("a memory, a mapping", answer)
    if answer and not term.stateful:
        # It would be dropped at the round's end, and the method would run on as another one.
        raise InvariantError(
            f"the term {term.name!r} ({type(term).__name__}) returned memory ({', '.join(answer)}), but is not"
            " declared stateful, so the memory would be lost; set stateful = True on the class"
        )


def term_finish(answer: Any, call: Call) -> None:
    """Check a term's memory and payload, and params or nothing; a payload only of one that is declared to send any."""
    term: Any = call.component
    if not isinstance(answer, tuple) or len(answer) not in (2, 3):
        raise call.wrong("(memory, payload) or (memory, payload, params or None)", answer)
    memory, payload, *replacing = answer
    term_memory(memory, call)
    named(Tensor)(payload, call)
    params_tree(replacing[0] if replacing else None, call)
    if payload and not term.sends:
        # Where a round folds, nobody would ask for it.
        raise InvariantError(
            f"the term {term.name!r} ({type(term).__name__}) returned a payload ({', '.join(payload)}), but is"
            " not declared to send one, so it may be lost; set sends = True on the class"
        )


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
    text = value if isinstance(value, str) else " ".join(repr(value).split())
    return f"{text[:80]}" if isinstance(value, str) else f"{type(value).__name__} {text[:80]}"
