"""The group of least divergence, with a proof: our own yardstick for the choosers that only search.

The best sets of DynaComm, improved by single moves, give a group; levels below it are searched to the end
(:mod:`.exact_levels`), from low to high. The first level that holds a group holds the optimum; a level that holds none
is a lower bound.

Shape letters: C classes, E usable clients, M moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsweep.components import Count

from .chooser import Floats, GroupChooser, GroupProblem, Orders, sizes_of
from .dynacomm import best_by_size, random_orders
from .exact_levels import LevelSearch, Work, best_centre
from .scores import TIE, LabelDivergence, Usable, group_divergence, usable

# Where no more pairs than these exist, one level does.
_FEW_PAIRS = 1 << 22
# A level holds about as many groups as its radius to the power of half the dimensions: low levels cost next to nothing.
_LEVEL_SHARES = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A group and how good it is at least.

    Attributes:
        group: Rows of the clients, ascending; empty where no client may be in a group.
        kl: Its divergence in nats; infinite for the empty group.
        lower_bound: No admissible group has a smaller one; at most ``kl``.
        certified: ``kl`` is the least there is, to 1e-12 nats.
        pairs: Work done, as :class:`~fedsweep.algorithms.dynamicfl.exact_levels.Work` counts it.
    """

    group: tuple[int, ...]
    kl: float
    lower_bound: float
    certified: bool
    pairs: int


@dataclass(frozen=True, kw_only=True)
class ExactGroup(GroupChooser):
    """The admissible group of least divergence; past its limit, the best one found.

    Attributes:
        max_pairs: Limit on the work, in pairs of subset sums looked at; None: none. The default takes a second or two
            on one core and proves the optimum for nearly all cohorts of thirty clients and ten classes. A limit on time
            would make the group depend on the machine.
        orders: Random orders of the DynaComm that it starts from, at least 1.

    Source: None; DynamicFL compares with exhaustive search, which ends at some twenty clients.
    """

    max_pairs: Count | None = 1 << 29
    orders: Orders = 10

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        return self.solve(problem, size=size).group

    def solve(self, problem: GroupProblem, *, size: int | None = None) -> Solution:
        """Return the best group, with the bounds of the optimum.

        Args:
            problem: The clients and the budgets; its stream draws the starting orders.
            size: Of the group; None: at most ``problem.max_size``.

        Raises:
            ConfigError: No group has this size.
        """
        work = Work(max_pairs=self.max_pairs)
        able = usable(problem)
        members, lower_bound = np.zeros(0, dtype=np.int64), math.inf
        if sizes := sizes_of(problem, len(able.rows_E), size):
            members = self._incumbent(able, problem, sizes)
            members, lower_bound = _prove(able, members, sizes, work)
        group = able.group(members)
        kl = group_divergence(problem, group)
        lower_bound = min(lower_bound, kl)
        return Solution(
            group=group,
            kl=kl,
            lower_bound=lower_bound,
            certified=kl == math.inf or kl - lower_bound <= TIE,
            pairs=work.pairs,
        )

    def _incumbent(self, able: Usable, problem: GroupProblem, sizes: range) -> NDArray[np.int64]:
        """Return DynaComm's best sets of the five best sizes, each improved by moves; the best of them."""
        orders_OE = random_orders(problem.stream.numpy(), len(able.rows_E), orders=self.orders)
        table = best_by_size(able.counts_EC, able.score, orders_OE, max_size=sizes[-1])
        best_J = table.scores_OJ.min(axis=0)
        starts = sorted(sizes, key=lambda size: (best_J[size], size))[:5]
        first = table.best(sizes)
        cells = [cell for cell in (first, *(table.best([size]) for size in starts)) if cell]
        results = [improve(able.counts_EC, able.score, table.members(*cell), sizes=sizes) for cell in cells]
        best, score = results[0]
        for members, divergence in results[1:]:
            if divergence < score - TIE:
                best, score = members, divergence
        return np.asarray(best, dtype=np.int64)


def improve(
    counts_EC: Floats, score: LabelDivergence, members: list[int], *, sizes: Sequence[int]
) -> tuple[list[int], float]:
    """Take the best of all moves (a client in, out, or one for another) until none improves.

    Args:
        counts_EC: Clients' counts.
        score: The divergence of a sum.
        members: The set to start from, of a size within the limits.
        sizes: All that a set may have, ascending.

    Returns:
        The set, and its divergence.
    """
    inside = set(members)
    best = float(score(counts_EC[members].sum(axis=0)))
    while True:
        ins = [place for place in range(len(counts_EC)) if place not in inside]
        outs = sorted(inside)
        moves = [(joins, leaves) for joins in ins for leaves in outs]
        moves += [(joins, -1) for joins in ins if len(outs) < sizes[-1]]
        moves += [(-1, leaves) for leaves in outs if len(outs) > sizes[0]]
        if not moves:
            return outs, best
        with_none_EC = np.vstack([counts_EC, np.zeros(counts_EC.shape[1])])
        moves_M2 = np.asarray(moves)
        sums_MC = counts_EC[outs].sum(axis=0) + with_none_EC[moves_M2[:, 0]] - with_none_EC[moves_M2[:, 1]]
        scores_M = score(sums_MC)
        place = int(scores_M.argmin())
        if not scores_M[place] < best - TIE:
            return outs, best
        best = float(scores_M[place])
        joins, leaves = moves[place]
        inside = (inside | {joins}) - {leaves, -1}


def _prove(able: Usable, members: NDArray[np.int64], sizes: range, work: Work) -> tuple[NDArray[np.int64], float]:
    """Return a group at least as good as the incumbent, and a lower bound for all groups."""
    held_C = able.counts_EC.any(axis=0)
    counts_EC, population_C = able.counts_EC[:, held_C], able.population_C[held_C]
    score = LabelDivergence(np.log(population_C))
    incumbent = float(score(counts_EC[members].sum(axis=0)))
    if incumbent <= TIE:
        return members, 0.0
    centre = best_centre(counts_EC, population_C, incumbent=incumbent)
    bound = max(0.0, centre.bound)
    if incumbent - bound <= TIE or not LevelSearch.fits(len(counts_EC), len(population_C), sizes[-1]):
        return members, bound
    search = LevelSearch(counts_EC, score, centre=centre, min_size=sizes[0], max_size=sizes[-1])
    shares = _LEVEL_SHARES if search.num_pairs > _FEW_PAIRS else (1.0,)
    for share in shares:
        level = bound + share * (incumbent - bound)
        result = search.below(level, work)
        if result.members and result.score < incumbent - TIE:
            members, incumbent = np.asarray(result.members, dtype=np.int64), result.score
            if result.complete:
                return members, incumbent
        if not result.complete:
            return members, bound
        bound = level
    return members, bound
