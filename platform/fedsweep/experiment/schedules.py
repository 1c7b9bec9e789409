"""Learning-rate schedules over rounds; within a round the rate is constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedsweep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate in every round."""

    rate: float

    def __call__(self, round: int) -> float:
        """The rate of a round, from 1."""
        return self.rate


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """From ``rate`` in round 1 towards ``floor`` along half a cosine.

    Source: DynamicFL, section 8 of its specification: ``floor + (rate - floor) (1 + cos(pi (t - 1) / T)) / 2``.
    """

    rate: float
    floor: float
    num_rounds: int

    def __post_init__(self) -> None:
        if self.floor > self.rate:
            raise ConfigError(
                "training.schedule.floor must not exceed training.optimizer.lr, but got"
                f" floor={self.floor:g}, lr={self.rate:g}; lower the floor"
            )

    def __call__(self, round: int) -> float:
        """The rate of a round, from 1."""
        return self.floor + 0.5 * (self.rate - self.floor) * (1 + math.cos(math.pi * (round - 1) / self.num_rounds))


@dataclass(frozen=True, kw_only=True)
class Exponential:
    """``rate * decay ** (round - 1)``."""

    rate: float
    decay: float

    def __call__(self, round: int) -> float:
        """The rate of a round, from 1."""
        return float(self.rate * self.decay ** (round - 1))


@dataclass(frozen=True, kw_only=True)
class HalfCosineWithDrops:
    """Half a cosine from ``rate`` to half of it, then two drops.

    Source: the FedStg authors' program: ``rate/2 + rate/4 (1 + cos(pi R / T))``, times 0.75 after three quarters of
    the rounds; after nine tenths half of that, but at least a tenth of ``rate``. Theirs has rate 1e-3 and T = 100.
    """

    rate: float
    num_rounds: int

    def __call__(self, round: int) -> float:
        """The rate of a round, from 1."""
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
