"""Learning-rate schedules over rounds, by name; within a round the rate is constant.

A builder is given the optimiser's rate and the number of rounds where it names them; its other parameters are the
configuration's. It gives a callable: the rate of a round, from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedsweep.errors import ConfigError
from fedsweep.parameters.ranges import Checked, NotNegative, PositiveShare

# So many rounds have their rate looked at before the first: nobody waits for those of 10^30.
MOST_RATES = 100_000


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate in every round.

    Attributes:
        rate: Of the optimiser.
    """

    rate: float

    def __call__(self, round: int) -> float:
        """Return the rate of a round, from 1."""
        return self.rate


@dataclass(frozen=True, kw_only=True)
class Cosine(Checked):
    """From the learning rate in round 1 towards ``floor`` along half a cosine over the run's rounds.

    Attributes:
        rate: Of the optimiser.
        floor: The learning rate that the schedule ends at, >= 0.
        num_rounds: T.

    Source: DynamicFL, section 8 of its specification: ``floor + (rate - floor) (1 + cos(pi (t - 1) / T)) / 2``.
    """

    section: ClassVar[str] = "training.schedule"
    rate: float
    floor: NotNegative = 1e-4
    num_rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor > self.rate:
            raise ConfigError(
                "training.schedule.floor must not exceed training.optimizer.lr, but got"
                f" floor={self.floor:g}, lr={self.rate:g}; lower the floor"
            )

    def __call__(self, round: int) -> float:
        """Return the rate of a round, from 1."""
        return self.floor + 0.5 * (self.rate - self.floor) * (1 + math.cos(math.pi * (round - 1) / self.num_rounds))


@dataclass(frozen=True, kw_only=True)
class Exponential(Checked):
    """The learning rate times ``decay`` to the power of the rounds done.

    Attributes:
        rate: Of the optimiser.
        decay: Factor per round, > 0 and <= 1.
    """

    section: ClassVar[str] = "training.schedule"
    rate: float
    decay: PositiveShare = 0.99

    def __call__(self, round: int) -> float:
        """Return the rate of a round, from 1."""
        return float(self.rate * self.decay ** (round - 1))


@dataclass(frozen=True, kw_only=True)
class HalfCosineWithDrops:
    """Half a cosine from the learning rate to half of it, then two drops.

    Attributes:
        rate: Of the optimiser.
        num_rounds: T.

    Source: the FedStg authors' program: ``rate/2 + rate/4 (1 + cos(pi R / T))``, times 0.75 after three quarters of
    the rounds; after nine tenths half of that, but at least a tenth of ``rate``. Theirs has rate 1e-3 and T = 100.
    """

    rate: float
    num_rounds: int

    def __call__(self, round: int) -> float:
        """Return the rate of a round, from 1."""
        share = round / self.num_rounds
        rate = self.rate / 2 + self.rate / 4 * (1 + math.cos(math.pi * share))
        if share > 0.75:
            rate *= 0.75
        if share > 0.9:
            rate = max(0.5 * rate, 0.1 * self.rate)
        return rate


SCHEDULES: Mapping[str, Callable[..., Callable[[int], float]]] = {
    "constant": Constant,
    "cosine": Cosine,
    "exponential": Exponential,
    "fedstg": HalfCosineWithDrops,
}
