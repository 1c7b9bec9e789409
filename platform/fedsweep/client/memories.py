"""Terms' memories and sub-models: what a client remembers is kept in the full model's size.

A term that stores trees of parameters sees them in the size of the client's present sub-model. Between participations
they lie in full size, since the next sub-model may hold other coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, ParamTree


def cut_memory(memory: Any, submodel: SubModel, full: FlatLayout) -> Any:
    """A memory as a sub-model sees it: every tree of parameters in it cut to the part; the rest as it is.

    Args:
        memory: A tree of dicts, lists, tuples and leaves. A dict from the model's parameter names, all of them, to
            tensors is a tree of parameters.
        submodel: The part.
        full: The full model's layout.
    """
    if submodel == FULL_MODEL:
        return memory
    part = submodel.layout(full)
    return _mapped(memory, None, full, lambda tree, _: part.params(submodel.extract(_flat(tree, full), full)))


def grown_memory(memory: Any, before: Any, *, submodel: SubModel, full: FlatLayout) -> Any:
    """The reverse of :func:`cut_memory`; what the part does not hold is as it was ``before``, or zero.

    Args:
        memory: The client's memory after its work.
        before: What was kept of it until then, in full size; None: nothing.
        submodel: The part that the client had.
        full: The full model's layout.
    """
    if submodel == FULL_MODEL:
        return memory
    part = submodel.layout(full)

    def grow(tree: ParamTree, old: Any) -> ParamTree:
        covered = submodel.embed(_flat(tree, part), full)
        if covered.cover is None:
            return full.params(covered.vector)
        kept = _flat(old, full) if _is_param_tree(old, full) else torch.zeros(full.num_values)
        return full.params(torch.where(covered.cover, covered.vector, kept.to(covered.vector)))

    return _mapped(memory, before, full, grow)


def _mapped(memory: Any, other: Any, full: FlatLayout, change: Callable[[ParamTree, Any], ParamTree]) -> Any:
    """The memory with its trees of parameters changed, each beside what stands at its place in ``other``."""
    if _is_param_tree(memory, full):
        return change(memory, other)
    if isinstance(memory, dict):
        beside = other if isinstance(other, dict) else {}
        return {key: _mapped(value, beside.get(key), full, change) for key, value in memory.items()}
    if isinstance(memory, list | tuple):
        known = other if isinstance(other, list | tuple) and len(other) == len(memory) else [None] * len(memory)
        return type(memory)(_mapped(value, old, full, change) for value, old in zip(memory, known, strict=True))
    return memory


def _is_param_tree(value: Any, layout: FlatLayout) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == set(_param_names(layout))
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    )


def _param_names(layout: FlatLayout) -> Iterator[str]:
    offset = 0
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if offset >= layout.num_params:
            return
        offset += prod(shape)
        yield name


def _flat(tree: ParamTree, layout: FlatLayout) -> Tensor:
    """The parameters as a vector [V]; buffers and riders, which no memory has, are zero."""
    params = torch.cat([tree[name].detach().reshape(-1) for name in _param_names(layout)])
    return torch.cat([params, params.new_zeros(layout.num_values - layout.num_params)])
