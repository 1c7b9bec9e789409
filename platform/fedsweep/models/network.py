"""What every network offers: a split into features and head, and its unit groups.

Methods look inside a network at two places only: at the features that the head reads (contrastive and generator
methods) and at the units that can be left out (sub-model methods). Both are part of the base, so that no method
knows an architecture by name.

Shape letters: B batch, C classes, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedsweep.errors import ConfigError

if TYPE_CHECKING:
    from fedsweep.models.unit_groups import UnitGroup

InputShape = tuple[int, int, int]


class Network(nn.Module, ABC):
    """A classifier of images, split into features and head.

    Parameters are never tied or parametrized, and float buffers are the statistics of batch norm: an executor may
    rebind the data of both as views into one flat tensor.

    Attributes:
        input_shape: Channels, height and width of one sample.
        num_classes: C, at least 2.
        has_features: Whether ``features`` gives what the head reads; false where a user's own module does not say
            (then the features are the logits and the head is the identity).
    """

    input_shape: InputShape
    num_classes: int
    has_features: bool

    def __init__(self, *, input_shape: InputShape, num_classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or any(size < 1 for size in input_shape):
            raise ConfigError(
                f"input_shape must be (channels, height, width), each at least 1, but got {tuple(input_shape)}"
            )
        if num_classes < 2:
            raise ConfigError(f"num_classes must be at least 2, but got {num_classes}")
        channels, height, width = input_shape
        self.input_shape = (int(channels), int(height), int(width))
        self.num_classes = int(num_classes)
        self.has_features = True

    @property
    @abstractmethod
    def feature_width(self) -> int:
        """D, the number of features that the head reads."""

    @abstractmethod
    def features(self, inputs: Tensor) -> Tensor:
        """What the head reads, ``[B, D]``, of inputs ``[B, channels, height, width]``."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """Logits ``[B, C]`` of features ``[B, D]``."""

    @abstractmethod
    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """The groups of units that a sub-model may leave out, from the input on; empty where there are none.

        Sizes are those of this very module: in a sub-model they are the numbers of units kept.
        """

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[B, C]`` of inputs ``[B, channels, height, width]``."""
        return self.head(self.features(inputs))


class LinearHeadNetwork(Network, ABC):
    """A network whose head is one linear layer, ``classifier``, that each concrete network adds."""

    classifier: nn.Linear

    @property
    def feature_width(self) -> int:
        """D, the number of features that the classifier reads."""
        return self.classifier.in_features

    def head(self, features: Tensor) -> Tensor:
        """Logits ``[B, C]`` of features ``[B, D]``."""
        logits: Tensor = self.classifier(features)
        return logits


def require_size(model: str, input_shape: InputShape, *, smallest: int) -> None:
    """Refuse inputs on which the network's maps would vanish.

    Args:
        model: The model's name, for the message.
        input_shape: Channels, height and width of one sample.
        smallest: The least height and width that the network can take, in pixels.

    Raises:
        ConfigError: Where height or width is below ``smallest``.
    """
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"model {model!r} needs inputs of at least {smallest}x{smallest} pixels, "
            f"but got {channels}x{height}x{width}; set scenario.image_size={smallest} or more, "
            "or choose a smaller model (mlp takes any size)"
        )
