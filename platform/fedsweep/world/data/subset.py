"""A part of a data set: fewer samples, or those of fewer natural clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import ConfigError
from fedsweep.streams import Stream, stream
from fedsweep.world.data.record import Dataset, Samples

Order = Literal["random", "first", "last"]


def subset(
    dataset: Dataset,
    *,
    seed: int,
    share: float | None = None,
    counts: Mapping[str, int | None],
    groups: int | None = None,
    order: Order = "random",
) -> Dataset:
    """Return some of a data set's samples, in their order.

    Groups are chosen first, of the training set; the test keeps those of the same groups, where it says whose its
    samples are. Of what is left come so many samples.

    Args:
        dataset: All of it.
        seed: The run's: what is random follows from it alone.
        share: Of the samples of either part, above 0 to 1; rounded, at least one.
        counts: Of the samples of ``train`` and ``test``, in place of a share; None: all.
        groups: Natural clients: writers, speakers.
        order: Which ones.

    Raises:
        ConfigError: There are not as many, or no groups.
    """
    draws = {part: stream(seed, f"subset of {part}") for part in ("groups", "train", "test")}
    parts = {"train": dataset.train, "test": dataset.test}
    if groups is not None:
        if dataset.train.groups is None:
            raise ConfigError(
                f"scenario.subset.groups={groups}, but data set {dataset.name!r} does not say whose its samples are;"
                " use share, train or test"
            )
        names = np.unique(dataset.train.groups)
        chosen = names[_chosen(len(names), groups, "groups", order, draws["groups"])]
        parts = {part: _of_groups(samples, chosen, f"{part} samples") for part, samples in parts.items()}
    taken = {part: _part(parts[part], counts.get(part), share, part, order, draws[part]) for part in parts}
    return replace(dataset, train=taken["train"], test=taken["test"])


def _of_groups(samples: Samples, chosen: NDArray[np.int64], what: str) -> Samples:
    if samples.groups is None:
        return samples
    index = np.flatnonzero(np.isin(samples.groups, chosen))
    if not len(index):
        raise ConfigError(f"scenario.subset.groups: of these {len(chosen)} there are no {what}; choose more")
    return samples.taken(index)


def _part(samples: Samples, count: int | None, share: float | None, part: str, order: Order, draws: Stream) -> Samples:
    wanted = max(1, round(share * len(samples))) if share is not None else count
    if wanted is None:
        return samples
    return samples.taken(_chosen(len(samples), wanted, f"{part} samples", order, draws))


def _chosen(length: int, wanted: int, what: str, order: Order, draws: Stream) -> NDArray[np.int64]:
    """Return the places of some of so many, ascending."""
    if wanted > length:
        raise ConfigError(f"scenario.subset asks for {wanted} {what}, but there are {length}")
    if order != "random":
        return np.arange(wanted) if order == "first" else np.arange(length - wanted, length)
    return np.sort(draws.numpy().permutation(length)[:wanted])
