"""FedAS: clients keep their heads, align the body that they receive with their last, and count by Fisher information.

Source: Yang, Huang, Ye (2024): FedAS: Bridging inconsistency in personalized federated learning. CVPR.

Shape letters: B samples, C classes, D features, M attendees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    BySamples,
    ClientUpdate,
    Count,
    CountOrZero,
    LocalClient,
    Memory,
    ParamTree,
    Passes,
    Payload,
    Positive,
    Probe,
    State,
    SyncContext,
    Weighting,
    WholeModel,
    by_samples,
    features_with,
    head_names,
    taken,
)

from .parts.own_models import KeepsModel, OwnModels, Travels, own_values

_TERM = "fedas"
Head = Literal["local", "averaged", "shared"]
Fisher = Literal["batch", "sample"]


def class_means(features_BD: Tensor, targets_B: Tensor) -> dict[int, Tensor]:
    """Return the mean of the features [D] of each class that occurs."""
    return {label: features_BD[targets_B == label].mean(dim=0) for label in sorted(set(targets_B.tolist()))}


@dataclass(frozen=True, kw_only=True)
class AlignedBody(KeepsModel):
    """Starts from the received body, aligned, under the client's own head.

    For ``epochs`` passes over the client's data the body descends on ``sum over the batch's classes c of the mean
    square of features - P_c``, where P_c is the mean of the features that the client's last body has of its class c.

    Attributes:
        epochs: At least 0; 0: no alignment.
        learning_rate: Of these steps, above 0.
        batch_size: Samples of each, at least 1.
        keeps_head: The client goes on with its own head; otherwise with the server's.

    Source: Yang et al. (2024) and the authors' program, which aligns the server's model in place, so that each client
    goes on from the one before: not copied. Reading: a client that never took part has no body to align with and starts
    from the server's model; the alignment runs in evaluation mode, so that batch norm's statistics stay the received.
    """

    name: str = _TERM
    epochs: int
    learning_rate: float
    batch_size: int
    keeps_head: bool

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        return Passes(job=1 + 3 * self.epochs if self.epochs else 0)

    def prepare(
        self, memory: Memory, anchor: ParamTree, local: LocalClient | None = None
    ) -> tuple[Memory, ParamTree | None]:
        own = own_values(memory)
        if own is None or local is None:
            return memory, None
        heads = head_names(local.model)
        start = {name: own[name] for name in sorted(heads)} if self.keeps_head else {}
        if self.epochs:
            start |= self._aligned({n: v for n, v in anchor.items() if n not in heads}, own, local)
        return memory, start

    def _aligned(self, body: ParamTree, own: ParamTree, local: LocalClient) -> ParamTree:
        params = {name: body[name].detach().clone() for name in local.params if name in body}
        if not params:
            return params  # the head alone is trained
        device = local.targets.device
        with torch.no_grad():
            features = features_with(local.model, {n: v.to(device) for n, v in own.items()}, local.inputs)
        prototypes = class_means(features, local.targets)
        for epoch in range(self.epochs):
            order = torch.randperm(len(local.targets), generator=local.stream.child("align", epoch).torch())
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size].to(device)
                params = self._step(params, body, local, chosen=chosen, prototypes=prototypes)
        return params

    def _step(
        self,
        params: ParamTree,
        body: ParamTree,
        local: LocalClient,
        *,
        chosen: Tensor,
        prototypes: dict[int, Tensor],
    ) -> ParamTree:
        leaves = {name: value.requires_grad_() for name, value in params.items()}
        features = features_with(local.model, {**body, **leaves}, taken(local.inputs, chosen))
        targets = local.targets[chosen]
        losses = [
            F.mse_loss(features[targets == label], prototypes[label].expand(int((targets == label).sum()), -1))
            # In the order of the classes: the sum's bits must not depend on how the batch was shuffled.
            for label in sorted(set(targets.tolist()))
        ]
        gradients = torch.autograd.grad(torch.stack(losses).sum(), list(leaves.values()), materialize_grads=True)
        with torch.no_grad():
            return {
                name: value - self.learning_rate * gradient
                for (name, value), gradient in zip(leaves.items(), gradients, strict=True)
            }


@dataclass(frozen=True, kw_only=True)
class FisherTrace(Probe):
    """``sum over minibatches of |gradient of the mean negative log-likelihood|^2``, over all of the client's params.

    Attributes:
        of: ``"batch"``, as the authors' program has it; ``"sample"``: a gradient for each sample, which is the trace of
            the empirical Fisher information times n.
        batch_size: At least 1.
    """

    name: str = "fisher"
    of: Fisher
    batch_size: int

    @property
    def passes(self) -> float:
        return 3

    def measure(self, client: LocalClient) -> Payload:
        size, total = (1 if self.of == "sample" else self.batch_size), 0.0
        leaves = {name: value.detach().clone().requires_grad_() for name, value in client.params.items()}
        for start in range(0, len(client.targets), size):
            part = slice(start, start + size)
            loss = F.cross_entropy(client.forward_with(leaves, taken(client.inputs, part)), client.targets[part])
            gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            total += math.fsum(float(gradient.double().square().sum()) for gradient in gradients)
        return {"trace": torch.tensor([total], dtype=torch.float32)}


@dataclass(frozen=True, kw_only=True)
class ByFisher(Weighting):
    """``F_k / sum_j F_j``; by samples where nothing was measured or all are 0.

    Attributes:
        of: See :class:`FisherTrace`.
        batch_size: Likewise.
    """

    of: Fisher
    batch_size: int

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        return (FisherTrace(of=self.of, batch_size=self.batch_size),)

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        if not all("fisher/trace" in update.extras for update in updates):
            return by_samples(updates), state
        traces_M = torch.tensor([float(u.extras["fisher/trace"]) for u in updates], dtype=torch.float64)
        total = traces_M.sum()
        return (traces_M / total if 0 < float(total) < math.inf else by_samples(updates)), state


def trace_up(*, weights: str) -> int:
    """The trace of the client's Fisher information, 1 value, with `weights` fisher."""
    return int(weights == "fisher")


