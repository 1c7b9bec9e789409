"""Which part of the test set is a client's own: as much of each class as it has of that class's training samples."""

from __future__ import annotations

import numpy as np

from fedsweep.streams import Stream


def test_shares(test_labels: np.ndarray, label_counts_NC: np.ndarray, draws: Stream) -> tuple[np.ndarray, ...]:
    """Deal the test set out among the clients, class by class.

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
    dealt: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        members = generator.permutation(np.flatnonzero(test_labels == label))
        order = generator.permutation(num_clients)  # or rounding would favour the same clients in every class
        held = np.cumsum(label_counts_NC[order, label], dtype=np.int64)
        if not held[-1]:
            continue
        ends = (2 * held * len(members) + held[-1]) // (2 * held[-1])  # in whole numbers, halves up
        for client, own in zip(order.tolist(), np.split(members, ends[:-1]), strict=True):
            dealt[client].append(own)
    return tuple(np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64) for parts in dealt)
