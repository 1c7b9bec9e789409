"""The networks that are plain chains of layers: the perceptron, LeNet-5 and the papers' convolutional networks."""

from __future__ import annotations

from abc import ABC
from math import prod
from operator import attrgetter
from typing import ClassVar, final

from torch import Tensor, nn

from fedsweep.models.network import InputShape, LinearHeadNetwork, require_size
from fedsweep.models.unit_groups import UnitGroup, unit_group
from fedsweep.parameters.ranges import BelowOne, Count

_VGG_WIDTHS = (64, 128, 256, 256, 512, 512, 512, 512)
_VGG_POOLED_AFTER = frozenset({0, 1, 3, 5, 7})


class ChainNetwork(LinearHeadNetwork, ABC):
    """Convolutions and linear layers one after the other; each layer's units are a group."""

    def __init__(self, *, input_shape: InputShape, num_classes: int) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self._layers: list[tuple[str, list[str], str]] = []
        self._steps: list[str] = []

    def add_layer(
        self, name: str, layer: nn.Module, *, norm: nn.Module | None = None, pool: nn.Module | None = None
    ) -> None:
        """Add the n-th layer, called ``name``, and after it ``norm<n>``, ``relu<n>`` and ``pool<n>``."""
        number = len(self._layers) + 1
        holder, _, last = name.rpartition(".")
        self.get_submodule(holder).add_module(last, layer)
        self._steps.append(name)
        for part, module in (("norm", norm), ("relu", nn.ReLU()), ("pool", pool)):
            if module is not None:
                self.add_module(f"{part}{number}", module)
                self._steps.append(f"{part}{number}")
        self._layers.append((name, [] if norm is None else [f"norm{number}"], f"relu{number}"))

    def encode(self, inputs: Tensor) -> Tensor:
        values = inputs
        for step in attrgetter(*self._steps)(self):
            values = step(values.flatten(1) if isinstance(step, nn.Linear) else values)
        return values.flatten(1)

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        consumers = [*(name for name, _, _ in self._layers[1:]), self.reader]
        chain = (
            unit_group(self, name=name, layers=[name], norms=norms, consumers=[consumer], modules=[relu])
            for (name, norms, relu), consumer in zip(self._layers, consumers, strict=True)
        )
        return (*chain, *self.projection_groups())


@final
class Mlp(ChainNetwork):
    """Flatten - FC - ReLU - FC - ReLU - FC, torch's default initialisation.

    Source: Pi et al. (DynaFed), CVPR 2023, the MLP for MNIST; 118,282 parameters from 1x28x28 to 10 classes.

    Args:
        input_shape: Channels, height and width of one sample; any size.
        num_classes: C.
        hidden_width: Neurons in each of the two hidden layers, at least 1.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(
        self, *, input_shape: InputShape, num_classes: int, hidden_width: Count = 128, projection: int | None = None
    ) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self.add_layer("fc1", nn.Linear(prod(self.input_shape), hidden_width))
        self.add_layer("fc2", nn.Linear(hidden_width, hidden_width))
        self.add_head(hidden_width, projection)


class _LeNetBody(ChainNetwork, ABC):
    """Conv 5x5 to 6 - pool - conv 5x5 to 16 - pool - FC 120 - FC 84 - FC C; norms stand between conv and ReLU.

    The printed parameter counts without and with norms differ by the 44 parameters of the two norms alone.
    """

    is_normalised: ClassVar[bool] = False

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        require_size("cnn" if self.is_normalised else "lenet5", input_shape, smallest=16)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, *sides = self.input_shape
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in sides)
        norms = (nn.GroupNorm(1, 6), nn.GroupNorm(1, 16)) if self.is_normalised else (None, None)
        self.add_layer("conv1", nn.Conv2d(channels, 6, 5), norm=norms[0], pool=nn.MaxPool2d(2))
        self.add_layer("conv2", nn.Conv2d(6, 16, 5), norm=norms[1], pool=nn.MaxPool2d(2))
        self.add_layer("fc1", nn.Linear(16 * rows * columns, 120))
        self.add_layer("fc2", nn.Linear(120, 84))
        self.add_head(84, projection)
        if self.is_normalised:
            initialise_by_fan_out(self)


@final
class LeNet5(_LeNetBody):
    """LeNet-5 with ReLU and max-pooling, torch's default initialisation.

    Source: FedDHAD, the printed sizes; 62,006 parameters for 3x32x32 and 10 classes, 69,656 for 100.

    Args:
        input_shape: Channels, height and width of one sample; at least 16x16 pixels.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """


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

    is_normalised: ClassVar[bool] = True


def initialise_by_fan_out(model: nn.Module) -> None:
    """Set initial values that keep the variance on the way back, in place.

    Weights of convolutions become Kaiming normal (fan out, ReLU) and biases of linear layers 0; the rest stays as
    torch makes it. Draws from torch's global generator, as torch's own initialisation does: the registry seeds it.

    Source: DynamicFL's authors.

    Args:
        model: The network just built.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


