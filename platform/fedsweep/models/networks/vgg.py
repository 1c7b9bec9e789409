"""VGG11 without batch norm, with the narrow classifier that FedDHAD's printed size implies."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.models.network import InputShape, LinearHeadNetwork, require_size
from fedsweep.models.unit_groups import UnitGroup, chain_groups

_WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
_POOLED_AFTER = frozenset({0, 1, 3, 5, 7})


@final
class Vgg11(LinearHeadNetwork):
    """Eight conv 3x3 (padding 1) with five max-pools, FC 512, FC 512, FC C; ReLU, no norm, no dropout.

    Source: FedDHAD, the printed size: 9,750,922 parameters for 3x32x32 and 10 classes. Torch's default
    initialisation. Dropout inside the classifier is not specified there and left out.

    Args:
        input_shape: Channels, height and width of one sample; at least 32x32 pixels.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        require_size("vgg11", input_shape, smallest=32)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, height, width = self.input_shape
        inputs = (channels, *_WIDTHS[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in zip(inputs, _WIDTHS, strict=True)
        )
        self.relus = nn.ModuleList(nn.ReLU() for _ in _WIDTHS)
        self.fc1 = nn.Linear(512 * (height // 32) * (width // 32), 512)
        self.fc_relu1 = nn.ReLU()
        self.fc2 = nn.Linear(512, 512)
        self.fc_relu2 = nn.ReLU()
        self.add_head(512, projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """The second hidden fully connected layer ``[B, D]``."""
        maps = inputs
        for position, (conv, relu) in enumerate(zip(self.convs, self.relus, strict=True)):
            maps = relu(conv(maps))
            if position in _POOLED_AFTER:
                maps = F.max_pool2d(maps, 2)
        hidden: Tensor = self.fc_relu2(self.fc2(self.fc_relu1(self.fc1(maps.flatten(1)))))
        return hidden

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The channels of the eight convolutions and the neurons of both hidden layers."""
        convs = [(f"convs.{position}", None, f"relus.{position}") for position in range(len(_WIDTHS))]
        return chain_groups(self, [*convs, ("fc1", None, "fc_relu1"), ("fc2", None, "fc_relu2")])
