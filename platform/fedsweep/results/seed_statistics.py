"""Means over seeds, and when a difference may be called one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsweep.streams import Stream

CONFIDENCE = 0.95
_RESAMPLES = 4000
# With fewer pairs neither interval means anything.
_FEWEST_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure over seeds.

    Attributes:
        count: How many seeds have the figure.
        mean: NaN without any.
        sd: Sample standard deviation; NaN below two.
        low: Lower end of the bootstrap interval of the mean; NaN below two.
        high: Its upper end.
    """

    count: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two settings over the seeds that both have.

    Attributes:
        first: Index of the one setting.
        second: Index of the other.
        pairs: Seeds that both have.
        mean: Mean of first minus second.
        low: Lower end of the paired bootstrap interval.
        high: Its upper end.
        p_value: Two-sided, of the paired t test, corrected for the number of comparisons; NaN with too few pairs.
        is_real: The corrected p value is at most 0.05 and the interval leaves out zero.
    """

    first: int
    second: int
    pairs: int
    mean: float
    low: float
    high: float
    p_value: float
    is_real: bool


def estimate(values: Sequence[float], *, stream: Stream) -> Estimate:
    """Mean, standard deviation and bootstrap interval; what is NaN is left out.

    Args:
        values: One per seed.
        stream: Keys the resamples.
    """
    known = np.array([value for value in values if not math.isnan(value)])
    if len(known) == 0:
        return Estimate(count=0, mean=math.nan, sd=math.nan, low=math.nan, high=math.nan)
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Estimate(count=1, mean=mean, sd=math.nan, low=math.nan, high=math.nan)
    low, high = bootstrap(known, stream=stream)
    return Estimate(count=len(known), mean=mean, sd=float(known.std(ddof=1)), low=low, high=high)


def bootstrap(values: np.ndarray, *, stream: Stream) -> tuple[float, float]:
    """Percentile interval of the mean.

    Args:
        values: At least one, ``[n]``.
        stream: Keys the resamples.
    """
    picks = stream.numpy().integers(len(values), size=(_RESAMPLES, len(values)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values[picks].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def differences(by_seed: Sequence[Mapping[Any, float]], *, stream: Stream) -> list[Difference]:
    """Every setting against every other one, over the seeds that both have.

    Reading: the bootstrap interval alone is too narrow with the few seeds that experiments have, so the paired t test
    must agree, with Holm's correction for the number of comparisons.

    Args:
        by_seed: Per setting, seed -> figure; NaN counts as missing.
        stream: Keys the resamples.
    """
    found = []
    for first in range(len(by_seed)):
        for second in range(first + 1, len(by_seed)):
            seeds = sorted(set(by_seed[first]) & set(by_seed[second]), key=str)
            gaps = np.array([by_seed[first][seed] - by_seed[second][seed] for seed in seeds])
            found.append(_difference(first, second, gaps[~np.isnan(gaps)], stream=stream))
    return _corrected(found)


def _difference(first: int, second: int, gaps: np.ndarray, *, stream: Stream) -> Difference:
    nothing = math.nan
    mean = math.fsum(gaps) / len(gaps) if len(gaps) else nothing
    low = high = p_value = nothing
    if len(gaps) >= _FEWEST_PAIRS:
        low, high = bootstrap(gaps, stream=stream.child(first, second))
        p_value = _paired_p(gaps)
    return Difference(
        first=first, second=second, pairs=len(gaps), mean=mean, low=low, high=high, p_value=p_value, is_real=False
    )


def _paired_p(gaps: np.ndarray) -> float:
    """Two-sided p value of Student's paired t test [n >= 2]."""
    from scipy.stats import t as student  # type: ignore[import-untyped]

    spread = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    mean = float(gaps.mean())
    if spread <= 1e-12 * abs(mean):
        return 1.0 if mean == 0 else 0.0
    return float(2 * student.sf(abs(mean) / spread, df=len(gaps) - 1))


def _corrected(found: Sequence[Difference]) -> list[Difference]:
    """Holm's step-down correction over those that have a p value."""
    order = sorted((k for k, d in enumerate(found) if not math.isnan(d.p_value)), key=lambda k: found[k].p_value)
    adjusted = {k: found[k].p_value for k in range(len(found))}
    highest = 0.0
    for rank, k in enumerate(order):
        highest = max(highest, min(1.0, found[k].p_value * (len(order) - rank)))
        adjusted[k] = highest
    return [
        Difference(
            first=d.first,
            second=d.second,
            pairs=d.pairs,
            mean=d.mean,
            low=d.low,
            high=d.high,
            p_value=adjusted[k],
            is_real=bool(adjusted[k] <= 1 - CONFIDENCE and (d.low > 0 or d.high < 0)),
        )
        for k, d in enumerate(found)
    ]
