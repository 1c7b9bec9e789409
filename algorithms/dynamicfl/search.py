"""Choosers that search all groups, or search by a genetic algorithm: what DynamicFL compares DynaComm with.

Shape letters: B groups of a batch, C classes, E usable clients, I individuals.
"""

from __future__ import annotations

import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations, islice
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, MultipleOf

from fedsweep import ConfigError, ResourceError
from fedsweep.components import Count, Share

from .chooser import Floats, GroupChooser, GroupProblem, Orders, sizes_of
from .dynacomm import random_orders
from .scores import TIE, Rows, Usable, usable

_BATCH = 1 << 14


@dataclass(frozen=True, kw_only=True)
class ExhaustiveGroup(GroupChooser):
    """The admissible group of least divergence, by looking at every one.

    Attributes:
        max_subsets: Limit on the number of groups; more is an error. Four million take a few seconds and cover all
            groups among 21 clients.

    Source: DynamicFL, section 5 (brute force). Ties go to the smaller group, then to the lower rows.
    """

    max_subsets: Count = 4_000_000

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        """Return the best group of the sizes admitted.

        Raises:
            ConfigError: There are more than ``max_subsets`` groups, or no group has this size.
        """
        able = usable(problem)
        num_clients = len(able.rows_E)
        sizes = sizes_of(problem, num_clients, size)
        num_subsets = sum(math.comb(num_clients, size) for size in sizes)
        if num_subsets > self.max_subsets:
            raise ConfigError(
                f"an exhaustive search looks at no more than max_subsets={self.max_subsets} groups, but {num_clients}"
                f" clients have {num_subsets} of the sizes admitted; choose by dynacomm or exact, or admit fewer"
            )
        best, chosen = math.inf, np.zeros(0, dtype=np.int64)
        for groups in chain.from_iterable(_batches(num_clients, size) for size in sizes):
            members_BE = np.zeros((len(groups), num_clients))
            np.put_along_axis(members_BE, groups, 1.0, axis=1)
            scores_B = able.score(members_BE @ able.counts_EC)
            # The first within rounding of the least, so that equal groups come in their order.
            place = int((scores_B <= scores_B.min() + TIE).argmax())
            if scores_B[place] < best - TIE:
                best, chosen = float(scores_B[place]), groups[place]
        return able.group(chosen)


def _batches(num_clients: int, size: int) -> Iterator[Rows]:
    """Yield all sets of a size in lexicographic order, in arrays ``[up to 16384, size]``."""
    places = chain.from_iterable(combinations(range(num_clients), size))
    while len(batch := np.fromiter(islice(places, _BATCH * size), dtype=np.int64)):
        yield batch.reshape(-1, size)


@dataclass(frozen=True, kw_only=True)
class GeneticGroup(GroupChooser):
    """scikit-opt's genetic algorithm, one 0/1 variable per eligible client.

    Attributes:
        orders: Random orders of the clients; one run each, the best is kept.
        individuals: Population, an even number.
        generations: At least 1.
        mutation: Probability that a variable flips, 0..1. The paper prints 0.01, its program has the library's 0.001.

    Source: DynamicFL, section 5 (comparators); library class ``sko.GA.GA``, all else at its defaults.
    Reading: A group of a given size is the paper's use, with an equality constraint, which is a penalty in the library.
        In a round the size is free, so the constraints are at least one member and at most ``max_size``; without the
        first the empty set, which scores 0, would always win. The library may end outside its constraints (a small
        group among many clients); then members are taken out or in, one at a time, each time the one that leaves the
        least divergence.
    """

    orders: Orders = 10
    individuals: Annotated[int, Ge(2), MultipleOf(2)] = 50
    generations: Count = 200
    mutation: Share = 0.001

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        """Return the best group of all runs.

        Raises:
            ConfigError: No group has this size.
            ResourceError: scikit-opt is not installed.
        """
        able = usable(problem)
        sizes = sizes_of(problem, len(able.rows_E), size)
        if not sizes:
            return ()
        algorithm = _genetic_algorithm()
        best, chosen = math.inf, np.zeros(0, dtype=np.int64)
        for run, order_E in enumerate(random_orders(problem.stream.numpy(), len(able.rows_E), orders=self.orders)):
            seed = problem.stream.child("genetic", run).seed(32)
            members = order_E[self._run(algorithm, able, able.counts_EC[order_E], sizes, seed)]
            members = _fit(able, members, sizes)
            score = float(able.score(able.counts_EC[members].sum(axis=0)))
            if score < best - TIE:
                best, chosen = score, members
        return able.group(chosen)

    def _run(self, algorithm: Callable[..., Any], able: Usable, counts_EC: Floats, sizes: range, seed: int) -> Rows:
        """Return places of the best individual's members in ``counts_EC``."""
        low, high = sizes[0], sizes[-1]

        def divergence(individuals_IE: Floats) -> Floats:
            filled = individuals_IE.any(axis=1)
            scores_I = np.zeros(len(individuals_IE))
            scores_I[filled] = able.score(individuals_IE[filled] @ counts_EC)
            return scores_I

        # What scikit-opt's set_run_mode does: all individuals in one call.
        divergence.__dict__["mode"] = "vectorization"

        def members_amiss(single_E: Floats) -> float:
            size = float(single_E.sum())
            return low - size if low == high else max(low - size, size - high)

        constraint = "constraint_eq" if low == high else "constraint_ueq"
        with _global_seed(seed):
            best_E, _ = algorithm(
                func=divergence,
                n_dim=len(counts_EC),
                size_pop=self.individuals,
                max_iter=self.generations,
                prob_mut=self.mutation,
                lb=0,
                ub=1,
                precision=1,
                **{constraint: (members_amiss,)},
            ).run()
        return np.flatnonzero(best_E)


def _fit(able: Usable, members: Rows, sizes: range) -> Rows:
    """Return the members, less or more some, so that their number is one of the sizes."""
    inside = [int(place) for place in members]
    while len(inside) not in sizes:
        sum_C = able.counts_EC[inside].sum(axis=0)
        too_many = len(inside) > sizes[-1]
        moves = inside if too_many else [place for place in range(len(able.rows_E)) if place not in inside]
        sums_MC = sum_C - able.counts_EC[moves] if too_many else sum_C + able.counts_EC[moves]
        moved = moves[int(able.score(sums_MC).argmin())]
        inside = [place for place in inside if place != moved] if too_many else [*inside, moved]
    return np.asarray(sorted(inside), dtype=np.int64)


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which scikit-opt draws from, and put it back afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


def _genetic_algorithm() -> Callable[..., Any]:
    """Import scikit-opt's GA.

    Raises:
        ResourceError: It is not installed.
    """
    # Importing it sets the process's start method for good, and fails where one is set already.
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        with warnings.catch_warnings():
            # Its docstrings have escapes that Python warns of.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            from sko.GA import GA
    except ModuleNotFoundError as error:
        if error.name != "sko":
            raise
        raise ResourceError(
            "the genetic algorithm needs scikit-opt, which is not installed; pip install 'fedsweep[genetic]'"
        ) from error
    finally:
        multiprocessing.set_start_method(method, force=True)
    algorithm: Callable[..., Any] = GA
    return algorithm
