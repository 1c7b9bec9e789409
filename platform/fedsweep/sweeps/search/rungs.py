"""Seeds as rungs of a search: which tried setting is worth one more seed, and what the search is told of it.

A search compares settings by means over seeds. Between two that may be the best, one more seed of either tells more
than a third setting; one that is surely worse needs none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsweep.results.seed_statistics import CONFIDENCE, deviation, mean

# Before the noise is known from so many degrees of freedom (two settings of four seeds), nothing is settled.
_LEAST_FREEDOM = 6
# Also where noise explains all differences, the better ones stay the better ones.
_LEAST_BETWEEN = 0.01


@dataclass(kw_only=True)
class TriedSetting:
    """A setting of a search with what its seeds came to.

    Attributes:
        values: What it sets, without the seed.
        seeds: Those begun, in their order.
        results: Of each that has ended well: the metrics, turned so that more is better.
        excesses: Of the same: how far each constraint is missed.
        is_given_up: A seed failed, or the scheduler ended it: no other is run.
    """

    values: Mapping[str, Any]
    seeds: list[int] = field(default_factory=list)
    results: list[tuple[float, ...]] = field(default_factory=list)
    excesses: list[tuple[float, ...]] = field(default_factory=list)
    is_given_up: bool = False


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The spread over seeds that settings have in common: pooled, since one has few seeds.

    Attributes:
        freedom: Degrees of freedom.
        deviations: Standard deviation of each metric; 0 without freedom.
    """

    freedom: int
    deviations: tuple[float, ...]

    @classmethod
    def of(cls, tried: Sequence[TriedSetting]) -> Noise:
        """Pool the spread of the settings with two seeds or more."""
        repeated = [setting.results for setting in tried if len(setting.results) > 1]
        if not repeated:
            return cls(freedom=0, deviations=())
        freedom = sum(len(results) - 1 for results in repeated)
        columns = [list(zip(*results, strict=True)) for results in repeated]
        squares = [
            math.fsum(deviation(column) ** 2 * (len(column) - 1) for column in metric)
            for metric in zip(*columns, strict=True)
        ]
        return cls(freedom=freedom, deviations=tuple(math.sqrt(total / freedom) for total in squares))

    def half_widths(self, num_seeds: int) -> tuple[float, ...]:
        """Return half the width of each metric's confidence interval for a mean over so many seeds."""
        from scipy.stats import t

        factor = float(t.ppf((1 + CONFIDENCE) / 2, self.freedom)) / math.sqrt(num_seeds)
        return tuple(factor * sd for sd in self.deviations)


def most_doubtful(tried: Sequence[TriedSetting], *, most_seeds: int) -> TriedSetting | None:
    """Return the setting for which one more seed says most; None where all is settled.

    Those with the best means and their strongest challengers take turns, whoever has fewer seeds. A setting is
    settled where another one's worst is better than its best; with several metrics, where it is so in all of them, and
    where none can still beat or be beaten. What "worst" and "best" are says the pooled noise. Wherever some keep all
    constraints in the mean, these alone are judged.

    Source: LUCB, Kalyanakrishnan, Tewari, Auer and Stone, ICML 2012; with several metrics by domination.

    Args:
        tried: The settings.
        most_seeds: A setting gets no more.
    """
    sound = [setting for setting in tried if setting.results and not setting.is_given_up]
    noise = Noise.of(sound)
    judged = [setting for setting in sound if _keeps_constraints(setting)] or sound
    means = [_means(setting) for setting in judged]
    lows, highs = list(means), list(means)
    if noise.freedom:
        widths = [noise.half_widths(len(setting.results)) for setting in judged]
        lows = [tuple(m - w for m, w in zip(*pair, strict=True)) for pair in zip(means, widths, strict=True)]
        highs = [tuple(m + w for m, w in zip(*pair, strict=True)) for pair in zip(means, widths, strict=True)]
    doubtful = _doubtful(lows, highs) if noise.freedom >= _LEAST_FREEDOM else [*range(len(judged))]
    open_ones = [k for k in doubtful if len(judged[k].seeds) < most_seeds]
    leaders = [k for k in open_ones if not any(_beats(other, means[k]) for other in means)]
    rest = [k for k in open_ones if k not in leaders]
    challengers = [k for k in rest if not any(_beats(highs[other], highs[k]) for other in rest)]
    contenders = [*leaders, *challengers]
    return judged[min(contenders, key=lambda k: len(judged[k].seeds))] if contenders else None


def told_means(tried: Sequence[TriedSetting]) -> list[tuple[float, ...] | None]:
    """Return each setting's means as a search is to know them; None where no seed has ended.

    A mean of few seeds is drawn towards the mean of all, as much as it owes to chance: otherwise the search would go
    after the luckiest seed.

    Source: empirical Bayes, Efron and Morris, JASA 1975.
    """
    means = [_means(setting) if setting.results else None for setting in tried]
    counted_means = [(m, len(setting.results)) for m, setting in zip(means, tried, strict=True) if m is not None]
    noise = Noise.of(tried)
    if len(counted_means) < 2 or not noise.freedom:
        return means
    table, counts = np.array([m for m, _ in counted_means]), np.array([count for _, count in counted_means])[:, None]
    centre, seen, within = table.mean(0), table.var(0, ddof=1), np.array(noise.deviations) ** 2
    between = np.maximum(seen - within * (1 / counts).mean(), _LEAST_BETWEEN * seen)
    own = between / np.maximum(between + within / counts, np.finfo(float).tiny)
    drawn = iter((centre + own * (table - centre)).tolist())
    return [None if m is None else tuple(next(drawn)) for m in means]


def _means(setting: TriedSetting) -> tuple[float, ...]:
    return tuple(mean(column) for column in zip(*setting.results, strict=True))


def _keeps_constraints(setting: TriedSetting) -> bool:
    return all(mean(column) <= 0 for column in zip(*setting.excesses, strict=True))


def _beats(first: Sequence[float], second: Sequence[float]) -> bool:
    """Check that the first is no worse anywhere, and better somewhere."""
    return all(a >= b for a, b in zip(first, second, strict=True)) and tuple(first) != tuple(second)


def _doubtful(lows: Sequence[tuple[float, ...]], highs: Sequence[tuple[float, ...]]) -> list[int]:
    """Return those that no other surely beats, but that another one may."""
    alive = [k for k, high in enumerate(highs) if not any(_beats(low, high) for low in lows)]
    return [k for k in alive if any(j != k and _beats(highs[j], lows[k]) for j in alive)]
