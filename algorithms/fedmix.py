"""FedMix and NaiveMix: clients mix their samples with averages of all clients' samples.

Source: Yoon, Shin, Hwang, Yang (2021): FedMix: approximation of Mixup under mean augmented federated learning. ICLR.

Shape letters: B samples, C classes, G averages of the whole federation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    BelowOne,
    ClientUpdate,
    LocalClient,
    LocalStep,
    Objective,
    Payload,
    Probe,
    Published,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    parameters_of,
    takes,
)

Mixup = Literal["taylor", "naive"]


@dataclass(frozen=True, kw_only=True)
class GroupMeans(Probe):
    """Averages of a client's inputs, and of their labels as shares of classes, over groups drawn at random.

    Attributes:
        group_size: Samples in a group; the last has what is left. None: all of the client's samples are one group.
    """

    reads_model: ClassVar[bool] = False
    group_size: int | None
    name: str = "group_means"

    def measure(self, client: LocalClient) -> Payload:
        if not isinstance(client.inputs, Tensor) or not client.inputs.is_floating_point():
            raise ConfigError("fedmix averages inputs, so these must be one tensor of floats each; use another method")
        number = len(client.targets)
        order = torch.randperm(number, generator=client.stream.torch()).to(client.inputs.device)
        inputs, labels = client.inputs[order], F.one_hot(client.targets[order], client.num_classes)
        size = self.group_size or number
        starts = range(0, number, size)
        return {
            "inputs": torch.stack([inputs[start : start + size].mean(dim=0) for start in starts]),
            "labels": torch.stack([labels[start : start + size].to(inputs).mean(dim=0) for start in starts]),
        }


@dataclass(frozen=True, kw_only=True)
class MeanBank(Refinement):
    """Collects the clients' averages before round 1 and sends each client all of them once.

    Attributes:
        group_size: Samples of an average, at least 2; null: each client sends one average, that of all its samples.

    Source: Yoon et al. (2021), Algorithm 1. Reading: a client's own averages are among those that it gets.
    """

    needs_server: ClassVar[bool] = False

    group_size: Annotated[int, Ge(2)] | None = None

    def init(self, context: ServerContext) -> State:
        """Return the state before any averages.

        Raises:
            ConfigError: An average would be a client's only sample.
        """
        alone = [p.client for p in context.profiles if p.num_samples < 2]
        if alone:
            raise ConfigError(
                f"fedmix sends averages of at least two samples, but clients {alone[:5]} have one sample; use fewer"
                " clients, or a partition with min_samples=2"
            )
        return {}

    def setup(self, state: State, context: ServerContext) -> tuple[Probe, ...]:
        return (GroupMeans(group_size=self.group_size),)

    def setup_done(self, state: State, answers: Mapping[int, Payload], context: ServerContext) -> State:
        # Every client draws from the bank by a number, so its order must not follow who answered first.
        clients = sorted(answers)
        return {key: torch.cat([answers[k][f"group_means/{key}"] for k in clients]) for key in ("inputs", "labels")}

    def publish(self, state: State) -> Mapping[str, Published]:
        return {f"bank/{key}": Published(value=value) for key, value in state.items()}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state


@dataclass(frozen=True, kw_only=True)
class MixedLoss(Objective):
    """Cross-entropy under Mixup with an average of other samples, drawn anew for each step.

    ``taylor``: with s the strength, X and Y the average's input and label shares, at x' = (1 - s) x:
    ``(1 - s) CE(f(x'), y) + s CE(f(x'), Y) + s (1 - s) <d CE(f(x'), y) / dx', X>``, the mean over the batch.
    ``naive``: ``(1 - s) CE(f(x' + s X), y) + s CE(f(x' + s X), Y)``.

    Attributes:
        strength: Share of the average, at least 0 and below 1; 0 is FedAvg bit for bit. The paper has 0.05 on
            CIFAR-10, 0.1 on CIFAR-100 and 0.2 on FEMNIST.
        mixup: taylor: FedMix, the first order of Mixup with each sample of the average; naive: NaiveMix, plain Mixup
            with the average, 0.1, 0.1 and 0.2 in the paper.

    Source: Yoon et al. (2021), Eq. 4 and Proposition 3.1. Reading: the inner products are summed over the batch, since
    the gradient of a mean has the factor 1/B already; public programs divide by B once more.
    """

    in_lanes: ClassVar[bool] = False
    strength: BelowOne = 0.05
    mixup: Mixup = "taylor"

    @property
    def passes(self) -> float:
        """Taylor's slope along the inputs costs as much as the forward pass, and to go back through it twice that."""
        return 3 if self.mixup == "naive" else 6

    def loss(self, step: LocalStep) -> Tensor:
        inputs, labels = step.broadcast["bank/inputs"], step.broadcast["bank/labels"]
        number = int(step.stream.child("fedmix").numpy().integers(len(inputs)))
        other, shares = inputs[number].to(step.inputs), labels[number].to(step.inputs)
        share = self.strength
        mixed = (1 - share) * step.inputs
        if self.mixup == "naive":
            logits = step.forward(mixed + share * other)
        else:
            # Taylor's slope is taken along the inputs, which a plain step asks no gradient of.
            logits = step.forward(mixed.requires_grad_())
        own = F.cross_entropy(logits, step.targets)
        loss = (1 - share) * own + share * F.cross_entropy(logits, shares.expand(len(logits), -1))
        if self.mixup == "naive":
            return loss
        # The slope is part of the loss: its own graph is needed to go back through it to the params.
        (slope,) = torch.autograd.grad(own, mixed, create_graph=True)
        return loss + share * (1 - share) * (slope * other).sum()


def means_up(*, samples: int, strength: float, group_size: int | None, input_values: int, classes: int) -> int:
    """A mean input and its label shares, `input_values + classes` values, per `group_size` samples (null: of all)."""
    return (math.ceil(samples / group_size) if group_size else 1) * (input_values + classes) if strength else 0


def bank_down(
    *, is_first: bool, strength: float, sizes: Sequence[int], group_size: int | None, input_values: int, classes: int
) -> int:
    """In the client's first round what all clients (of all `sizes`) sent before round 1."""
    one = partial(means_up, strength=strength, group_size=group_size, input_values=input_values, classes=classes)
    return sum(one(samples=size) for size in sizes) if is_first else 0


@with_card(
    Card(
        title="FedMix",
        source="Yoon et al., ICLR 2021",
        needs=("two samples", "classes"),
        setup_up=(means_up,),
        down=(bank_down,),
        limits=(Limit(given={"strength": 0.0}),),
    )
)
@takes(MixedLoss, MeanBank)
def fedmix(**parameters: Any) -> FederatedMethod:
    """FedAvg whose clients mix their samples with averages of all clients' samples, sent once before round 1."""
    loss = MixedLoss(**parameters_of(MixedLoss, parameters))
    bank = MeanBank(**parameters_of(MeanBank, parameters))
    if not loss.strength:
        return FederatedMethod(name="fedmix")
    return FederatedMethod(name="fedmix", objective=loss, refinements=(bank,))
