"""The two ResNet-18 of the papers: DynamicFL's (pre-activation, group norm) and FedDHAD's (batch norm, biases).

Units that an addition ties together share one group: the block outputs of a stage, with the stem (stage 1) or the
projection of the shortcut (stages 2 to 4). The inner convolution of each block has a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import final

from torch import Tensor, nn

from fedsweep.models.network import InputShape, LinearHeadNetwork, image_shape, require_size
from fedsweep.models.networks.chains import initialise_by_fan_out
from fedsweep.models.unit_groups import UnitGroup, unit_group

_WIDTHS = (64, 128, 256, 512)
_BLOCKS_PER_STAGE = 2


def _block_chain(block: Callable[[int, int], nn.Module]) -> nn.Sequential:
    """Return the blocks of all stages, in order."""
    widths = [width for width in _WIDTHS for _ in range(_BLOCKS_PER_STAGE)]
    return nn.Sequential(*(block(before, after) for before, after in pairwise([_WIDTHS[0], *widths])))


def _blocks_of(stage: int) -> list[str]:
    """Return names of the blocks whose outputs form a stage's sum."""
    start = stage * _BLOCKS_PER_STAGE
    return [f"blocks.{number}" for number in range(start, start + _BLOCKS_PER_STAGE)]


def _readers_of(stage: int) -> list[str]:
    """Return names of the blocks that read a stage's sum: its own but for the first, and the next stage's first.

    In the first stage the first block reads the stem, which belongs to the stage.
    """
    own = _blocks_of(stage)
    following = [] if stage == len(_WIDTHS) - 1 else _blocks_of(stage + 1)[:1]
    return own[0 if stage == 0 else 1 :] + following


class PreActivationBlock(nn.Module):
    """GN - ReLU - conv - GN - ReLU - conv, plus the input, or a 1x1 convolution of the first activation."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels_out else 2
        self.norm1 = nn.GroupNorm(1, channels_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(1, channels_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps ``[B, channels_out, ceil(H / stride), ceil(W / stride)]``."""
        active = self.relu1(self.norm1(maps))
        carried = maps if self.shortcut is None else self.shortcut(active)
        added: Tensor = self.conv2(self.relu2(self.norm2(self.conv1(active)))) + carried
        return added


def _groups_of(
    network: LinearHeadNetwork, passed: Callable[[int], tuple[list[str], list[str]]], *, norm: str, relu: str
) -> tuple[UnitGroup, ...]:
    """Return the groups of a network's stages and, behind each, of its blocks.

    A stage's sum passes the norms and activations that ``passed`` gives, what is within a block this norm and ReLU.
    """
    groups = []
    for stage in range(len(_WIDTHS)):
        blocks, readers = _blocks_of(stage), _readers_of(stage)
        norms, activations = passed(stage)
        # Of the blocks that read the sum the next stage's first alone has a projection; the others carry it as it is.
        last = network.reader if stage == len(_WIDTHS) - 1 else f"{readers[-1]}.shortcut"
        whole = unit_group(
            network,
            name=f"stage{stage + 1}",
            layers=["stem" if stage == 0 else f"{blocks[0]}.shortcut", *(f"{block}.conv2" for block in blocks)],
            norms=norms,
            consumers=[*(f"{block}.conv1" for block in readers), last],
            modules=activations,
            residual=True,
        )
        groups.append(whole)
        for block in blocks:
            first = f"{block}.conv1"
            own, read, through = [f"{block}.{norm}"], [f"{block}.conv2"], [f"{block}.{relu}"]
            groups.append(unit_group(network, name=first, layers=[first], norms=own, consumers=read, modules=through))
    return (*groups, *network.projection_groups())


