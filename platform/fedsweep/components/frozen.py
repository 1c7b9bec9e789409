"""Models that are only asked: teachers, anchors, what a client remembers."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from fedsweep.models.functional import features_with, logits_with
from fedsweep.trees import ParamTree


def twin(model: nn.Module) -> nn.Module:
    """A copy of a client's module in evaluation mode, to be asked under any values.

    The client's own module can't be asked: in training mode a forward pass would move its batch norms' statistics and
    draw its dropout.
    """
    return copy.deepcopy(model).eval().requires_grad_(False)


class Frozen:
    """A model under given values; gradients reach the inputs, not the values.

    Args:
        model: The module to ask with, a :func:`twin`.
        values: Params by name, and float buffers.

    Raises:
        ValueError: Values are missing.
    """

    def __init__(self, model: nn.Module, values: ParamTree) -> None:
        missing = [name for name, _ in model.named_parameters() if name not in values]
        if missing:
            raise ValueError(f"a frozen model needs all params by name, but {', '.join(missing[:3])} are not given")
        # Passed along with each call, not written into the module: the next model to be asked must not change what a
        # backward pass of this one finds.
        self._model, self._values = model, {name: value.detach() for name, value in values.items()}

    def features(self, inputs: Tensor) -> Tensor:
        """Output of the model's ``features`` [B, D]."""
        return features_with(self._model, self._values, inputs)

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits [B, C]."""
        return logits_with(self._model, self._values, inputs)
