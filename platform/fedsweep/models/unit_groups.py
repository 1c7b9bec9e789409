"""Groups of units that are dropped together: which slices of which tensors belong to a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

Kept = Mapping[str, Sequence[int] | Tensor]
KeptIndex = Mapping[str, tuple[tuple[int, Tensor], ...]]
UnitKind = Literal["conv", "linear", "head"]


@dataclass(frozen=True, kw_only=True)
class UnitGroup:
    """Units that are kept or left out by one set of indices.

    Attributes:
        name: Unique in the network.
        size: Number of units.
        kind: Whether the units are channels of maps ``[B, units, ...]``, neurons ``[..., units]`` or attention heads
            ``[B, units, T, D]``.
        produced: (parameter or buffer, dimension) whose entries are the units; the first is the weight that makes them.
        consumed: (parameter, dimension, block) that read the units: ``block`` consecutive columns belong to each (the
            map's H*W where a linear layer reads flattened maps, else 1).
        modules: The activations whose outputs are the units: a unit's scale or mask multiplies there.
        residual: Whether additions tie the units of several layers together.
        rows: Consecutive entries of each produced tensor that belong to a unit: a head's width, else 1.
    """

    name: str
    size: int
    kind: UnitKind
    produced: tuple[tuple[str, int], ...]
    consumed: tuple[tuple[str, int, int], ...]
    modules: tuple[str, ...]
    residual: bool = False
    rows: int = 1

    @property
    def module(self) -> str:
        """The activation after which the units are complete (the last one, where there are several)."""
        return self.modules[-1]


def unit_group(
    model: nn.Module,
    *,
    name: str,
    layers: Sequence[str],
    norms: Sequence[str],
    consumers: Sequence[str],
    modules: Sequence[str],
    residual: bool = False,
    kind: UnitKind | None = None,
    rows: int = 1,
) -> UnitGroup:
    """Return the group of the units that some layers make; sizes are read from the layers' tensors.

    Args:
        model: The network; all names are its submodules'.
        name: The group's name.
        layers: Convolutions or linear layers whose outputs are the units (of the same number each).
        norms: Norms over the units; modules without parameters may be named too.
        consumers: Convolutions or linear layers that read the units.
        modules: The activations whose outputs are the units.
        residual: Whether additions tie the units of several layers together.
        kind: What the units are; by default channels of a convolution or neurons of a linear layer.
        rows: Consecutive outputs of the layers that make up a unit.
    """
    weight = model.get_parameter(f"{layers[0]}.weight")
    size = weight.shape[0] // rows
    produced = []
    for path in (*layers, *norms):
        owner = model.get_submodule(path)
        for part in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(getattr(owner, part, None), Tensor):
                produced.append((f"{path}.{part}", 0))
    consumed = [(f"{path}.weight", 1, model.get_parameter(f"{path}.weight").shape[1] // size) for path in consumers]
    return UnitGroup(
        name=name,
        size=size,
        kind=kind or ("linear" if weight.dim() == 2 else "conv"),
        produced=tuple(produced),
        consumed=tuple(consumed),
        modules=tuple(modules),
        residual=residual,
        rows=rows,
    )
