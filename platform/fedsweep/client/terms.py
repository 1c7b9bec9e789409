"""A term of the method on one client in one round, with its slot of the client's memory."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from fedsweep.client.memories import cut_memory, filled_memory, grown_memory
from fedsweep.components.local import ClientFacts, LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.components.probes import LocalClient
from fedsweep.errors import InvariantError
from fedsweep.guard import OnClient, ask
from fedsweep.records import Payload
from fedsweep.trees import FlatLayout, ParamTree

# ``look(purpose)`` shows the client as it is now; the purpose names its random numbers.
Look = Callable[[str], LocalClient]


class ClientTerm:
    """A term and what the client remembers of it. Of the terms of a method each sees what those before it changed.

    Args:
        term: The method's.
        stored: What the client remembers of it, in the full model's size; None: nothing yet.
        facts: What the client knows of itself.
        full: The full model's layout.

    Attributes:
        name: The term's.
        is_stateful: The memory is kept between the client's participations.
        memory: What is remembered during the client's work, in its sub-model's size; None before the first job.
    """

    def __init__(self, term: LocalTerm, stored: Memory | None, facts: ClientFacts, full: FlatLayout) -> None:
        self._term, self._stored, self._facts, self._full = term, stored, facts, full
        self.name, self.is_stateful, self._when = term.name, term.stateful, OnClient(facts.client, facts.round)
        self._has = _own_hooks(type(term))
        self.memory: Memory | None = None
        self._marks: dict[str, tuple[int, int]] | None = None

    def prepare(self, params: ParamTree, values: ParamTree, anchor: ParamTree, look: Look) -> ParamTree | None:
        """Begin a job; returns what replaces starting params, or float buffers among all ``values``."""
        view = functools.partial(look, f"prepare {self.name}")
        # Where nobody looks at an anchor there is none: then it is what the terms before this one left of it.
        memory, replacing = self.remembered(anchor or values), None
        if memory is None:
            memory = self._asked("init", view, params) if "init" in self._has else {}
        if "prepare" in self._has:
            memory, replacing = self._asked("prepare", view, memory, anchor, like=values)
        self.memory = memory
        # What after_step hands back may be another memory each time: there is nothing to compare it with.
        self._marks = None if "after_step" in self._has else marks(memory)
        return replacing

    def loss(self, step: LocalStep) -> Tensor | None:
        """Compute what the term adds to the objective at a step."""
        if "loss" not in self._has:
            return None
        extra: Tensor | None = ask(self._term, "loss", self._in(step), when=self._when)
        return extra

    def gradient(self, step: LocalStep, *, like: ParamTree) -> ParamTree | None:
        """Compute what it adds to the gradient at a step; ``like`` has the shapes."""
        if "gradient" not in self._has:
            return None
        # Of the round's first step alone they are compared: the others will be alike.
        shapes = None if step.position else like
        added: ParamTree | None = ask(self._term, "gradient", self._in(step), like=shapes, when=self._when)
        return added

    def after_step(self, step: LocalStep, gradients: ParamTree) -> ParamTree | None:
        """Follow an optimiser step; returns what replaces the present params."""
        if "after_step" not in self._has:
            return None
        shapes = None if step.position else step.params
        answer: tuple[Memory, ParamTree | None] = ask(
            self._term, "after_step", self._in(step), gradients, like=shapes, when=self._when
        )
        self.memory, replacing = answer
        return replacing

    def finish(self, work: LocalWork, look: Look) -> tuple[Payload, ParamTree | None]:
        """End a job; returns what the term sends, and what replaces the params."""
        memory = self._present
        if self._marks is not None and self._marks != marks(memory):
            # What a resumed or repeated round starts from would no longer be what this one started from.
            raise InvariantError(
                f"the term {self.name!r} ({type(self._term).__name__}) changed its memory in place during its steps"
                f" {self._when}; return a new one from after_step or finish"
            )
        if "finish" not in self._has:
            return {}, None
        view = functools.partial(look, f"finish {self.name}")
        self.memory, payload, *replacing = self._asked("finish", view, memory, work, like=work.values)
        return payload, replacing[0] if replacing else None

    def remembered(self, received: ParamTree | None = None) -> Memory | None:
        """Give the client's memory in its present sub-model's size; None: there is none.

        Args:
            received: The values that stand for what the client never held of models; None: zeros, so that who looks at
                the client's own narrow model sees no more than that.
        """
        if self.memory is not None or self._stored is None:
            return self.memory
        memory: Memory = cut_memory(self._stored, self._facts.submodel, self._full)
        return filled_memory(memory, received or {}, self._full) if self._term.keeps_models else memory

    def kept(self) -> Memory:
        """Give the memory to be kept, in the full model's size."""
        memory: Memory = grown_memory(
            self._present,
            self._stored,
            submodel=self._facts.submodel,
            full=self._full,
            never_held=math.nan if self._term.keeps_models else 0.0,
        )
        return memory

    @property
    def _present(self) -> Memory:
        assert self.memory is not None, "a job prepares its terms first"
        return self.memory

    def _in(self, step: LocalStep) -> LocalStep:
        """Return the step with the term's memory, cut to what the step trains."""
        step.memory = self._present if step._cut is None else step._cut(self._present)
        return step

    def _asked(self, hook: str, view: Callable[[], LocalClient], *args: Any, like: Any = None) -> Any:
        """Call a hook, with the further arguments that it takes."""
        takes = _takes(getattr(type(self._term), hook))
        more: dict[str, Any] = {"client": self._facts} if "client" in takes else {}
        if "local" in takes:
            more["local"] = view()
        return ask(self._term, hook, *args, like=like, when=self._when, **more)


def marks(memory: Memory) -> dict[str, tuple[int, int]]:
    """Mark a memory, to tell whether it is changed in place: its values, and how often tensors were written."""
    return {
        name: (id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0)
        for name, value in memory.items()
    }


@cache
def _takes(hook: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(hook).parameters)


@cache
def _own_hooks(kind: type[LocalTerm]) -> frozenset[str]:
    """Return the optional hooks in which a term does something: the others are not asked."""
    hooks = ("init", "prepare", "loss", "gradient", "after_step", "finish")
    return frozenset(hook for hook in hooks if kind.has_own(hook))
