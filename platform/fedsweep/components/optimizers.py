"""Torch's optimisers, called beneath their decorators, which import the whole compiler at the first step.

That takes a second in each process; the arithmetic is the decorated methods' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


class _Light(torch.optim.Optimizer):
    plain_step: Callable[..., Any]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def step(self, closure: Any = None) -> Any:
        """As torch's."""
        with torch.no_grad():
            return self.plain_step(closure)


class SGD(_Light, torch.optim.SGD):
    """``torch.optim.SGD``."""

    plain_step = inspect.unwrap(torch.optim.SGD.step)


class Adam(_Light, torch.optim.Adam):
    """``torch.optim.Adam``."""

    plain_step = inspect.unwrap(torch.optim.Adam.step)
