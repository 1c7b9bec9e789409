"""Local steps that a method clips by itself, whatever the training section says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsweep.components.local import LocalSolver


@dataclass(frozen=True, kw_only=True)
class ClippedSteps(LocalSolver):
    """Steps of the configured optimiser on clipped gradients.

    Attributes:
        norm: Greatest 2-norm, above 0.
    """

    norm: float

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        loss = evaluate()
        nn.utils.clip_grad_norm_([value for group in optimizer.param_groups for value in group["params"]], self.norm)
        optimizer.step()
        return loss
