"""A local step that trains a part of what the client has: its module, its values, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.client.flat_module import ModuleSlot
from fedsweep.client.memories import cut_memory
from fedsweep.submodel import SubModel
from fedsweep.trees import ParamTree


class Narrowed:
    """A part of a client's part, as big as it is.

    Args:
        part: It, as a part of the client's own model.
        slot: The client's own module.
        device: Where it lives.

    Attributes:
        slot: The part's module; its gradient is the part's.
        params: The part's parameters by name.
    """

    def __init__(self, part: SubModel, slot: ModuleSlot, device: str) -> None:
        self._part, self._whole = part, slot.layout
        layout = part.layout(slot.layout)
        self.slot = ModuleSlot(part.build(slot.module), layout, device)
        self._vector = torch.zeros(layout.num_values, dtype=layout.dtype, device=device)
        self._views = list(layout.views(self._vector).values())
        self.params = layout.params(self._vector)

    def module(self) -> nn.Module:
        """The module in training mode, with the part's values."""
        return self.slot.bind(self._views).train()

    def load(self, vector: Tensor) -> None:
        """Take the values from the client's own vector; the gradient starts at zero."""
        self._vector.copy_(self._part.extract(vector, self._whole))
        self.slot.gradient.zero_()

    def tree(self, vector: Tensor) -> ParamTree:
        """The part's parameters of a vector like the client's own."""
        return self.slot.layout.params(self._part.extract(vector, self._whole))

    def memory(self, memory: Any) -> Any:
        """A term's memory as the part sees it."""
        return cut_memory(memory, self._part, self._whole)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the part's gradient to the client's own [P]."""
        padded = torch.zeros_like(self._vector)
        padded[: self.slot.layout.num_params] = self.slot.gradient
        grown = self._part.embed(padded, self._whole).vector[: self._whole.num_params]
        gradient.add_(grown.to(gradient.device))

    def keep_buffers(self, vector: Tensor) -> None:
        """Put the part's buffers, which a forward pass may change, into the client's own vector."""
        own = slice(self._whole.num_params, self._whole.num_params + self._whole.num_buffers)
        if self._whole.num_buffers:
            grown = self._part.embed(self._vector, self._whole)
            cover = torch.ones_like(grown.vector, dtype=torch.bool) if grown.cover is None else grown.cover
            vector[own] = torch.where(cover[own].to(vector.device), grown.vector[own].to(vector.device), vector[own])

    def undo_elsewhere(self, values: Tensor, before: Tensor) -> None:
        """Put what the part does not hold of values with one entry per parameter [P] back to what it was."""
        cover = self._part.embed(self._vector, self._whole).cover
        if cover is not None:
            held = cover[: self._whole.num_params].to(values.device)
            values.copy_(torch.where(held, values, before))
