"""FedKTL: no model travels; clients send prototypes, and get images that a decoder on the server makes of them.

Source: Zhang, Liu, Hua, Cao (2024): An upload-efficient scheme for transferring knowledge from a server-side
pre-trained generator to clients in heterogeneous federated learning. CVPR.

Shape letters: B samples, C classes, D features, K images, L latent width, M prototypes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from fedsweep import Card, FederatedMethod, Stream, with_card
from fedsweep.components import (
    Adam,
    ClientTest,
    ClientUpdate,
    ComponentReport,
    Count,
    Evaluation,
    LocalClient,
    LocalSolver,
    LocalStep,
    Memory,
    NotNegative,
    Objective,
    ParamTree,
    Passes,
    Payload,
    Positive,
    Probe,
    Published,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    parameters_of,
    takes,
    training_flops,
)

from .parts.decoders import SmallDecoder, server_images
from .parts.features import network_with_features
from .parts.own_models import KeepsModel, OwnModelTest, Travels

_TERM = "fedktl"
_ETF, _WEIGHT, _BIAS, _IMAGES, _LATENTS = (f"{_TERM}_{n}" for n in ("etf", "weight", "bias", "images", "latents"))
_BANDWIDTHS = (10, 15, 20, 50)
_CLIP = 100.0  # greatest norm of any gradient: the models', the projections', the server's


@functools.cache
def simplex(num_classes: int) -> Tensor:
    """Return a simplex equiangular tight frame [C, C]: columns of length 1 with products ``-1 / (C - 1)``."""
    drawn = torch.rand(num_classes, num_classes, generator=Stream((_ETF, num_classes)).torch(), dtype=torch.float64)
    orthogonal, _ = torch.linalg.qr(drawn)
    centred = torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes
    frame: Tensor = math.sqrt(num_classes / (num_classes - 1)) * orthogonal @ centred
    return frame


def cosines(logits_BC: Tensor, etf_CC: Tensor) -> Tensor:
    """Return the cosines of the outputs with each class's direction [B, C]."""
    return F.normalize(logits_BC, dim=1) @ etf_CC.to(logits_BC)


def with_margin(cosines_BC: Tensor, targets_B: Tensor, margin: float) -> Tensor:
    """Return ``cos(theta + margin)`` in place of the true class's cosine; beyond pi its linear continuation.

    Source: Deng et al. (2019), ArcFace; the fall-back is its published program's.
    """
    true = cosines_BC.gather(1, targets_B[:, None]).clamp(-1 + 1e-7, 1 - 1e-7)
    angle = true.acos()
    moved = torch.where(angle + margin <= math.pi, (angle + margin).cos(), true - margin * math.sin(margin))
    return cosines_BC.scatter(1, targets_B[:, None], moved)


def discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Estimate the maximum mean discrepancy of two samples [M, L]: Gaussian kernels of four widths, biased."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        apart = (a[:, None] - b).square().sum(dim=2)
        return torch.stack([(-0.5 * apart / width).exp() for width in _BANDWIDTHS]).sum(dim=0)

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()


@dataclass(frozen=True, kw_only=True)
class ArcFace(Objective):
    """Cross-entropy of ``scale * cosine`` with the frame's directions, with an angular margin on the true class.

    Attributes:
        margin: Angular margin of a client's loss, in radians, at least 0.
        scale: Of its cosines, above 0; the paper's, for a learning rate of 0.01.
    """

    margin: NotNegative = 0.5
    scale: Positive = 64.0

    def loss(self, step: LocalStep) -> Tensor:
        similarities = cosines(step.logits, step.broadcast[_ETF])
        return F.cross_entropy(self.scale * with_margin(similarities, step.targets, self.margin), step.targets)


