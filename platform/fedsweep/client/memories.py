"""Terms' memories and sub-models: what a client remembers is kept in the full model's size.

A term that stores trees of parameters sees them in the size of the client's present sub-model. Between participations
they lie in full size, since the next sub-model may hold other coordinates. There NaN is what a client never held of a
model that it keeps, and 0 what it never held of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, ParamTree


def cut_memory(memory: Any, submodel: SubModel, full: FlatLayout) -> Any:
    """Return a memory as a sub-model sees it: every tree of parameters in it cut to the part; the rest as it is.

    Args:
        memory: A tree of dicts, lists, tuples and leaves. A dict from the model's parameter names, all of them, to
            tensors is a tree of parameters; it may have all float buffers, too.
        submodel: The part.
        full: The full model's layout.
    """
    if submodel == FULL_MODEL:
        return memory
    part = submodel.layout(full)
    return _mapped(memory, None, full, lambda tree, _: _like(tree, part, submodel.extract(_flat(tree, full), full)))


def grown_memory(memory: Any, before: Any, *, submodel: SubModel, full: FlatLayout, never_held: float = 0.0) -> Any:
    """Undo :func:`cut_memory`; values outside the part are as they were ``before``, in full size, or ``never_held``."""
    if submodel == FULL_MODEL:
        return memory
    part = submodel.layout(full)

    def grow(tree: ParamTree, old: Any) -> ParamTree:
        covered = submodel.stays(_flat(tree, part), full)
        if covered.cover is None:
            return _like(tree, full, covered.vector)
        # At this place there may have been nothing, or something else, before.
        has_old = _is_param_tree(old, full)
        previous = _flat(old, full) if has_old else torch.full((full.num_values,), never_held)
        return _like(tree, full, torch.where(covered.cover, covered.vector, previous.to(covered.vector)))

    return _mapped(memory, before, full, grow)


def filled_memory(memory: Any, values: ParamTree, full: FlatLayout) -> Any:
    """Return a memory whose values that the client never held, NaN, are these; zero where there are none."""

    def fill(tree: ParamTree, _: Any) -> ParamTree:
        return {
            name: torch.where(own.isnan(), values[name].to(own) if values else own.new_zeros(()), own)
            for name, own in tree.items()
        }

    return _mapped(memory, None, full, fill)


def _mapped(memory: Any, other: Any, full: FlatLayout, change: Callable[[ParamTree, Any], ParamTree]) -> Any:
    """Return the memory with its trees of parameters changed, each beside the value at its place in ``other``."""
    if _is_param_tree(memory, full):
        return change(memory, other)
    if isinstance(memory, dict):
        beside = other if isinstance(other, dict) else {}
        return {key: _mapped(value, beside.get(key), full, change) for key, value in memory.items()}
    if isinstance(memory, list | tuple):
        others = other if isinstance(other, list | tuple) and len(other) == len(memory) else [None] * len(memory)
        return type(memory)(_mapped(value, old, full, change) for value, old in zip(memory, others, strict=True))
    return memory


def _is_param_tree(value: Any, layout: FlatLayout) -> bool:
    """Tell whether it is all params by name, with all float buffers or without any."""
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        return False
    params, buffers = layout.num_params, layout.num_buffers
    return value.keys() in (_names(layout, params), _names(layout, params + buffers))


def _names(layout: FlatLayout, stop: int) -> set[str]:
    """Return the names of what lies before a place in the vector."""
    return {name for name, place in layout.places().items() if place.start < stop}


def _like(tree: ParamTree, layout: FlatLayout, vector: Tensor) -> ParamTree:
    """Return a vector as a tree with buffers, where the given one has some, or without."""
    has_buffers = len(tree) > len(_names(layout, layout.num_params))
    return layout.model(vector) if has_buffers else layout.params(vector)


def _flat(tree: ParamTree, layout: FlatLayout) -> Tensor:
    """Return the tree as a vector [V]; values that it does not have are zero."""
    values = torch.cat([tree[name].detach().reshape(-1) for name in layout.names if name in tree])
    return torch.cat([values, values.new_zeros(layout.num_values - values.numel())])
