"""Parts that the choosers of a group share: the score of a set of clients, and the clients that may be in it at all.

A score is a function of the sum of its members' rows, so a search keeps sums and never the sets themselves.

Shape letters: A active clients, C classes, E usable clients (eligible, and of finite divergence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedsweep.components import kl_divergence

from .chooser import Floats, GroupProblem

Rows = NDArray[np.int64]

# Scores nearer than this are a tie. Rounding is a thousand times smaller, so it never decides which group is taken.
TIE = 1e-12


class Score(Protocol):
    """A divergence of groups from the population; smaller is better."""

    def __call__(self, sums: Floats, /) -> Floats:
        """Return one score per group, ``[...]``, from the sums of its members' rows, ``[..., W]``."""


@dataclass(frozen=True, eq=False)
class LabelDivergence:
    """D_KL(p_z || p_Y) in nats, from a group's summed label counts.

    Attributes:
        log_population_C: ln p_Y of the classes that are summed [C], finite.

    Source: DynamicFL, section 3: ``sum_y p_z(y) ln(p_z(y) / p_Y(y))`` with 0 ln 0 = 0; here with the sum's total n
    taken out, ``(sum_y S_y (ln S_y - ln p_Y(y))) / n - ln n``.
    """

    log_population_C: Floats

    def __call__(self, sums: Floats, /) -> Floats:
        totals = sums.sum(axis=-1)
        logs = np.log(np.maximum(sums, 1.0))
        logs -= self.log_population_C
        scores: Floats = np.einsum("...c,...c->...", sums, logs) / totals - np.log(totals)
        return scores


@dataclass(frozen=True, eq=False)
class Usable:
    """The clients of a problem that can be in a group, and how groups of them are scored.

    Attributes:
        rows_E: Their rows in the problem, ascending.
        counts_EC: Their counts of the classes that the population has, as floats.
        population_C: The population's shares of those classes.
        score: Of sums of ``counts_EC``.
    """

    rows_E: Rows
    counts_EC: Floats
    population_C: Floats
    score: LabelDivergence

    def group(self, members: Sequence[int] | NDArray[np.integer]) -> tuple[int, ...]:
        """Return rows of the problem, ascending, from positions among the usable."""
        return tuple(sorted(int(row) for row in self.rows_E[np.asarray(members, dtype=np.int64)]))


def usable(problem: GroupProblem) -> Usable:
    """Select the eligible clients without a class that the population lacks: with such a class KL is infinite."""
    present_C = problem.population_C > 0
    stray_A = problem.counts_AC[:, ~present_C].any(axis=1)
    rows = np.flatnonzero(np.asarray(problem.eligible_A, dtype=bool) & ~stray_A)
    shares = np.asarray(problem.population_C, dtype=np.float64)[present_C]
    counts = problem.counts_AC[rows][:, present_C].astype(np.float64)
    return Usable(rows_E=rows, counts_EC=counts, population_C=shares, score=LabelDivergence(np.log(shares)))


def group_divergence(problem: GroupProblem, group: Sequence[int]) -> float:
    """Return D_KL(p_z || p_Y) of a group given by rows, in nats; infinite for the empty group."""
    if not len(group):
        return float("inf")
    return float(kl_divergence(problem.counts_AC[list(group)].sum(axis=0), problem.population_C))
