"""Local steps each of which trains another part of the client's model, in a module of that part's size.

The part's gradient is added to the gradient of the client's own size, so that its optimiser's state always has that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.client.memories import cut_memory
from fedsweep.client.modules import BoundModule, ClientModel
from fedsweep.client.steps import Steps
from fedsweep.components.local import LocalStep
from fedsweep.records import Payload
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, ParamTree


class PartSteps(Steps):
    """Takes a client's local steps, each on the part that its sub-model names; arguments as of :class:`Steps`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._submodels: Sequence[SubModel] = self._model.submodel.step_parts or ()
        self._parts: dict[str, StepPart] = {}
        self._is_bare = False  # a part's gradient is first put in its place in the client's

    def _show_part(self, step: LocalStep, part: StepPart) -> None:
        """Have objective and terms see the part that the step trains."""
        step.whole, step.model = self._model.slot.module, part.module()
        step.params, step._eval_copy, step._cut = part.params, part.slot.eval_copy, part.memory
        step.anchor = self._model.anchor_tree if self._model.anchor is None else part.tree(self._model.anchor)
        step.broadcast = part.broadcast(self.broadcast)

    def _show_all(self, step: LocalStep) -> None:
        """Have terms see all that the client has."""
        step.model, step.params, step.anchor = self._model.slot.module, self._model.params, self._model.anchor_tree
        step.broadcast, step._eval_copy, step._cut = self.broadcast, self._model.slot.eval_copy, None

    def _part_of(self, position: int) -> StepPart | None:
        """Return the part that a step trains; None: all that the client has."""
        submodel = self._submodels[position]
        if submodel == FULL_MODEL:
            return None
        key = submodel.key()
        if key not in self._parts:
            self._parts[key] = StepPart(submodel, self._model)
        return self._parts[key]

    def _moved(self, step: LocalStep) -> Tensor:
        part = self._part_of(step.position)
        if part is None:
            return super()._moved(step)
        solver = self._side.solver
        # What a step may change without a gradient stays as it was outside the part, unless the loss read it there.
        moved = self._optimizer.moved_without_gradient(plain=solver.plain)
        before = [value.clone() for value in moved]
        loss: Tensor = solver.step(self._optimizer.as_torch, lambda: self._part_gradient(step, part))
        if step._whole_logits is None:
            part.undo_elsewhere(moved, before)
        part.keep_buffers(self._model.vector)
        self._show_all(step)
        return loss

    def _part_gradient(self, step: LocalStep, part: StepPart) -> Tensor:
        self._model.slot.gradient.zero_()
        part.load(self._model.vector)
        self._show_part(step, part)
        loss = self._loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        trains_all = step._whole_logits is not None
        if not trains_all:
            self._add_terms(step, part.gradients)
        part.add_gradient(self._model.slot.gradient)
        if trains_all:
            # What a term adds acts on all that moves.
            self._show_all(step)
            self._add_terms(step, self._model.slot.gradients)
        self._optimizer.scale_and_clip()
        return loss.detach()


class StepPart:
    """A part of a client's own model, which may be a part of the full one, in a module of its size.

    Args:
        part: Which; as a part of the client's own model.
        model: The client's own model.

    Attributes:
        slot: A module of its size.
        params: The part's parameters by name.
        gradients: Their gradients.
    """

    def __init__(self, part: SubModel, model: ClientModel) -> None:
        self._part, self._whole = part, model.layout
        device = str(model.vector.device)
        layout = part.layout(model.layout)
        self.slot = BoundModule(part.build(model.slot.module), layout, device)
        self._vector = torch.zeros(layout.num_values, dtype=layout.dtype, device=device)
        cover = part.embed(self._vector, model.layout).cover
        self._cover = None if cover is None else cover.to(device)
        self._places = _places(part, model.layout, device)
        self._views = list(layout.views(self._vector).values())
        self.params, self.gradients = layout.params(self._vector), layout.params(self.slot.gradient)

    def module(self) -> nn.Module:
        """Return the module in training mode, with the part's values."""
        module = self.slot.bind(self._views)
        return module if module.training else module.train()

    def load(self, vector: Tensor) -> None:
        """Take the values from the client's own vector; the gradient starts at zero."""
        # At every step, so by index wherever extracting is no more than a choice of values.
        if self._places is None:
            self._vector.copy_(self._part.extract(vector, self._whole))
        else:
            torch.index_select(vector, 0, self._places, out=self._vector)
        self.slot.gradient.zero_()

    def tree(self, vector: Tensor) -> ParamTree:
        """Return the part's params and float buffers of a vector like the client's own."""
        return self.slot.layout.model(self._part.extract(vector, self._whole))

    def memory(self, memory: Any) -> Any:
        """Return a term's memory as the part sees it."""
        return cut_memory(memory, self._part, self._whole)

    def broadcast(self, payload: Payload) -> Payload:
        """Cut what the server sent like the params (``"<name>/<param>"``) to the part."""
        trees: dict[str, ParamTree] = {}
        for name, value in payload.items():
            content, _, param = name.partition("/")
            trees.setdefault(content if param else "", {})[param or name] = value
        cut = {content: self.memory(tree) if content else tree for content, tree in trees.items()}
        joined = ((f"{c}/{name}" if c else name, value) for c, tree in cut.items() for name, value in tree.items())
        return dict(joined)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the part's gradient to the client's own [P]."""
        if self._places is not None:
            # No place comes twice, so the bits do not depend on the order in which a GPU adds.
            gradient.scatter_add_(0, self._places[: self.slot.layout.num_params], self.slot.gradient)
            return
        padded = self.slot.layout.padded(self.slot.gradient)
        grown = self._part.embed(padded, self._whole).vector[: self._whole.num_params]
        gradient.add_(grown.to(gradient.device))

    def keep_buffers(self, vector: Tensor) -> None:
        """Put the part's buffers, which a forward pass may change, into the client's own vector."""
        own = slice(self._whole.num_params, self._whole.num_params + self._whole.num_buffers)
        if self._whole.num_buffers:
            grown = self._part.embed(self._vector, self._whole).vector[own].to(vector.device)
            vector[own] = grown if self._cover is None else torch.where(self._cover[own], grown, vector[own])

    def undo_elsewhere(self, values: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Put back values [P], one per parameter, outside the part."""
        if self._cover is not None:
            covered = self._cover[: self._whole.num_params]
            for value, old in zip(values, before, strict=True):
                torch.where(covered, value, old, out=value)


def _places(part: SubModel, whole: FlatLayout, device: str) -> Tensor | None:
    """Return the places of the part's values in the client's own vector; None where it is no choice of values."""
    # Each value is its own place: what extracting makes of them says where the part's values come from.
    numbers = torch.arange(whole.num_values)
    places = part.extract(numbers, whole)
    cover = part.embed(places, whole).cover
    chosen = numbers if cover is None else numbers[cover]
    return places.to(device) if torch.equal(places.sort().values, chosen) else None
