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
        plain: A step is one gradient and one step of the optimiser, so several clients' can be taken together.
    """

    plain: ClassVar[bool] = False

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

    plain: ClassVar[bool] = True

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        loss = evaluate()
        optimizer.step()
        return loss
