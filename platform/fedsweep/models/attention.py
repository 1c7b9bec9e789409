"""Self-attention whose heads are units that a sub-model can leave out.

Shape letters: B batch, T tokens, H heads, D values per head.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn


@final
class SelfAttention(nn.Module):
    """Self-attention, head by head, before the heads are joined by an output projection.

    The number of heads follows from the projections' rows, so that a part with fewer heads is the same module with
    smaller tensors. Scores are ``softmax(q k^T / sqrt(D))``, as written in the formula and not by torch's fused
    kernels: these have no second derivative, which curvature probes and data synthesis need.

    Source: Vaswani et al. (2017), section 3.2.

    Args:
        width: Features of a token.
        heads: H, at least 1.
        head_width: D, at least 1.
        causal: No token sees a later one.
    """

    def __init__(self, width: int, *, heads: int, head_width: int, causal: bool = False) -> None:
        super().__init__()
        self.head_width, self.causal = head_width, causal
        self.query = nn.Linear(width, heads * head_width)
        self.key = nn.Linear(width, heads * head_width)
        self.value = nn.Linear(width, heads * head_width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the heads' outputs ``[B, H, T, D]`` of tokens ``[B, T, width]``."""
        query, key, value = (self._by_head(layer(tokens)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_width)
        if self.causal:
            later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        outputs: Tensor = scores.softmax(dim=-1) @ value
        return outputs

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.reshape(*projected.shape[:2], -1, self.head_width).transpose(1, 2)

    def macs(self, outputs: Tensor) -> int:
        """Return multiply-accumulates of the scores and of the weighted sums, without the projections: ``2 H T T D``.

        Args:
            outputs: The heads' outputs ``[B, H, T, D]``.
        """
        return 2 * outputs.numel() * outputs.shape[2]


class AttentionBlock(nn.Module):
    """Attention and MLP, each after a layer norm and added to the tokens ``[B, T, width]``."""

    def __init__(self, width: int, *, heads: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        # The heads' width is given apart: a sub-model has fewer heads, each as wide as before.
        self.attention = SelfAttention(width, heads=heads, head_width=width // heads, causal=causal)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        heads = self.attention(self.norm1(tokens))
        tokens = tokens + self.project(heads.transpose(1, 2).flatten(2))
        mixed: Tensor = tokens + self.fc2(self.gelu(self.fc1(self.norm2(tokens))))
        return mixed
