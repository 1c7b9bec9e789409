"""The multi-layer perceptron of DynaFed; it takes inputs of any size, so it is the default model."""

from __future__ import annotations

from math import prod
from typing import final

from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.network import InputShape, LinearHeadNetwork
from fedsweep.models.unit_groups import UnitGroup, chain_groups


@final
class Mlp(LinearHeadNetwork):
    """Flatten - FC - ReLU - FC - ReLU - FC, torch's default initialisation.

    Source: Pi et al. (DynaFed), CVPR 2023, the MLP for MNIST; 118,282 parameters from 1x28x28 to 10 classes.

    Args:
        input_shape: Channels, height and width of one sample; any size.
        num_classes: C.
        hidden_width: Neurons in each of the two hidden layers, at least 1.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(
        self, *, input_shape: InputShape, num_classes: int, hidden_width: int = 128, projection: int | None = None
    ) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        if hidden_width < 1:
            raise ConfigError(f"model.hidden_width must be at least 1, but got {hidden_width}")
        self.fc1 = nn.Linear(prod(self.input_shape), hidden_width)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(hidden_width, hidden_width)
        self.relu2 = nn.ReLU()
        self.add_head(hidden_width, projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """The second hidden layer ``[B, D]``."""
        hidden: Tensor = self.relu2(self.fc2(self.relu1(self.fc1(inputs.flatten(1)))))
        return hidden

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The neurons of both hidden layers."""
        return chain_groups(self, [("fc1", None, "relu1"), ("fc2", None, "relu2")])
