"""Label counts of clients, and how far label distributions are from one another.

Distributions may be given as shares or as counts: each is divided by its sum first. Logarithms are natural, 0 ln 0 is
0, and nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsweep.errors import InvariantError


def label_counts(labels: NDArray[np.int64], parts: Sequence[NDArray[np.int64]], num_classes: int) -> NDArray[np.int64]:
    """How many samples of each class each client holds: ``[N, C]`` int64 for N clients and C classes.

    Args:
        labels: ``[S]``, each in ``0 .. num_classes - 1``.
        parts: Each client's sample indices; may overlap.
        num_classes: C.
    """
    sizes = [len(part) for part in parts]
    if not sum(sizes):
        return np.zeros((len(parts), num_classes), np.int64)
    clients = np.repeat(np.arange(len(parts)), sizes)
    cells = clients * num_classes + labels[np.concatenate(parts)]
    return np.bincount(cells, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)


def population(counts: ArrayLike) -> NDArray[np.float64]:
    """The class shares of all clients together, ``[C]``, from their counts ``[N, C]``; they sum to 1.

    Source: DynamicFL's p_Y; FedDHAD's P_m.
    """
    return _shares(np.asarray(counts).sum(axis=0))


def kl_divergence(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """Kullback-Leibler divergence ``sum_y p(y) ln(p(y) / q(y))`` over the last axis, in nats.

    Args:
        p: Shares or counts, ``[..., C]``.
        q: Likewise; the leading axes broadcast.

    Returns:
        ``[...]``, >= 0; infinite where p has a class that q lacks. A number (0-d) for two vectors.

    Raises:
        InvariantError: a distribution has a negative entry or no mass at all.

    Source: DynamicFL, D_KL(p_z || p_Y).
    """
    p_shares, q_shares = np.broadcast_arrays(_shares(p), _shares(q))
    # log(p) - log(q), not log(p / q): the quotient overflows where q is tiny.
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p_shares > 0, p_shares * (np.log(p_shares) - np.log(q_shares)), 0.0)
    # Rounding can leave equal distributions a hair below zero.
    divergence: NDArray[np.float64] = np.maximum(terms.sum(axis=-1), 0.0)
    return divergence


def js_divergence(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """Jensen-Shannon divergence over the last axis, in nats: the mean KL divergence to the two's average.

    Args:
        p: Shares or counts, ``[..., C]``.
        q: Likewise; the leading axes broadcast.

    Returns:
        ``[...]``, from 0 (equal) to ln 2 (no class in common). A number (0-d) for two vectors.

    Raises:
        InvariantError: a distribution has a negative entry or no mass at all.

    Source: FedDHAD, section on FedDH: JS_k of P_k and P_m.
    """
    p_shares, q_shares = _shares(p), _shares(q)
    middle = (p_shares + q_shares) / 2
    return (kl_divergence(p_shares, middle) + kl_divergence(q_shares, middle)) / 2


def _shares(values: ArrayLike) -> NDArray[np.float64]:
    weights = np.asarray(values, dtype=np.float64)
    totals = weights.sum(axis=-1, keepdims=True)
    if not ((weights >= 0).all() and (totals > 0).all()):
        raise InvariantError(
            "a label distribution must have no negative entry and a positive sum; a client without samples has none"
        )
    shares: NDArray[np.float64] = weights / totals
    return shares
