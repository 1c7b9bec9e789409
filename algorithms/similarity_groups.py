"""Choosing the group without label counts: by how well its members' mean update stands for everybody's.

For clients that keep their labels to themselves. What they send instead is a short sketch of their model update, which
the server gets to see anyway in a federation without secure aggregation.

Shape letters: A active clients, D features of a sketch, V values of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsweep.errors import ConfigError
from fedsweep.streams import Stream

from .dynacomm import best_by_size, random_orders
from .group_scores import Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class SketchProblem:
    """One choice of a group by sketches.

    Attributes:
        sketches_AD: The active clients' sketches, all made from one anchor with one stream.
        num_samples_A: Their numbers of training samples, at least 1.
        population_D: The sketch to come near to: the size-weighted mean of all clients', or of those heard so far.
        eligible_A: Who can afford the high frequency, bool.
        max_size: Greatest size of the group, 0..A.
        stream: Random numbers of this choice.
    """

    sketches_AD: Floats
    num_samples_A: np.ndarray
    population_D: Floats
    eligible_A: np.ndarray
    max_size: int
    stream: Stream


def sketch(update_V: Floats, *, features: int, stream: Stream) -> Floats:
    """A short linear image of an update, ``[features]``, that keeps inner products and distances in expectation.

    Args:
        update_V: A client's model minus the anchor, flat; or its gradient at the anchor.
        features: Length of the sketch; squared distances have a relative error of about ``sqrt(2 / features)``.
        stream: Places and signs; the same for all clients, so that the mean of sketches is the sketch of the mean.

    Raises:
        ConfigError: ``features`` is below 1.

    Source: count sketch (Charikar, Chen and Farach-Colton, 2002): each value is added to one place with a sign.
    """
    if features < 1:
        raise ConfigError(f"a sketch must have at least 1 feature, but got {features}")
    generator = stream.numpy()
    places_V = generator.integers(0, features, size=len(update_V))
    signs_V = generator.integers(0, 2, size=len(update_V)) * 2.0 - 1.0
    return np.bincount(places_V, weights=signs_V * update_V, minlength=features).astype(np.float64)


def choose_by_sketches(problem: SketchProblem, *, orders: int = 10) -> tuple[int, ...]:
    """Rows of the eligible clients, at most ``max_size``, whose mean sketch is nearest to the population's; ascending.

    Args:
        problem: The clients and the budgets.
        orders: Random orders of the dynamic programme, at least 1.

    Source: DynamicFL's remark that similarity may stand in for label counts where labels are private.
    Reading: The paper leaves the similarity open. Label counts serve it because a group with the population's labels
        has nearly the population's gradient, so we compare the gradients themselves: the squared distance of the
        group's size-weighted mean sketch to the population's takes the place of KL in the programme. From one anchor a
        group that equals the population has distance 0, as with KL. The distance is divided by the clients' mean
        squared distance, so that a tie means the same at any scale of the updates.
    """
    rows = np.flatnonzero(np.asarray(problem.eligible_A, dtype=bool))
    weights_A1 = np.asarray(problem.num_samples_A, dtype=np.float64)[rows, None]
    offsets_AD = problem.sketches_AD[rows] - problem.population_D
    spread = float((offsets_AD**2).sum(axis=1).mean()) if len(rows) else 0.0
    # A mean of offsets is the offset of the mean, so sums of weighted offsets and of weights are all that is needed.
    sums_AW = np.hstack([weights_A1 * offsets_AD, weights_A1])

    def distance(sums: Floats, /) -> Floats:
        means = sums[..., :-1] / sums[..., -1:]
        squares: Floats = (means**2).sum(axis=-1) / (spread or 1.0)
        return squares

    orders_OA = random_orders(problem.stream.numpy(), len(rows), orders=orders)
    largest = min(problem.max_size, len(rows))
    table = best_by_size(sums_AW, distance, orders_OA, max_size=largest)
    cell = table.best(range(1, largest + 1))
    return tuple(sorted(int(rows[place]) for place in table.members(*cell))) if cell else ()
