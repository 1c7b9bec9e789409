"""Means over seeds, and when a difference may be called one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

CONFIDENCE = 0.95
# With fewer seeds, or pairs of them, neither an interval nor a test means anything.
FEWEST_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure over seeds.

    Attributes:
        count: How many seeds have the figure.
        mean: NaN without any.
        sd: Sample standard deviation; NaN below two.
        low: Lower end of the mean's 95 % interval by Student's t; NaN below three.
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
        low: Lower end of its 95 % interval by Student's t; NaN with too few pairs.
        high: Its upper end.
        p_value: Two-sided, of the paired t test, :func:`corrected` for the number of comparisons; NaN with too few
            pairs.
        is_real: The corrected p value is at most 0.05.
    """

    first: int
    second: int
    pairs: int
    mean: float
    low: float
    high: float
    p_value: float
    is_real: bool


def number_in(text: str) -> float | None:
    """Return the finite number that a text is; None for other texts."""
    try:
        return finite(float(text))
    except ValueError:
        return None


def finite(value: Any) -> float | None:
    """Return the value where it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def mean(values: Sequence[float]) -> float:
    """Compute the mean of at least one value, whatever their order; NaN where the sum is beyond all numbers or none."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # too large, and infinities of both signs
        return math.nan


def deviation(values: Sequence[float]) -> float:
    """Compute the sample standard deviation of at least two values, whatever their order; inf beyond all numbers."""
    centre = mean(values)
    gaps = [value - centre for value in values]
    # By multiplication: a power that is too large is an error, a product infinite.
    try:
        return math.sqrt(math.fsum(gap * gap for gap in gaps) / (len(gaps) - 1))
    except OverflowError:
        return math.inf


def estimate(values: Iterable[float | None]) -> Estimate:
    """Estimate mean, standard deviation and interval of the values that are neither None nor NaN."""
    present = [value for value in values if value is not None and not math.isnan(value)]
    if not present:
        return Estimate(count=0, mean=math.nan, sd=math.nan, low=math.nan, high=math.nan)
    if len(present) == 1:
        return Estimate(count=1, mean=present[0], sd=math.nan, low=math.nan, high=math.nan)
    low, high = interval(present)
    return Estimate(count=len(present), mean=mean(present), sd=deviation(present), low=low, high=high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the 95 % interval of a mean by Student's t, whatever the values' order; NaN for fewer than three.

    Of normal values a percentile bootstrap's interval holds the mean in 76 and 82 % of cases only, with three and five.
    """
    if len(values) < FEWEST_SEEDS:
        return math.nan, math.nan
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * deviation(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def differences(by_seed: Sequence[Mapping[Any, float]]) -> list[Difference]:
    """Compare every setting with every other one, over the seeds that both have.

    By the paired t test, with Holm's correction for the number of comparisons.

    Args:
        by_seed: Per setting, seed -> figure; NaN counts as missing.
    """
    return corrected(paired(by_seed))


def paired(by_seed: Sequence[Mapping[Any, float]]) -> list[Difference]:
    """Return :func:`differences` before the correction, none of them real yet: for families of several such lists."""
    pairs = []
    for first in range(len(by_seed)):
        for second in range(first + 1, len(by_seed)):
            seeds = sorted(set(by_seed[first]) & set(by_seed[second]), key=str)
            gaps = [by_seed[first][seed] - by_seed[second][seed] for seed in seeds]
            pairs.append(_difference(first, second, [gap for gap in gaps if not math.isnan(gap)]))
    return pairs


def _difference(first: int, second: int, gaps: Sequence[float]) -> Difference:
    low, high = interval(gaps)
    p_value = _paired_p(np.asarray(gaps)) if len(gaps) >= FEWEST_SEEDS else math.nan
    centre = mean(gaps) if gaps else math.nan
    return Difference(
        first=first, second=second, pairs=len(gaps), mean=centre, low=low, high=high, p_value=p_value, is_real=False
    )


def _paired_p(gaps: np.ndarray) -> float:
    """Compute two-sided p value of Student's paired t test [n >= 2]."""
    from scipy.stats import ttest_1samp

    # Gaps that are all alike have no spread to divide by; SciPy would warn and give NaN.
    if float(gaps.std()) <= 1e-12 * abs(float(gaps.mean())):
        return 1.0 if gaps.mean() == 0 else 0.0
    return float(ttest_1samp(gaps, 0.0).pvalue)


def corrected(pairs: Sequence[Difference]) -> list[Difference]:
    """Apply Holm's step-down correction over those of a family that have a p value; it must not have been applied."""
    order = sorted((k for k, d in enumerate(pairs) if not math.isnan(d.p_value)), key=lambda k: pairs[k].p_value)
    judged = list(pairs)
    highest = 0.0
    for rank, k in enumerate(order):
        d = pairs[k]
        highest = max(highest, min(1.0, d.p_value * (len(order) - rank)))
        judged[k] = replace(d, p_value=highest, is_real=highest <= 1 - CONFIDENCE)
    return judged
