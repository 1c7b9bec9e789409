"""How the global loss changes with each client's aggregation weight, and where the loss's gradient comes from.

The server has no data: the gradient is put together from the clients' moves, asked of them, or taken on proxy data.

Shape letters: M attendees, P trained parameters of the full model, V all values of a model's vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.components.probes import LocalClient, Probe
from fedsweep.records import ClientUpdate, Payload, State, SyncContext
from fedsweep.trees import ParamTree, coverage_mean

from ..parts.server_updates import in_whole

# Samples per forward pass where a gradient over many samples is summed up.
_CHUNK = 256

Forward = Callable[[ParamTree, Tensor], Tensor]


def loss_gradient(forward: Forward, params: Mapping[str, Tensor], inputs: Tensor, *, targets: Tensor) -> Tensor:
    """The gradient [P] of the mean cross-entropy, parameters one after the other.

    Args:
        forward: ``forward(params, inputs)`` gives the logits.
        params: The parameters.
        inputs: At least one sample [S, ...].
        targets: Their labels [S].
    """
    own = {name: value.detach().requires_grad_() for name, value in params.items()}
    total: list[Tensor] = []
    for part, labels in zip(torch.split(inputs, _CHUNK), torch.split(targets, _CHUNK), strict=True):
        loss = F.cross_entropy(forward(own, part), labels, reduction="sum") / len(targets)
        pieces = torch.autograd.grad(loss, list(own.values()))
        total = [a + b for a, b in zip(total, pieces, strict=True)] if total else list(pieces)
    return torch.cat([piece.reshape(-1) for piece in total])


@dataclass(frozen=True, kw_only=True)
class GradientAtAnchor(Probe):
    """The gradient of the client's loss, over all its samples, at the model that it was sent.

    Sends ``gradient``: one value per parameter of its sub-model. Taken in evaluation mode, without unit scales.
    """

    when: ClassVar[Literal["start"]] = "start"
    name: str = "gradient_at_anchor"

    def measure(self, client: LocalClient) -> Payload:
        return {"gradient": loss_gradient(client.forward_with, client.params, client.inputs, targets=client.targets)}


def pulls(updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
    """How far the aggregate moves towards each client when its unnormalised weight grows: [M, P].

    ``pull[k, e] = q_k / (sum of q_j over the holders of e) * (w_ke - w_e)``, 0 where client k does not hold e, with
    w the coverage mean; so ``dw / d ln a_k = pull_k`` for weights ``q_k = a_k / sum_j a_j``.

    Args:
        updates: The attendees', with vectors.
        weights: q [M].
        sync: Where this is; its vector is the model before the aggregation.
    """
    size = sync.layout.num_params
    held = [in_whole(u, sync) for u in updates]
    mean = coverage_mean(sync.vector.double(), [c.vector for c in held], [c.cover for c in held], weights.tolist())
    mass = torch.zeros(size, dtype=torch.float64)
    for part, weight in zip(held, weights.tolist(), strict=True):
        mass += weight if part.cover is None else part.cover[:size].double() * weight
    found = torch.zeros(len(updates), size, dtype=sync.layout.dtype)
    for row, part, weight in zip(found, held, weights.tolist(), strict=True):
        pull = (part.vector[:size].double() - mean[:size]).mul_(weight).div_(mass)
        row.copy_(pull if part.cover is None else pull.masked_fill_(~part.cover[:size] | (mass == 0), 0.0))
    return found


def degree_gradients(gradient: Tensor, pulls_MP: Tensor, degrees_M: Tensor) -> Tensor:
    """dF/dD_k [M] in float64: ``-<g, pull_k> / D_k``.

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
    """A sum of gradients, weighted by samples, of nobody yet: ``total`` [P], and ``mass``, the weights [P]; float64."""
    return {"total": torch.zeros(size, dtype=torch.float64), "mass": torch.zeros(size, dtype=torch.float64)}


def with_gradient(found: State, vector: Tensor, update: ClientUpdate, sync: SyncContext) -> State:
    """The sum with a client's gradient, given as a vector [V] of its sub-model; what else is in the tree stays."""
    size = len(found["total"])
    part, weight = update.submodel.embed(vector, sync.layout), float(update.num_samples)
    cover = torch.ones(size, dtype=torch.bool) if part.cover is None else part.cover[:size]
    values = (weight * part.vector[:size].double()).masked_fill(~cover, 0.0)
    return {**found, "total": found["total"] + values, "mass": found["mass"] + weight * cover.double()}


def mean_gradient(found: State) -> Tensor:
    """The gradient [P] as a mean over those who said something on each coordinate; 0 where nobody did."""
    return torch.where(found["mass"] > 0, found["total"] / found["mass"].clamp_min(1e-300), 0.0)


def mean_move(update: ClientUpdate, sync: SyncContext) -> Tensor | None:
    """The client's mean gradient on its way, [V] of its sub-model: (anchor - model) / (learning rate x steps).

    Momentum's share is in the number of steps; None where the client took none. For Adam, whose moves are no sums of
    gradients, the number of local steps is taken: a direction, of another length.
    """
    steps = update.effective_steps if isfinite(update.effective_steps) else float(update.steps)
    if not steps or not update.learning_rate:
        return None
    anchor = update.submodel.extract(sync.anchors[update.anchor_version], sync.layout)
    return (anchor - cast(Tensor, update.vector)) / (update.learning_rate * steps)


def sent_gradient(update: ClientUpdate) -> Tensor | None:
    """What :class:`GradientAtAnchor` measured, as a vector [V] of the client's sub-model; None: nothing."""
    sent = update.extras.get("gradient_at_anchor/gradient")
    if sent is None:
        return None
    vector = torch.zeros(update.layout.num_values, dtype=sent.dtype)
    vector[: len(sent)] = sent
    return vector
