"""Local solver: how a client takes its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class LocalSolver(ABC):
    """Takes one local step at a time.

    Class attributes:
        optimizer_alone: Only the optimiser's steps move the params, so that what has no gradient may rest.
    """

    optimizer_alone: ClassVar[bool] = False

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        """Take one step and return the loss at its start.

        Args:
            optimizer: The client's optimiser over its parameters as one vector.
            evaluate: Computes the loss at the present parameters and leaves its gradient (terms and clipping
                included) with the optimiser; may be called several times.
        """


@dataclass(frozen=True, kw_only=True)
class OptimizerSteps(LocalSolver):
    """One gradient, one step of the configured optimiser."""

    optimizer_alone: ClassVar[bool] = True

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        loss = evaluate()
        optimizer.step()
        return loss
