"""Models that are only asked: teachers, anchors, what a client remembers."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from fedsweep.trees import ParamTree


class Twin(nn.Module):
    """A copy of a client's module in evaluation mode, to be asked under any values.

    The client's own module can't be asked: in training mode a forward pass would move its batch norms' statistics and
    draw its dropout.

    Args:
        model: The module; it is copied.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def forward(self, inputs: Tensor, part: Literal["features", "logits"]) -> Tensor:
        """What the model says, or what its last layer is given."""
        answer: Tensor = self.model.features(inputs) if part == "features" else self.model(inputs)  # type: ignore[operator]
        return answer


class Frozen:
    """A model under given values; gradients reach the inputs, not the values.

    Args:
        twin: The module to ask with.
        values: Params by name, and float buffers.

    Raises:
        ValueError: Values are missing.
    """

    def __init__(self, twin: Twin, values: ParamTree) -> None:
        missing = [name for name, _ in twin.model.named_parameters() if name not in values]
        if missing:
            raise ValueError(f"a frozen model needs all params by name, but {', '.join(missing[:3])} are not given")
        # Passed along with each call, not written into the module: the next model to be asked must not change what a
        # backward pass of this one finds.
        self._twin = twin
        self._values = {f"model.{name}": value.detach() for name, value in values.items()}

    def features(self, inputs: Tensor) -> Tensor:
        """Output of the model's ``features`` [B, D]."""
        return self._ask(inputs, "features")

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits [B, C]."""
        return self._ask(inputs, "logits")

    def _ask(self, inputs: Tensor, part: Literal["features", "logits"]) -> Tensor:
        answer: Tensor = torch.func.functional_call(self._twin, self._values, (inputs, part), strict=False)
        return answer
