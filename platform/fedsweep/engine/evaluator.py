"""Testing a model: accuracy and mean loss, the same on every machine of a kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.components.evaluation import Evaluation
from fedsweep.records import ClientUpdate, State
from fedsweep.world.transforms import Transform

# Test sets of up to this many bytes are transformed once.
_CACHE_BYTES = 512 * 2**20


class Evaluator:
    """Tests models on one data set.

    Args:
        images: [T, C, H, W].
        labels: [T].
        transform: What is done to a batch; without augmentation here.
        batch_size: Samples per forward pass.
        device: Where the passes run.
        dtype: The model's floating type.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        transform: Transform,
        batch_size: int,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self._transform, self._batch_size, self._device, self._dtype = transform, batch_size, device, dtype
        self._images = images
        self._labels = torch.from_numpy(np.array(labels, dtype=np.int64))
        self._ready: list[Tensor] | None = None
        if images[0].size * len(images) * 4 <= _CACHE_BYTES:
            self._ready = [self._inputs(start) for start in range(0, len(images), batch_size)]

    def _inputs(self, start: int) -> Tensor:
        raw = torch.from_numpy(np.array(self._images[start : start + self._batch_size]))
        return self._transform(raw, generator=None, train=False).to(device=self._device, dtype=self._dtype)

    def test(
        self, evaluation: Evaluation, state: State, model: nn.Module, updates: Sequence[ClientUpdate]
    ) -> tuple[float, float]:
        """Accuracy in 0..1 and mean cross-entropy.

        Args:
            evaluation: Which model answers.
            state: That component's state.
            model: Loaded with the server's model, on the evaluator's device.
            updates: The round's last attendees.
        """
        model.eval()
        correct, loss = 0, 0.0
        with torch.inference_mode():
            for number, start in enumerate(range(0, len(self._labels), self._batch_size)):
                inputs = self._ready[number] if self._ready is not None else self._inputs(start)
                targets = self._labels[start : start + self._batch_size].to(self._device)
                logits = evaluation.predict(state, model, updates, inputs)
                correct += int((logits.argmax(1) == targets).sum())
                loss += float(F.cross_entropy(logits, targets, reduction="none").to(torch.float64).sum())
        return correct / len(self._labels), loss / len(self._labels)