@with_card(
    Card(
        title="FedAS",
        source="Yang, Huang, Ye, CVPR 2024",
        needs=("features", "classes"),
        up=(trace_up,),
        limits=(Limit(given={"align_epochs": 0, "weights": "samples", "head": "shared"}),),
        live=("personal_accuracy",),
        differs=(
            "the alignment runs in evaluation mode; a client's first round has none",
            "Fisher information is summed over minibatches of align_batch, in the authors' program over the training's:"
            " a sum of squared means depends on the batch",
            "the trace travels as float32",
        ),
    )
)
def fedas(
    *,
    align_epochs: CountOrZero = 1,
    align_rate: Positive = 0.01,
    align_batch: Count = 16,
    weights: Literal["fisher", "samples"] = "fisher",
    fisher: Fisher = "batch",
    head: Head = "local",
) -> FederatedMethod:
    """Clients keep their heads; the body that they receive is aligned with their own, and counts by Fisher information.

    What clients reach with their own models on their own shares of the test set is ``personal_accuracy``. The server's
    model, and so ``test_accuracy``, has the head of ``head``.

    Args:
        align_epochs: Passes over a client's data in which the body is aligned, at least 0.
        align_rate: Rate of these steps, above 0.
        align_batch: Samples of each, and of the Fisher information's minibatches, at least 1.
        weights: By Fisher information, or by samples, as FedPer has it.
        fisher: Gradients of minibatches' means, as the authors' program has them, or of each sample.
        head: ``local``: heads do not travel, and the server's stays the initial one; ``averaged``: clients keep theirs,
            but send them for the server's model; ``shared``: clients go on with the server's head.
    """
    return FederatedMethod(
        name="fedas",
        terms=(
            AlignedBody(
                epochs=align_epochs, learning_rate=align_rate, batch_size=align_batch, keeps_head=head != "shared"
            ),
        ),
        submodels=Travels(method="fedas", part="body") if head == "local" else WholeModel(),
        weighting=ByFisher(of=fisher, batch_size=align_batch) if weights == "fisher" else BySamples(),
        evaluation=OwnModels(term=_TERM),
    )
