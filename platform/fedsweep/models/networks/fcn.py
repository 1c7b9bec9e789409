"""A small fully convolutional network: a class for each pixel."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from fedsweep.models.network import InputShape, Network, image_shape
from fedsweep.parameters.ranges import Count


@final
class Fcn(Network):
    """Three 3x3 convolutions with ReLU, the second dilated by 2, the third by 4, and one of 1x1.

    Takes pictures ``[B, C, H, W]`` and gives scores ``[B, classes, H, W]``.

    Source: Long, Shelhamer and Darrell (2015), fully convolutional; dilations: Yu and Koltun (2016), at a small size.

    Args:
        input_shape: Channels, height and width of one sample.
        num_classes: Classes of a pixel.
        width: Channels of the hidden maps, at least 1.
    """

    has_features = False

    def __init__(self, *, input_shape: InputShape, num_classes: int, width: Count = 16) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, _, _ = image_shape("fcn", self.input_shape)
        layers: list[nn.Module] = []
        for number, reach in enumerate((1, 2, 4)):
            layers += [nn.Conv2d(width if number else channels, width, 3, padding=reach, dilation=reach), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.classifier = nn.Conv2d(width, num_classes, 1)

    @property
    def feature_width(self) -> int:
        return self.classifier.in_channels

    def features(self, inputs: Tensor) -> Tensor:
        """Return the last hidden maps ``[B, width, H, W]``."""
        maps: Tensor = self.body(self.arranged(inputs))
        return maps

    def head(self, features: Tensor) -> Tensor:
        scores: Tensor = self.classifier(features)
        return scores
