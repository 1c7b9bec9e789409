"""Arithmetic on parameter trees, and how a tree lies in one flat vector.

Models travel, are averaged and are saved as one contiguous vector: trained parameters first, then float buffers (batch
norm's statistics), then what else moves with the model (averaged momentum). A :class:`FlatLayout` says where each
tensor lies; the trees that components see are views into such a vector. Parameters without ``requires_grad`` are
constants: every process has them once, and they lie in no vector. Inputs of a model are one tensor or a tree.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isfinite, prod
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

ParamTree = dict[str, Tensor]
# A data set's inputs as a model gets them: one tensor, or several by name.
Inputs = Tensor | dict[str, Tensor]
_Inputs = TypeVar("_Inputs", bound=Inputs)
_Model = TypeVar("_Model", bound=nn.Module)

# Sums run over blocks of this many values, so that the float64 accumulator stays in the cache.
_BLOCK = 65_536


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Where each tensor of a model lies in its flat vector.

    Attributes:
        names: Tensors in order: parameters, float buffers, riders.
        shapes: Their shapes.
        num_params: Trained scalars; they lie first.
        num_buffers: Scalars in float buffers; they lie next.
        num_riders: Scalars that move with the model but are not part of it (averaged optimiser state).
        dtype: One floating type for all.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_params: int
    num_buffers: int
    num_riders: int = 0
    dtype: torch.dtype = torch.float32

    @cached_property
    def num_values(self) -> int:
        """Scalars in the vector: what one message that carries the model counts."""
        return self.num_params + self.num_buffers + self.num_riders

    def views(self, vector: Tensor) -> ParamTree:
        """Return each tensor by name, as a view into ``vector`` [num_values]."""
        return self._views(vector, self.num_values)

    def params(self, vector: Tensor) -> ParamTree:
        """Return the trained parameters alone, as views into ``vector``."""
        return self._views(vector, self.num_params)

    def model(self, vector: Tensor) -> ParamTree:
        """Return parameters and float buffers, without riders, as views into ``vector``."""
        return self._views(vector, self.num_params + self.num_buffers)

    def padded(self, params: Tensor) -> Tensor:
        """Return a new vector [num_values]: the trained parameters' values [num_params], and zeros behind them."""
        vector = params.new_zeros(self.num_values)
        vector[: self.num_params] = params
        return vector

    def parts(self, views: ParamTree) -> tuple[ParamTree, ParamTree]:
        """Return views of a vector: the trained parameters alone, and these with the float buffers."""
        starts = {name: self._places[name].start for name in views}
        trained = {name: view for name, view in views.items() if starts[name] < self.num_params}
        return trained, {name: v for name, v in views.items() if starts[name] < self.num_params + self.num_buffers}

    def _views(self, vector: Tensor, stop: int) -> ParamTree:
        return {
            name: vector[place].view(shape)
            for (name, place), shape in zip(self._places.items(), self.shapes, strict=True)
            if place.start < stop
        }

    def places(self) -> dict[str, slice]:
        """Return the place of each tensor in the vector, by name."""
        return dict(self._places)

    @cached_property
    def _places(self) -> dict[str, slice]:
        ends = [*accumulate((prod(shape) for shape in self.shapes), initial=0)]
        return {name: slice(*ends[k : k + 2]) for k, name in enumerate(self.names)}

    def flatten(self, tree: Mapping[str, Tensor]) -> Tensor:
        """Return a new vector [num_values] from tensors by name; a missing name is a KeyError."""
        if not self.names:
            return torch.zeros(0, dtype=self.dtype)
        return torch.cat([tree[name].detach().reshape(-1).to(self.dtype) for name in self.names])


def trained_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; of tied ones each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def constants(model: nn.Module) -> ParamTree:
    """Return what stays as the model was built, by name: frozen parameters, and float buffers that are not learned."""
    frozen: ParamTree = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    moving = moving_buffers(model)
    return frozen | {n: b for n, b in model.named_buffers() if b.is_floating_point() and n not in moving}


def moving_buffers(model: nn.Module) -> ParamTree:
    """Return the float buffers that training may change, by name.

    Not those of a layer whose parameters are all frozen, nor those that ``state_dict`` leaves out: they follow from how
    the model is built.
    """
    saved = model.state_dict(keep_vars=True).keys()
    still = {id(b) for layer in still_layers(model) for b in layer.buffers(recurse=False)}
    named = model.named_buffers()
    return {n: b for n, b in named if b.is_floating_point() and n in saved and id(b) not in still}


def still_layers(model: nn.Module) -> list[nn.Module]:
    """Return layers that have parameters of their own, all of them frozen."""
    own = ((layer, list(layer.parameters(recurse=False))) for layer in model.modules())
    return [layer for layer, params in own if params and not any(p.requires_grad for p in params)]


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model that has the original's constants, not copies of them."""
    # New parameters around the same memory: moving the copy to a device leaves the original where it is.
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if not p.requires_grad
    }
    return copied_with(model, memo)