@dataclass(frozen=True, kw_only=True)
class Knowledge(KeepsModel):
    """The client's own model; and ``strength * mean square of projection(features(image)) - latent`` on server's pairs.

    The projection is the same for all clients at a round's start, and trained along with the model's rate.

    Attributes:
        strength: mu, the weight of the images in a client's loss, at least 0. The paper's, at a learning rate of
            0.01; at 0.05 that diverges.
    """

    name: str = _TERM
    strength: NotNegative = 50.0

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        # A step reads as many images as it has samples, but there is one a class.
        return Passes(step=3 * min(1.0, num_classes / batch_size) if self.strength else 0)

    def loss(self, step: LocalStep) -> Tensor | None:
        if not self.strength or _IMAGES not in step.broadcast:
            return None
        images, latents = step.broadcast[_IMAGES], step.broadcast[_LATENTS]
        chosen = torch.randperm(len(images), generator=step.stream.child("images").torch())[: len(step.targets)]
        features: Callable[[Tensor], Tensor] = step.model.features  # type: ignore[assignment]
        outputs = features(images[chosen].to(step.inputs))
        start = step.memory.get("projection", (step.broadcast[_WEIGHT], step.broadcast[_BIAS]))
        weight, bias = (cast(Tensor, v).detach().to(outputs).requires_grad_() for v in cast(tuple[Any, Any], start))
        # What after_step reads: the projection is no part of the model, so the backward pass leaves its gradient here.
        step.memory["leaves"] = (weight, bias)
        return self.strength * F.mse_loss(F.linear(outputs, weight, bias), latents[chosen].to(outputs))

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        memory = dict(step.memory)
        leaves = cast(tuple[Tensor, ...], memory.pop("leaves", ()))
        if leaves:
            nn.utils.clip_grad_norm_(leaves, _CLIP)
            moves = (leaf.detach() - step.learning_rate * cast(Tensor, leaf.grad) for leaf in leaves)
            memory["projection"] = tuple(moves)
        return memory, None


@dataclass(frozen=True, kw_only=True)
class ClippedSteps(LocalSolver):
    """Steps of the configured optimiser on clipped gradients.

    Attributes:
        norm: Greatest 2-norm, above 0.
    """

    norm: float

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        loss = evaluate()
        nn.utils.clip_grad_norm_([value for group in optimizer.param_groups for value in group["params"]], self.norm)
        optimizer.step()
        return loss


@dataclass(frozen=True, kw_only=True)
class ClassPrototypes(Probe):
    """For each of the client's classes, ascending, the mean of the normalised outputs, normalised [classes, C]."""

    name: str = "prototypes"

    @property
    def passes(self) -> float:
        return 1

    def measure(self, client: LocalClient) -> Payload:
        with torch.no_grad():
            vectors = F.normalize(client.model(client.inputs), dim=1)
        means = [vectors[client.targets == label].mean(dim=0) for label in sorted(set(client.targets.tolist()))]
        return {"means": F.normalize(torch.stack(means), dim=1)}


