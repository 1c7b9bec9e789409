"""DynaComm: the group whose labels look most like the population's, by dynamic programming over random orders.

Going through the clients in one order, the programme keeps the best set found of every size; a set grows only from
the best one that is smaller by one, so an order can miss the optimum, and the best of several orders is taken.

Source: DynamicFL (2024), section 3, DynaComm.

Shape letters: C classes, E usable clients, J sizes 0..H, O orders, W columns of a row that is summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .chooser import Floats, GroupChooser, GroupProblem, Orders, sizes_of
from .scores import TIE, Rows, Score, usable


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeTable:
    """The programme's last row, for each order: the best set found of every size.

    Attributes:
        orders_OE: The orders: positions of clients.
        scores_OJ: The best set's score; infinite for size 0 and where there is no set.
        took_EOJ: Whether the cell of size j took the client that came at this place of its order.
    """

    orders_OE: Rows
    scores_OJ: Floats
    took_EOJ: NDArray[np.bool_]

    def members(self, order: int, size: int) -> list[int]:
        """Return the set of a cell: positions of clients, in the order in which they joined."""
        positions = []
        for place in range(self.orders_OE.shape[1] - 1, -1, -1):
            if self.took_EOJ[place, order, size]:
                positions.append(int(self.orders_OE[order, place]))
                size -= 1
        return positions[::-1]

    def best(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """Return order and size of the smallest score among the sizes, the first one on ties; None without any set."""
        best, cell = np.inf, None
        for order, row in enumerate(self.scores_OJ[:, list(sizes)].tolist()):
            row_best, place = np.inf, None
            for column, score in enumerate(row):
                if score < row_best - TIE:
                    row_best, place = score, column
            if place is not None and row_best < best - TIE:
                best, cell = row_best, (order, sizes[place])
        return cell


def best_by_size(rows_EW: Floats, score: Score, orders_OE: Rows, *, max_size: int) -> SizeTable:
    """Run the dynamic programme, all orders and all sizes of a row at once.

    Args:
        rows_EW: What is summed over a set's members; every sum's score is finite.
        score: Of a sum.
        orders_OE: Permutations of 0..E-1.
        max_size: H, the greatest size of a set; sizes above E stay empty.

    Source: DynamicFL, DynaComm: ``O[i][j] = min(O[i-1][j], O[i-1][j-1] + client i)``, the old set on ties.
    """
    num_orders, num_clients = orders_OE.shape
    sums_OJW = np.zeros((num_orders, max_size + 1, rows_EW.shape[1]))
    scores_OJ = np.full((num_orders, max_size + 1), np.inf)
    took_EOJ = np.zeros((num_clients, num_orders, max_size + 1), dtype=bool)
    for place in range(num_clients):
        # After this many clients each size up to `top` has its set, so no cell grows from an empty one.
        top = min(place + 1, max_size)
        candidates = sums_OJW[:, :top] + rows_EW[orders_OE[:, place], None]
        candidate_scores = score(candidates)
        # On ties the old set stays: rounding alone must not decide who is in the group.
        better = candidate_scores < scores_OJ[:, 1 : top + 1] - TIE
        scores_OJ[:, 1 : top + 1][better] = candidate_scores[better]
        sums_OJW[:, 1 : top + 1][better] = candidates[better]
        took_EOJ[place, :, 1 : top + 1] = better
    return SizeTable(orders_OE=orders_OE, scores_OJ=scores_OJ, took_EOJ=took_EOJ)


def random_orders(generator: np.random.Generator, num_clients: int, *, orders: int) -> Rows:
    """Draw permutations of 0..num_clients-1 uniformly, ``[orders, num_clients]``."""
    return np.stack([generator.permutation(num_clients) for _ in range(orders)]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class DynaComm(GroupChooser):
    """The best of the sets that the dynamic programme finds in several random orders.

    Attributes:
        orders: Random orders tried (eta_ens), at least 1. More of them find the optimum more often: with ten clients
            and ten classes one order does in half of the cases, ten orders in nine of ten.

    Source: DynamicFL, section 3, DynaComm; ten orders as in the authors' program.
    Reading: The paper's cells that a client's budget closes keep the value above them, so shuffling all clients and
        leaving those without the budget out is the same. Divergences nearer than 1e-12 nats are ties; the first set
        found wins, the smaller size first.
    """

    orders: Orders = 10

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        able = usable(problem)
        sizes = sizes_of(problem, len(able.rows_E), size)
        table = self.table(problem, max_size=max(sizes, default=0))
        cell = table.best(sizes)
        return able.group(table.members(*cell)) if cell else ()

    def table(self, problem: GroupProblem, *, max_size: int) -> SizeTable:
        """Return all cells; positions are those among the problem's usable clients."""
        able = usable(problem)
        # Everybody is shuffled, usable or not: who can't afford the group changes nobody else's place in the order.
        everyone = random_orders(problem.stream.numpy(), len(problem.counts_AC), orders=self.orders)
        place_of_row = np.full(len(problem.counts_AC), -1, dtype=np.int64)
        place_of_row[able.rows_E] = np.arange(len(able.rows_E))
        places = place_of_row[everyone]
        orders_OE = places[places >= 0].reshape(self.orders, len(able.rows_E))
        return best_by_size(able.counts_EC, able.score, orders_OE, max_size=min(max_size, len(able.rows_E)))
