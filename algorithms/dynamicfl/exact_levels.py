"""Every group whose KL divergence is below a level, by meeting in the middle.

The clients are cut into two halves. A group is a subset of each, and its summed counts S are the sum of two of the
2^(E/2) subset sums per half. "KL at most K" is a convex cone in S, so each linear or quadratic bound of the cone can be
told from the two parts, and nearly all pairs fall to a bound on a block of sums or to one matrix product; what is left
is computed exactly. A level searched to its end proves that no group lies below it.

For any distribution c that is positive on the classes held (the centre), ``KL(p|q) = KL(p|c) + p.ln(c/q)``. As p is a
mean of clients' distributions, ``p.ln(c/q)`` is at least its smallest value over single clients: a lower bound for
every group, and tight where c is the nearest point to q that the clients span.

Shape letters: B blocks, C classes, E clients, K directions, P points (subsets of a half), T trial values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .chooser import Floats
from .scores import LabelDivergence, Rows

_BLOCK = 64
_CHUNK = 1 << 14
# Multiplications in one matrix product. BLAS spreads larger ones over threads, which costs far more than it gains here.
_PRODUCT = 1 << 18
_MAX_DIRECTIONS = 24
# Counts are scaled to sum to 1, so this is far above rounding and lets no group slip through a bound.
_SLACK = 1e-11


class Work:
    """Remaining work of a search, counted so that the same limit stops at the same place on any machine.

    Attributes:
        max_pairs: Pairs of subset sums looked at, of ten classes; those of 100 classes count tenfold, and a group that
            is computed exactly counts as two pairs per class. None: no limit.
    """

    def __init__(self, *, max_pairs: int | None) -> None:
        self.max_pairs = max_pairs
        self.pairs = 0

    def spend(self, pairs: int) -> bool:
        """Count pairs that are about to be looked at; false where the limit forbids it."""
        self.pairs += pairs
        return self.max_pairs is None or self.pairs <= self.max_pairs


@dataclass(frozen=True, kw_only=True, eq=False)
class Centre:
    """A distribution to measure from, and the bound that it gives.

    Attributes:
        shares_C: Positive, sums to 1.
        tilt_C: ``ln(shares / population)``.
        bound: No group's divergence is below it, in nats.
    """

    shares_C: Floats
    tilt_C: Floats
    bound: float


def centre_at(shares_C: Floats, distributions_EC: Floats, population_C: Floats) -> Centre:
    """Return the centre with these shares and the lower bound that it gives for all groups of the clients."""
    tilt_C = np.log(shares_C / population_C)
    return Centre(shares_C=shares_C, tilt_C=tilt_C, bound=float((distributions_EC @ tilt_C).min()))


def best_centre(counts_EC: Floats, population_C: Floats, *, incumbent: float, max_steps: int = 400) -> Centre:
    """Return the population itself, or a point near its nearest one in the clients' hull where that bounds better.

    Args:
        counts_EC: Clients' counts; every class is held by somebody.
        population_C: Shares of these classes, positive; their sum may be below 1.
        incumbent: A divergence that is reached, in nats; a bound a little below it is good enough.
        max_steps: Of the descent, which goes by pairs: weight moves from the worst client to the best.
    """
    distributions_EC = counts_EC / counts_EC.sum(axis=1, keepdims=True)
    plain = centre_at(population_C / population_C.sum(), distributions_EC, population_C)
    best = plain
    weights_E = np.full(len(counts_EC), 1 / len(counts_EC))
    fractions_T = 0.5 ** np.arange(40.0)[:, None]
    for _ in range(max_steps):
        # With a little of the population, so that every class has a share: the tilt takes its logarithm.
        mixed_C = 0.999999 * (weights_E @ distributions_EC) + 1e-6 * plain.shares_C
        centre = centre_at(mixed_C, distributions_EC, population_C)
        best = max(best, centre, key=lambda candidate: candidate.bound)
        reached = float(mixed_C @ centre.tilt_C)
        if reached - plain.bound <= 0.1 * (incumbent - plain.bound) or reached - best.bound <= 1e-3 * incumbent:
            break
        slopes_E = distributions_EC @ centre.tilt_C
        to = int(slopes_E.argmin())
        source = int(np.where(weights_E > 0, slopes_E, -np.inf).argmax())
        # The best of forty halvings of all that can be moved, so that the descent has no rate to be chosen.
        steps_T = weights_E[source] * fractions_T
        tried_TC = mixed_C + steps_T * 0.999999 * (distributions_EC[to] - distributions_EC[source])
        # Rounding may leave a share at 0 or a hair below, which has no logarithm.
        tried_TC = np.maximum(tried_TC, 1e-300)
        step = float(steps_T[(tried_TC * np.log(tried_TC / population_C)).sum(axis=1).argmin(), 0])
        weights_E[to] += step
        weights_E[source] = max(0.0, weights_E[source] - step)
    return best


def reach(directions_KC: Floats, shares_C: Floats, radius: float) -> Floats:
    """Return an upper bound of ``direction.p`` over all p with KL(p|shares) <= radius, for each direction [K].

    By duality, ``t x radius + t ln sum_y shares(y) exp(direction(y) / t)`` is one for every t > 0.
    """
    tops_K = directions_KC.max(axis=1)
    spreads_K = np.sqrt(np.maximum(directions_KC**2 @ shares_C - (directions_KC @ shares_C) ** 2, 1e-300))
    trial_KT = np.geomspace(1e-2, 1e2, 41) * (spreads_K / math.sqrt(2 * radius))[:, None]
    powers_KTC = np.exp((directions_KC - tops_K[:, None])[:, None, :] / trial_KT[:, :, None])
    bounds_KT = trial_KT * radius + tops_K[:, None] + trial_KT * np.log(powers_KTC @ shares_C)
    nearest: Floats = np.minimum(bounds_KT.min(axis=1), tops_K)
    return nearest


@dataclass(frozen=True, kw_only=True, eq=False)
class Half:
    """All subsets of half of the clients.

    Attributes:
        sums_PC: Their summed counts.
        sizes_P: Their numbers of members.
        masks_P: Their members as bits, the half's first client lowest.
        projections_PK: The scaled sums along the directions.
        blocks: Points that lie near one another, by index; together all points.
    """

    sums_PC: Floats
    sizes_P: Rows
    masks_P: Rows
    projections_PK: Floats
    blocks: list[Rows]


@dataclass(frozen=True, kw_only=True, eq=False)
class LevelResult:
    """Result of the search of a level.

    Attributes:
        members: Positions of the clients of the best group below the level; empty where there is none.
        score: Its divergence; the level where there is none.
        complete: The level was searched to its end: no group is below ``score``.
    """

    members: tuple[int, ...]
    score: float
    complete: bool


class LevelSearch:
    """Searches levels of one instance.

    Args:
        counts_EC: Clients' counts; every class is held by somebody.
        score: The divergence of a sum.
        centre: See :func:`best_centre`.
        min_size: Of a group, at least 1.
        max_size: Of a group.
    """

    def __init__(
        self, counts_EC: Floats, score: LabelDivergence, *, centre: Centre, min_size: int, max_size: int
    ) -> None:
        self._score = score
        self._centre = centre
        self._sizes = (min_size, max_size)
        self._scale = 1 / float(counts_EC.sum())
        self._first = len(counts_EC) // 2
        # Near the centre the divergence is half the squared distance in units of these roots.
        root_C = np.sqrt(centre.shares_C)
        totals_E = counts_EC.sum(axis=1, keepdims=True)
        axes_KC = np.linalg.svd((counts_EC - totals_E * centre.shares_C) / root_C, full_matrices=False)[2]
        directions_KC = axes_KC[:_MAX_DIRECTIONS] / root_C
        self._directions_KC: Floats = directions_KC - (directions_KC @ centre.shares_C)[:, None]
        self._left = self._half(counts_EC[: self._first])
        self._right = self._half(counts_EC[self._first :])

    @staticmethod
    def fits(num_clients: int, num_classes: int, max_size: int) -> bool:
        """Return whether the halves' subset sums stay within some hundred megabytes."""
        half = num_clients - num_clients // 2
        points = sum(math.comb(half, size) for size in range(min(half, max_size) + 1))
        return points * (num_classes + 60) <= 1 << 24

    @property
    def num_pairs(self) -> int:
        """Pairs of subset sums in all."""
        return len(self._left.sizes_P) * len(self._right.sizes_P)

    def _half(self, counts_EC: Floats) -> Half:
        sums_PC, sizes_P, masks_P = np.zeros((1, counts_EC.shape[1])), np.zeros(1, np.int64), np.zeros(1, np.int64)
        for place, row_C in enumerate(counts_EC):
            grows = sizes_P < self._sizes[1]
            sums_PC = np.concatenate([sums_PC, sums_PC[grows] + row_C])
            sizes_P = np.concatenate([sizes_P, sizes_P[grows] + 1])
            masks_P = np.concatenate([masks_P, masks_P[grows] | 1 << place])
        projections_PK = sums_PC @ self._directions_KC.T * self._scale
        return Half(
            sums_PC=sums_PC,
            sizes_P=sizes_P,
            masks_P=masks_P,
            projections_PK=projections_PK,
            blocks=_blocks(np.column_stack([projections_PK[:, :4], sums_PC.sum(axis=1) * self._scale * 0.02])),
        )

    def below(self, level: float, work: Work) -> LevelResult:
        """Return the best group whose divergence is below the level, which is above the centre's bound."""
        alive_BB = self._alive_blocks(level)
        left_P, right_P = self._factors(level)
        weight = max(1, len(self._centre.shares_C) // 10)
        best, members = level, (0, 0)
        complete = True
        for place in np.flatnonzero(alive_BB.any(axis=1)):
            points = self._left.blocks[place]
            others = np.concatenate([self._right.blocks[other] for other in np.flatnonzero(alive_BB[place])])
            for start in range(0, len(others), _CHUNK):
                part = others[start : start + _CHUNK]
                complete = complete and work.spend(len(points) * len(part) * weight)
                if not complete:
                    break
                candidate = self._exact(*_near(left_P, points, right_P, part), work)
                if candidate is None:
                    complete = False
                elif candidate[0] < best:
                    best, members = candidate[0], candidate[1:]
            if not complete:
                break
        return LevelResult(members=self._members(*members), score=best, complete=complete)

    def _alive_blocks(self, level: float) -> NDArray[np.bool_]:
        """Return pairs of blocks that a linear bound of the cone does not rule out, [B, B]."""
        radius = level - self._centre.bound
        above_K = reach(self._directions_KC, self._centre.shares_C, radius)
        below_K = reach(-self._directions_KC, self._centre.shares_C, radius)
        left_BF, right_BF = (self._block_tops(half, above_K, below_K, level) for half in (self._left, self._right))
        alive_BB = np.ones((len(left_BF), len(right_BF)), dtype=bool)
        for left_B, right_B in zip(left_BF.T, right_BF.T, strict=True):
            alive_BB &= left_B[:, None] + right_B >= -_SLACK
        return alive_BB

    def _block_tops(self, half: Half, above_K: Floats, below_K: Floats, level: float) -> Floats:
        """Return each block's greatest value of functions of which no group below the level has a negative sum."""
        masses_P1 = half.sums_PC.sum(axis=1, keepdims=True) * self._scale
        tilts_P1 = (half.sums_PC @ self._centre.tilt_C)[:, None] * self._scale
        # A size of m + m' is within [low, high] where m - low + m' and high - m - m' are not negative.
        low, high = self._sizes
        sizes_P1 = half.sizes_P[:, None].astype(np.float64)
        values_PF = np.hstack(
            [
                above_K * masses_P1 - half.projections_PK,
                below_K * masses_P1 + half.projections_PK,
                level * masses_P1 - tilts_P1,
                sizes_P1 - low / 2,
                high / 2 - sizes_P1,
            ]
        )
        return np.stack([values_PF[block].max(axis=0) for block in half.blocks])

    def _factors(self, level: float) -> tuple[Floats, Floats]:
        """Return vectors of the halves' points; a group below the level has an inner product of at most 0.

        With n its total, KL(p|c) is at least ``sum_y (p - c)^2 / (2 m)`` for any m between (2c + p)/3 and above, so the
        level K asks for ``sum_y (S - n c)^2 / (2 m) + n (S.ln(c/q) - K n) <= 0``: a quadratic form of the two parts.
        """
        shares_C = self._centre.shares_C
        tops_C = reach(np.eye(len(shares_C)), shares_C, level - self._centre.bound)
        weights_C = np.sqrt(1.5 / (2 * shares_C + np.maximum(tops_C, shares_C)))
        parts = []
        for half in (self._left, self._right):
            scaled_PC = half.sums_PC * self._scale
            masses_P = scaled_PC.sum(axis=1)
            offsets_PC = (scaled_PC - masses_P[:, None] * shares_C) * weights_C
            lines_P = scaled_PC @ self._centre.tilt_C - level * masses_P
            own_P = (offsets_PC**2).sum(axis=1) + masses_P * lines_P
            parts.append((offsets_PC, masses_P, lines_P, own_P, np.ones(len(own_P))))
        (left_PC, left_mass, left_line, left_own, ones), (right_PC, right_mass, right_line, right_own, more) = parts
        return (
            np.column_stack([2 * left_PC, left_mass, left_line, left_own, ones]),
            np.column_stack([right_PC, right_line, right_mass, more, right_own]),
        )

    def _exact(self, lefts: Rows, rights: Rows, work: Work) -> tuple[float, int, int] | None:
        """Return the best of some pairs, with its masks; infinite where no size fits, None where a limit ended it."""
        sizes = self._left.sizes_P[lefts] + self._right.sizes_P[rights]
        fitting = (sizes >= self._sizes[0]) & (sizes <= self._sizes[1])
        lefts, rights = lefts[fitting], rights[fitting]
        width = self._left.sums_PC.shape[1]
        if not work.spend(2 * width * len(lefts)):
            return None
        best: tuple[float, int, int] = (math.inf, 0, 0)
        for start in range(0, len(lefts), _CHUNK):
            left, right = lefts[start : start + _CHUNK], rights[start : start + _CHUNK]
            scores = self._score(self._left.sums_PC[left] + self._right.sums_PC[right])
            place = int(scores.argmin())
            if scores[place] < best[0]:
                masks = int(self._left.masks_P[left[place]]), int(self._right.masks_P[right[place]])
                best = (float(scores[place]), *masks)
        return best

    def _members(self, left_mask: int, right_mask: int) -> tuple[int, ...]:
        mask = left_mask | right_mask << self._first
        return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)


