"""Testing a model: accuracy and mean loss, the same on every machine of a kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.components.evaluation import Evaluation
from fedsweep.components.metrics import Metric, measured
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask
from fedsweep.records import ClientUpdate, State

# Test sets of up to this many bytes are transformed once.
_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class Tested:
    """The outcome of a test.

    Attributes:
        labels: The true classes [T].
        predicted: What the model said [T].
        loss: Mean cross-entropy.
        figures: Those of the evaluator's metrics, by column.
    """

    labels: np.ndarray
    predicted: np.ndarray
    loss: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def counts_C(self) -> np.ndarray:
        """Samples of each class [C], C up to the highest class of the set."""
        return np.bincount(self.labels)

    @cached_property
    def hits_C(self) -> np.ndarray:
        """Of these, those that were told right."""
        return np.bincount(self.labels[self.predicted == self.labels], minlength=len(self.counts_C))

    @property
    def accuracy(self) -> float:
        """In 0..1, over all samples; NaN where the model computes NaN, of which argmax makes a class all the same."""
        if math.isnan(self.loss):
            return math.nan
        return int(self.hits_C.sum()) / int(self.counts_C.sum())

    def class_accuracies(self, num_classes: int) -> tuple[float, ...]:
        """Return the accuracy of each class [C], 0..1; NaN where the set has none of it."""
        accuracies_C = np.full(num_classes, np.nan)
        if math.isnan(self.loss):
            return tuple(accuracies_C.tolist())
        labels = np.flatnonzero(self.counts_C)
        accuracies_C[labels] = self.hits_C[labels] / self.counts_C[labels]
        return tuple(accuracies_C.tolist())

    def confusion(self, num_classes: int) -> np.ndarray:
        """Count samples by class [C, C]: rows are true, columns predicted."""
        cells = np.bincount(self.labels * num_classes + self.predicted, minlength=num_classes**2)
        return cells.reshape(num_classes, num_classes)


class Evaluator:
    """Tests models on one data set.

    Args:
        experiment: Says what is done to a batch, how large it is, and where the passes run: on the server's device.
        images: [T, C, H, W].
        labels: [T].
        metrics: What is measured beside accuracy and loss.
    """

    def __init__(
        self, experiment: Experiment, images: np.ndarray, labels: np.ndarray, *, metrics: Sequence[Metric] = ()
    ) -> None:
        self._metrics = metrics
        self._transform, self._batch_size = experiment.world.data.transform, experiment.evaluation_batch
        self._device, self._dtype = experiment.server_device, experiment.layout.dtype
        self._images = images
        self._labels = torch.from_numpy(np.array(labels, dtype=np.int64))
        self._ready: list[Tensor] | None = None
        if images[0].size * len(images) * 4 <= _CACHE_BYTES:
            self._ready = [self._inputs(start) for start in range(0, len(images), self._batch_size)]

    def _inputs(self, start: int) -> Tensor:
        raw = torch.from_numpy(np.array(self._images[start : start + self._batch_size]))
        return self._transform(raw, generator=None, train=False).to(device=self._device, dtype=self._dtype)

    def test(
        self,
        evaluation: Evaluation,
        state: State,
        model: nn.Module,
        updates: Sequence[ClientUpdate],
        *,
        when: str = "at a test of the model",
    ) -> Tested:
        """Test a model, loaded and on the evaluator's device, in one pass; the updates are the last attendees'.

        Raises:
            ComponentError: A metric failed; the message says ``when``.
            InvariantError: The evaluation's answer, or a metric's, is not what it must be.
        """
        model.eval()
        predicted, outputs, loss = [], [], 0.0
        with torch.no_grad():
            for number, start in enumerate(range(0, len(self._labels), self._batch_size)):
                inputs = self._ready[number] if self._ready is not None else self._inputs(start)
                targets = self._labels[start : start + self._batch_size].to(self._device)
                logits = ask(evaluation, "predict", state, model, updates, inputs, like=targets, when=when)
                predicted.append(logits.argmax(1).cpu())
                if self._metrics:
                    outputs.append(logits.cpu())
                # Sample by sample: a mean of the batches' means would overrate a last, smaller batch.
                loss += float(F.cross_entropy(logits, targets, reduction="none").to(torch.float64).sum())
        loss /= len(self._labels)
        figures = {}
        if self._metrics:
            figures = measured(self._metrics, torch.cat(outputs), self._labels, when=when, diverged=math.isnan(loss))
        return Tested(labels=self._labels.numpy(), predicted=torch.cat(predicted).numpy(), loss=loss, figures=figures)
