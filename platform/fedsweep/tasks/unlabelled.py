"""Tasks without targets: what is learned of a sample is the sample itself.

A sample's values are the inputs that the model gets, so after the transform. Shape letters: B samples of a batch,
D values of a sample, Z numbers of a code.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsweep.errors import DataError
from fedsweep.parameters.ranges import CountOrZero
from fedsweep.tasks.base import Tally, Task, r_squared
from fedsweep.tasks.declaration import Declaration


@dataclass(frozen=True, kw_only=True)
class OfInputs(Task, ABC):
    """A task whose targets are the inputs; labels, where there are any, serve partitions by class alone."""

    of_inputs: ClassVar[bool] = True
    stratum: ClassVar[str] = "class"

    @property
    def num_outputs(self) -> int:
        return self.outputs[-1]

    @property
    def num_strata(self) -> int:
        return max(1, self.num_classes)

    @property
    def num_values(self) -> int:
        """D."""
        return math.prod(self.target_shape)

    def check(self, targets: NDArray[Any], where: str) -> None:
        is_picture = targets.ndim == 4 and targets.dtype == np.uint8
        if targets.dtype.names is not None or not (is_picture or targets.dtype.kind == "f"):
            kind = "several by name" if targets.dtype.names is not None else f"{targets.dtype} {targets.shape}"
            raise DataError(f"{where} must be pictures or floats to be made again, but are {kind}")

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64] | None:
        return targets if self.num_classes else None


@dataclass(frozen=True, kw_only=True)
class Generative(OfInputs):
    """Samples made again of a short code: half the squared error, and the code's divergence from a normal one.

    A model's outputs are D values made again, then the code's Z means and Z logarithms of variances. The loss is the
    negative evidence lower bound in nats, for values of unit variance, without the constant D / 2 log(2 pi); where the
    code is drawn is the model's choice: ``vae`` draws in training and takes the mean in the test. ``reconstruction`` is
    the mean squared error of a value, ``divergence`` that of Kullback and Leibler in nats.

    Source: Kingma and Welling (2014), Auto-encoding variational Bayes, Eq. 10.

    Attributes:
        latent: Z; 0: an autoencoder without a distribution of codes.
    """

    measures: ClassVar[Mapping[str, Declaration]] = {
        "reconstruction": Declaration(mode="min"),
        "divergence": Declaration(mode="min", unit="nats"),
    }
    source: ClassVar[str] = "Kingma and Welling, ICLR 2014"

    latent: CountOrZero = 8

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.num_values + 2 * self.latent,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors_B, divergences_B = self._parts(outputs, targets)
        return (errors_B / 2 + divergences_B).mean()

    def _parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return squared errors and divergences [B]."""
        made_BD, mean_BZ, log_variance_BZ = torch.split(outputs, [self.num_values, self.latent, self.latent], dim=1)
        divergence_BZ = (log_variance_BZ.exp() + mean_BZ.square() - 1 - log_variance_BZ) / 2
        return (made_BD - targets.flatten(1)).square().sum(1), divergence_BZ.sum(1)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        errors_B, divergences_B = (part.to(torch.float64) for part in self._parts(outputs, targets))
        return {
            "loss": (errors_B / 2 + divergences_B).sum().cpu(),
            "count": torch.tensor(len(targets)),
            "squares": errors_B.sum().cpu(),
            "divergence": divergences_B.sum().cpu(),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        count = int(tally["count"])
        return {
            "reconstruction": float(tally["squares"]) / (count * self.num_values),
            "divergence": float(tally["divergence"]) / count,
        }


@dataclass(frozen=True, kw_only=True)
class SelfSupervised(OfInputs):
    """Hidden values told from the others: mean squared error over what was hidden.

    A model's outputs [2, D] are the values made again and, as 1, which of them were hidden from it: it hides them
    itself, so ``masked_autoencoder`` or one's own. ``masked_r2`` is the share of the hidden values' variance that is
    explained, around the mean of their place in a sample.

    Source: Vincent et al. (2008), denoising autoencoders; that the loss is over hidden values alone: He et al. (2022).
    """

    measures: ClassVar[Mapping[str, Declaration]] = {
        "masked_mse": Declaration(mode="min"),
        "masked_r2": Declaration(chance=0.0),
    }
    source: ClassVar[str] = "Vincent et al., ICML 2008; He et al., CVPR 2022"

    @property
    def outputs(self) -> tuple[int, ...]:
        return (2, self.num_values)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        made_BD, hidden_BD = outputs.unbind(1)
        return (hidden_BD * (made_BD - targets.flatten(1)).square()).sum() / hidden_BD.sum().clamp(min=1)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        made_BD, hidden_BD = outputs.to(torch.float64).unbind(1)
        true_BD = targets.flatten(1).to(torch.float64)
        return {
            "loss": (hidden_BD * (made_BD - true_BD).square()).sum().cpu(),
            "count": hidden_BD.sum().round().long().cpu(),
            "hidden": hidden_BD.sum(0).cpu(),
            "values": (hidden_BD * true_BD).sum(0).cpu(),
            "squares": (hidden_BD * true_BD.square()).sum(0).cpu(),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        around_mean = (tally["squares"] - tally["values"].square() / tally["hidden"].clamp(min=1)).sum()
        return {
            "masked_mse": float(tally["loss"]) / max(1, int(tally["count"])),
            "masked_r2": float(r_squared(tally["loss"], around_mean, tally["squares"].sum())),
        }
