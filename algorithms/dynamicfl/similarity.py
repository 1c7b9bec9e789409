"""Choosing the group without label counts: by how well its members' mean gradient stands for everybody's.

For clients that keep their labels to themselves. What they send instead, once, is a short sketch of their gradient at
the initial model: far less than what their first model update tells the server in a federation without secure
aggregation.

Shape letters: A active clients, D features of a sketch, V values of an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from fedsweep import InvariantError, Stream
from fedsweep.components import PASSES_OF_A_STEP, Count, LocalClient, Payload, Probe

from ..feddhad.degrees import loss_gradient
from .chooser import Floats, GroupChooser, GroupProblem, Orders, sizes_of
from .dynacomm import best_by_size, random_orders

_PROBE = "gradient_sketch"


def sketch(update_V: Floats, *, features: int, stream: Stream) -> Floats:
    """Return a short linear image of an update, ``[features]``, that keeps inner products and distances in expectation.

    Args:
        update_V: A client's model minus the anchor, flat; or its gradient at the anchor.
        features: Length of the sketch, at least 1; squared distances have a relative error of about
            ``sqrt(2 / features)``.
        stream: Places and signs; the same for all clients, so that the mean of sketches is the sketch of the mean.

    Source: count sketch (Charikar, Chen and Farach-Colton, 2002): each value is added to one place with a sign.
    """
    generator = stream.numpy()
    places_V = generator.integers(0, features, size=len(update_V))
    signs_V = generator.integers(0, 2, size=len(update_V)) * 2.0 - 1.0
    return np.bincount(places_V, weights=signs_V * update_V, minlength=features).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class GradientSketch(Probe):
    """The sketch of the client's gradient, over all its samples and without augmentation, at the model it was sent.

    Sends ``sketch``: :attr:`num_features` float32 values.

    Attributes:
        num_features: Length of the sketch, at least 1.
        shared: Random numbers that all clients share.
    """

    when: ClassVar[Literal["start"]] = "start"
    name: str = _PROBE
    num_features: int
    shared: Stream

    @property
    def passes(self) -> float:
        return PASSES_OF_A_STEP

    def measure(self, client: LocalClient) -> Payload:
        gradient = loss_gradient(client.forward_with, client.params, client.inputs, targets=client.targets)
        # In double: a count sketch sums many values of either sign into each of its few places.
        values = sketch(gradient.double().cpu().numpy(), features=self.num_features, stream=self.shared)
        return {"sketch": torch.from_numpy(values).float()}


@dataclass(frozen=True, kw_only=True)
class SimilarityGroup(GroupChooser):
    """The group whose mean gradient sketch is nearest to the population's; no label counts are sent.

    Every client sends one sketch, before round 1: its gradient at the initial model, where all gradients can be
    compared, in ``sketch_values`` values.

    Attributes:
        orders: Random orders of the dynamic programme, at least 1.
        sketch_values: D, values that each client sends, at least 1. Squared distances are kept within about
            ``sqrt(2 / D)`` of themselves.

    Source: DynamicFL's remark that similarity may stand in for label counts where labels are private.
    Reading: The paper leaves the similarity open. Label counts serve it because a group with the population's labels
        has nearly the population's gradient, so we compare the gradients themselves: the squared distance of the
        group's size-weighted mean sketch to the population's takes the place of KL in the programme. From one anchor a
        group that equals the population has distance 0, as with KL. The distance is divided by the clients' mean
        squared distance, so that a tie means the same at any scale of the updates.
    Reading: The paper says neither what is sent nor when. Gradients at one common model differ by data alone, those
        that clients take later differ by the model, too; so they are asked for once, at the initial one.
    """

    needs_classes: ClassVar[bool] = True

    orders: Orders = 10
    sketch_values: Count = 256

    def reads_labels(self) -> bool:
        return False

    def setup(self, stream: Stream) -> tuple[Probe, ...]:
        return (GradientSketch(num_features=self.sketch_values, shared=stream),)

    def features(self, answer: Payload) -> Floats:
        values: Floats = answer[f"{_PROBE}/sketch"].double().numpy()
        return values

    def choose(self, problem: GroupProblem, *, size: int | None = None) -> tuple[int, ...]:
        if problem.features_AD is None or problem.population_D is None or problem.num_samples_A is None:
            raise InvariantError(
                "a group by similarity needs the clients' sketches, but got a problem without features"
            )
        rows = np.flatnonzero(np.asarray(problem.eligible_A, dtype=bool))
        sizes = sizes_of(problem, len(rows), size)
        weights_A1 = np.asarray(problem.num_samples_A, dtype=np.float64)[rows, None]
        offsets_AD = problem.features_AD[rows] - problem.population_D
        spread = float((offsets_AD**2).sum(axis=1).mean()) if len(rows) else 0.0
        # A mean of offsets is the offset of the mean: sums of weighted offsets and of weights are all that is needed.
        sums_AW = np.hstack([weights_A1 * offsets_AD, weights_A1])

        def distance(sums: Floats, /) -> Floats:
            means = sums[..., :-1] / sums[..., -1:]
            squares: Floats = (means**2).sum(axis=-1) / (spread or 1.0)
            return squares

        orders_OA = random_orders(problem.stream.numpy(), len(rows), orders=self.orders)
        table = best_by_size(sums_AW, distance, orders_OA, max_size=max(sizes, default=0))
        cell = table.best(sizes)
        return tuple(sorted(int(rows[place]) for place in table.members(*cell))) if cell else ()
