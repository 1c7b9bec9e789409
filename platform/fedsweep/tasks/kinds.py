"""The tasks that come with the package.

Shape letters: B samples of a batch, C classes, L labels, K numbers, T positions, V words, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedsweep.errors import DataError
from fedsweep.parameters.ranges import Count
from fedsweep.tasks.base import Tally, Task, r_squared, require_integers
from fedsweep.tasks.declaration import SHARE, Declaration
from fedsweep.tasks.unlabelled import Generative, SelfSupervised

# What F.cross_entropy leaves out.
_NO_TARGET = -100


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One class for each sample: cross-entropy and accuracy."""

    stratum: ClassVar[str] = "class"
    measures: ClassVar[Mapping[str, Declaration]] = {"accuracy": Declaration(unit=SHARE)}
    has_classes: ClassVar[bool] = True
    skips_padding: ClassVar[bool] = True

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.num_classes,)

    @property
    def num_strata(self) -> int:
        return self.num_classes

    def check(self, targets: NDArray[Any], where: str) -> None:
        if targets.ndim != 1:
            raise DataError(f"{where} must be one class for each sample, but are of shape {targets.shape}")
        require_integers(targets, self.num_classes, where, what="class", gaps=False)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        losses = F.cross_entropy(outputs, targets, reduction="none").to(torch.float64)
        num_classes = outputs.shape[1]
        cells = targets.cpu() * num_classes + outputs.argmax(1).cpu()
        return {
            # Sample by sample: a mean of the batches' means would overrate a last, smaller batch.
            "loss": losses.sum().cpu(),
            "count": torch.tensor(len(targets)),
            "confusion": cells.bincount(minlength=num_classes**2).view(num_classes, num_classes),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        return {"accuracy": int(tally["confusion"].diag().sum()) / int(tally["count"])}

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        return targets


@dataclass(frozen=True, kw_only=True)
class MultiLabel(Task):
    """Any number of L labels for each sample: targets [L] of 0 and 1, binary cross-entropy, F1.

    A label is predicted where its logit is above 0. A stratum is a sample's label that is rarest in the training set;
    samples without any form one more.
    """

    stratum: ClassVar[str] = "rarest label"
    measures: ClassVar[Mapping[str, Declaration]] = {
        "micro_f1": Declaration(unit=SHARE),
        "label_f1": Declaration(unit=SHARE),
        "exact_match": Declaration(unit=SHARE),
    }

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.target_shape

    @property
    def num_strata(self) -> int:
        return self.target_shape[0] + 1

    def check(self, targets: NDArray[Any], where: str) -> None:
        if targets.ndim != 2 or not np.isin(targets, (0, 1)).all():
            raise DataError(f"{where} must be [samples, labels] of 0 and 1, but are {targets.dtype} {targets.shape}")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        losses = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        predicted, true = (outputs > 0).cpu(), (targets > 0).cpu()
        return {
            "loss": losses.to(torch.float64).mean(dim=1).sum().cpu(),
            "count": torch.tensor(len(targets)),
            "hits": (predicted & true).sum(0),
            "predicted": predicted.sum(0),
            "true": true.sum(0),
            "exact": (predicted == true).all(1).sum(),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        hits_L, both_L = tally["hits"], tally["predicted"] + tally["true"]
        f1_L = 2 * hits_L.double() / both_L.clamp(min=1)
        return {
            "micro_f1": 2 * int(hits_L.sum()) / max(1, int(both_L.sum())),
            "label_f1": float(f1_L.mean()),
            "exact_match": int(tally["exact"]) / int(tally["count"]),
        }

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        counts_L = targets.sum(axis=0)
        rarity = np.where(targets > 0, counts_L, len(targets) + 1)
        strata: NDArray[np.int64] = np.where(targets.any(axis=1), rarity.argmin(axis=1), targets.shape[1])
        return strata


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """One or K numbers for each sample: mean squared error; errors in the targets' own unit.

    Figures are means over the K numbers.

    Attributes:
        bins: Strata for partitions by class: so many quantiles of the (first) number over the training set.
    """

    stratum: ClassVar[str] = "quantile"
    measures: ClassVar[Mapping[str, Declaration]] = {
        "rmse": Declaration(mode="min"),
        "mae": Declaration(mode="min"),
        "r2": Declaration(chance=0.0),
    }

    bins: Count = 10

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.target_shape or (1,)

    @property
    def num_strata(self) -> int:
        return self.bins

    def check(self, targets: NDArray[Any], where: str) -> None:
        if targets.ndim > 2 or not np.issubdtype(targets.dtype, np.floating):
            raise DataError(
                f"{where} must be floats [samples] or [samples, K], but are {targets.dtype} {targets.shape}"
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets.view_as(outputs))

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        true_BK = targets.view_as(outputs).to(torch.float64)
        off_BK = outputs.to(torch.float64) - true_BK
        return {
            "loss": off_BK.square().mean(1).sum().cpu(),
            "count": torch.tensor(len(targets)),
            "squares": off_BK.square().sum(0).cpu(),
            "absolute": off_BK.abs().sum(0).cpu(),
            "targets": true_BK.sum(0).cpu(),
            "target_squares": true_BK.square().sum(0).cpu(),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        count = int(tally["count"])
        around_mean_K = tally["target_squares"] - tally["targets"].square() / count
        return {
            "rmse": math.sqrt(float((tally["squares"] / count).mean())),
            "mae": float((tally["absolute"] / count).mean()),
            "r2": float(r_squared(tally["squares"], around_mean_K, tally["target_squares"]).mean()),
        }

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        first = targets.reshape(len(targets), -1)[:, 0]
        edges = np.quantile(first, np.linspace(0, 1, self.bins + 1)[1:-1])
        return np.searchsorted(edges, first, side="right").astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class NextToken(Task):
    """A word for each of T positions: targets [T] are ids below V, or -100 where nothing is asked.

    Loss and perplexity are over all positions alike, so a longer sample counts for more.
    """

    measures: ClassVar[Mapping[str, Declaration]] = {
        "perplexity": Declaration(mode="min"),
        "token_accuracy": Declaration(unit=SHARE),
    }
    skips_padding: ClassVar[bool] = True

    @property
    def outputs(self) -> tuple[int, ...]:
        return (*self.target_shape, self.num_classes)

    def check(self, targets: NDArray[Any], where: str) -> None:
        if targets.ndim != 2:
            raise DataError(f"{where} must be [samples, positions], but are of shape {targets.shape}")
        require_integers(targets, self.num_classes, where, what="word's id")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _asked_loss(outputs.flatten(0, 1), targets.flatten())

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        flat, wanted = outputs.flatten(0, 1), targets.flatten()
        losses = F.cross_entropy(flat, wanted, ignore_index=_NO_TARGET, reduction="none").to(torch.float64)
        return {
            "loss": losses.sum().cpu(),
            "count": (wanted != _NO_TARGET).sum().cpu(),
            "hits": (flat.argmax(1) == wanted).sum().cpu(),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        count = int(tally["count"])
        loss = float(tally["loss"]) / count
        # Beyond that a float has no such number; a model that far off has learned nothing.
        return {"perplexity": math.exp(min(loss, 700.0)), "token_accuracy": int(tally["hits"]) / count}


@dataclass(frozen=True, kw_only=True)
class Segmentation(Task):
    """A class for each pixel: targets [H, W] are below C, or -100 where nothing is asked; outputs [C, H, W].

    The mean intersection over union is over the classes that are true or predicted somewhere. A stratum is a sample's
    most frequent class but 0, which is taken for the background.
    """

    stratum: ClassVar[str] = "most frequent class"
    measures: ClassVar[Mapping[str, Declaration]] = {
        "mean_iou": Declaration(unit=SHARE),
        "pixel_accuracy": Declaration(unit=SHARE),
    }

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.num_classes, *self.target_shape)

    @property
    def num_strata(self) -> int:
        return self.num_classes

    def check(self, targets: NDArray[Any], where: str) -> None:
        if targets.ndim != 3:
            raise DataError(f"{where} must be [samples, height, width], but are of shape {targets.shape}")
        masks = targets.view(np.uint8) if targets.dtype == bool else targets
        require_integers(masks, self.num_classes, where, what="pixel's class")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _asked_loss(outputs, targets)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        num_classes = outputs.shape[1]
        losses = F.cross_entropy(outputs, targets, ignore_index=_NO_TARGET, reduction="none").to(torch.float64)
        predicted, wanted = outputs.argmax(1).cpu().flatten(), targets.cpu().flatten()
        is_asked = wanted != _NO_TARGET
        cells = wanted[is_asked] * num_classes + predicted[is_asked]
        return {
            "loss": losses.sum().cpu(),
            "count": is_asked.sum(),
            "confusion": cells.bincount(minlength=num_classes**2).view(num_classes, num_classes),
        }

    def scores(self, tally: Tally) -> Mapping[str, float]:
        cells_CC = tally["confusion"]
        both_C, either_C = cells_CC.diag(), cells_CC.sum(0) + cells_CC.sum(1) - cells_CC.diag()
        seen_C = either_C > 0
        return {
            "mean_iou": float((both_C[seen_C].double() / either_C[seen_C]).mean()),
            "pixel_accuracy": int(both_C.sum()) / int(cells_CC.sum()),
        }

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        counts = np.stack([(targets == label).sum(axis=(1, 2)) for label in range(self.num_classes)], axis=1)
        counts[:, 0] = 0
        strata: NDArray[np.int64] = counts.argmax(axis=1)
        return strata


def _asked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over what is asked; 0 where nothing is: empty texts may make up a batch."""
    loss = F.cross_entropy(outputs, targets, ignore_index=_NO_TARGET)
    return torch.where((targets != _NO_TARGET).any(), loss, torch.zeros_like(loss))


TASKS: Mapping[str, type[Task]] = {
    "classification": Classification,
    "multi_label": MultiLabel,
    "regression": Regression,
    "next_token": NextToken,
    "segmentation": Segmentation,
    "generative": Generative,
    "self_supervised": SelfSupervised,
}


def stratum_of(config: Mapping[str, Any]) -> str:
    """Return what strata are called under the task of a configuration, which may be somebody else's."""
    scenario = config.get("scenario")
    task = scenario.get("task") if isinstance(scenario, Mapping) else None
    kind = task.get("kind") if isinstance(task, Mapping) else None
    if kind is None:
        return Classification.stratum
    return TASKS[kind].stratum if isinstance(kind, str) and kind in TASKS else Task.stratum
