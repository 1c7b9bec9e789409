"""FedDST: sparse networks whose clients move their weights to where the gradient is large.

Source: Bibikar et al. (2022): Federated dynamic sparse training: computing less, communicating less, yet learning
better. AAAI.

Shape letters: P params, N weights that a mask decides, n weights of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import cos, pi, prod
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    BelowOne,
    ClientUpdate,
    Count,
    ElementMask,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    ParamTree,
    Payload,
    RoundContext,
    ServerContext,
    ServerUpdate,
    State,
    SyncContext,
    mean_of_updates,
    takes,
)

from .parts.element_masks import (
    Layers,
    MaskPolicy,
    StayZero,
    decided,
    largest,
    mask_values,
    shared_out,
)

Distribution = Literal["erk", "uniform"]

_SENT = "feddst/mask"


@dataclass(frozen=True, kw_only=True, eq=False)
class AdjustableMask(ElementMask):
    """A mask that the client changes at the round's end.

    Attributes:
        layers: Where each layer's weights begin and end in the vector.
        moved: Share of each layer's alive weights that it moves elsewhere; 0: the mask stays.
    """

    layers: Layers
    moved: float = 0.0


def erk_densities(shapes: Sequence[tuple[int, ...]], density: float) -> list[float]:
    """Return shares of alive weights by layer, proportional to the sum of its weight's sides over their product.

    Layers that would have more than all of their weights are dense, and the others share what is left.

    Args:
        shapes: Of the layers' weights.
        density: Share of all weights together, above 0 and at most 1.

    Source: Evci et al. (2020), Rigging the lottery, Erdos-Renyi-Kernel.
    """
    sizes, raw = [prod(shape) for shape in shapes], [sum(shape) / prod(shape) for shape in shapes]
    dense: set[int] = set()
    while True:
        free = [i for i in range(len(shapes)) if i not in dense]
        left = density * sum(sizes) - sum(sizes[i] for i in dense)
        scale = left / sum(raw[i] * sizes[i] for i in free) if free else 0.0
        over = {i for i in free if scale * raw[i] > 1}
        if not over:
            return [1.0 if i in dense else scale * raw[i] for i in range(len(shapes))]
        dense |= over


def moved_weights(mask_n: Tensor, values_n: Tensor, gradient_n: Tensor, share: float) -> Tensor:
    """Return a layer's mask with its smallest alive weights exchanged for dead ones of large gradient (bool [n])."""
    number = min(int(share * int(mask_n.sum()) + 0.5), int((~mask_n).sum()))
    if not number:
        return mask_n
    least = largest(torch.where(mask_n, -values_n.abs(), -torch.inf), number)
    grown = largest(torch.where(mask_n, -torch.inf, gradient_n.abs()), number)
    return (mask_n & ~least) | grown


@dataclass(frozen=True, kw_only=True)
class Readjust(LocalTerm):
    """At a round's last step moves weights, where the round asks for it, and sends the mask, a bit for each weight.

    Reading: the gradient is that of the last step; the authors take it anew on the last batch after pruning. Reading:
    weights do not grow where they were just pruned, so that a layer without dead weights stays as it is.
    """

    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    needs_anchor: ClassVar[bool] = False
    sets_params: ClassVar[bool] = True
    name: str = "feddst"

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        part, work = step.client.submodel, step.client.work
        if not isinstance(part, AdjustableMask) or not part.moved or work is None or step.position + 1 < work.steps:
            return step.memory, None
        mask, values = part.mask.clone(), {}
        for name, (start, stop) in part.layers.items():
            value, gradient = step.params[name], gradients[name]
            own = moved_weights(mask[start:stop], value.flatten().cpu(), gradient.flatten().cpu(), part.moved)
            # What has just grown is zero already: StayZero has seen to that.
            mask[start:stop] = own
            values[name] = value * own.view(value.shape).to(value.device)
        return {"mask": decided(mask, part.layers)}, values

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return {}, {name: torch.as_tensor(value) for name, value in memory.items()}


@dataclass(frozen=True, kw_only=True)
class MeanOfSentMasks(ServerUpdate):
    """The mean over those whose own mask, where they sent one, has a weight alive."""

    needs_updates: ClassVar[bool] = True

    @property
    def follows_mean(self) -> bool:
        return False

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        masked = [replace(u, submodel=ElementMask(mask=_alive(u))) if _SENT in u.extras else u for u in updates]
        return mean_of_updates(masked, weights, sync), state


def _alive(update: ClientUpdate) -> Tensor:
    """Return a client's mask of alive weights after its work (bool [P])."""
    part = cast(AdjustableMask, update.submodel)
    if _SENT not in update.extras:
        return part.mask
    mask = part.mask.clone()
    mask[decided(torch.arange(len(mask)), part.layers)] = update.extras[_SENT]
    return mask


