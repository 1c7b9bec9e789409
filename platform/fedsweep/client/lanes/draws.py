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
        strides: How that lies in memory: numbers are drawn in the order of its places there.
        p: Share that is dropped.
    """

    function: Callable[..., Tensor]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    p: float

    def ones(self, like: Tensor) -> Tensor:
        """Return ones in that shape, which lie as those did, of a tensor's type and device."""
        return torch.empty_strided(self.shape, self.strides, dtype=like.dtype, device=like.device).fill_(1)


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


def dropout_calls(module: nn.Module, values: ParamTree, inputs: Inputs) -> list[DropoutCall]:
    """Return the network's draws in a forward pass, in order; its values may be changed."""
    draws: list[DropoutCall] = []

    def note(function: Callable[..., Tensor], tensor: Tensor, p: float) -> Tensor:
        draws.append(DropoutCall(function, tuple(tensor.shape), tensor.stride(), p))
        return tensor

    module.train()
    with torch.no_grad(), _Intercepted(note):
        torch.func.functional_call(module, values, (inputs,), strict=False)
    return draws


class LaneDraws:
    """The noise of one step for K lanes.

    Args:
        calls: What the network draws for one client's full batch.
        size: Samples of that.
        make: Makes a tensor of zeros [K, ...].

    Attributes:
        noise: What the network's activations are multiplied with, for each draw [K, ...].
    """

    def __init__(self, calls: Sequence[DropoutCall], size: int, make: Callable[..., Tensor]) -> None:
        self._calls = calls
        self.noise = [make(*call.shape) for call in calls]
        self._ones = [call.ones(noise) for call, noise in zip(calls, self.noise, strict=True)]
        # By the size of a batch: of each draw what is drawn of a full one's, from its beginning.
        self._parts: dict[int, list[Tensor]] = {size: self._ones}

    def knows(self, size: int) -> bool:
        """Tell whether it is known what the network draws for a batch of so many samples."""
        return size in self._parts

    def note(self, size: int, calls: Sequence[DropoutCall]) -> None:
        """Take note of what the network draws for a smaller batch.

        Raises:
            RuntimeError: It is not the first of what it draws for a full one.
        """
        pairs = [*zip(calls, self._ones, strict=True)]
        if any(call.shape not in (ones.shape, (size, *ones.shape[1:])) for call, ones in pairs):
            raise RuntimeError("its dropout does not go sample by sample, and some batches are smaller")
        self._parts[size] = [ones[: call.shape[0]] for call, ones in pairs]

    def drawn(self, places: Sequence[Tensor], seed: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """Draw the noise of one client's batch of a known size; places are for a full one [B, ...], at least one.

        Returns:
            For each draw the part of its place that it fills, and what was drawn.
        """
        seed_draws(seed, places[0].device.type)
        ones = self._parts[size]
        parts = places if ones is self._ones else [place[: len(one)] for place, one in zip(places, ones, strict=True)]
        noise = [call.function(one, call.p, True) for call, one in zip(self._calls, ones, strict=True)]
        return [*zip(parts, noise, strict=True)]

    @contextlib.contextmanager
    def replaying(self, noise: Sequence[Tensor]) -> Iterator[None]:
        """Replace the network's draws, within it, by one lane's noise, in the order of the draws."""
        if not self._calls:
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