@final
class FeddhadCnn(ChainNetwork):
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
        channels, *sides = self.input_shape
        rows, columns = (((side - 2) // 2 - 2) // 2 - 2 for side in sides)
        self.add_layer("conv1", nn.Conv2d(channels, 32, 3), pool=nn.MaxPool2d(2))
        self.add_layer("conv2", nn.Conv2d(32, 64, 3), pool=nn.MaxPool2d(2))
        self.add_layer("conv3", nn.Conv2d(64, 64, 3))
        self.add_layer("fc1", nn.Linear(64 * rows * columns, 64))
        self.add_head(64, projection)


@final
class ConvNet3(ChainNetwork):
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
        self, *, input_shape: InputShape, num_classes: int, width: Count = 128, projection: int | None = None
    ) -> None:
        require_size("convnet3", input_shape, smallest=8)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, *sides = self.input_shape
        is_mnist_size = sides == [28, 28]
        rows, columns = (32, 32) if is_mnist_size else sides
        convs = [nn.Conv2d(channels, width, 3, padding=3 if is_mnist_size else 1)]
        convs += [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
        for number, conv in enumerate(convs, start=1):
            self.add_layer(f"conv{number}", conv, norm=nn.GroupNorm(width, width), pool=nn.AvgPool2d(2))
        self.add_head(width * (rows // 8) * (columns // 8), projection)


@final
class FedstgCnn(ChainNetwork):
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
        self, *, input_shape: InputShape, num_classes: int, dropout: BelowOne = 0.5, projection: int | None = None
    ) -> None:
        require_size("fedstg_cnn", input_shape, smallest=8)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        channels, height, width = self.input_shape
        widths = (channels, 64, 128, 256)
        for number in (1, 2, 3):
            conv = nn.Conv2d(widths[number - 1], widths[number], 3, padding=1)
            self.add_layer(f"conv{number}", conv, norm=nn.BatchNorm2d(widths[number]), pool=nn.MaxPool2d(2))
        self.add_layer("fc1", nn.Linear(256 * (height // 8) * (width // 8), 512))
        self.dropout = nn.Dropout(dropout)
        # A step alone: it has no units that a sub-model could leave out.
        self._steps.append("dropout")
        self.add_head(512, projection)


@final
class Vgg11(ChainNetwork):
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
        self.convs = nn.ModuleList()
        for position, (before, after) in enumerate(zip((channels, *_VGG_WIDTHS), _VGG_WIDTHS, strict=False)):
            pool = nn.MaxPool2d(2) if position in _VGG_POOLED_AFTER else None
            self.add_layer(f"convs.{position}", nn.Conv2d(before, after, 3, padding=1), pool=pool)
        self.add_layer("fc1", nn.Linear(512 * (height // 32) * (width // 32), 512))
        self.add_layer("fc2", nn.Linear(512, 512))
        self.add_head(512, projection)
