"""The arithmetic of partitions: drawing shares, cutting classes by them, and collecting each client's samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

_ALTERNATIONS = 1000
# At what is smaller a draw is its limit, all for one, already; divided by less, logarithms would be infinite.
SMALLEST_CONCENTRATION = 1e-290


def log_dirichlet(concentration: float | Floats, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Return logarithms of unnormalised draws from a Dirichlet: ``[columns]``, or one per row, ``[rows, columns]``.

    The concentration is every column's, or ``[columns]``.

    A gamma variable of shape a is one of shape a + 1 times U^(1/a). In logarithms that stays finite at any
    concentration, where the plain draw underflows to zeros.
    """
    concentration = np.maximum(concentration, SMALLEST_CONCENTRATION)
    return np.log(rng.standard_gamma(concentration + 1.0, shape)) - rng.standard_exponential(shape) / concentration


def doubly_stochastic(log_weights: Floats) -> Floats | None:
    """Return the matrix of row sums 1 and column sums rows / columns, by dividing by both sums in turn.

    Args:
        log_weights: ``[rows, columns]``, natural logarithms of positive weights.

    Returns:
        ``[rows, columns]``; None where a row underflows to zeros, so that a fresh draw is needed.

    Source: Sinkhorn and Knopp 1967; DynaFed's authors, up to 1000 alternations.
    """
    # The first division by the column sums is done in logarithms, where no column can vanish.
    matrix: Floats = np.exp(log_weights - log_weights.max(axis=0))
    if not matrix.any(axis=1).all():
        return None
    target = matrix.shape[0] / matrix.shape[1]
    for _ in range(_ALTERNATIONS):
        matrix /= matrix.sum(axis=0)
        row_sums = matrix.sum(axis=1, keepdims=True)
        if not (row_sums > 0).all():
            return None
        matrix /= row_sums
        column_sums = matrix.sum(axis=0)
        if not (column_sums > 0).all():
            return None
        if np.abs(column_sums - target).max() < 1e-9 * target:
            break
    return matrix


def cut(weights: Floats, size: int) -> Indices:
    """Cut ``size`` samples among clients: differences of floor(cumulative share x size), which sum to size.

    Args:
        weights: One per client, >= 0, with a positive sum.
        size: How many samples there are.
    """
    cumulative = weights.cumsum()
    counts: Indices = (cumulative / cumulative[-1] * size).astype(np.int64)
    counts[1:] -= counts[:-1]
    return counts


def owners_by_counts(labels: Indices, counts: Indices, rng: np.random.Generator | None) -> Indices:
    """Return each sample's client, ``[S]``, so that client n holds ``counts[c, n]`` samples of class c.

    Args:
        labels: ``[S]``.
        counts: ``[C, N]``; row c sums to the size of class c.
        rng: Shuffles each class first; None keeps the data set's order.
    """
    owners = np.empty(len(labels), np.int64)
    clients = np.arange(counts.shape[1])
    for label in np.flatnonzero(counts.sum(axis=1)):
        samples = np.flatnonzero(labels == label)
        if rng is not None:
            samples = rng.permutation(samples)
        owners[samples] = np.repeat(clients, counts[label])
    return owners


def parts_by_owner(owners: Indices, num_clients: int) -> list[Indices]:
    """Return each client's sample indices, ascending, from each sample's client ``[S]``; -1: nobody's."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(owners[order], np.arange(num_clients)))[1:]


def repaired(counts: Indices, min_samples: int) -> Indices:
    """Return counts ``[C, N]`` in which each client holds ``min_samples``: the largest gave to those too small.

    One sample at a time goes from the client that holds most, of the class of which it holds most, to the client that
    holds fewest. There must be ``min_samples`` per client in all.
    """
    counts = counts.copy()
    sizes = counts.sum(axis=0)
    while sizes.min() < min_samples:
        taker, giver = sizes.argmin(), sizes.argmax()
        label = counts[:, giver].argmax()
        counts[label, giver] -= 1
        counts[label, taker] += 1
        sizes[giver] -= 1
        sizes[taker] += 1
    return counts
