"""Parts that sparse methods share: one element mask for all clients, kept on the server, and clients that stay in it.

A mask decides about weights of linear and convolutional layers; biases and norms are always alive.

Shape letters: P params, N weights that a mask decides, n weights of a layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsweep import ConfigError
from fedsweep.components import (
    ClientUpdate,
    ComponentReport,
    ElementMask,
    LocalStep,
    LocalTerm,
    Memory,
    ParamTree,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    SyncContext,
    layout_of,
)

Layers = Mapping[str, tuple[int, int]]


def weight_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the places of linear and convolutional layers' weights in the model's vector, (begin, end) by name."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    names = {
        f"{path}.weight" if path else "weight" for path, module in model.named_modules() if isinstance(module, kinds)
    }
    return {name: (place.start, place.stop) for name, place in layout_of(model).places().items() if name in names}


def decided(values_P: Tensor, layers: Layers) -> Tensor:
    """Select, from one value for each param, those of the weights that a mask decides [N]."""
    return torch.cat([values_P[start:stop] for start, stop in layers.values()])


def largest(values_n: Tensor, number: int, *, then_n: Tensor | None = None) -> Tensor:
    """Mark the largest values (bool [n]); of equal ones those with more in ``then_n``, then the first."""
    order = torch.arange(len(values_n))
    # The lesser key first: a stable sort by the other one keeps its order among equals.
    for key in (then_n, values_n):
        if key is not None:
            order = order[torch.sort(key[order], descending=True, stable=True).indices]
    chosen = torch.zeros(len(values_n), dtype=torch.bool)
    chosen[order[:number]] = True
    return chosen


def shared_out(total: int, sizes: Sequence[int], densities: Sequence[float]) -> list[int]:
    """Share ``total`` out in whole numbers near ``size * density``, each at least 1 and at most ``size``."""
    wanted = [size * density for size, density in zip(sizes, densities, strict=True)]
    counts = [min(size, max(1, int(want))) for size, want in zip(sizes, wanted, strict=True)]
    while (missing := total - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        free = [i for i, count in enumerate(counts) if 1 <= count + step <= sizes[i]]
        if not free:
            break
        nearest = max(free, key=lambda i: (step * (wanted[i] - counts[i]), -i))
        counts[nearest] += step
    return counts


def mask_values(bits: int) -> Fraction:
    """Count a mask of so many bits in values of four bytes; it travels in whole bytes."""
    return Fraction(-(-bits // 8), 4)


@dataclass(frozen=True, kw_only=True)
class StayZero(LocalTerm):
    """Sets what the client's mask leaves out to zero after each step."""

    needs_anchor: ClassVar[bool] = False
    name: str = "mask"

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        part = step.client.submodel
        if not isinstance(part, ElementMask):
            return step.memory, None
        masked, masks = {}, torch.split(part.mask, [value.numel() for value in step.params.values()])
        for (name, value), mask in zip(step.params.items(), masks, strict=True):
            if not bool(mask.all()):
                masked[name] = value * mask.view(value.shape).to(value.device)
        return step.memory, masked


class MaskPolicy(SubModelPolicy):
    """Everybody trains what one mask leaves alive; the mask travels to whoever does not have it.

    Attributes:
        sparsity: Share of the weights that are zero, above 0 and below 1.
        saves_work: Forward and backward passes cost what alive weights cost, as kernels for sparse weights would have
            it; otherwise they cost what they do without a mask.
    """

    sparsity: float
    saves_work: bool

    @abstractmethod
    def first_mask(self, context: ServerContext, layers: Layers) -> Tensor:
        """Return the mask of round 1 (bool [P])."""

    def next_mask(self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext) -> Tensor:
        """Return the mask after an aggregation (bool [P])."""
        mask: Tensor = state["mask"]
        return mask

    def made(self, state: State, context: RoundContext, *, fresh: bool) -> ElementMask:
        """Return the round's mask, for clients that have it or not."""
        return ElementMask(
            mask=state["mask"], fresh=fresh, num_maskable=state["num_weights"], saves_work=self.saves_work
        )

    def init(self, context: ServerContext) -> State:
        """Return the first mask, which nobody has.

        Raises:
            ConfigError: The network has no layers whose weights could be left out, or too few weights.
        """
        layers = weight_layers(context.model)
        number = sum(stop - start for start, stop in layers.values())
        if round((1 - self.sparsity) * number) < max(1, len(layers)):
            raise ConfigError(
                f"method.sparsity={self.sparsity} leaves fewer weights of {type(context.model).__name__} than it has"
                f" layers ({number} weights in {len(layers)} linear and convolutional layers); choose a lower one"
            )
        return {
            "mask": self.first_mask(context, layers),
            "version": 0,
            "known": {},
            "layers": {name: list(place) for name, place in layers.items()},
            "num_weights": number,
            "zeros": 0.0,
        }

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        masks = {fresh: self.made(state, context, fresh=fresh) for fresh in (True, False)}
        mask_versions, version = state["known"], state["version"]
        return {k: masks[mask_versions.get(k) != version] for k in context.cohort}, state

    def after_aggregate(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        """Set weights outside the mask to zero, where new ones start; who was sent a model has the present mask."""
        mask_versions = {**state["known"], **{u.client: state["version"] for u in updates if u.steps}}
        mask = self.next_mask(state, vector, updates, sync)
        changed = not torch.equal(mask, state["mask"])
        vector = vector.clone()
        vector[: sync.layout.num_params].mul_(mask & state["mask"])
        zeros = (decided(vector, state["layers"]) == 0).double().mean()
        return vector, {
            **state,
            "mask": mask,
            "version": state["version"] + changed,
            "known": dict(sorted(mask_versions.items())),
            "zeros": float(zeros),
        }

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={"sparsity": state["zeros"]})
