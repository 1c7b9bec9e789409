"""Base of every network: a split into features and head, and its unit groups.

Methods look inside a network at two places only: at the features that the head reads (contrastive and generator
methods) and at the units that can be left out (sub-model methods). Both are part of the base, so that no method
knows an architecture by name.

Shape letters: B batch, C classes, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.unit_groups import UnitGroup, unit_group
from fedsweep.trees import Inputs, each, still_layers

InputShape = tuple[int, ...]
# Measured (docs/speed.md): up to here every network gained, ResNet-18 and VGG-11 with 512 lost.
_MOST_CHANNELS = 256


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shapes of what a network takes and gives.

    Attributes:
        input_shape: Channels, height and width of one sample; of other inputs, what they have, of several by name.
        num_classes: C, or what else a task has for a builder.
        outputs: Of one sample; empty: ``(num_classes,)``.
        sample: One sample of zeros; None: floats of the input shape.
    """

    input_shape: Any
    num_classes: int
    outputs: tuple[int, ...] = ()
    sample: Inputs | None = field(default=None, compare=False)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The shape of a sample's outputs."""
        return self.outputs or (self.num_classes,)


class Network(nn.Module, ABC):
    """A network, split into features and head: a classifier of images, or what else a task asks for.

    Parameters are never parametrized, and float buffers are the statistics of batch norm: an executor may rebind the
    data of both as views into one flat tensor. What is not trained stays as it is built, see :mod:`fedsweep.trees`.

    Attributes:
        input_shape: Channels, height and width of one sample; of other inputs, what they have.
        num_classes: C, at least 1.
        sample: One sample of zeros [1, ...]; None: floats of the input shape.
        has_features: Whether ``features`` gives what the head reads; false where a user's own module does not say
            (then the features are the logits and the head is the identity).
        pixels_last: Whether :meth:`arranged` turns images round; false until the network is built by name.
    """

    has_features: bool = True
    pixels_last: bool = False
    sample: Inputs | None = None

    def __init__(self, *, input_shape: InputShape, num_classes: int) -> None:
        super().__init__()
        if any(size < 1 for size in input_shape):
            raise ConfigError(f"input_shape must hold sizes of at least 1, but got {tuple(input_shape)}")
        if num_classes < 1:
            raise ConfigError(f"num_classes must be at least 1, but got {num_classes}")
        self.input_shape = tuple(int(size) for size in input_shape)
        self.num_classes = int(num_classes)
        self._still: list[nn.Module] = []

    @property
    @abstractmethod
    def feature_width(self) -> int:
        """D, the number of features that the head reads."""

    @abstractmethod
    def features(self, inputs: Tensor) -> Tensor:
        """Return the head's inputs, ``[B, D]``, from images ``[B, channels, height, width]``."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of features ``[B, D]``."""

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """Return the groups of units that a sub-model may leave out, from the input on; by default there are none.

        Sizes are those of this very module: in a sub-model they are the numbers of units kept.
        """
        return ()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits ``[B, C]`` of inputs ``[B, channels, height, width]``."""
        return self.head(self.features(inputs))

    def hold_still(self) -> None:
        """Keep layers whose parameters are frozen from gathering statistics, from now on: they are part of the base."""
        self._still = [layer for layer in still_layers(self) if [*layer.buffers(recurse=False)]]
        # At once: who steps the network sets its mode only where that is another.
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """As torch's, but for layers that are held still."""
        super().train(mode)
        for layer in self._still:
            layer.training = False
        return self

    def example(self, samples: int) -> Any:
        """Return inputs of zeros for so many samples, on the CPU."""
        if self.sample is None:
            return torch.zeros(samples, *self.input_shape)
        return each(lambda values: values.expand(samples, *values.shape[1:]), self.sample)

    def arranged(self, inputs: Tensor) -> Tensor:
        """Return the same inputs as they best lie in memory."""
        return pixels_last(inputs) if self.pixels_last else inputs


