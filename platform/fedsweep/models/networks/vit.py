"""A small vision transformer whose heads and MLP neurons can be left out."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.attention import AttentionBlock, SelfAttention
from fedsweep.models.network import InputShape, LinearHeadNetwork, image_shape
from fedsweep.models.unit_groups import UnitGroup, unit_group
from fedsweep.parameters.ranges import Count

_MOST_PATCHES_PER_SIDE = 8


@final
class VitTiny(LinearHeadNetwork):
    """Patches, learned positions, pre-norm blocks of self-attention and a GELU MLP, layer norm, mean over patches, FC.

    Units are each block's heads and hidden MLP neurons; what the blocks add to, the tokens of ``width`` features, is
    never cut. So a sub-model computes what the full model computes with the other heads' and neurons' outputs at 0.

    Source: Dosovitskiy et al. (2021), An image is worth 16x16 words, section 3.1, at a size for small images; mean
    over patches instead of a class token: Beyer et al. (2022), Better plain ViT baselines. Linear layers
    start Xavier uniform with bias 0; 141,898 parameters for 3x32x32 and 10 classes.
    Reading: positions start standard normal, as torch's embeddings do; at the standard deviation 0.02 that is usual in
    long training, short runs hardly tell the patches apart.

    Args:
        input_shape: Channels, height and width of one sample.
        num_classes: C.
        depth: Blocks, at least 1.
        width: Features of a token, a multiple of the heads.
        heads: Attention heads in each block, at least 1.
        mlp_ratio: Hidden neurons of each block's MLP over the width, at least 1.
        patch_size: Pixels of a patch's side, a divisor of height and width; 0 derives it: the smallest from 2 up that
            divides both and leaves at most 8 patches a side (8x8 pixels: 2, 28x28 and 32x32: 4, 64x64: 8).
        projection: Outputs of two linear layers before the classifier, as MOON has them; null: there are none.
    """

    def __init__(
        self,
        *,
        input_shape: InputShape,
        num_classes: int,
        depth: Count = 4,
        width: Count = 64,
        heads: Count = 4,
        mlp_ratio: Count = 2,
        patch_size: int = 0,
        projection: int | None = None,
    ) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        if width % heads:
            raise ConfigError(
                f"model.width must be a multiple of model.heads, but got width={width}, heads={heads}; change one"
            )
        side = patch_side(self.input_shape, patch_size)
        channels, rows, columns = self.input_shape
        self.embed = nn.Conv2d(channels, width, side, stride=side)
        self.positions = nn.Parameter(torch.empty((rows // side) * (columns // side), width))
        self.blocks = nn.Sequential(
            *(AttentionBlock(width, heads=heads, hidden=mlp_ratio * width) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.add_head(width, projection)
        nn.init.normal_(self.positions)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the mean of the normalised tokens ``[B, D]``."""
        tokens = self.embed(inputs).flatten(2).transpose(1, 2) + self.positions
        pooled: Tensor = self.norm(self.blocks(tokens)).mean(dim=1)
        return pooled

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """Return each block's attention heads and hidden neurons."""
        groups = (group for position in range(len(self.blocks)) for group in self._groups_of(f"blocks.{position}"))
        return (*groups, *self.projection_groups())

    def _groups_of(self, block: str) -> tuple[UnitGroup, UnitGroup]:
        attention = self.get_submodule(f"{block}.attention")
        assert isinstance(attention, SelfAttention)
        heads = unit_group(
            self,
            name=f"{block}.heads",
            kind="head",
            layers=[f"{block}.attention.{part}" for part in ("value", "query", "key")],
            norms=[],
            consumers=[f"{block}.project"],
            modules=[f"{block}.attention"],
            rows=attention.head_width,
        )
        neurons = unit_group(
            self,
            name=f"{block}.fc1",
            layers=[f"{block}.fc1"],
            norms=[],
            consumers=[f"{block}.fc2"],
            modules=[f"{block}.gelu"],
        )
        return heads, neurons


def patch_side(input_shape: InputShape, patch_size: int = 0) -> int:
    """Return the pixels of a patch's side.

    Args:
        input_shape: Channels, height and width of one sample.
        patch_size: A divisor of height and width; 0: the smallest from 2 up that divides both and leaves 2..8 patches
            along the longer side.

    Raises:
        ConfigError: The size does not divide both, or none can be derived.
    """
    channels, height, width = image_shape("vit_tiny", input_shape)
    shape = f"{channels}x{height}x{width}"
    if patch_size:
        if patch_size < 1 or height % patch_size or width % patch_size:
            raise ConfigError(
                f"model.patch_size must be 0 or divide the inputs' height and width, but got patch_size={patch_size}"
                f" for {shape}"
            )
        return patch_size
    longest = max(height, width)
    for side in range(2, longest // 2 + 1):
        if height % side == 0 and width % side == 0 and longest // side <= _MOST_PATCHES_PER_SIDE:
            return side
    raise ConfigError(
        f"model 'vit_tiny' can't derive a patch size for inputs {shape}: no size from 2 up divides height and width and"
        f" leaves 2 to {_MOST_PATCHES_PER_SIDE} patches a side; set model.patch_size, or scenario.image_size=32"
    )