def _near(left_P: Floats, lefts: Rows, right_P: Floats, rights: Rows) -> tuple[Rows, Rows]:
    """Return the pairs of points whose inner product is at most 0, give or take rounding; some may come twice."""
    width = min(len(rights), max(1, _PRODUCT // (len(lefts) * left_P.shape[1])))
    rights = np.concatenate([rights, np.repeat(rights[-1:], -len(rights) % width)])
    pieces = right_P[rights].reshape(-1, width, right_P.shape[1]).transpose(0, 2, 1)
    places = np.flatnonzero(left_P[lefts] @ pieces <= _SLACK)
    rows, columns = np.divmod(places, width)
    piece, row = np.divmod(rows, len(lefts))
    return lefts[row], rights[piece * width + columns]


def _blocks(points_PD: Floats) -> list[Rows]:
    """Cut points at the median of their widest coordinate, again and again, into blocks of at most 64."""
    blocks: list[Rows] = []
    waiting: list[Rows] = [np.arange(len(points_PD))]
    while waiting:
        block = waiting.pop()
        if len(block) <= _BLOCK:
            blocks.append(block)
            continue
        near_PD = points_PD[block]
        widest = int((near_PD.max(axis=0) - near_PD.min(axis=0)).argmax())
        ordered = block[np.argsort(near_PD[:, widest], kind="stable")]
        waiting += [ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]]
    return blocks
