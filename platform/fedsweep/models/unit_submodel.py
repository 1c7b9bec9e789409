"""Unit-wise sub-models: a network without some of its channels and neurons, really smaller.

Which units are kept and by what factor their outputs are multiplied in training is all that a method decides; how the
smaller network is cut out, trained and put back is here, for any network that lists its unit groups.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedsweep.errors import InvariantError
from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.models.network import Network
from fedsweep.models.slicing import build_submodel_module, kept_index
from fedsweep.models.unit_groups import KeptIndex, UnitGroup
from fedsweep.submodel import FULL_MODEL, Covered, SubModel
from fedsweep.trees import FlatLayout

MultiplierIn = Literal["activation", "incoming", "split"]

# Index and cover of models of up to this many values are kept with the sub-model (9 bytes each); for larger ones they
# are made anew at each use, which costs less than one of their local steps.
_CACHE_VALUES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class UnitSubModel(SubModel):
    """The network with the kept units alone.

    Attributes:
        groups: The full network's unit groups.
        kept: (group, kept units) of the groups that are cut, in the network's order; units ascending, at least one.
        scales: (group, factors) of units whose outputs are multiplied in training: one factor for all kept units of
            the group, or one for each.
        scales_in: Where the client's steps see the factors: behind the activation; or in the weights and biases that
            make a unit, as if they had been multiplied before they were sent and were divided on return; or the square
            roots there and in the weights that read it. The module computes the same in all three, by hooks behind the
            activations, where these are positively homogeneous.
    """

    groups: tuple[UnitGroup, ...]
    kept: tuple[tuple[str, tuple[int, ...]], ...]
    scales: tuple[tuple[str, tuple[float, ...]], ...] = ()
    scales_in: MultiplierIn = "activation"

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: what is kept for speed does not travel."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def key(self) -> str:
        if "_key" not in vars(self):
            text = repr((tuple((g.name, g.size) for g in self.groups), self.kept, self.scales, self.scales_in))
            digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            object.__setattr__(self, "_key", f"units {digest}")
        return cast(str, vars(self)["_key"])

    def shape(self) -> str:
        return f"units {[(name, len(units)) for name, units in self.kept]} {self.scales} {self.scales_in}"

    def layout(self, full: FlatLayout) -> FlatLayout:
        entry = vars(self).get("_layout")
        if entry is None or (entry[0] is not full and entry[0] != full):
            entry = (full, self._make_layout(full))
            object.__setattr__(self, "_layout", entry)
        return cast(FlatLayout, entry[1])

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        index, _ = self._index_and_cover(full)
        return vector.index_select(0, index.to(vector.device))

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        index, cover = self._index_and_cover(full)
        whole = torch.zeros(full.num_values, dtype=vector.dtype)
        return Covered(vector=whole.index_copy_(0, index, vector.cpu()), cover=cover)

    def build(self, model: nn.Module) -> nn.Module:
        return build_submodel_module(cast(Network, model), dict(self.kept), scales=self._factors())

    def _factors(self) -> dict[str, Tensor]:
        """Return group -> factor of each kept unit, in float64."""
        units_of, sizes = dict(self.kept), {group.name: group.size for group in self.groups}
        return {
            name: torch.tensor(values, dtype=torch.float64).expand(len(units_of.get(name, ())) or sizes[name])
            for name, values in self.scales
        }

    @property
    def scales_steps(self) -> bool:
        return bool(self.scales) and self.scales_in != "activation"

    def step_scale(self, full: FlatLayout) -> Tensor | None:
        if not self.scales_steps:
            return None
        part, factors = self.layout(full), self._factors()
        scale = torch.ones(part.num_params, dtype=torch.float64)
        views = part.params(scale)
        for group in self.groups:
            if group.name not in factors:
                continue
            is_split = self.scales_in == "split"
            unit = factors[group.name] ** (-0.5 if is_split else -1.0)
            cuts = [(name, dim, unit.repeat_interleave(group.rows)) for name, dim in group.produced]
            cuts += [(name, dim, unit.repeat_interleave(block)) for name, dim, block in group.consumed if is_split]
            for name, dim, along in cuts:
                if name in views:
                    views[name].mul_(along.view(-1, *(1,) * (views[name].dim() - 1 - dim)))
        return scale.to(full.dtype)

    def index_bytes(self) -> int:
        """Count a bit per unit of each cut group (none where the first units are kept), and a value per factor."""
        sizes = {group.name: group.size for group in self.groups}
        bits = sum(-(-sizes[name] // 8) for name, units in self.kept if units != tuple(range(len(units))))
        return bits + BYTES_PER_VALUE * sum(len(values) for _, values in self.scales)

    def _cuts(self) -> KeptIndex:
        return kept_index(self.groups, dict(self.kept))

    def _make_layout(self, full: FlatLayout) -> FlatLayout:
        cuts, shapes = self._cuts(), []
        sizes = [0, 0, 0]  # of parameters, buffers and riders
        for (name, place), shape in zip(full.places().items(), full.shapes, strict=True):
            kind = bisect([full.num_params, full.num_params + full.num_buffers], place.start)
            part = list(shape)
            for dim, units in cuts.get(name, ()):
                part[dim] = len(units)
            if kind == 2 and shape == (full.num_params,):
                part = [sizes[0]]  # optimiser state that moves with the model: a value per parameter
            sizes[kind] += prod(part)
            shapes.append(tuple(part))
        return replace(full, shapes=tuple(shapes), num_params=sizes[0], num_buffers=sizes[1], num_riders=sizes[2])

    def _index_and_cover(self, full: FlatLayout) -> tuple[Tensor, Tensor]:
        """Return the part's places in the full vector [V of the part], and the same as a mask (bool [V])."""
        entry = vars(self).get("_index")
        if entry is None or (entry[0] is not full and entry[0] != full):
            entry = (full, self._make_index(full))
            if full.num_values <= _CACHE_VALUES:
                object.__setattr__(self, "_index", entry)
        return cast(tuple[Tensor, Tensor], entry[1])

    def _make_index(self, full: FlatLayout) -> tuple[Tensor, Tensor]:
        cuts, own = self._cuts(), self.layout(full)
        parts: list[Tensor] = []
        for (name, place), shape in zip(full.places().items(), full.shapes, strict=True):
            if place.start >= full.num_params + full.num_buffers and shape == (full.num_params,):
                parts.append(torch.cat(parts)[: own.num_params] + place.start)
            else:
                places = torch.arange(place.start, place.stop).view(shape)
                for dim, units in cuts.get(name, ()):
                    places = places.index_select(dim, units)
                parts.append(places.reshape(-1))
        index = torch.cat(parts)
        cover = torch.zeros(full.num_values, dtype=torch.bool)
        cover[index] = True
        return index, cover


