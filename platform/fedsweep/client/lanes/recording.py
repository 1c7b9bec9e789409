"""A step as one launch: its kernels are recorded once, as a CUDA graph, and then played again.

A recording holds the addresses of what it reads and writes, so all that differs from step to step is copied into
tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsweep.errors import first_line

Step = Callable[[], tuple[Tensor, ...]]

_WARM_UPS = 3


class NotRecorded(RuntimeError):
    """A step has no recording that could be relied on; nothing but the tile's own state was changed."""


class Recording:
    """A recorded step, which was replayed once beside the step itself and has its bits.

    Args:
        step: Reads and changes tensors that stay where they are; returns others.
        state: All that it changes; as before afterwards.

    Raises:
        NotRecorded: It can't be recorded, or the recording gives other values.
    """

    def __init__(self, step: Step, state: Sequence[Tensor]) -> None:
        before = _copied(state)
        expected = _copied([*step(), *state])
        _put(before, state)
        try:
            self._replay, self._outputs = captured(step)
            _put(before, state)
            self._replay()
            replayed = _copied([*self._outputs, *state])
        except Exception as error:  # whatever it is, the step itself is left
            raise NotRecorded(first_line(error)) from error
        finally:
            _put(before, state)
        # With NaN as with any value: a client that diverges is told in the step, not here.
        if not all(
            torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True) for pair in zip(expected, replayed, strict=True)
        ):
            raise NotRecorded("it gives other values than the step")

    def replayed(self) -> tuple[Tensor, ...]:
        """Take the step by its recording."""
        self._replay()
        # Copies: the next replay writes to the recording's own.
        return tuple(output.clone() for output in self._outputs)


def captured(step: Step) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Record a step; returns what plays it, and where that leaves what the step returns.

    Raises:
        RuntimeError: There is no GPU, or the step does what can't be recorded.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("only CUDA GPUs record")
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries set themselves up in their first calls, which can't be recorded
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph.replay, outputs


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _put(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for value, place in zip(values, places, strict=True):
        place.copy_(value)
