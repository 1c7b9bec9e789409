"""Non-IID degrees of clients, the weights that follow from them, and how the global loss changes with these.

The server has no data: the loss's gradient is put together from the clients' moves, asked of them, or taken on proxy
data. FedJS, where degrees are not learned.

Shape letters: C classes, M attendees, N federation, P trained parameters of the full model, V all values of a model's
vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep import ConfigError
from fedsweep.components import (
    PASSES_OF_A_STEP,
    ClientUpdate,
    LocalClient,
    ParamTree,
    Payload,
    Positive,
    Probe,
    ServerContext,
    State,
    SyncContext,
    Weighting,
    coverage_mean,
    js_divergence,
    population,
    taken,
)

from ..parts.server_updates import in_whole

# Samples per forward pass where a gradient over many samples is summed up.
_CHUNK = 256
# Equal shares' divergence may be so large, by rounding.
_ROUNDING = 1e-12

Forward = Callable[[ParamTree, Tensor], Tensor]


def degrees(v: Tensor, b: Tensor, js: Tensor, *, floor: float) -> tuple[Tensor, Tensor]:
    """Return D = max(v JS + b, floor), and where the floor is not active (there D follows v and b); shapes as given."""
    raw = v * js + b
    return raw.clamp_min(floor), raw > floor


def degree_weights(num_samples_M: Tensor, degrees_M: Tensor) -> Tensor:
    """Return ``q_k = (n_k / D_k) / sum_j n_j / D_j`` in float64 [M]; with equal degrees the bits of n_k / sum_j n_j.

    Args:
        num_samples_M: n, above 0.
        degrees_M: D, above 0.
    """
    # Weights do not depend on the degrees' scale; relative to the largest, equal ones are exactly 1.
    counts = num_samples_M.double() / (degrees_M / degrees_M.max())
    return counts / counts.sum()


def divergences(counts_NC: np.ndarray) -> Tensor:
    """Return JS_k [N] of each client's labels from the population's, in nats: 0 .. ln 2.

    Args:
        counts_NC: Samples per client and class.

    Source: FedDHAD, Eq. of JS_k; logarithms are natural, 0 ln 0 = 0.
    """
    return torch.from_numpy(np.asarray(js_divergence(counts_NC, population(counts_NC)), dtype=np.float64).copy())


def label_counts_of(context: ServerContext) -> np.ndarray:
    """Return samples per client and class [N, C]."""
    return np.stack([np.asarray(profile.label_counts, dtype=np.float64) for profile in context.profiles])


def note_of_equals(context: ServerContext, rest: str) -> tuple[str, ...]:
    """Warn where no client's labels are far from the population's, as of samples with neither classes nor strata.

    Args:
        context: The world.
        rest: What weights go by then.
    """
    if divergences(label_counts_of(context)).max() > _ROUNDING:
        return ()
    return (f"no client's label shares differ from the population's, or samples have none: weights go by {rest}",)


def samples_of(updates: Sequence[ClientUpdate]) -> Tensor:
    """Return the attendees' numbers of samples in float64 [M]."""
    return torch.tensor([u.num_samples for u in updates], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class JensenShannon(Weighting):
    """Samples over the Jensen-Shannon divergence of the client's labels: FedJS, FedDH without learning.

    Attributes:
        floor: Smallest divergence that counts.

    Source: FedDHAD, the static comparator. Reading: the paper has no floor, but equal distributions give a
    degree of 0.
    """

    knows_clients: ClassVar[bool] = True

    floor: Positive = 1e-3

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",)

    def init(self, context: ServerContext) -> State:
        return {"js": divergences(label_counts_of(context))}

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        return note_of_equals(context, "sizes alone")

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        js = state["js"][[u.client for u in updates]]
        degrees_M, _ = degrees(torch.ones_like(js), torch.zeros_like(js), js, floor=self.floor)
        return degree_weights(samples_of(updates), degrees_M), state


# -- gradients ----------------------------------------------------------------------------------------------------


def loss_gradient(forward: Forward, params: Mapping[str, Tensor], inputs: Tensor, *, targets: Tensor) -> Tensor:
    """Return the gradient [P] of the mean cross-entropy, parameters one after the other; unused ones have 0.

    Args:
        forward: ``forward(params, inputs)`` gives the logits.
        params: The parameters.
        inputs: At least one sample [S, ...].
        targets: Their labels [S].
    """
    own = {name: value.detach().requires_grad_() for name, value in params.items()}
    total: list[Tensor] = []
    for start in range(0, len(targets), _CHUNK):
        part = slice(start, start + _CHUNK)
        # Not the mean of the parts' means, of which the last may have fewer samples.
        loss = F.cross_entropy(forward(own, taken(inputs, part)), targets[part], reduction="sum") / len(targets)
        pieces = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
        total = [a + b for a, b in zip(total, pieces, strict=True)] if total else list(pieces)
    return torch.cat([piece.reshape(-1) for piece in total])


def refuse_without_classes(context: ServerContext, setting: str) -> None:
    """Refuse a world in which :func:`loss_gradient` is not the loss's.

    Args:
        context: The world.
        setting: The parameter that asks for that gradient, with its value.

    Raises:
        ConfigError: A sample's target is not its class.
    """
    if not context.has_classes:
        raise ConfigError(
            f"method.{setting} takes gradients of the cross-entropy of classes, but samples of scenario.task have"
            " none; choose another value"
        )


@dataclass(frozen=True, kw_only=True)
class GradientAtAnchor(Probe):
    """The gradient of the client's loss, over all its samples, at the model that it was sent.

    Sends ``gradient``: one value per parameter of its sub-model. Taken in evaluation mode, without unit scales.
    """

    when: ClassVar[Literal["start"]] = "start"
    name: str = "gradient_at_anchor"

    @property
    def passes(self) -> float:
        return PASSES_OF_A_STEP

    def measure(self, client: LocalClient) -> Payload:
        return {"gradient": loss_gradient(client.forward_with, client.params, client.inputs, targets=client.targets)}


def pulls(updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
    """Return the aggregate's move towards each client as its unnormalised weight grows: [M, P].

    ``pull[k, e] = q_k / (sum of q_j over the holders of e) * (w_ke - w_e)``, 0 where client k does not hold e, with
    w the coverage mean; so ``dw / d ln a_k = pull_k`` for weights ``q_k = a_k / sum_j a_j``.

    Args:
        updates: The attendees', with vectors.
        weights: q [M].
        sync: Where this is; its vector is the model before the aggregation.
    """
    size = sync.layout.num_params
    parts = [in_whole(u, sync) for u in updates]
    # In double: pulls are small differences of large values.
    mean = coverage_mean(sync.vector.double(), [c.vector for c in parts], [c.cover for c in parts], weights.tolist())
    mass = torch.zeros(size, dtype=torch.float64)
    for part, weight in zip(parts, weights.tolist(), strict=True):
        mass += weight if part.cover is None else part.cover[:size].double() * weight
    pulls_MP = torch.zeros(len(updates), size, dtype=sync.layout.dtype)
    for row, part, weight in zip(pulls_MP, parts, weights.tolist(), strict=True):
        pull = (part.vector[:size].double() - mean[:size]).mul_(weight).div_(mass)
        # Where nobody holds a coordinate, the division above has made NaN.
        row.copy_(pull if part.cover is None else pull.masked_fill_(~part.cover[:size] | (mass == 0), 0.0))
    return pulls_MP


def degree_gradients(gradient: Tensor, pulls_MP: Tensor, degrees_M: Tensor) -> Tensor:
    """Return dF/dD_k [M] in float64: ``-<g, pull_k> / D_k``.

    With full models this is ``-(q_k / D_k) <g, w_k - w>``; with sub-models it is
    ``-(a_k / D_k) sum_e g_e (w_ke - w_e) / A_e`` over the coordinates e that client k holds.

    Args:
        gradient: g, the gradient of the global loss at the aggregate [P].
        pulls_MP: See :func:`pulls`.
        degrees_M: D, above 0.

    Source: FedDHAD, the gradients of the control parameters (the chain rule, local models taken as constants).
    """
    inner = torch.stack([(row.double() * gradient.double()).sum() for row in pulls_MP])
    return -inner / degrees_M


def no_gradient(size: int) -> dict[str, Tensor]:
    """Return an empty sum of gradients, weighted by samples: ``total`` [P], and ``mass``, the weights [P]; float64."""
    return {"total": torch.zeros(size, dtype=torch.float64), "mass": torch.zeros(size, dtype=torch.float64)}


def with_gradient(sums: State, vector: Tensor, update: ClientUpdate, sync: SyncContext) -> State:
    """Add a client's gradient, a vector [V] of its sub-model, to the sum; what else is in the tree stays."""
    size = len(sums["total"])
    part, weight = update.submodel.embed(vector, sync.layout), float(update.num_samples)
    cover = torch.ones(size, dtype=torch.bool) if part.cover is None else part.cover[:size]
    values = (weight * part.vector[:size].double()).masked_fill(~cover, 0.0)
    return {**sums, "total": sums["total"] + values, "mass": sums["mass"] + weight * cover.double()}


def mean_gradient(sums: State) -> Tensor:
    """Return the gradient [P] as a mean over those who sent a value of each coordinate; 0 where nobody did."""
    # Where nobody sent a value some divisor must stand; that quotient is not taken.
    return torch.where(sums["mass"] > 0, sums["total"] / sums["mass"].clamp_min(1e-300), 0.0)


def mean_move(update: ClientUpdate, sync: SyncContext) -> Tensor | None:
    """Return the client's mean gradient on its way, [V] of its sub-model: (anchor - model) / (learning rate x steps).

    Where its steps have a scale s of their own, they moved by s^2 of the gradient, which is divided out. Momentum's
    share is in the number of steps; None where the client took none. For Adam, whose moves are no sums of gradients,
    the number of local steps is taken: a direction, of another length.
    """
    steps = update.effective_steps if isfinite(update.effective_steps) else float(update.steps)
    if not steps or not update.learning_rate:
        return None
    anchor = update.submodel.extract(sync.anchors[update.anchor_version], sync.layout)
    move = (anchor - cast(Tensor, update.vector)) / (update.learning_rate * steps)
    return update.submodel.unscaled(move, sync.layout)


def sent_gradient(update: ClientUpdate) -> Tensor | None:
    """Return :class:`GradientAtAnchor`'s gradient as a vector [V] of the client's sub-model; None: there is none."""
    sent = update.extras.get("gradient_at_anchor/gradient")
    return None if sent is None else update.layout.padded(sent)
