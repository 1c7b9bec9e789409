"""A client's module, bound to its values; and that of the part which a local step trains, with the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.client.memories import cut_memory
from fedsweep.components.local import LocalStep, twin
from fedsweep.records import Payload
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, ParamTree


class ModuleSlot:
    """A module whose parameters and float buffers can be bound to any client's vector.

    Args:
        module: Taken over by the slot.
        layout: How its values lie in a vector.
        device: Where it lives.

    Attributes:
        gradient: Where backward passes leave the gradient [P].
        gradients: The same by name, as views.
        parameters: The module's, in the layout's order.
        twin: Gives a copy that is only asked; made when it is first wanted.
    """

    def __init__(self, module: nn.Module, layout: FlatLayout, device: str) -> None:
        self.module = module.to(device)
        self.layout = layout
        self.gradient = torch.zeros(layout.num_params, dtype=layout.dtype, device=device)
        self.parameters = list(self.module.parameters())
        self._tensors: list[Tensor] = list(self.parameters)
        self.gradients = layout.params(self.gradient)
        for parameter, view in zip(self._tensors, self.gradients.values(), strict=True):
            # A backward pass adds to the gradient that it finds, so from now on all gradients lie in the one vector.
            parameter.grad = view
        self._tensors += [b for b in self.module.buffers() if b.is_floating_point()]
        self._bound: list[Tensor] | None = None
        self.twin = cache(partial(twin, self.module))

    def bind(self, views: list[Tensor]) -> nn.Module:
        """The module, with the given tensors as its parameters and buffers."""
        # By the list itself, of which each client has one: nothing is compared where the same client is stepped again.
        if self._bound is not views:
            # Not strict: riders come last in the layout, and no tensor of the module is theirs.
            for tensor, view in zip(self._tensors, views, strict=False):
                tensor.data = view
            self._bound = views
        return self.module

    def descend(self, loss: Tensor, values: list[Tensor], rate: float) -> Tensor:
        """A step of the loss's gradient alone, to the same bits as by way of :attr:`gradient`.

        A backward pass would read and write that vector twice before an optimiser reads it: with 1.6 million parameters
        an eighth of a step's time.

        Args:
            loss: A scalar.
            values: The bound tensors, as for :meth:`bind`.
            rate: The learning rate.

        Returns:
            The loss.
        """
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = [(value, given) for value, given in zip(values, gradients, strict=False) if given is not None]
        torch._foreach_add_([value for value, _ in pairs], [given for _, given in pairs], alpha=-rate)
        return loss.detach()


class Narrowed:
    """A part of a client's part, as big as it is.

    Args:
        part: It, as a part of the client's own model.
        slot: The client's own module.

    Attributes:
        params: The part's parameters by name.
        gradients: Their gradients.
        twin: As the slot has it, of the part.
    """

    def __init__(self, part: SubModel, slot: ModuleSlot) -> None:
        self._part, self._whole = part, slot.layout
        device = str(slot.gradient.device)
        layout = part.layout(slot.layout)
        self._slot = ModuleSlot(part.build(slot.module), layout, device)
        self.twin = self._slot.twin
        self._vector = torch.zeros(layout.num_values, dtype=layout.dtype, device=device)
        cover = part.embed(self._vector, slot.layout).cover
        self._cover = None if cover is None else cover.to(device)
        self._places = _places(part, slot.layout, device)
        self._views = list(layout.views(self._vector).values())
        self.params, self.gradients = layout.params(self._vector), layout.params(self._slot.gradient)

    def module(self) -> nn.Module:
        """The module in training mode, with the part's values."""
        module = self._slot.bind(self._views)
        return module if module.training else module.train()

    def load(self, vector: Tensor) -> None:
        """Take the values from the client's own vector; the gradient starts at zero."""
        # At every step, so by index wherever extracting is no more than a choice of values.
        if self._places is None:
            self._vector.copy_(self._part.extract(vector, self._whole))
        else:
            torch.index_select(vector, 0, self._places, out=self._vector)
        self._slot.gradient.zero_()

    def tree(self, vector: Tensor) -> ParamTree:
        """The part's params and float buffers of a vector like the client's own."""
        return self._slot.layout.model(self._part.extract(vector, self._whole))

    def memory(self, memory: Any) -> Any:
        """A term's memory as the part sees it."""
        return cut_memory(memory, self._part, self._whole)

    def broadcast(self, payload: Payload) -> Payload:
        """What the server sent as the part sees it: what lies like the params (``"<name>/<param>"``) is cut."""
        trees: dict[str, ParamTree] = {}
        for name, value in payload.items():
            content, _, param = name.partition("/")
            trees.setdefault(content if param else "", {})[param or name] = value
        cut = {content: self.memory(tree) if content else tree for content, tree in trees.items()}
        joined = ((f"{c}/{name}" if c else name, value) for c, tree in cut.items() for name, value in tree.items())
        return dict(joined)

    def stepped(self, take: Callable[[], Tensor], step: LocalStep, vector: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Take a step; what lies outside the part stays as it is, the optimiser's state too, unless the loss read it.

        Args:
            take: Takes it.
            step: As objective and terms see it.
            vector: The client's own [V].
            values: Its params and what its optimiser has for each of them [P], where a step may change that without a
                gradient.
        """
        before = [value.clone() for value in values]
        loss = take()
        if step._whole_logits is None:
            self.undo_elsewhere(values, before)
        self.keep_buffers(vector)
        return loss

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the part's gradient to the client's own [P]."""
        if self._places is not None:
            # No place comes twice, so the bits do not depend on the order in which a GPU adds.
            gradient.scatter_add_(0, self._places[: self._slot.layout.num_params], self._slot.gradient)
            return
        padded = self._slot.layout.padded(self._slot.gradient)
        grown = self._part.embed(padded, self._whole).vector[: self._whole.num_params]
        gradient.add_(grown.to(gradient.device))

    def keep_buffers(self, vector: Tensor) -> None:
        """Put the part's buffers, which a forward pass may change, into the client's own vector."""
        own = slice(self._whole.num_params, self._whole.num_params + self._whole.num_buffers)
        if self._whole.num_buffers:
            grown = self._part.embed(self._vector, self._whole).vector[own].to(vector.device)
            vector[own] = grown if self._cover is None else torch.where(self._cover[own], grown, vector[own])

    def undo_elsewhere(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Put what the part does not hold of values with one entry per parameter [P] back to what it was."""
        if self._cover is not None:
            held = self._cover[: self._whole.num_params]
            for value, old in zip(values, before, strict=True):
                torch.where(held, value, old, out=value)


def _places(part: SubModel, whole: FlatLayout, device: str) -> Tensor | None:
    """Where the part's values lie in the client's own vector; None where the part is no choice of values."""
    # Each value is its own place: what extracting makes of them says where the part's values come from.
    numbers = torch.arange(whole.num_values)
    places = part.extract(numbers, whole)
    cover = part.embed(places, whole).cover
    chosen = numbers if cover is None else numbers[cover]
    return places.to(device) if torch.equal(places.sort().values, chosen) else None


def part_of_step(submodel: SubModel, position: int, *, slot: ModuleSlot, known: dict[str, Narrowed]) -> Narrowed | None:
    """What a local step (from 0 within the round) trains of a client's part; None: all of it. ``known`` is added to."""
    part = submodel.at_step(position)
    if part == FULL_MODEL:
        return None
    key = part.key()
    if key not in known:
        known[key] = Narrowed(part, slot)
    return known[key]
