"""A small causal transformer over tokens: next-token prediction.

Shape letters: B samples, T positions, V words, H heads, D values per head.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.attention import AttentionBlock
from fedsweep.models.network import InputShape, Network
from fedsweep.parameters.ranges import Count


@final
class Transformer(Network):
    """Learned embeddings of words and positions, pre-norm blocks of causal self-attention, layer norm, linear layer.

    Takes ids ``[B, T]`` and gives scores of the word at each position ``[B, T, V]``; no position sees a later one.

    Source: Vaswani et al. (2017), the decoder's side; pre-norm and learned positions: Radford et al. (2019), GPT-2.

    Args:
        input_shape: (T,).
        num_classes: V.
        depth: Blocks, at least 1.
        width: Features of a token, a multiple of the heads.
        heads: Attention heads in each block, at least 1.
    """

    has_features = False

    def __init__(
        self, *, input_shape: InputShape, num_classes: int, depth: Count = 2, width: Count = 64, heads: Count = 4
    ) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        if width % heads:
            raise ConfigError(
                f"model.width must be a multiple of model.heads, but got width={width}, heads={heads}; change one"
            )
        if len(self.input_shape) != 1:
            raise ConfigError(
                f"model 'transformer' takes ids [positions], but a sample is {list(input_shape)}; choose another model"
            )
        self.words = nn.Embedding(num_classes, width)
        self.positions = nn.Parameter(torch.empty(self.input_shape[0], width))
        self.blocks = nn.Sequential(
            *(AttentionBlock(width, heads=heads, hidden=4 * width, causal=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    @property
    def feature_width(self) -> int:
        return self.classifier.in_features

    def features(self, inputs: Tensor) -> Tensor:
        """Return the normalised tokens ``[B, T, width]``."""
        tokens = self.words(inputs) + self.positions[: inputs.shape[1]]
        normalised: Tensor = self.norm(self.blocks(tokens))
        return normalised

    def head(self, features: Tensor) -> Tensor:
        scores: Tensor = self.classifier(features)
        return scores
