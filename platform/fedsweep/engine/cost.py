"""What training costs: MACs and FLOPs of a sub-model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from fedsweep.experiment.experiment import Experiment
from fedsweep.models.cost import fwd_macs_per_sample, layer_costs
from fedsweep.submodel import SubModel
from fedsweep.trees import layout_of


class CostModel:
    """Forward MACs of each sub-model, counted once.

    Args:
        experiment: Gives the model and the shape of its inputs.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.model = experiment.template
        shape = experiment.world.data.images.shape[1:]
        self._shape = (int(shape[0]), int(shape[1]), int(shape[2]))
        self._full = layout_of(self.model)
        self._sizes = dict(zip(self._full.names, self._full.shapes, strict=True))
        self._macs: dict[tuple[str, bool], int] = {}

    @cached_property
    def _layers(self) -> Mapping[str, tuple[int, int]]:
        return layer_costs(self.model, self._shape)  # a forward pass, which planning without devices can do without

    def macs(self, submodel: SubModel, *, count_batch_norm: bool = False) -> int:
        """Multiply-accumulates of one sample's forward pass; the mean where a round's steps train several parts."""
        return round(sum(times * self._of_part(part, count_batch_norm) for part, times in submodel.trained()))

    def _of_part(self, submodel: SubModel, count_batch_norm: bool) -> int:
        key = (submodel.key(), count_batch_norm)
        if key not in self._macs:
            macs = self._scaled(submodel, count_batch_norm)
            if macs is None:
                module = submodel.build(self.model)
                macs = fwd_macs_per_sample(module, self._shape, count_batch_norm=count_batch_norm)
            self._macs[key] = macs
        return self._macs[key]

    def _scaled(self, submodel: SubModel, count_batch_norm: bool) -> int | None:
        """The layers' costs in proportion to their weights; None where the part's tensors are no slices.

        Spares a forward pass for each of the sub-models that are drawn anew in every round.
        """
        own = submodel.layout(self._full)
        shapes = dict(zip(own.names, own.shapes, strict=True))
        total = 0
        for name, (macs, norm) in self._layers.items():
            whole, part = self._sizes.get(name), shapes.get(name)
            if whole is None or part is None or len(part) != len(whole) or any(map(int.__gt__, part, whole)):
                return None
            total += (macs + norm * count_batch_norm) * math.prod(part) // math.prod(whole)
        return total

    def flops(self, submodel: SubModel, samples: int) -> int:
        """Training FLOPs: a sample costs three forward passes, a MAC two operations."""
        return 6 * self.macs(submodel) * samples
