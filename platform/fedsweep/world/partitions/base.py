"""Base of partitions, and the checks that all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsweep.errors import ConfigError, DataError, InvariantError
from fedsweep.parameters.ranges import Checked
from fedsweep.streams import Stream
from fedsweep.world.partitions.draws import Indices


@dataclass(frozen=True, kw_only=True)
class Partition(Checked, ABC):
    """A rule that splits S training samples among clients.

    Class attributes:
        needs_strata: It goes by classes, or what stands for them.

    Attributes:
        source: Who proposed it; for listings.
    """

    section: ClassVar[str] = "scenario.partition"
    needs_strata: ClassVar[bool] = False

    source: ClassVar[str] = ""
    # Clients are drawn one by one, when they are asked for; then they may share samples.
    draws_clients: ClassVar[bool] = False

    @abstractmethod
    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> Sequence[Indices]:
        """Return each client's sample indices.

        Args:
            labels: ``[S]``, each in ``0 .. num_classes - 1``.
            num_clients: How many clients there are, at least 1.
            stream: What is random comes from here.
            num_classes: C.
            writers: ``[S]``, each sample's natural client, where the data set has such.

        Returns:
            One ascending int64 array per client, none empty; together they hold each of ``0 .. S - 1`` exactly once.

        Raises:
            DataError: the samples cannot be split like this.
        """


def check_parts(parts: Sequence[Indices], *, num_samples: int, num_clients: int) -> None:
    """Check what a partition returned, a user's own in particular.

    Raises:
        InvariantError: there is not one array per client, an index is out of range, or a sample was given away twice.
    """
    is_list = hasattr(parts, "__len__") and not isinstance(parts, Mapping)
    answer = len(parts) if is_list else type(parts).__name__
    if answer != num_clients:
        raise InvariantError(f"a partition must return one index array per client ({num_clients}), not {answer}")
    # An empty list becomes an array of floats.
    arrays = [np.asarray(part, None if np.size(part) else np.int64) for part in parts]
    for array in arrays:
        if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1:
            is_odd = array.dtype == object  # a set, say
            what = type(array.item()).__name__ if is_odd and array.size == 1 else f"{array.dtype} {array.shape}"
            raise InvariantError(f"a partition must return one-dimensional integer arrays, not {what}")
    joined = np.concatenate([array.astype(np.int64) for array in arrays])
    if len(joined) and not 0 <= joined.min() <= joined.max() < num_samples:
        raise InvariantError(
            f"a partition's indices must lie in 0..{num_samples - 1}, but range from {joined.min()} to {joined.max()}"
        )
    if len(joined) and np.bincount(joined).max() > 1:
        raise InvariantError(f"a partition must not use a sample twice, but sample {np.bincount(joined).argmax()} is")


def check_enough(num_samples: int, num_clients: int, *, min_samples: int) -> None:
    """Check that each client can get ``min_samples``.

    Raises:
        ConfigError: there is no client.
        DataError: there are too few samples.
    """
    if num_clients < 1:
        raise ConfigError(f"scenario.clients must be at least 1, but is {num_clients}")
    if num_clients * min_samples > num_samples:
        raise DataError(
            f"{num_clients} clients with at least {min_samples} samples each need {num_clients * min_samples} training "
            f"samples, but there are {num_samples}; lower scenario.clients"
            + (" or scenario.partition.min_samples" if min_samples > 1 else "")
        )


def without_empty(parts: list[Indices], way_out: str) -> list[Indices]:
    """Return the parts, none of which is empty.

    Raises:
        DataError: one is; the message ends in ``way_out``.
    """
    empty = [client for client, part in enumerate(parts) if not len(part)]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(parts)} clients would hold no sample, the first is client {empty[0]}; {way_out}"
        )
    return parts
