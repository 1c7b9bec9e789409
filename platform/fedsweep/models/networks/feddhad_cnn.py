"""FedDHAD's CNN: three convolutions, small enough for phones."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.models.network import InputShape, LinearHeadNetwork, require_size
from fedsweep.models.unit_groups import UnitGroup, chain_groups


@final
class FeddhadCnn(LinearHeadNetwork):
    """Conv 3x3 to 32 - pool - conv 3x3 to 64 - pool - conv 3x3 to 64 - FC 64 - FC C, ReLU, no padding, no norm.

    Source: FedDHAD, the printed sizes; 122,570 parameters for 3x32x32 and 10 classes, 128,420 for 100.

    Args:
        input_shape: Channels, height and width of one sample; at least 18x18 pixels.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        require_size("feddhad_cnn", input_shape, smallest=18)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, height, width = self.input_shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.relu3 = nn.ReLU()
        self.fc1 = nn.Linear(64 * _map_size(height) * _map_size(width), 64)
        self.relu4 = nn.ReLU()
        self.add_head(64, projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """The hidden fully connected layer ``[B, D]``."""
        maps = F.max_pool2d(self.relu1(self.conv1(inputs)), 2)
        maps = F.max_pool2d(self.relu2(self.conv2(maps)), 2)
        maps = self.relu3(self.conv3(maps))
        hidden: Tensor = self.relu4(self.fc1(maps.flatten(1)))
        return hidden

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The channels of the three convolutions and the neurons of the hidden layer."""
        return chain_groups(
            self,
            [("conv1", None, "relu1"), ("conv2", None, "relu2"), ("conv3", None, "relu3"), ("fc1", None, "relu4")],
        )


def _map_size(size: int) -> int:
    return ((size - 2) // 2 - 2) // 2 - 2
