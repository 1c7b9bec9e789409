"""Unit groups: what belongs to a channel or neuron, and how a smaller model is cut out and put back.

A unit is an output channel of a convolution, a neuron of a hidden layer or a head of an attention layer. Leaving it
out removes the rows of the layers that make it, its entries in norms, and the columns of the layers that read it. Units
that an addition ties together form one group and share one set of indices. Input channels and class logits belong to no
group.

Trees are ``dict[str, Tensor]`` by parameter or buffer name. An index says, per name, which entries along which
dimensions are kept; a name that it does not list is kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.unit_groups import Kept, KeptIndex, UnitGroup
from fedsweep.trees import copied_with

if TYPE_CHECKING:
    from fedsweep.models.network import Network


def ordered_width(size: int, width: float) -> int:
    """Return the number of ``size`` units at the ordered width ``width``: max(1, ceil(width * size)), guarded.

    Without the guard of 1e-9, 0.55 of 100 units would round up to 56.

    Args:
        size: Number of units, at least 1.
        width: Share to keep, 0 < width <= 1.

    Raises:
        ConfigError: Where width is out of range.
    """
    if not 0.0 < width <= 1.0:
        raise ConfigError(f"0 < width <= 1 must hold, but got width={width}")
    return max(1, math.ceil(width * size - 1e-9))


def ordered_kept(groups: Sequence[UnitGroup], width: float) -> dict[str, range]:
    """Return the first units of each group at an ordered width: group name -> indices, ascending.

    Args:
        groups: The groups to cut.
        width: Share to keep, 0 < width <= 1.
    """
    return {group.name: range(ordered_width(group.size, width)) for group in groups}


def kept_index(groups: Sequence[UnitGroup], kept: Kept) -> KeptIndex:
    """Return the entries of each parameter and buffer that stay when some units are kept.

    Args:
        groups: All groups of the network.
        kept: Group name -> kept units, ascending, distinct, at least one; groups not named are kept whole.

    Returns:
        Name of parameter or buffer -> (dimension, kept indices) per cut dimension, dimensions ascending. Tensors of
        which nothing is left out are not listed.
    """
    cuts: dict[str, list[tuple[int, Tensor]]] = {}
    for group in groups:
        units = torch.as_tensor(kept.get(group.name, range(group.size)), dtype=torch.long, device="cpu")
        if len(units) == group.size:
            continue
        for name, dim in group.produced:
            cuts.setdefault(name, []).append((dim, _entries(units, group.rows)))
        for name, dim, block in group.consumed:
            cuts.setdefault(name, []).append((dim, _entries(units, block)))
    return {name: tuple(sorted(parts, key=lambda part: part[0])) for name, parts in cuts.items()}


def _entries(units: Tensor, block: int) -> Tensor:
    """Return the entries that belong to the units, where each has ``block`` in a row."""
    return units if block == 1 else (units[:, None] * block + torch.arange(block)).flatten()


def _sliced(tensor: Tensor, parts: tuple[tuple[int, Tensor], ...]) -> Tensor:
    """Return the kept part of a tensor, in new memory; all of it where nothing is cut."""
    if not parts:
        return tensor.detach().clone()
    cut = tensor.detach()
    for dim, units in parts:
        cut = cut.index_select(dim, units.to(tensor.device))
    return cut


def build_submodel_module(model: Network, kept: Kept, *, scales: Mapping[str, Tensor] | None = None) -> Network:
    """Return a smaller copy of a network: the same architecture with the kept units alone, in new memory.

    Its parameters and buffers have the names of the full model's and the shapes and values of their slices, so what
    it learns is put back by :class:`~fedsweep.models.unit_submodel.UnitSubModel`. A norm over all channels
    (``GroupNorm(1, C)``, ``LayerNorm``) takes its statistics over the kept channels: there the sub-model is not the
    masked full model, by construction.

    Args:
        model: The full network, or itself a sub-model, without scales attached; left as it is.
        kept: As in :func:`kept_index`.
        scales: Group name -> factor per kept unit ``[kept]``, as in :func:`attach_unit_scales`.

    Raises:
        ConfigError: Where a residual group is scaled, or a group norm can't be cut.
    """
    index = kept_index(model.unit_groups(), kept)
    # Handing deepcopy the sliced tensors as already copied spares a copy of the full ones.
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        is_whole_constant = not parameter.requires_grad and name not in index
        cut = parameter.detach() if is_whole_constant else _sliced(parameter, index.get(name, ()))
        memo[id(parameter)] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = _sliced(buffer, index.get(name, ()))
    smaller = copied_with(model, memo)
    for module in smaller.modules():
        _match_sizes(module)
    if scales:
        attach_unit_scales(smaller, scales)
    return smaller


def _match_sizes(module: nn.Module) -> None:
    """Bring a layer's declared sizes in line with its tensors."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
        module.out_channels, module.in_channels = module.weight.shape[:2]
    elif (
        isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and module.groups == module.in_channels == module.out_channels  # depthwise
    ):
        module.out_channels = module.in_channels = module.groups = module.weight.shape[0]
    elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is not None:
        module.num_features = module.running_mean.shape[0]
    elif isinstance(module, nn.GroupNorm) and module.affine:
        channels = module.weight.shape[0]
        if channels != module.num_channels and module.num_groups not in (1, module.num_channels):
            raise ConfigError(
                f"a group norm can be cut where it has one group or one group per channel, but this one has "
                f"{module.num_groups} groups for {module.num_channels} channels; change the model or keep the group"
            )
        module.num_groups = 1 if module.num_groups == 1 else channels
        module.num_channels = channels


class _Scaled:
    """A forward hook that multiplies each unit's output by its factor, in training only."""

    def __init__(self, factors: Tensor, *, is_last: bool) -> None:
        self._factors, self._is_last = factors, is_last

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        if not module.training:
            return None
        self._factors = self._factors.to(output)  # kept there: a recorded step can't fetch it from the host
        trailing = 0 if self._is_last else output.dim() - 2
        return output * self._factors.reshape(-1, *(1,) * trailing)


def attach_unit_scales(model: Network, scales: Mapping[str, Tensor]) -> None:
    """Multiply units' outputs, after the activation, by fixed factors while the network trains.

    The factors are no parameters, and in evaluation mode they do nothing. Zeros and ones on a full network give the
    masked model that a sub-model stands for.

    Args:
        model: The network, changed in place.
        scales: Group name -> factor per unit ``[size]``. A residual group takes zeros and ones only: its sum passes
            several activations, where any other factor would be applied again and again.

    Raises:
        ConfigError: Where a residual group gets other factors than zeros and ones.
    """
    groups = {group.name: group for group in model.unit_groups()}
    for name, factors in scales.items():
        group = groups[name]
        if group.residual and not bool(((factors == 0) | (factors == 1)).all()):
            raise ConfigError(
                f"unit group {name!r} is tied by residual additions and can't be scaled, only masked by 0 and 1; "
                "drop units of the blocks' inner convolutions instead, or train without rescaling"
            )
        hook = _Scaled(factors.detach().clone(), is_last=group.kind == "linear")
        for path in group.modules:
            model.get_submodule(path).register_forward_hook(hook)