class LinearHeadNetwork(Network, ABC):
    """A network whose head is one linear layer, ``classifier``, with or without a projection before it.

    Source: the projection: Li, He, Song (2021), Model-contrastive federated learning, section 3.2 and the authors'
    program: two linear layers with ReLU between them, the first as wide as what it reads.
    """

    projection: nn.Sequential | None

    def add_head(self, width: int, projection: int | None) -> None:
        """Add the last layers; a concrete network's constructor does so.

        Args:
            width: What :meth:`encode` gives per sample.
            projection: Outputs of the projection; None: there is none.

        Raises:
            ConfigError: The projection has no outputs.
        """
        if projection is not None and projection < 1:
            raise ConfigError(f"model.projection must be at least 1, or null for none, but got {projection}")
        self.projection = None
        if projection is not None:
            self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection))
        self.classifier = nn.Linear(projection or width, self.num_classes)

    @abstractmethod
    def encode(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the projection, or of the classifier where there is none: ``[B, width]``."""

    def features(self, inputs: Tensor) -> Tensor:
        encoded = self.encode(self.arranged(inputs))
        return encoded if self.projection is None else self.projection(encoded)

    @property
    def reader(self) -> str:
        """The name of the linear layer that reads what :meth:`encode` gives."""
        return "classifier" if self.projection is None else "projection.0"

    def projection_groups(self) -> tuple[UnitGroup, ...]:
        """Return the projection's hidden neurons; its outputs are always whole."""
        if self.projection is None:
            return ()
        group = unit_group(
            self,
            name="projection",
            layers=["projection.0"],
            norms=[],
            consumers=["projection.2"],
            modules=["projection.1"],
        )
        return (group,)

    @property
    def feature_width(self) -> int:
        return self.classifier.in_features

    def head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features)
        return logits


def image_shape(model: str, input_shape: InputShape) -> tuple[int, int, int]:
    """Return channels, height and width of inputs that are pictures.

    Args:
        model: The model's name, for the message.
        input_shape: Of one sample.

    Raises:
        ConfigError: They are none.
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model {model!r} needs pictures [channels, height, width], but a sample is {list(input_shape)}; choose"
            " another model (mlp takes floats of any shape, transformer ids)"
        )
    channels, height, width = input_shape
    return channels, height, width


def require_size(model: str, input_shape: InputShape, *, smallest: int) -> None:
    """Refuse inputs on which the network's maps would vanish.

    Args:
        model: The model's name, for the message.
        input_shape: Channels, height and width of one sample.
        smallest: The least height and width that the network can take, in pixels.

    Raises:
        ConfigError: Where height or width is below ``smallest``.
    """
    channels, height, width = image_shape(model, input_shape)
    if min(height, width) < smallest:
        raise ConfigError(
            f"model {model!r} needs inputs of at least {smallest}x{smallest} pixels, "
            f"but got {channels}x{height}x{width}; set scenario.image_size={smallest} or more, "
            "or choose a smaller model (mlp takes any size)"
        )


def gains_by_pixels_last(network: nn.Module) -> bool:
    """Return whether a network's steps are faster for it on a CPU.

    It follows from the network alone and from no timing: the same run has the same bits wherever it is.
    """
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    return (
        bool(convolutions)
        and all(max(c.in_channels, c.out_channels) <= _MOST_CHANNELS and c.groups == 1 for c in convolutions)
        and not any(_is_instance_norm(module) for module in network.modules())
    )


def _is_instance_norm(module: nn.Module) -> bool:
    """Return whether it reads its maps channel by channel, and takes back what convolutions gain."""
    in_groups = isinstance(module, nn.GroupNorm) and 1 < module.num_groups == module.num_channels
    return in_groups or isinstance(module, nn.InstanceNorm2d)


def pixels_last(inputs: Tensor) -> Tensor:
    """Return images [B, C, H, W] with the same values and their channels innermost in memory.

    They stay as they are on a GPU, in float64, which has no such kernels, and under ``torch.func``'s transforms, which
    do not know of it.
    """
    is_here = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and inputs.dim() == 4
    if not is_here or torch._C._functorch.peek_interpreter_stack() is not None:
        return inputs
    return inputs.contiguous(memory_format=torch.channels_last)
