"""LeNet-5 as FedDHAD runs it, and DynamicFL's CNN: the same shape with layer normalisation.

Their printed parameter counts differ by the 44 parameters of the two norms alone, so both are built on one body.
"""

from __future__ import annotations

from abc import ABC
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.models.network import InputShape, LinearHeadNetwork, require_size
from fedsweep.models.unit_groups import UnitGroup, chain_groups


class _LeNetBody(LinearHeadNetwork, ABC):
    """Conv 5x5 to 6 - pool - conv 5x5 to 16 - pool - FC 120 - FC 84 - FC C; norms stand between conv and ReLU."""

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, height, width = self.input_shape
        flat = 16 * _map_size(height) * _map_size(width)
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.norm1: nn.Module = nn.Identity()
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.norm2: nn.Module = nn.Identity()
        self.relu2 = nn.ReLU()
        self.fc1 = nn.Linear(flat, 120)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(120, 84)
        self.relu4 = nn.ReLU()
        self.add_head(84, projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """The second hidden fully connected layer ``[B, D]``."""
        maps = F.max_pool2d(self.relu1(self.norm1(self.conv1(inputs))), 2)
        maps = F.max_pool2d(self.relu2(self.norm2(self.conv2(maps))), 2)
        hidden: Tensor = self.relu4(self.fc2(self.relu3(self.fc1(maps.flatten(1)))))
        return hidden

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The channels of both convolutions and the neurons of both hidden layers."""
        return chain_groups(
            self,
            [("conv1", "norm1", "relu1"), ("conv2", "norm2", "relu2"), ("fc1", None, "relu3"), ("fc2", None, "relu4")],
        )


def _map_size(size: int) -> int:
    return ((size - 4) // 2 - 4) // 2


@final
class LeNet5(_LeNetBody):
    """LeNet-5 with ReLU and max-pooling, torch's default initialisation.

    Source: FedDHAD, the printed sizes; 62,006 parameters for 3x32x32 and 10 classes, 69,656 for 100.

    Args:
        input_shape: Channels, height and width of one sample; at least 16x16 pixels.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        require_size("lenet5", input_shape, smallest=16)
        super().__init__(input_shape=input_shape, num_classes=num_classes, projection=projection)


@final
class Cnn(_LeNetBody):
    """DynamicFL's CNN: LeNet-5 with layer normalisation (one group over C*H*W, affine) after each convolution.

    The statistics of a sub-model's norm are over the channels that it keeps: it computes something else than the
    full model with the other channels masked.

    Source: DynamicFL, experiments and the authors' code; 62,050 parameters for 3x32x32 and 10 classes. Convolutions
    start Kaiming normal (fan out) with torch's default bias, linear layers with the default weight and bias 0.

    Args:
        input_shape: Channels, height and width of one sample; at least 16x16 pixels.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        require_size("cnn", input_shape, smallest=16)
        super().__init__(input_shape=input_shape, num_classes=num_classes, projection=projection)
        self.norm1 = nn.GroupNorm(1, 6)
        self.norm2 = nn.GroupNorm(1, 16)
        initialise_as_dynamicfl(self)


def initialise_as_dynamicfl(model: nn.Module) -> None:
    """Set DynamicFL's initial values in place.

    Weights of convolutions become Kaiming normal (fan out, ReLU) and biases of linear layers 0; the rest stays as
    torch makes it. Draws from torch's global generator, as torch's own initialisation does: the registry seeds it.

    Args:
        model: The network just built.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
