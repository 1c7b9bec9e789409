"""A network's own draws (dropout) in lanes: each lane gets what its client would draw alone.

The loop seeds torch's generator for each client and step, and dropout draws from it. Under vmap one draw would serve
all lanes, so the noise is drawn before the step, lane by lane from the same seeds, and put in where the network asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsweep.client.shards import seed_draws
from fedsweep.trees import Inputs, ParamTree

# Those that multiply what they are given; any other random operation is refused by vmap.
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)


@dataclass(frozen=True)
class DropoutCall:
    """A call of a dropout function.

    Attributes:
        function: Which.
        shape: Of what it was given.
        p: Share that is dropped.
    """

    function: Callable[..., Tensor]
    shape: tuple[int, ...]
    p: float


class _Intercepted(TorchFunctionMode):
    """Answers dropout in training; everything else is as it is."""

    def __init__(self, answer: Callable[[Callable[..., Tensor], Tensor, float], Tensor]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        arguments = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
        if not arguments.get("training", True) or not arguments.get("p", 0.5):
            return arguments["input"]
        return self._answer(func, arguments["input"], arguments.get("p", 0.5))


def drawn_shapes(module: nn.Module, values: ParamTree, inputs: Inputs) -> list[DropoutCall]:
    """Return the network's draws in a forward pass, in order; its values may be changed."""
    draws: list[DropoutCall] = []

    def note(function: Callable[..., Tensor], tensor: Tensor, p: float) -> Tensor:
        draws.append(DropoutCall(function, tuple(tensor.shape), p))
        return tensor

    module.train()
    with torch.no_grad(), _Intercepted(note):
        torch.func.functional_call(module, values, (inputs,), strict=False)
    return draws


class LaneDraws:
    """The noise of one step for K lanes.

    Args:
        shapes: What the network draws for one client's full batch.
        make: Makes a tensor of zeros [K, ...].

    Attributes:
        noise: What the network's activations are multiplied with, for each draw [K, ...].
    """

    def __init__(self, shapes: Sequence[DropoutCall], make: Callable[..., Tensor]) -> None:
        self._shapes = shapes
        self.noise = [make(*drawn.shape) for drawn in shapes]

    def draw(self, lane: int, seed: int, size: int) -> None:
        """Draw a lane's noise for a batch of ``size`` samples; the network draws something."""
        seed_draws(seed, self.noise[0].device.type)
        for noise, drawn in zip(self.noise, self._shapes, strict=True):
            ones = torch.ones(size, *drawn.shape[1:], dtype=noise.dtype, device=noise.device)
            noise[lane, :size].copy_(drawn.function(ones, drawn.p, True))

    @contextlib.contextmanager
    def replaying(self, noise: Sequence[Tensor]) -> Iterator[None]:
        """Replace the network's draws, within it, by one lane's noise, in the order of the draws."""
        if not self._shapes:
            yield
            return
        rest = iter(noise)

        def put(function: Callable[..., Tensor], tensor: Tensor, p: float) -> Tensor:
            drawn = next(rest, None)
            if drawn is None or drawn.shape != tensor.shape:
                raise RuntimeError("it draws other dropout than in its first forward pass")
            return tensor * drawn.to(tensor.dtype)

        with _Intercepted(put):
            yield
