"""FedGen: the server learns a generator of features from the clients' heads, and sends it to the clients.

Source: Zhu, Hong, Zhou (2021): Data-free knowledge distillation for heterogeneous federated learning. ICML.

Shape letters: B samples, C classes, D features, E noise, H hidden neurons, M attendees, N clients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    Adam,
    ClientUpdate,
    ComponentReport,
    Count,
    LocalStep,
    LocalTerm,
    NotNegative,
    Positive,
    PositiveShare,
    Published,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    head_names,
    head_with,
    takes,
)

from .parts.ensembles import template
from .parts.features import diversity, drawn, generated, network_with_features, new_generator, step_flops

Head = Callable[[Tensor], Tensor]
Teacher = Literal["clients", "logits", "global"]
Variant = Literal["authors", "dynamicfl"]

_STATISTICS = ("mean", "variance")


@dataclass(frozen=True, kw_only=True)
class GeneratedLatents(LocalTerm):
    """``a_r CE(head(G(e, y')), y') + b_r KL(softmax(head(G(e, y))) || softmax(f(x)))``, y' drawn, y the batch's labels.

    In round r from 0, ``a_r = max(1e-4, strength * decay^r)`` and ``b_r`` likewise. The second target has no gradient.

    Attributes:
        strength: Of the first part, at least 0; 0: it is left out.
        consistency: Of the second part, the same.
        decay: Above 0, at most 1.
        noise_width: E.
        own_classes: y' are classes of the client; otherwise of anybody.

    Source: Zhu et al. (2021), Algorithm 1, and the authors' program, which has the second part. Reading: as many
    features are drawn as the batch has samples; in the program both numbers are 32.
    """

    needs_anchor: ClassVar[bool] = False
    in_lanes: ClassVar[bool] = False
    strength: NotNegative
    consistency: NotNegative
    decay: PositiveShare
    noise_width: int
    own_classes: bool = False
    name: str = "fedgen"

    def loss(self, step: LocalStep) -> Tensor | None:
        if "generator/mean" not in step.broadcast:
            return None
        values = {
            name.removeprefix("generator/"): value.to(step.targets.device)
            for name, value in step.broadcast.items()
            if name.startswith("generator/")
        }
        num_classes = values["hidden_weight"].shape[1] - self.noise_width
        anybodys = step.broadcast.get("labels", torch.ones(num_classes, dtype=torch.bool))
        allowed = step.client.label_counts > 0 if self.own_classes else anybodys
        noise, labels = drawn(
            len(step.targets), allowed, self.noise_width, stream=step.stream.child("fedgen"), like=values["mean"]
        )
        factor = self.decay ** (step.client.round - 1)
        total = torch.zeros((), dtype=noise.dtype, device=noise.device)
        if self.strength:
            logits = step.head(generated(values, noise, labels, training=False))
            total = total + max(1e-4, self.strength * factor) * F.cross_entropy(logits, labels)
        if self.consistency:
            with torch.no_grad():
                target = step.head(generated(values, noise, step.targets, training=False)).softmax(dim=1)
            divergence = F.kl_div(step.logits.log_softmax(dim=1), target, reduction="batchmean")
            total = total + max(1e-4, self.consistency * factor) * divergence
        return total


@dataclass(frozen=True, kw_only=True)
class LatentGenerator(Refinement):
    """Trains the generator on the attendees' heads at each round's end; the clients get it from the next round on.

    Attributes:
        teacher: clients: the heads' cross-entropies weighted by class counts (the authors' program); logits: of their
            mean logits (the paper); global: of the averaged model's head (DynaFed).
        variant: authors; or dynamicfl, as DynamicFL's program runs it: clients use the untrained generator in round 1
            and draw their own classes, class counts add up over rounds and weigh without smoothing, a class needs two
            samples.
        noise_width: Noise per feature vector; DynamicFL and the authors have 64 on CIFAR.
        hidden_width: Neurons of the generator; DynamicFL and the authors have 512 on CIFAR.
        generator_steps: Adam steps of the generator a round.
        generator_batch: Feature vectors a step.
        generator_learning_rate: In the first round; DynamicFL prints 1e-4.
        generator_decay: It falls by this factor a round.
        generator_weight_decay: Adam's.
        diversity: Weight of the term that keeps features of different noise apart.

    Source: Zhu et al. (2021), Eq. 4 and Algorithm 1; the authors' program for weights, constants and the diversity.
    Reading: each feature's loss has the weight of its own class; in the program the product of losses and weights is
    a matrix, B by B, so that their means are multiplied. Class counts are those that clients register, not those of
    the batches that they happened to draw.
    """

    needs_updates: ClassVar[bool] = True
    teacher: Teacher = "clients"
    variant: Variant = "authors"
    noise_width: Count = 32
    hidden_width: Count = 256
    generator_steps: Count = 50
    generator_batch: Annotated[int, Ge(2)] = 32
    generator_learning_rate: Positive = 3e-4
    generator_decay: PositiveShare = 0.98
    generator_weight_decay: NotNegative = 1e-2
    diversity: NotNegative = 1.0

    @property
    def needs_whole_models(self) -> bool:
        return True  # it makes what a whole head reads

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",)

    def init(self, context: ServerContext) -> State:
        """Return an untrained generator.

        Raises:
            ConfigError: The network does not say where its features are.
        """
        model = network_with_features(context.model, method="fedgen", use="generates")
        sizes = (self.noise_width, self.hidden_width, model.feature_width, context.num_classes)
        fresh = new_generator(*sizes, stream=context.stream)
        counts = torch.stack([torch.from_numpy(p.label_counts) for p in context.profiles]).double()
        return {
            "generator": {name: value.to(context.layout.dtype) for name, value in fresh.items()},
            "adam": None,
            "counts": counts,
            "labels": counts.sum(dim=0) > 0,
            "seen": torch.zeros(context.num_clients, context.num_classes, dtype=torch.float64),
            "sent": self.variant == "dynamicfl",
            "loss": None,
        }

    def publish(self, state: State) -> Mapping[str, Published]:
        """Return the generator, and the classes to draw where those are not all, and not each client's own."""
        if not state["sent"]:
            return {}
        contents = {f"generator/{name}": value for name, value in state["generator"].items()}
        if self.variant != "dynamicfl" and not bool(state["labels"].all()):
            contents["labels"] = state["labels"]
        return {name: Published(value=value) for name, value in contents.items()}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        counts = state["counts"][[u.client for u in updates]]
        if self.variant == "dynamicfl":
            seen = state["seen"].clone()
            seen[[u.client for u in updates]] += counts
            state, counts = {**state, "seen": seen}, seen[[u.client for u in updates]]
        labels, weights = self._weights(counts)
        if not bool(labels.any()):
            return vector, state
        models = [u.vector for u in updates if u.vector is not None] if self.teacher != "global" else [vector]
        return vector, {**state, **self._trained(state, models, labels, weights, sync), "sent": True}

    def _weights(self, counts_MC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes to train on [C], and each head's weight in each class [M, C]."""
        if self.variant == "dynamicfl":
            # A class that nobody has must not divide 0 by 0.
            return (counts_MC >= 2).any(dim=0), counts_MC / (counts_MC.sum(dim=0) + 1e-8)
        return (counts_MC > 0).any(dim=0), (counts_MC + 1) / (counts_MC + 1).sum(dim=0)

    def _trained(
        self, state: State, models: Sequence[Tensor], labels_C: Tensor, weights_MC: Tensor, sync: SyncContext
    ) -> State:
        model, trees = template(sync).requires_grad_(False), map(sync.layout.views, models)
        own = [{name: tree[name].to(sync.device) for name in head_names(sync.model)} for tree in trees]
        heads = [functools.partial(head_with, model, values) for values in own]
        values = {name: value.to(sync.device, copy=True) for name, value in state["generator"].items()}
        params = {name: value.requires_grad_() for name, value in values.items() if name not in _STATISTICS}
        optimizer = Adam(
            params.values(),
            lr=self.generator_learning_rate * self.generator_decay ** (sync.round - 1),
            weight_decay=self.generator_weight_decay,
            foreach=False,
        )
        for name, moments in (state["adam"] or {}).items():
            # Adam's count of steps stays on the CPU.
            optimizer.state[params[name]] = {
                key: value.to("cpu" if key == "step" else sync.device, copy=True) for key, value in moments.items()
            }
        weights, total = weights_MC.to(device=sync.device, dtype=values["mean"].dtype), 0.0
        for number in range(self.generator_steps):
            noise, labels = drawn(
                self.generator_batch, labels_C, self.noise_width, stream=sync.stream.child(number), like=values["mean"]
            )
            loss = self._loss(values, heads, weights, noise, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach())
        sync.count_flops(self.generator_steps * self.generator_batch * step_flops(values, sync.model, len(heads)))
        return {
            "generator": {name: value.detach().cpu() for name, value in values.items()},
            "adam": {name: {k: v.cpu() for k, v in optimizer.state[p].items()} for name, p in params.items()},
            "loss": total / self.generator_steps,
        }

    def _loss(
        self, values: Mapping[str, Tensor], heads: Sequence[Head], weights_MC: Tensor, noise: Tensor, labels: Tensor
    ) -> Tensor:
        features = generated(values, noise, labels, training=True)
        logits = torch.stack([head(features) for head in heads])
        if self.teacher == "clients":
            each = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(heads)), reduction="none")
            loss = (weights_MC[:, labels] * each.view(len(heads), -1)).mean(dim=1).sum()
        else:
            loss = F.cross_entropy(logits.mean(dim=0), labels)
        return loss + self.diversity * diversity(noise, features) if self.diversity else loss

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={} if state["loss"] is None else {"generator_loss": state["loss"]})


