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
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

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
