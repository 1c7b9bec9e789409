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
        plain: A step is one gradient and one step of the optimiser, so it may be taken otherwise to the same end:
            several clients' together, or without this solver being asked. Not so, unless it says so again, for a class
            with a ``step`` of its own.
    """

    plain: ClassVar[bool] = False

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "step" in vars(cls):
            cls.plain = bool(vars(cls).get("plain", False))

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