def unit_submodel(
    groups: Sequence[UnitGroup],
    kept: Mapping[str, Sequence[int]],
    *,
    scales: Mapping[str, Sequence[float]] | None = None,
    scales_in: MultiplierIn = "activation",
) -> SubModel:
    """Return the sub-model with these units; the full model where nothing is left out and all factors are 1.

    Args:
        groups: The network's unit groups.
        kept: Group name -> kept units, ascending, at least one; groups that are not named are kept whole.
        scales: Group name -> factor for each kept unit, applied to its output in training.
        scales_in: Where the steps see them, see :class:`UnitSubModel`.

    Raises:
        InvariantError: A group is unknown, or its units or factors are not as said above.
    """
    sizes = {group.name: group.size for group in groups}
    units_of = {name: tuple(int(unit) for unit in units) for name, units in kept.items()}
    for name, units in units_of.items():
        ascends = bool(units) and all(low < high for low, high in pairwise(units))
        if name not in sizes or not ascends or units[0] < 0 or units[-1] >= sizes[name]:
            raise InvariantError(
                f"kept units must be at least one, ascending and of a group of the network, but got {name!r}:"
                f" {list(units)}"
            )
    factors: dict[str, tuple[float, ...]] = {}
    for name, values in (scales or {}).items():
        wanted = len(units_of[name]) if name in units_of else sizes.get(name, -1)
        if len(values) != wanted:
            raise InvariantError(f"unit group {name!r} needs {wanted} factors, but got {len(values)}")
        numbers = tuple(float(value) for value in values)
        same = set(numbers)
        if same != {1.0}:
            factors[name] = numbers[:1] if len(same) == 1 else numbers
    cut = tuple((g.name, units_of[g.name]) for g in groups if len(units_of.get(g.name, ())) not in (0, g.size))
    if not cut and not factors:
        return FULL_MODEL
    return UnitSubModel(
        groups=tuple(groups),
        kept=cut,
        scales=tuple((g.name, factors[g.name]) for g in groups if g.name in factors),
        scales_in=scales_in,
    )
