"""Base of tasks: the loss, the sums that a test adds up, and the figures that follow from them.

Shape letters: S samples, B samples of a batch, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsweep.errors import ConfigError, DataError
from fedsweep.guard import Call, as_number, returns, sums
from fedsweep.parameters.ranges import Checked
from fedsweep.tasks.declaration import Declaration

Tally = Mapping[str, Tensor]


def _figures(answer: Any, call: Call) -> None:
    measures = [*cast(Task, call.component).measures]
    numbers = answer if isinstance(answer, Mapping) else {}
    if {*numbers} != {*measures} or any(as_number(value) is None for value in numbers.values()):
        raise call.wrong(f"a mapping with a number for each of its measures ({', '.join(measures)})", answer)


@dataclass(frozen=True, kw_only=True)
class Task(Checked, ABC):
    """The thing that is learned of samples, and how it is judged.

    A concrete task is a frozen dataclass; its further fields are parameters of ``scenario.task``.

    Class attributes:
        measures: The figures of :meth:`scores` by name and how to read them; the first one leads.
        has_classes: A sample's target is its class, its outputs are the logits [C], and :meth:`tally` counts samples by
            true class and predicted class, too: ``confusion`` [C, C].
        skips_padding: A sample with the target -100 does not count in the loss, not even in the mean; to be said again
            beside a subclass's own loss.
        of_inputs: What is learned of a sample is the sample: ``targets`` are the inputs that the model gets, and
            :meth:`check` is asked of the data set's inputs.
        source: Where it comes from; for listings.
        stratum: What one of :meth:`strata` is of a sample, for pictures of how samples fall to clients.

    Attributes:
        num_classes: Classes, labels or words of the data set; 0 where it has none.
        target_shape: Of one sample's target; empty: it is one number.
    """

    section: ClassVar[str] = "scenario.task"
    measures: ClassVar[Mapping[str, Declaration]] = {}
    has_classes: ClassVar[bool] = False
    skips_padding: ClassVar[bool] = False
    of_inputs: ClassVar[bool] = False
    source: ClassVar[str] = ""
    stratum: ClassVar[str] = "stratum"

    num_classes: int = 0
    target_shape: tuple[int, ...] = ()

    @property
    def leading(self) -> tuple[str, Declaration]:
        """The first of :attr:`measures`; the loss where there are none."""
        return next(iter(self.measures.items()), ("loss", Declaration(mode="min")))

    @property
    @abstractmethod
    def outputs(self) -> tuple[int, ...]:
        """The shape of a network's outputs for one sample."""

    @property
    def num_outputs(self) -> int:
        """The number that a model's builder gets as ``num_classes``."""
        outputs = self.outputs
        sizes = outputs if isinstance(outputs, tuple) else ()
        if not (sizes and all(isinstance(size, int | np.integer) and size > 0 for size in sizes)):
            raise ConfigError(
                f"task {type(self).__name__}: outputs must be a tuple of sizes, such as (1,), not {outputs!r}"
            )
        return self.num_classes or int(outputs[-1])

    def check(self, targets: NDArray[Any], where: str) -> None:
        """Refuse targets that the task can't have.

        Args:
            targets: [S, ...].
            where: ``data set 'x': train targets``, for messages.

        Raises:
            DataError: They are of another type or out of range.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a differentiable scalar, the mean over the batch.

        Args:
            outputs: [B, ...], a network's.
            targets: [B, ...]: int64 or float as the data set has them.
        """

    @abstractmethod
    @returns(sums)
    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        """Return a batch's sums, on the CPU, in float64 or int64; batches are added up in the test set's order.

        ``loss`` and ``count`` must be among them: the test's loss is the one divided by the other.

        Args:
            outputs: [B, ...].
            targets: [B, ...].
        """

    @abstractmethod
    @returns(_figures)
    def scores(self, tally: Tally) -> Mapping[str, float]:
        """Return the figures of :attr:`measures`, of the sums over all batches."""

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return what partitions by class go by [S], 0..num_strata-1; None: there is no such thing.

        Args:
            targets: Those of the training set [S, ...].
        """
        return None

    @property
    def num_strata(self) -> int:
        """Values that :meth:`strata` may have; 1 where there are none."""
        return 1


def r_squared(off: Tensor, around_mean: Tensor, squares: Tensor) -> Tensor:
    """Return the share of the variance that is explained, as scikit-learn's ``r2_score``.

    Of what does not vary it is 1 where everything is met, else 0.

    Args:
        off: Sums of squared errors.
        around_mean: Sums of squared distances of the true values from their mean.
        squares: Sums of the true values' squares; a difference of these that is this small is rounding.
    """
    varies = around_mean > 1e-12 * squares
    return torch.where(varies, 1 - off / around_mean.where(varies, 1.0), (off == 0).to(off.dtype))


def require_integers(targets: NDArray[Any], below: int, where: str, *, what: str, gaps: bool = True) -> None:
    """Refuse targets that are no integers from 0 up to a number of classes.

    Args:
        targets: [S, ...].
        below: The number of classes.
        where: For messages.
        what: What one of them is, likewise.
        gaps: Some, but not all of them, may be -100, which means none.

    Raises:
        DataError: The message says ``where``, and ``what`` one of them is.
    """
    if not np.issubdtype(targets.dtype, np.integer):
        raise DataError(f"{where} must be integers, each a {what}, but are {targets.dtype}")
    is_none = (targets == -100) if gaps else np.zeros(targets.shape, bool)
    odd = targets[(targets >= below) | ((targets < 0) & ~is_none)]
    if len(odd):
        none = " (or be -100, which counts for nothing)" if gaps else ""
        raise DataError(f"{where} must lie in 0..{below - 1}{none}, but one is {odd[0]}")
    if is_none.all():
        raise DataError(f"{where} are -100 throughout, which counts for nothing: there must be a {what}")
