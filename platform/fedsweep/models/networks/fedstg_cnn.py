"""FedStg's CNN: three batch-normalised convolutions and a wide hidden layer with dropout."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.network import InputShape, LinearHeadNetwork, require_size
from fedsweep.models.unit_groups import UnitGroup, chain_groups


@final
class FedstgCnn(LinearHeadNetwork):
    """Three times [conv 3x3 - batch norm - ReLU - max pool] to 64, 128, 256 channels, FC 512, dropout, FC C.

    Dropout draws from torch's global generator, as any torch module does: whoever trains the network seeds it.

    Source: FedStg and the authors' code; 2,474,506 parameters for 3x32x32 and 10 classes, 2,520,676 for 100 (the
    published description says about 1.4 million). Torch's default initialisation.

    Args:
        input_shape: Channels, height and width of one sample; at least 8x8 pixels.
        num_classes: C.
        dropout: Share of the hidden neurons that a training step leaves out, 0 <= dropout < 1.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(
        self, *, input_shape: InputShape, num_classes: int, dropout: float = 0.5, projection: int | None = None
    ) -> None:
        require_size("fedstg_cnn", input_shape, smallest=8)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"0 <= model.dropout < 1 must hold, but got {dropout}")
        channels, height, width = self.input_shape
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(64)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(64, 128, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(128)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(128, 256, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(256)
        self.relu3 = nn.ReLU()
        self.fc1 = nn.Linear(256 * (height // 8) * (width // 8), 512)
        self.relu4 = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.add_head(512, projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """The hidden fully connected layer after dropout ``[B, D]``."""
        maps = F.max_pool2d(self.relu1(self.norm1(self.conv1(inputs))), 2)
        maps = F.max_pool2d(self.relu2(self.norm2(self.conv2(maps))), 2)
        maps = F.max_pool2d(self.relu3(self.norm3(self.conv3(maps))), 2)
        hidden: Tensor = self.dropout(self.relu4(self.fc1(maps.flatten(1))))
        return hidden

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The channels of the three convolutions and the neurons of the hidden layer."""
        return chain_groups(
            self,
            [
                ("conv1", "norm1", "relu1"),
                ("conv2", "norm2", "relu2"),
                ("conv3", "norm3", "relu3"),
                ("fc1", None, "relu4"),
            ],
        )