def generator_down(
    *, round: int, variant: Variant, hidden_width: int, noise_width: int, classes: int, features: int
) -> int:
    """The generator, from round 2 on, with `variant` dynamicfl from round 1 on.

    It has `hidden_width * (noise_width + classes + features + 5) + features` values.
    """
    generator = hidden_width * (noise_width + classes + features + 5) + features
    return generator if round > 1 or variant == "dynamicfl" else 0


@with_card(
    Card(
        title="FedGen",
        source="Zhu et al., ICML 2021",
        needs=("features", "classes"),
        down=(generator_down,),
        limits=(Limit(given={"strength": 0.0, "consistency": 0.0}),),
        live=("generator_loss",),
        small={"noise_width": 3, "hidden_width": 5, "generator_steps": 4},
    )
)
@takes(LatentGenerator)
def fedgen(
    *,
    strength: NotNegative = 10.0,
    consistency: NotNegative = 10.0,
    strength_decay: PositiveShare = 0.98,
    **parameters: Any,
) -> FederatedMethod:
    """FedAvg with a generator of features, learned from the clients' heads, that helps them train.

    The defaults are those of the authors' MNIST runs.

    Args:
        strength: Of the cross-entropy on generated features; with consistency 0, too, it is FedAvg bit for bit.
        consistency: Of the divergence between predictions of inputs and of features generated for their labels; the
            paper has none.
        strength_decay: Both strengths fall by this factor a round, down to 1e-4.
    """
    if not strength and not consistency:
        return FederatedMethod(name="fedgen")
    latents = GeneratedLatents(
        strength=strength,
        consistency=consistency,
        decay=strength_decay,
        noise_width=parameters["noise_width"],
        own_classes=parameters["variant"] == "dynamicfl",
    )
    return FederatedMethod(name="fedgen", terms=(latents,), refinements=(LatentGenerator(**parameters),))
