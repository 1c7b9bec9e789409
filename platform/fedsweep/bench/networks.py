"""Networks that only benchmarks have: they stand in set-ups that others published."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.models.network import InputShape


class SpeedCnn(nn.Module):
    """Conv 3x3 to 32 - conv 3x3 to 64 - pool - dropout 0.25 - FC 128 - dropout 0.5 - FC C, ReLU, no padding.

    Source: Granqvist et al. 2024, pfl-research, the network of its speed comparison on CIFAR-10; 1,626,442 parameters
    for 3x32x32 and 10 classes.

    Args:
        input_shape: Channels, height and width of one sample.
        num_classes: C.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, C]``."""
        maps = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(inputs)))), 2)
        hidden = F.relu(self.fc1(self.dropout1(maps).flatten(1)))
        logits: Tensor = self.fc2(self.dropout2(hidden))
        return logits


class Logistic(nn.Module):
    """Logistic regression on the pixels; 7,850 parameters from 1x28x28 to 10 classes.

    Args:
        input_shape: Channels, height and width of one sample.
        num_classes: C.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.linear = nn.Linear(channels * height * width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, C]``."""
        logits: Tensor = self.linear(inputs.flatten(1))
        return logits
