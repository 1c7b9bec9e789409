"""Label counts of clients, how far label distributions are from one another, and test sets that follow them.

Distributions may be given as shares or as counts: each is divided by its sum first. Logarithms are natural, 0 ln 0 is
0, and nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsweep.errors import InvariantError
from fedsweep.streams import Stream
from fedsweep.world.partitions.draws import parts_by_owner
from fedsweep.world.population import Split


def label_counts(labels: NDArray[np.int64], parts: Sequence[NDArray[np.int64]], num_classes: int) -> NDArray[np.int64]:
    """Count the samples of each class that each client holds: ``[N, C]`` int64 for N clients and C classes.

    Args:
        labels: ``[S]``, each in ``0 .. num_classes - 1``.
        parts: Each client's sample indices; may overlap.
        num_classes: C.
    """
    if not isinstance(parts, Split):
        # One by one: clients may all have the whole training set, which side by side would be it as many times.
        counts = [np.bincount(labels[part], minlength=num_classes) for part in parts]
        return np.array(counts, dtype=np.int64).reshape(len(parts), num_classes)
    clients = np.repeat(np.arange(len(parts)), parts.sizes)
    cells = clients * num_classes + labels[parts.flat]
    return np.bincount(cells, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)


def population(counts: ArrayLike) -> NDArray[np.float64]:
    """Return the class shares of all clients together, ``[C]``, from their counts ``[N, C]``; they sum to 1.

    Source: DynamicFL's p_Y; FedDHAD's P_m.
    """
    return _shares(np.asarray(counts).sum(axis=0))


def kl_divergence(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """Compute the Kullback-Leibler divergence ``sum_y p(y) ln(p(y) / q(y))`` over the last axis, in nats.

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
    """Compute the Jensen-Shannon divergence over the last axis, in nats: the mean KL divergence to the two's average.

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


def test_shares(test_labels: np.ndarray, label_counts_NC: np.ndarray, draws: Stream) -> tuple[np.ndarray, ...]:
    """Deal the test set out among the clients, class by class: each gets its own part.

    Nothing is dealt twice, and everything of a class that some client holds. A client gets of each class what its
    training samples entitle it to, to within one; of classes that it does not hold, none.

    Args:
        test_labels: [T].
        label_counts_NC: Training samples per client and class [N, C].
        draws: Decides which samples, and in favour of whom shares are rounded.

    Returns:
        Indices of each client's test samples, ascending; none where there are too few for everybody.
    """
    num_clients, num_classes = label_counts_NC.shape
    generator = draws.numpy()
    owners = np.full(len(test_labels), -1)
    for label in range(num_classes):
        members = generator.permutation(np.flatnonzero(test_labels == label))
        order = generator.permutation(num_clients)  # or rounding would favour the same clients in every class
        cumulative = np.cumsum(label_counts_NC[order, label], dtype=np.int64)
        if not cumulative[-1]:
            continue
        ends = (2 * cumulative * len(members) + cumulative[-1]) // (2 * cumulative[-1])  # in whole numbers, halves up
        owners[members] = np.repeat(order, np.diff(ends, prepend=0))
    return tuple(parts_by_owner(owners, num_clients))


def test_owners(
    parts: Sequence[NDArray[np.int64]], groups: NDArray[np.int64] | None, test_groups: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    """Tell whose each test sample is: that client's which holds the training samples of its group.

    Args:
        parts: Each client's training samples.
        groups: The training samples' natural clients [S], or None.
        test_groups: The test samples' [T], or None.

    Returns:
        Clients [T], -1 for a sample whose group nobody holds. None where the data do not say, nobody has a test sample,
        or one group lies with several clients, so that its test samples are no one's own.
    """
    if groups is None or test_groups is None:
        return None
    if len(parts) > 1 and not isinstance(parts, Split) and all(part is parts[0] for part in parts):
        return None  # each has all samples, which side by side would be these as many times
    sizes = parts.sizes if isinstance(parts, Split) else [len(part) for part in parts]
    trained = groups[parts.flat if isinstance(parts, Split) else np.concatenate(parts)]
    names, numbers = np.unique(np.concatenate([trained, test_groups]), return_inverse=True)
    trained, tested = np.split(numbers.reshape(-1), [len(trained)])
    clients = np.repeat(np.arange(len(parts)), sizes)
    owner_by_group = np.full(len(names), -1)
    owner_by_group[trained] = clients
    owners: NDArray[np.int64] = owner_by_group[tested]
    return owners if (owner_by_group[trained] == clients).all() and (owners >= 0).any() else None


def _shares(values: ArrayLike) -> NDArray[np.float64]:
    weights = np.asarray(values, dtype=np.float64)
    totals = weights.sum(axis=-1, keepdims=True)
    if not ((weights >= 0).all() and (totals > 0).all()):
        raise InvariantError(
            "a label distribution must have no negative entry and a positive sum; a client without samples has none"
        )
    shares: NDArray[np.float64] = weights / totals
    return shares
