"""The partitions that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsweep.errors import ConfigError, DataError
from fedsweep.parameters.ranges import Count, Positive
from fedsweep.streams import Stream
from fedsweep.world.partitions.base import Partition, check_enough, without_empty
from fedsweep.world.partitions.draws import (
    Floats,
    Indices,
    cut,
    doubly_stochastic,
    log_dirichlet,
    owners_by_counts,
    parts_by_owner,
    repaired,
)

_MAX_BALANCED_DRAWS = 100
# After this many draws that all left more than this many clients short, a thousand more would not help.
_HOPELESS_DRAWS = 20
_HOPELESS_SHORT = 50


@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Equal parts of a random order; sizes differ by at most one sample."""

    source: ClassVar[str] = "McMahan et al. 2017"

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        check_enough(len(labels), num_clients, min_samples=1)
        owners = np.empty(len(labels), np.int64)
        owners[stream.numpy().permutation(len(labels))] = np.arange(len(labels)) % num_clients
        return parts_by_owner(owners, num_clients)


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """At most K classes per client, in shards of equal size.

    Each class, in data-set order, is cut into equal contiguous shards (left-over samples go one each to the first);
    the list of class labels, each repeated as often as the class has shards, is shuffled and dealt K per client; for
    each label the client takes a random unused shard. A client may be dealt the same class twice.

    Reading: where ``num_clients * K`` is no multiple of the number of classes, random classes have one shard more
    than the others (the paper's floor would leave clients short). Classes without samples have no shards.

    Attributes:
        classes_per_client: K, from 1 to the number of classes.
    """

    needs_strata: ClassVar[bool] = True
    source: ClassVar[str] = "DynamicFL's authors, after McMahan et al. 2017"
    classes_per_client: Count = 2

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        check_enough(len(labels), num_clients, min_samples=1)
        if self.classes_per_client > num_classes:
            raise ConfigError(
                "scenario.partition.classes_per_client must not exceed the number of classes, but is "
                f"{self.classes_per_client}, and the data set has {num_classes}"
            )
        present = np.flatnonzero(np.bincount(labels, minlength=num_classes))
        num_shards = num_clients * self.classes_per_client
        if num_shards < len(present):
            raise DataError(
                f"clients * classes_per_client >= classes must hold to use all data, but {num_clients} * "
                f"{self.classes_per_client} < {len(present)}; raise scenario.clients or "
                "scenario.partition.classes_per_client"
            )
        rng = stream.numpy()
        shards_by_class = np.full(len(present), num_shards // len(present))
        shards_by_class[rng.permutation(len(present))[: num_shards % len(present)]] += 1
        dealt = rng.permutation(np.repeat(np.arange(len(present)), shards_by_class))
        owners = np.empty(len(labels), np.int64)
        for position, label in enumerate(present):
            # The label's places in the dealt list, in random order: shard i goes to the client of place i.
            takers = rng.permutation(np.flatnonzero(dealt == position)) // self.classes_per_client
            samples = np.flatnonzero(labels == label)
            sizes = len(samples) // len(takers) + (np.arange(len(takers)) < len(samples) % len(takers))
            owners[samples] = np.repeat(takers, sizes)
        return without_empty(parts_by_owner(owners, num_clients), "lower scenario.clients")


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Label skew with unequal sizes: each class is split by its own draw from a symmetric Dirichlet distribution.

    Class after class, a client that already holds its even share S / N gets nothing more, and the others' proportions
    are scaled up accordingly; the class, in random order, is cut at floor(cumulative share x class size). The whole
    draw is repeated until every client holds ``min_samples``, or until that is plainly hopeless.

    Source: Li et al. 2022 (NIID-Bench); FedDHAD, section 6 (concentration 0.5); DynamicFL (0.01 to 0.3).

    Attributes:
        dirichlet_alpha: Concentration, > 0; small means few classes per client.
        min_samples: Fewest samples of a client, at least 1. The papers have 10.
        max_draws: How often to draw before giving up, at least 1.
        repair: Instead of giving up, take the best draw and move samples from the largest clients to those too small.
    """

    needs_strata: ClassVar[bool] = True
    source: ClassVar[str] = "Li et al. 2022 (NIID-Bench); FedDHAD, DynamicFL"
    dirichlet_alpha: Positive
    min_samples: Count = 5
    max_draws: Count = 1000
    repair: bool = False

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        check_enough(len(labels), num_clients, min_samples=self.min_samples)
        rng = stream.numpy()
        class_sizes = np.bincount(labels, minlength=num_classes)
        counts = self._draw(class_sizes, num_clients, rng)
        return parts_by_owner(owners_by_counts(labels, counts, rng), num_clients)

    def _draw(self, class_sizes: Indices, num_clients: int, rng: np.random.Generator) -> Indices:
        """Draw counts ``[C, N]`` with at least ``min_samples`` for each client."""
        best, fewest_short = np.empty(0, np.int64), num_clients + 1
        draws = 0
        while draws < self.max_draws and not (draws == _HOPELESS_DRAWS and fewest_short > _HOPELESS_SHORT):
            counts = self._draw_once(class_sizes, num_clients, rng)
            draws += 1
            short = int((counts.sum(axis=0) < self.min_samples).sum())
            if short == 0:
                return counts
            if short < fewest_short:
                best, fewest_short = counts, short
        if self.repair:
            return repaired(best, self.min_samples)
        raise DataError(
            f"none of {draws} draws gave each of {num_clients} clients min_samples={self.min_samples} samples (the "
            f"best left {fewest_short} with fewer); lower scenario.partition.min_samples or scenario.clients, raise "
            f"scenario.partition.dirichlet_alpha={self.dirichlet_alpha:g}, or set scenario.partition.repair=true"
        )

    def _draw_once(self, class_sizes: Indices, num_clients: int, rng: np.random.Generator) -> Indices:
        log_weights = log_dirichlet(self.dirichlet_alpha, (len(class_sizes), num_clients), rng)
        even_share = class_sizes.sum() / num_clients
        counts = np.zeros((len(class_sizes), num_clients), np.int64)
        client_sizes = np.zeros(num_clients, np.int64)
        for label in np.flatnonzero(class_sizes):
            # Zeroing and renormalising the shares, in logarithms: what remains never underflows to nothing.
            weights = log_weights[label]
            weights[client_sizes >= even_share] = -np.inf
            counts[label] = cut(np.exp(weights - weights.max()), int(class_sizes[label]))
            client_sizes += counts[label]
        return counts


@dataclass(frozen=True, kw_only=True)
class Quantity(Dirichlet):
    """Quantity skew: sizes by one draw from a symmetric Dirichlet distribution, classes at random.

    Attributes:
        dirichlet_alpha: Concentration, > 0; small means few clients hold nearly everything.
        min_samples: Fewest samples of a client, at least 1.
        max_draws: How often to draw before giving up, at least 1.
        repair: Instead of giving up, take the best draw and move samples from the largest clients to those too small.
    """

    needs_strata: ClassVar[bool] = False
    source: ClassVar[str] = "Li et al. 2022 (NIID-Bench), quantity skew"

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        # To the draw all samples are of one class.
        return super().split(np.zeros_like(labels), num_clients, stream, num_classes=1)


@dataclass(frozen=True, kw_only=True)
class BalancedDirichlet(Partition):
    """Label skew with equal sizes: the matrix of Dirichlet draws (classes x clients) is made doubly stochastic.

    Columns and rows are divided by their sums in turn, up to 1000 times; each class, in data-set order, is cut at
    floor(cumulative share x class size). Sizes are equal where the classes are.

    Attributes:
        dirichlet_alpha: Concentration, > 0; small means few classes per client.
    """

    needs_strata: ClassVar[bool] = True
    source: ClassVar[str] = "DynaFed's authors"
    dirichlet_alpha: Positive

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        check_enough(len(labels), num_clients, min_samples=1)
        class_sizes = np.bincount(labels, minlength=num_classes)
        present = np.flatnonzero(class_sizes)
        counts = np.zeros((num_classes, num_clients), np.int64)
        shares = self._draw((len(present), num_clients), stream.numpy())
        for row, label in enumerate(present):
            counts[label] = cut(shares[row], int(class_sizes[label]))
        parts = parts_by_owner(owners_by_counts(labels, counts, None), num_clients)
        return without_empty(parts, "lower scenario.clients or raise scenario.partition.dirichlet_alpha")

    def _draw(self, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
        for _ in range(_MAX_BALANCED_DRAWS):
            shares = doubly_stochastic(log_dirichlet(self.dirichlet_alpha, shape, rng))
            if shares is not None:
                return shares
        raise DataError(
            f"none of {_MAX_BALANCED_DRAWS} draws could be balanced over {shape[1]} clients; raise "
            f"scenario.partition.dirichlet_alpha={self.dirichlet_alpha:g}"
        )


@dataclass(frozen=True, kw_only=True)
class Writer(Partition):
    """The data set's own clients: whole writers, dealt to the clients in random order, as evenly as they go."""

    source: ClassVar[str] = "Caldas et al. 2018 (LEAF)"

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        if writers is None:
            raise DataError("partition 'writer' needs a data set that names each sample's writer, such as femnist")
        check_enough(len(labels), num_clients, min_samples=1)
        names, numbers = np.unique(writers, return_inverse=True)
        if num_clients > len(names):
            raise DataError(
                f"partition 'writer' needs at least one writer per client, but scenario.clients={num_clients} and the "
                f"data set has {len(names)} writers; lower scenario.clients"
            )
        client_by_writer = np.empty(len(names), np.int64)
        client_by_writer[stream.numpy().permutation(len(names))] = np.arange(len(names)) % num_clients
        return parts_by_owner(client_by_writer[numbers.reshape(-1)], num_clients)