def copied_with(model: _Model, memo: dict[int, object]) -> _Model:
    """Return a copy of a model with what ``memo`` has for some of its tensors, as ``copy.deepcopy`` takes it."""
    # Each module has some eight tables of hooks, nearly all of them empty: half of the time of a copy.
    tables = (table for module in model.modules() for table in vars(module).values() if type(table) is OrderedDict)
    return copy.deepcopy(model, memo | {id(table): OrderedDict() for table in tables if not table})


def constants_sha256(model: nn.Module) -> str | None:
    """Return the SHA-256 of a model's constants with their names, types and shapes; None where it has none."""
    tree = constants(model)
    if not tree:
        return None
    digest = hashlib.sha256()
    for name, value in sorted(tree.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        # As bytes: numpy has no bfloat16. By way of one dimension, since a scalar has none to be viewed along.
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def to_arrays(value: Any) -> Any:
    """Turn tensors on the CPU, alone or in mappings, into arrays that share their memory; all else stays as it is."""
    if isinstance(value, Mapping):
        return {name: to_arrays(item) for name, item in value.items()}
    # Numpy has no bfloat16.
    return value.numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value


def to_tensors(value: Any) -> Any:
    """Make tensors of their own from what :func:`to_arrays` gave, whose arrays may be read-only by now."""
    if isinstance(value, Mapping):
        return {name: to_tensors(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    return value.clone() if isinstance(value, Tensor) else value


def are_equal(one: Any, other: Any) -> bool:
    """Tell whether two trees, of mappings, sequences, tensors, arrays and plain values, are the same; NaN is NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(one == other) or one is other or (one != one and other != other)


def layout_of(model: nn.Module, riders: Iterable[tuple[str, tuple[int, ...]]] = ()) -> FlatLayout:
    """Return the layout of a model's trained parameters and float buffers; all else stays where it is.

    Args:
        model: Any module; its trained parameters share one floating type.
        riders: Name and shape of what else travels with the model.

    Raises:
        ValueError: The trained parameters have several types, or there are none.
    """
    params, buffers = [*trained_params(model).items()], [*moving_buffers(model).items()]
    dtypes = {p.dtype for _, p in params}
    if len(dtypes) != 1:
        raise ValueError(
            f"a model's trained parameters must share one floating type, but got {sorted(map(str, dtypes))}"
        )
    extra = list(riders)
    return FlatLayout(
        names=tuple(name for name, _ in (*params, *buffers, *extra)),
        shapes=tuple(tuple(t.shape) for _, t in (*params, *buffers)) + tuple(shape for _, shape in extra),
        num_params=sum(p.numel() for _, p in params),
        num_buffers=sum(b.numel() for _, b in buffers),
        num_riders=sum(prod(shape) for _, shape in extra),
        dtype=dtypes.pop(),
    )


def model_vector(model: nn.Module, layout: FlatLayout) -> Tensor:
    """Return the model's values as a new vector [num_values] on the CPU; riders start at zero."""
    tree: ParamTree = {name: p.detach().cpu() for name, p in trained_params(model).items()}
    tree |= {name: b.detach().cpu() for name, b in moving_buffers(model).items()}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in tree:
            tree[name] = torch.zeros(shape, dtype=layout.dtype)
    return layout.flatten(tree)


def load_vector(model: nn.Module, layout: FlatLayout, vector: Tensor) -> None:
    """Copy a vector's parameters and buffers into a model."""
    views = layout.views(vector)
    with torch.no_grad():
        for name, value in (trained_params(model) | moving_buffers(model)).items():
            value.copy_(views[name])


def all_finite(values: Tensor) -> bool:
    """Tell whether no value is infinite or NaN."""
    # The sum first, one number; it may overflow where all values are finite, so only then each is looked at.
    return isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def weighted_mean(rows: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """Compute ``out[j] = sum_k weights[k] * rows[k][j]``, the one sum that all aggregation goes through.

    Accumulates in float64, in the order of ``rows``, and multiplies and adds in separate steps: a fused
    multiply-add would round differently in vectorised and in left-over lanes, so that the bits would depend on
    where a slice begins. As it is, any cut of the coordinates over processes gives the same bits.

    Args:
        rows: Vectors [V], at least one, in ascending order of client id.
        weights: One finite weight per row; they sum to 1 for a mean. One row of weight 1 comes out bit for bit.
        out: Vector [V] to write to; may be one of ``rows``. Where some row is on a GPU, the sum is taken there.
    """
    factors = [float(w) for w in weights]
    size, device = out.numel(), next((row.device for row in rows if row.device.type == "cuda"), out.device)
    # On a GPU there is no such cache, and each block would be launches of its own: there the vector is one.
    block = _BLOCK if device.type == "cpu" else max(size, 1)
    total = torch.empty(min(size, block), dtype=torch.float64, device=device)
    term = torch.empty_like(total)
    for start in range(0, size, block):
        stop = min(start + block, size)
        sums, product = total[: stop - start], term[: stop - start]
        for k, (row, factor) in enumerate(zip(rows, factors, strict=True)):
            # The first product starts the sum: added to a zero, a -0.0 would come out as 0.0.
            target = product if k else sums
            target.copy_(row[start:stop])
            target.mul_(factor)
            if k:
                sums.add_(product)
        # Not before a block is summed: `out` may be one of the rows.
        out[start:stop].copy_(sums)


def coverage_mean(
    server: Tensor, rows: Sequence[Tensor], covers: Sequence[Tensor | None], weights: Sequence[float]
) -> Tensor:
    """Apply the one aggregation rule: each coordinate is the weighted mean over the clients that hold it.

    With full models it is the ordinary weighted mean; a coordinate that nobody holds keeps the server's value.

    Args:
        server: The server's vector [V].
        rows: The clients' vectors in full shape [V], in ascending order of client id.
        covers: For each row which coordinates it holds (bool [V]), or None for all of them.
        weights: Non-negative, one per row; they need not sum to 1 over a coordinate's holders.

    Returns:
        A new vector [V].
    """
    out = torch.empty_like(server)
    if all(cover is None for cover in covers):
        weighted_mean(rows, weights, out)
        return out
    total, mass, term, shares = (torch.empty(min(out.numel(), _BLOCK), dtype=torch.float64) for _ in range(4))
    for start in range(0, out.numel(), _BLOCK):
        part = slice(start, min(start + _BLOCK, out.numel()))
        sums, masses, value, share = (t[: part.stop - start].zero_() for t in (total, mass, term, shares))
        for row, cover, weight in zip(rows, covers, weights, strict=True):
            value.copy_(row[part])
            if cover is None:
                masses.add_(float(weight))
                sums.add_(value.mul_(float(weight)))
                continue
            share.copy_(cover[part]).mul_(float(weight))
            masses.add_(share)
            # Filled, since what a client does not hold may be anything, and 0 times infinity is NaN.
            sums.add_(value.mul_(share).masked_fill_(~cover[part], 0.0))
        held_by_some = masses > 0
        # Where nobody holds a coordinate some divisor must stand; that quotient is not taken.
        sums.div_(masses.clamp_min_(torch.finfo(torch.float64).tiny))
        out[part].copy_(torch.where(held_by_some, sums, value.copy_(server[part])))
    return out


def as_tensors(array: NDArray[Any]) -> Inputs:
    """Return an array [n, ...] as a tensor, a structured one as a tensor for each field.

    Types that torch can't compute with become int64; all others stay.
    """
    if array.dtype.names is None:
        return torch.from_numpy(array.astype(np.int64) if array.dtype in (np.uint16, np.uint32, np.uint64) else array)
    return {name: as_tensors(array[name].copy()) for name in array.dtype.names}  # type: ignore[misc]


def each(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return what a function makes of each tensor."""
    return {name: function(tensor) for name, tensor in inputs.items()} if isinstance(inputs, dict) else function(inputs)


def on_device(inputs: _Inputs, device: torch.device | str) -> _Inputs:
    """Return the inputs on a device."""
    return cast(_Inputs, each(lambda tensor: tensor.to(device), inputs))


def taken(inputs: _Inputs, index: Tensor | slice) -> _Inputs:
    """Return some of the samples."""
    return cast(_Inputs, each(lambda tensor: tensor[index], inputs))


def concatenated(parts: Sequence[Inputs]) -> Inputs:
    """Return the samples of several inputs of the same form, one after another."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: torch.cat([cast("dict[str, Tensor]", part)[name] for part in parts]) for name in first}
    return torch.cat(cast("list[Tensor]", [*parts]))


def all_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors in their order."""
    return [*inputs.values()] if isinstance(inputs, dict) else [inputs]


def any_of(inputs: Inputs) -> Tensor:
    """Return one of the tensors: all have as many samples."""
    return all_of(inputs)[0]


def targets_of(array: NDArray[Any]) -> Tensor:
    """Return targets [n, ...] as int64 where they are integers, else as float32 (float64 stays)."""
    if array.dtype.kind in "bui":
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array.astype(np.float64 if array.dtype == np.float64 else np.float32))


def zeros(array: NDArray[Any], samples: int) -> Inputs:
    """Return inputs of zeros for so many samples, as transformed ones are: integers as int64, floats as float32."""
    shape = (samples, *array.shape[1:])

    def place(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor if tensor.dtype == torch.bool else tensor.long()

    return each(place, as_tensors(np.zeros(shape, array.dtype)))


def placed(inputs: Inputs, *, device: str | torch.device, dtype: torch.dtype) -> Inputs:
    """Return inputs on a device, floats in a model's type."""
    if isinstance(inputs, dict):
        return {name: placed(values, device=device, dtype=dtype) for name, values in inputs.items()}  # type: ignore[misc]
    return inputs.to(device=device, dtype=dtype) if inputs.is_floating_point() else inputs.to(device=device)


def sample_values(array: NDArray[Any] | Inputs) -> int:
    """Return how many values one sample has."""
    if isinstance(array, dict):
        return sum(prod(values.shape[1:]) for values in array.values())
    names = array.dtype.names if isinstance(array, np.ndarray) else None
    return prod(array.shape[1:]) if names is None else sum(prod(array.dtype[name].shape) for name in names)  # type: ignore[index,misc]