@dataclass(frozen=True, kw_only=True)
class LatentAlignment(Refinement):
    """Learns to place the clients' prototypes among a decoder's latents, and decodes each class's centroid to an image.

    In each round a transformer (linear, batch norm, ReLU, linear) goes on learning ``discrepancy(transformed, valid
    latents) + alignment * mean square of transformed - centroid of the class`` for some passes; the centroids are
    learned along, and in the end read from the transformer in evaluation mode. A class that nobody has keeps its last.

    Attributes:
        decoder: From latents to inputs; trained once, on the server's.
        alignment: lambda, the weight of the centroids on the server, at least 0.
        server_epochs: Passes over a round's prototypes, at least 1.
        server_rate: Of Adam on the server, above 0.
        server_batch: Prototypes of a step, at least 2.

    Source: Zhang et al. (2024) and the authors' program. Reading: their generators were pretrained elsewhere; here one
    is trained on the server's own unlabelled inputs in the first round. A last batch of one prototype is left out.
    """

    decoder: SmallDecoder
    alignment: NotNegative = 1.0
    server_epochs: Count = 100
    server_rate: Positive = 0.01
    server_batch: Annotated[int, Ge(2)] = 100

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",)

    def init(self, context: ServerContext) -> State:
        """Return the projection, the transformer and centroids, all random; no decoder yet.

        Raises:
            ConfigError: The server has no images, or the network does not say where its features are.
        """
        server_images(context, _TERM)
        model = network_with_features(context.model, method=_TERM, use="projects")
        classes, width, dtype = context.num_classes, self.decoder.latent_width, context.layout.dtype
        with context.stream.drawn_globally(bits=56):
            projection, transformer = nn.Linear(model.feature_width, width), self._transformer(classes)
            centroids = torch.randn(classes, width)
        return {
            "classes": {p.client: p.label_counts.nonzero()[0].tolist() for p in context.profiles},
            "etf": simplex(classes).to(dtype),
            "weight": projection.weight.detach().to(dtype),
            "bias": projection.bias.detach().to(dtype),
            "transformer": _tensors(transformer),
            "centroids": centroids,
            "decoder": None,
            "images": None,
            "figures": {},
        }

    def _transformer(self, num_classes: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(num_classes, num_classes),
            nn.BatchNorm1d(num_classes),
            nn.ReLU(),
            nn.Linear(num_classes, self.decoder.latent_width),
        )

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        return (ClassPrototypes(),)

    def publish(self, state: State) -> Mapping[str, Published]:
        sent = {_ETF: state["etf"], _WEIGHT: state["weight"], _BIAS: state["bias"]}
        if state["images"] is not None:
            sent |= {_IMAGES: state["images"], _LATENTS: state["centroids"]}
        return {name: Published(value=value) for name, value in sent.items()}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        measured = [update for update in updates if "prototypes/means" in update.extras]
        if not measured:
            return vector, state
        inputs = server_images(sync, _TERM)
        decoder = self.decoder.trained(inputs, sync) if state["decoder"] is None else state["decoder"]
        prototypes = torch.cat([u.extras["prototypes/means"].float() for u in measured])
        labels = torch.tensor([label for update in measured for label in _classes(update, state["classes"])])
        transformer, centroids, figures = self._aligned(state, prototypes, labels, sync)
        images = self.decoder.decode(decoder, centroids, inputs)
        sync.count_flops(len(images) * self.decoder.decode_flops(inputs))
        after = {"decoder": decoder, "transformer": transformer, "centroids": centroids}
        return vector, {**state, **after, "images": images, "figures": figures}

    def _aligned(
        self, state: State, prototypes: Tensor, labels: Tensor, sync: SyncContext
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
        """Return the transformer and the centroids after the round's passes, and how near they came."""
        transformer = self._transformer(prototypes.shape[1])
        transformer.load_state_dict(state["transformer"])
        centroids = nn.Parameter(_means(transformer, prototypes, labels, state["centroids"]))
        groups: list[list[nn.Parameter]] = [list(transformer.parameters()), [centroids]]
        optimizers = [Adam(group, lr=self.server_rate, foreach=False) for group in groups]
        first = last = math.nan
        weights = sum(weight.numel() for weight in transformer.parameters() if weight.dim() == 2)
        for epoch in range(self.server_epochs):
            transformer.train()
            order = torch.randperm(len(labels), generator=sync.stream.child("epoch", epoch).torch())
            for place in range(0, len(order), self.server_batch):
                chosen = order[place : place + self.server_batch]
                if len(chosen) < 2:
                    continue
                latents = transformer(prototypes[chosen])
                valid = self.decoder.latents(len(chosen), sync.stream.child("latents", epoch, place))
                loss = discrepancy(latents, valid) + self.alignment * F.mse_loss(latents, centroids[labels[chosen]])
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                sync.count_flops(training_flops(weights, len(chosen)))
                for group, optimizer in zip(groups, optimizers, strict=True):
                    nn.utils.clip_grad_norm_(group, _CLIP)
                    optimizer.step()
                last = float(loss.detach())
                first = last if math.isnan(first) else first
        final_centroids = _means(transformer, prototypes, labels, centroids.detach())
        return _tensors(transformer), final_centroids, {"alignment_loss": last, "alignment_start": first}

    def report(self, state: State) -> ComponentReport:
        """Return the first and the last loss of the round's alignment."""
        return ComponentReport(metrics={n: v for n, v in state["figures"].items() if math.isfinite(v)})


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _means(transformer: nn.Module, prototypes: Tensor, labels: Tensor, fallback: Tensor) -> Tensor:
    """Return each class's mean of the transformed prototypes; for a class without one, the fallback."""
    transformer.eval()
    with torch.no_grad():
        transformed, means = transformer(prototypes), fallback.clone()
    for label in sorted(set(labels.tolist())):
        means[label] = transformed[labels == label].mean(dim=0)
    return means


def _classes(update: ClientUpdate, registered: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the classes of a client's prototypes: those that it registered; under drift, of those the present."""
    present = update.classes_since_anchor
    return [label for label in registered[update.client] if present is None or label in present]


@dataclass(frozen=True, kw_only=True)
class NearestDirectionTest(OwnModelTest):
    """A client's own model: the class whose direction is nearest to its output."""

    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        logits = super().predictor(client)
        return lambda inputs: cosines(logits(inputs), simplex(client.num_classes))


@dataclass(frozen=True, kw_only=True)
class NearestDirection(Evaluation):
    """The server's model, which nobody trains, by directions; clients test their own."""

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return cosines(logits, simplex(logits.shape[1]))

    def client_test(self) -> ClientTest:
        return NearestDirectionTest(term=_TERM)


def prototypes_up(*, own_classes: int, classes: int) -> int:
    """A mean output for each class that the client has: `own_classes * classes`."""
    return own_classes * classes


def heads_down(*, is_first: bool, classes: int, features: int, latent_width: int) -> int:
    """In the client's first round the directions and the projection: `classes ** 2 + (features + 1) * latent_width`."""
    return (classes**2 + (features + 1) * latent_width) * is_first


def images_down(*, round: int, classes: int, input_values: int, latent_width: int) -> int:
    """From round 2 on an image and its latent for each class: `classes * (input_values + latent_width)`."""
    return classes * (input_values + latent_width) * (round > 1)


@with_card(
    Card(
        title="FedKTL",
        source="Zhang et al., CVPR 2024",
        needs=("proxy", "features", "classes"),
        up=(prototypes_up,),
        down=(heads_down, images_down),
        live=("alignment_loss", "personal_accuracy"),
        differs=(
            "the decoder is trained on the server's inputs, not pretrained elsewhere",
            "the images' passes count in round 1, too, where there are none; a smaller last batch takes one a sample",
        ),
        small={"strength": 0.5, "scale": 4.0, "decoder_steps": 10, "server_epochs": 5, "latent_width": 4},
    )
)
@takes(Knowledge, ArcFace, LatentAlignment, SmallDecoder, but=("name", "decoder", "width", "batch_size"))
def fedktl(**parameters: Any) -> FederatedMethod:
    """No model travels: clients send prototypes and get an image for each class from a decoder on the server.

    No model travels, so ``test_accuracy`` is that of a model which nobody trains. What counts is
    ``personal_accuracy``: the clients' own models on their own shares of the test set.
    """
    decoder = SmallDecoder(**parameters_of(SmallDecoder, parameters))
    return FederatedMethod(
        name="fedktl",
        objective=ArcFace(**parameters_of(ArcFace, parameters)),
        terms=(Knowledge(**parameters_of(Knowledge, parameters)),),
        solver=ClippedSteps(norm=_CLIP),
        submodels=Travels(method=_TERM, part="nothing"),
        refinements=(LatentAlignment(decoder=decoder, **parameters_of(LatentAlignment, parameters)),),
        evaluation=NearestDirection(),
    )