@dataclass(frozen=True, kw_only=True)
class MovingMask(MaskPolicy):
    """A mask of fixed size in each layer; after clients moved weights, the largest of what they have alive stay.

    Attributes:
        sparsity: Share of the weights of linear and convolutional layers that are zero, at least 0 and below 1; 0 is
            FedAvg bit for bit. The paper has 0.8 on CIFAR-10 and 0.5 on CIFAR-100.
        saves_work: Count operations of alive weights alone, which takes kernels for sparse weights; otherwise those of
            the whole network, which plain kernels carry out.
        moved: Share of a layer's alive weights that a client moves in an adjustment at first, at least 0 and below 1;
            it falls as half a cosine does. 0: the mask stays.
        distribution: erk: small layers keep more of their weights, as in the paper; uniform: all the same share.
        every: Rounds between two adjustments, at least 1; 15 in the paper on CIFAR-10, 10 on CIFAR-100.
        until: Round before which adjustments end; null: half of the run.

    Source: Bibikar et al. (2022), Algorithm 1. Reading: adjustments are in rounds 2, 2 + every, ..., as in the authors'
    program, which counts from 0 and adjusts where ``(t - 1) mod every = 0``. Reading: weights that have just grown are
    zero, so they stay where others were dropped by all; of these, those that most clients grew.
    """

    sparsity: BelowOne = 0.8
    saves_work: bool = False
    moved: BelowOne = 0.01
    distribution: Distribution = "erk"
    every: Count = 15
    until: Count | None = None

    def first_mask(self, context: ServerContext, layers: Layers) -> Tensor:
        shapes = [context.layout.params(context.vector)[name].shape for name in layers]
        densities = [1 - self.sparsity] * len(shapes)
        if self.distribution == "erk":
            densities = erk_densities([tuple(shape) for shape in shapes], 1 - self.sparsity)
        sizes = [prod(shape) for shape in shapes]
        counts = shared_out(round((1 - self.sparsity) * sum(sizes)), sizes, densities)
        mask = torch.ones(context.layout.num_params, dtype=torch.bool)
        for (start, stop), count in zip(layers.values(), counts, strict=True):
            mask[start:stop] = largest(context.vector[start:stop].abs(), count)
        return mask

    def init(self, context: ServerContext) -> State:
        return {**super().init(context), "until": context.num_rounds / 2 if self.until is None else self.until}

    def made(self, state: State, context: RoundContext, *, fresh: bool) -> ElementMask:
        passed, until = context.round - 1, state["until"]
        adjusts = 0 < passed < until and (passed - 1) % self.every == 0
        return AdjustableMask(
            mask=state["mask"],
            fresh=fresh,
            num_maskable=state["num_weights"],
            saves_work=self.saves_work,
            layers={name: (start, stop) for name, (start, stop) in state["layers"].items()},
            moved=self.moved / 2 * (1 + cos(pi * passed / until)) if adjusts else 0.0,
        )

    def next_mask(self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext) -> Tensor:
        if not any(_SENT in u.extras for u in updates):
            return super().next_mask(state, vector, updates, sync)
        masks = [_alive(u) for u in updates if isinstance(u.submodel, ElementMask)]
        votes = torch.stack(masks).sum(dim=0)
        mask: Tensor = state["mask"].clone()
        for start, stop in state["layers"].values():
            own = votes[start:stop]
            # Below every size, 0 included: what nobody has alive comes after what has just grown.
            sizes = torch.where(own > 0, vector[start:stop].abs(), -1.0)
            mask[start:stop] = largest(sizes, int(mask[start:stop].sum()), then_n=own)
        return mask


def mask_up(
    *, kernel_weights: int, sparsity: float, moved: float, round: int, rounds: int, until: int | None, every: int
) -> Fraction:
    """The client's new mask, `kernel_weights` bits, where it moved weights.

    That is in each `every`-th round from 2 to `until` (null: half of `rounds`).
    """
    adjusts = sparsity * moved and 0 < round - 1 < (until or rounds / 2) and not (round - 2) % every
    return mask_values(kernel_weights) if adjusts else Fraction(0)


@with_card(
    Card(
        title="FedDST",
        source="Bibikar et al., AAAI 2022",
        up=(mask_up,),
        limits=(Limit(given={"sparsity": 0.0}),),
        live=("sparsity",),
        small={"sparsity": 0.5, "moved": 0.2, "until": 3, "every": 1},
    )
)
@takes(MovingMask)
def feddst(**parameters: Any) -> FederatedMethod:
    """FedAvg on a sparse network: a mask with a fixed number of alive weights in each layer, which clients move."""
    mask = MovingMask(**parameters)
    if not mask.sparsity:
        return FederatedMethod(name="feddst")
    return FederatedMethod(
        name="feddst",
        terms=(StayZero(), Readjust()),
        submodels=mask,
        server_update=MeanOfSentMasks(),
    )
