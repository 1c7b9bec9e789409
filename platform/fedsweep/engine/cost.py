"""What a sub-model costs: MACs, FLOPs, and what a message that carries it counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from fedsweep.experiment.experiment import Experiment
from fedsweep.models.cost import BYTES_PER_VALUE, PASSES_OF_A_STEP, fwd_macs_per_sample, layer_costs, training_flops
from fedsweep.submodel import Direction, SubModel


class CostModel:
    """Costs of sub-models; the forward MACs of each are counted once.

    Args:
        experiment: Gives the model and the shape of its inputs.

    Attributes:
        model: A template of the full model.
        layout: How the full model lies in its vector.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.model = experiment.template
        shape = experiment.world.data.images.shape[1:]
        self._shape = (int(shape[0]), int(shape[1]), int(shape[2]))
        self.layout = experiment.layout
        self._sizes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        self._passes = experiment.method.passes
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
        own = submodel.layout(self.layout)
        shapes = dict(zip(own.names, own.shapes, strict=True))
        total = 0
        for name, (macs, norm) in self._layers.items():
            whole, part = self._sizes.get(name), shapes.get(name)
            if whole is None or part is None or len(part) != len(whole) or any(map(int.__gt__, part, whole)):
                return None
            total += (macs + norm * count_batch_norm) * math.prod(part) // math.prod(whole)
        return total

    def flops(self, submodel: SubModel, samples: int, *, probed: float = 0) -> int:
        """FLOPs of a client's work.

        Args:
            submodel: What it trains.
            samples: Samples that go through a step, repeats included.
            probed: Forward passes of one sample that its measurements take.
        """
        macs = self.macs(submodel)
        return training_flops(macs, samples, passes=self._passes) + training_flops(macs, probed, passes=1)

    def forward_macs(self, submodel: SubModel) -> float:
        """MACs of a sample's forward pass, batch norms included; teachers' in the proportion that they add to a step.

        Source: FedDHAD's column "MLPs", which leaves open what a teacher counts.
        """
        return self.macs(submodel, count_batch_norm=True) * self._passes / PASSES_OF_A_STEP

    def message(self, submodel: SubModel, direction: Direction) -> Mapping[str, int]:
        """Scalars of a message that carries the sub-model, by kind."""
        return submodel.message(self.layout, direction)

    def values(self, submodel: SubModel, direction: Direction) -> int:
        """The same in total."""
        return sum(self.message(submodel, direction).values())

    def bits(self, submodel: SubModel, direction: Direction) -> int:
        """Bits of that message, without the masks that come with it once a round."""
        return 8 * BYTES_PER_VALUE * self.values(submodel, direction)


def registration_bytes(experiment: Experiment) -> int:
    """Bytes that travel once: number of samples, label counts where a component reads them; their mean, back."""
    per_client = 1 + experiment.method.needs_share
    if "label_counts" in experiment.method.registration:
        per_client += experiment.world.data.num_classes
    return BYTES_PER_VALUE * per_client * len(experiment.world.profiles)
