"""DynaFed's ConvNet, the usual network of data-set distillation: three normalised convolutions, nothing else."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.network import InputShape, LinearHeadNetwork, require_size
from fedsweep.models.unit_groups import UnitGroup, chain_groups


@final
class ConvNet3(LinearHeadNetwork):
    """Three times [conv 3x3 - instance norm (affine) - ReLU - average pool], then FC C.

    The norm has one group per channel, so a sub-model computes what the full model with masked channels computes.

    Source: Pi et al. (DynaFed), CVPR 2023, and the authors' code; 320,010 parameters for 3x32x32 and 10 classes,
    504,420 for 100, 317,706 for 1x28x28 and 10. Torch's default initialisation.
    Reading: inputs of 28x28 pixels are padded to 32x32 by the first convolution (padding 3), whatever their channels;
    the authors' code pads by the number of channels, which fits MNIST alone.

    Args:
        input_shape: Channels, height and width of one sample; at least 8x8 pixels.
        num_classes: C.
        width: Channels of each convolution, at least 1.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(
        self, *, input_shape: InputShape, num_classes: int, width: int = 128, projection: int | None = None
    ) -> None:
        require_size("convnet3", input_shape, smallest=8)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        if width < 1:
            raise ConfigError(f"model.width must be at least 1, but got {width}")
        channels, rows, columns = self.input_shape
        is_mnist_size = (rows, columns) == (28, 28)
        if is_mnist_size:
            rows, columns = 32, 32
        self.conv1 = nn.Conv2d(channels, width, 3, padding=3 if is_mnist_size else 1)
        self.norm1 = nn.GroupNorm(width, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(width, width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, width, 3, padding=1)
        self.norm3 = nn.GroupNorm(width, width)
        self.relu3 = nn.ReLU()
        self.add_head(width * (rows // 8) * (columns // 8), projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """The flattened last maps ``[B, D]``."""
        maps = F.avg_pool2d(self.relu1(self.norm1(self.conv1(inputs))), 2)
        maps = F.avg_pool2d(self.relu2(self.norm2(self.conv2(maps))), 2)
        maps = F.avg_pool2d(self.relu3(self.norm3(self.conv3(maps))), 2)
        return maps.flatten(1)

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The channels of the three convolutions."""
        return chain_groups(
            self, [("conv1", "norm1", "relu1"), ("conv2", "norm2", "relu2"), ("conv3", "norm3", "relu3")]
        )