@final
class ResNet18(LinearHeadNetwork):
    """DynamicFL's ResNet-18: pre-activation blocks, layer normalisation (one group), no bias in convolutions.

    The statistics of a sub-model's norms are over the channels that it keeps. A stage's sum is carried unscaled; its
    units count as dropped where the blocks read them.

    Source: DynamicFL, experiments and the authors' code; 11,172,170 parameters for 3x32x32 and 10 classes,
    11,218,340 for 100. Initialisation as in DynamicFL's CNN.

    Args:
        input_shape: Channels, height and width of one sample; any size.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self.stem = nn.Conv2d(image_shape("resnet18", self.input_shape)[0], _WIDTHS[0], 3, padding=1, bias=False)
        self.blocks = _block_chain(PreActivationBlock)
        self.norm = nn.GroupNorm(1, _WIDTHS[-1])
        self.relu = nn.ReLU()
        self.add_head(_WIDTHS[-1], projection)
        initialise_by_fan_out(self)

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the globally averaged last maps ``[B, D]``."""
        # By the mean, not by a pool of a fixed size, so that inputs of any size will do.
        pooled: Tensor = self.relu(self.norm(self.blocks(self.stem(inputs)))).mean(dim=(2, 3))
        return pooled

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """Return one group per stage and one per block."""
        return _groups_of(self, self._passed, norm="norm2", relu="relu2")

    def _passed(self, stage: int) -> tuple[list[str], list[str]]:
        """Return the norms and activations of the blocks that read a stage's sum."""
        readers, is_last = _readers_of(stage), stage == len(_WIDTHS) - 1
        norms = [*(f"{block}.norm1" for block in readers), *(["norm"] if is_last else [])]
        return norms, [*(f"{block}.relu1" for block in readers), *(["relu"] if is_last else [])]


class BasicBlock(nn.Module):
    """Conv - BN - ReLU - conv - BN, plus the input or its projection (1x1 conv - BN), then ReLU; biases throughout."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels_out else 2
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Conv2d | None = None
        self.shortcut_norm: nn.BatchNorm2d | None = None
        if stride != 1:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride)
            self.shortcut_norm = nn.BatchNorm2d(channels_out)

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps ``[B, channels_out, ceil(H / stride), ceil(W / stride)]``."""
        carried = maps
        if self.shortcut is not None and self.shortcut_norm is not None:
            carried = self.shortcut_norm(self.shortcut(maps))
        branch = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(maps)))))
        added: Tensor = self.relu2(branch + carried)
        return added


@final
class FeddhadResNet18(LinearHeadNetwork):
    """FedDHAD's ResNet-18: post-activation blocks, batch norm, a bias in every convolution, no max-pool in the stem.

    Source: FedDHAD, the printed sizes: 11,276,232 parameters for 200 classes and 557,977,600 operations at 3x32x32.
    Torch's default initialisation.

    Args:
        input_shape: Channels, height and width of one sample; at least 9x9 pixels, as the last batch norms would
            otherwise see one value per channel in a batch of one sample.
        num_classes: C.
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, projection: int | None = None) -> None:
        require_size("feddhad_resnet18", input_shape, smallest=9)
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self.stem = nn.Conv2d(self.input_shape[0], _WIDTHS[0], 3, padding=1)
        self.norm = nn.BatchNorm2d(_WIDTHS[0])
        self.relu = nn.ReLU()
        self.blocks = _block_chain(BasicBlock)
        self.add_head(_WIDTHS[-1], projection)

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the globally averaged last maps ``[B, D]``."""
        maps: Tensor = self.blocks(self.relu(self.norm(self.stem(inputs))))
        return maps.mean(dim=(2, 3))

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """Return one group per stage and one per block."""
        return _groups_of(self, self._passed, norm="norm1", relu="relu1")

    def _passed(self, stage: int) -> tuple[list[str], list[str]]:
        """Return the norms behind the layers that add to a stage's sum, and the activations behind the sums."""
        blocks = _blocks_of(stage)
        first_norm = "norm" if stage == 0 else f"{blocks[0]}.shortcut_norm"
        norms = [first_norm, *(f"{block}.norm2" for block in blocks)]
        return norms, [*(["relu"] if stage == 0 else []), *(f"{block}.relu2" for block in blocks)]
