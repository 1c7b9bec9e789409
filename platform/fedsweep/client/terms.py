"""A method's terms on one client in one round, each with its own slot of the client's memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from fedsweep.client.memories import cut_memory, grown_memory
from fedsweep.components.local import ClientFacts, LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.components.probes import LocalClient
from fedsweep.errors import InvariantError
from fedsweep.guard import OnClient, check_named, check_scalar, check_tree, pair, wrong
from fedsweep.records import Payload
from fedsweep.trees import FlatLayout, ParamTree

# ``look(purpose)`` shows the client as it is now; the purpose names its random numbers.
Look = Callable[[str], LocalClient]


class ClientTerms:
    """The terms, asked one after another: each sees what those before it changed.

    Args:
        terms: The method's.
        stored: What the client remembers, by term, in the full model's size.
        facts: What the client knows of itself.
        full: The full model's layout.
    """

    def __init__(
        self, terms: Sequence[LocalTerm], stored: Mapping[str, Memory], facts: ClientFacts, full: FlatLayout
    ) -> None:
        self._terms, self._stored, self._facts, self._full = terms, stored, facts, full
        self._when = OnClient(facts.client, facts.round)
        self._memories: dict[str, Memory] = {}
        self._marks: dict[str, dict[str, tuple[int, int]] | None] = {}

    @property
    def present(self) -> Mapping[str, Memory]:
        """What each term remembers during its work."""
        return self._memories

    @property
    def see_gradients(self) -> bool:
        """Whether one of them adds to the gradient or is shown it."""
        return any(term.has_own("gradient", "after_step") for term in self._terms)

    def prepare(
        self, params: ParamTree, values: ParamTree, anchor: ParamTree, look: Look
    ) -> Iterator[ParamTree | None]:
        """At a job's start: for each term what replaces starting params, or float buffers among all ``values``.

        ``look`` shows the client to it.
        """
        for term in self._terms:
            view = functools.partial(look, f"prepare {term.name}")
            if term.name not in self._memories:
                stored = self._stored.get(term.name)
                if stored is None:
                    made = self._asked(term.init, view, params)
                    self._remember(term, made, "init")
                else:
                    self._memories[term.name] = cut_memory(stored, self._facts.submodel, self._full)
            given = self._asked(term.prepare, view, self._memories[term.name], anchor)
            memory, replacing = pair(given, term, "prepare", must="memory, params or None", when=self._when)
            self._remember(term, memory, "prepare")
            check_tree(replacing, values, term, "prepare", when=self._when)
            # What after_step hands back may be another memory each time: there is nothing to compare it with.
            self._marks[term.name] = None if term.has_own("after_step") else marks(memory)
            yield replacing

    def at(self, step: LocalStep, seen: Callable[[Memory], Memory] | None = None) -> Iterator[LocalTerm]:
        """Each term, with its memory in the step; ``seen`` cuts it to what the step trains."""
        for term in self._terms:
            memory = self._memories[term.name]
            step.memory = memory if seen is None else seen(memory)
            yield term

    def losses(self, step: LocalStep, seen: Callable[[Memory], Memory] | None = None) -> Iterator[Tensor]:
        """What terms add to the objective at a step."""
        for term in self.at(step, seen):
            extra = term.loss(step)
            if extra is not None:
                check_scalar(extra, term, "loss", when=self._when)
                yield extra

    def gradients(
        self, step: LocalStep, seen: Callable[[Memory], Memory] | None = None, *, like: ParamTree
    ) -> Iterator[ParamTree]:
        """What terms add to the gradient at a step; ``like`` has the shapes."""
        for term in self.at(step, seen):
            added = term.gradient(step)
            if added is not None:
                if not step.position:  # the others will be alike
                    check_tree(added, like, term, "gradient", when=self._when)
                yield added

    def after_step(self, step: LocalStep, gradients: ParamTree) -> Iterator[ParamTree | None]:
        """After an optimiser step: for each term what replaces the present params."""
        for term in self.at(step):
            given = term.after_step(step, gradients)
            memory, replacing = pair(given, term, "after_step", must="memory, params or None", when=self._when)
            self._remember(term, memory, "after_step")
            if not step.position:
                check_tree(replacing, step.params, term, "after_step", when=self._when)
            yield replacing

    def finish(self, work: LocalWork, look: Look) -> Iterator[tuple[str, Payload, ParamTree | None]]:
        """At a job's end: each term's name, what it sends, and what replaces the params."""
        for term in self._terms:
            view = functools.partial(look, f"finish {term.name}")
            self._check_unchanged(term)
            given = self._asked(term.finish, view, self._memories[term.name], work)
            if not isinstance(given, tuple) or len(given) not in (2, 3):
                must = "(memory, payload) or (memory, payload, params or None)"
                raise wrong(term, "finish", must=must, given=given, when=self._when)
            memory, payload, *replacing = given
            self._remember(term, memory, "finish")
            check_named(payload, Tensor, term, "finish", when=self._when)
            check_tree(replacing[0] if replacing else None, work.values, term, "finish", when=self._when)
            if payload and not term.sends:
                # Where a round folds, nobody would ask for it.
                raise InvariantError(
                    f"the term {term.name!r} ({type(term).__name__}) returned a payload ({', '.join(payload)}), but is"
                    " not declared to send one, so it may be lost; set sends = True on the class"
                )
            yield term.name, payload, replacing[0] if replacing else None

    def memories(self) -> dict[str, Memory]:
        """What the client remembers of each term, in its present sub-model's size; nothing before its first job."""
        stored = {name: cut_memory(m, self._facts.submodel, self._full) for name, m in self._stored.items()}
        return {**stored, **self._memories}

    def kept(self) -> dict[str, Memory]:
        """What the client remembers of the stateful terms, in the full model's size."""
        return {
            term.name: grown_memory(
                self._memories[term.name],
                self._stored.get(term.name),
                submodel=self._facts.submodel,
                full=self._full,
            )
            for term in self._terms
            if term.stateful
        }

    def _asked(self, hook: Callable[..., Any], view: Callable[[], LocalClient], *given: Any) -> Any:
        """Call a hook, with the further arguments that it takes."""
        takes = _takes(getattr(hook, "__func__", hook))
        more: dict[str, Any] = {"client": self._facts} if "client" in takes else {}
        return hook(*given, **more, local=view()) if "local" in takes else hook(*given, **more)

    def _check_unchanged(self, term: LocalTerm) -> None:
        before = self._marks.get(term.name)
        if before is not None and before != marks(self._memories[term.name]):
            # What a resumed or repeated round starts from would no longer be what this one started from.
            raise InvariantError(
                f"the term {term.name!r} ({type(term).__name__}) changed its memory in place during its steps"
                f" {self._when}; return a new one from after_step or finish"
            )

    def _remember(self, term: LocalTerm, memory: Memory, hook: str) -> None:
        if not isinstance(memory, Mapping):
            raise wrong(term, hook, must="a memory, a mapping", given=memory, when=self._when)
        if memory and not term.stateful:
            # It would be dropped at the round's end, and the method would run on as another one.
            raise InvariantError(
                f"the term {term.name!r} ({type(term).__name__}) returned memory ({', '.join(memory)}), but is not"
                " declared stateful, so the memory would be lost; set stateful = True on the class"
            )
        self._memories[term.name] = memory


def marks(memory: Memory) -> dict[str, tuple[int, int]]:
    """What tells whether a memory was changed in place: the values it holds, and how often tensors were written."""
    return {
        name: (id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0)
        for name, value in memory.items()
    }


@cache
def _takes(hook: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(hook).parameters)
