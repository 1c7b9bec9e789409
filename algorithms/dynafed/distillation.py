"""DynaFed: the server learns synthetic data from the global models' trajectory, and fine-tunes each aggregate on it.

Clients are those of FedAvg and see nothing new; nothing more travels. Up to the synthesis the run is FedAvg bit for
bit.

Source: Pi, Zhang, Xie, Gao, Wang, Kim, Chen (2023): DynaFed: tackling client data heterogeneity with global dynamics.
CVPR. Algorithm 2, and the authors' program where the paper is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    FULL_MODEL,
    PASSES_OF_A_STEP,
    Adam,
    BySamples,
    ClientUpdate,
    ComponentReport,
    Count,
    CountOrZero,
    NotNegative,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    Uniform,
    parameters_of,
    takes,
)

from ..parts.ensembles import template
from .augmentation import augment as augmented
from .synthesis import Synthesis, Synthesizer
from .trajectory import forward_of, soft_cross_entropy

Profile = Literal["default", "paper", "program"]
RealReference = Literal["none", "proxy", "validation"]

# A step's forward pass and backward pass, which costs two, and the backward pass of both, which costs twice as much.
_PASSES_OF_A_STEP_LEARNED_THROUGH = 9

_SHARED = {
    "inner_steps": 20,
    "images_per_class": 15,
    "image_learning_rate": 0.05,
    "label_learning_rate": 0.01,
    "inner_rate": 0.04,
    "inner_rate_learning_rate": 1e-5,
    "target": "drawn",
    "augment": True,
    "finetune_epochs": 20,
    "finetune_learning_rate": 1e-4,
}
_DEFAULT = {**_SHARED, "snapshots": 21, "horizon_rounds": 5, "iterations": 1000}
# As printed: at such an inner rate the steps leave the start where it is, so nothing is learned.
_PRINTED = {"label_learning_rate": 0.05, "inner_rate": 1e-5, "inner_rate_learning_rate": 0.0, "augment": False}
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "default": _DEFAULT,
    "paper": {**_DEFAULT, **_PRINTED, "target": "between"},
    "program": {**_SHARED, "snapshots": 25, "horizon_rounds": 3, "iterations": 3000},
}


@dataclass(frozen=True, kw_only=True)
class TrajectoryDistillation(Refinement):
    """Keeps the first global models, learns synthetic data from them once, and fine-tunes on it from then on.

    The synthesis happens at the end of the round in which the trajectory is complete, after its aggregation; that
    round is not fine-tuned.

    Attributes:
        snapshots: Global models in the trajectory, the initial one included; the synthesis follows aggregation
            number snapshots - 1, in the round of that number where every round aggregates.
        images_per_class: Synthetic images per class.
        synthesis: How the synthetic set is learned.
        finetune_epochs: Passes over the synthetic set after each aggregation (20).
        finetune_learning_rate: Adam's rate in fine-tuning (1e-4), where it is started anew each time.
        finetune_batch: Synthetic images per fine-tuning step.
        real_reference: A diagnosis, no part of the method: proxy or validation compares the move by the synthetic
            set with that by as many real images, which the server must hold; nothing is learned from them.

    Source: DynaFed, Algorithm 2. Reading: the initial model and that of the last round before the synthesis belong to
    the trajectory; labels are logits that start at zero; the inner rate is learned; the objective is the normalised
    squared distance (the cosine distance is reported beside it). Networks run in evaluation mode: without dropout.
    The authors' passes that refresh batch statistics are left out, since only networks without them are admitted.
    """

    snapshots: int
    images_per_class: Count
    synthesis: Synthesis
    finetune_epochs: CountOrZero
    finetune_learning_rate: NotNegative
    finetune_batch: Count = 256
    real_reference: RealReference = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.snapshots <= self.synthesis.horizon_rounds:
            raise ConfigError(
                "method.snapshots must exceed method.horizon_rounds, but got"
                f" snapshots={self.snapshots}, horizon_rounds={self.synthesis.horizon_rounds}; keep more snapshots or"
                " look less far ahead"
            )

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        if state is not None:
            return tuple(filter(None, [self._left_out(state)]))
        if self.snapshots <= context.num_rounds:
            return ()
        return (
            f"the synthesis follows round {self.snapshots - 1}, and rounds after it are fine-tuned, but the run has"
            f" {context.num_rounds}: this is FedAvg; set method.snapshots to fewer, or training.rounds to more",
        )

    def _left_out(self, state: State) -> str | None:
        """Say at the run's end which part of the method did not happen."""
        if state["synthetic"] is None:
            return f"there was no synthesis, since the run came to {len(state['snapshots'])} of {self.snapshots} models"
        if state["finetune_loss"] is None and self.finetune_epochs and self.finetune_learning_rate:
            return f"the synthesis came in round {state['learned_in']}, and no later round was fine-tuned"
        return None

    def init(self, context: ServerContext) -> State:
        """Return the state with the initial model as the first snapshot.

        Raises:
            ConfigError: The model has batch statistics, or does not tell the shape of its inputs.
        """
        if context.layout.num_buffers:
            raise ConfigError(
                f"dynafed matches parameters alone, but model {type(context.model).__name__} also has batch statistics"
                f" ({context.layout.num_buffers} values); use a model without batch norm, e.g. model.name=convnet3"
            )
        shape = getattr(context.model, "input_shape", None)
        if shape is None or len(shape) != 3:
            raise ConfigError(
                f"dynafed makes images, so model {type(context.model).__name__} needs an attribute input_shape with"
                f" channels, height and width, but it is {shape}"
            )
        real = self._real_sample(context)
        return {
            **({} if real is None else {"real": real}),
            "snapshots": [context.vector[: context.layout.num_params].clone()],
            "image_shape": [int(size) for size in shape],
            "num_classes": context.num_classes,
            "synthetic": None,
            "learned_in": None,
            "finetune_loss": None,
        }

    def _real_sample(self, context: ServerContext) -> State:
        """Return the first ``images_per_class`` images of each class that the server holds, for the figures."""
        if self.real_reference == "none":
            return None
        server_data = context.proxy_data if self.real_reference == "proxy" else context.validation_data
        images, labels = server_data if server_data is not None else (None, None)
        key = {"proxy": "proxy={per_class: 15, labelled: true}", "validation": "validation=0.05"}[self.real_reference]
        if images is None or labels is None:
            raise ConfigError(
                f"method.real_reference={self.real_reference} needs labelled data of that kind on the server, but the"
                f" scenario has none; set scenario.server_data.{key}, or method.real_reference=none"
            )
        indices_by_class = [
            torch.nonzero(labels == label)[: self.images_per_class, 0] for label in range(context.num_classes)
        ]
        chosen = torch.cat(indices_by_class)
        return {"images": images[chosen].clone(), "labels": labels[chosen].clone()}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        if state["synthetic"] is not None:
            return self._finetuned(state, vector, sync)
        # A copy: the engine goes on with the vector itself.
        snapshots = [*state["snapshots"], vector[: sync.layout.num_params].clone()]
        if len(snapshots) < self.snapshots:
            return vector, {**state, "snapshots": snapshots}
        synthesizer = Synthesizer(
            self.synthesis,
            replace(sync, stream=sync.stream.child("synthesis")),
            snapshots=snapshots,
            num_images=self.images_per_class * state["num_classes"],
            image_shape=tuple(state["image_shape"]),
            num_classes=state["num_classes"],
            real=state.get("real"),
        )
        synthetic = synthesizer.run(sync.resumed)
        sync.count_flops(synthesizer.samples * _PASSES_OF_A_STEP_LEARNED_THROUGH * sync.forward_flops(FULL_MODEL))
        # Without the snapshots and real images: nothing reads them again, and each checkpoint would carry them.
        left = {name: value for name, value in state.items() if name != "real"}
        return vector, {**left, "snapshots": [], "synthetic": synthetic, "learned_in": sync.round}

    def _finetuned(self, state: State, vector: Tensor, sync: SyncContext) -> tuple[Tensor, State]:
        """Train the aggregate on the synthetic set with Adam."""
        if not self.finetune_epochs or not self.finetune_learning_rate:
            return vector, state
        forward, device = forward_of(template(sync), sync.layout), torch.device(sync.device)
        images, labels = state["synthetic"]["images"].to(device), state["synthetic"]["labels"].to(device)
        views = sync.layout.params(vector.to(device))
        params = tuple(value.clone().requires_grad_() for value in views.values())
        optimizer = Adam(params, lr=self.finetune_learning_rate, foreach=False)
        loss_sum = 0.0
        for epoch in range(self.finetune_epochs):
            stream = sync.stream.child("finetune", epoch)
            loss_sum = 0.0
            order = torch.randperm(len(images), generator=stream.child("order").torch())
            for number, index in enumerate(torch.split(order, self.finetune_batch)):
                batch = images[index.to(device)]
                if self.synthesis.augment:
                    batch = augmented(batch, stream.child("augment", number))
                loss = soft_cross_entropy(forward(params, batch), labels[index.to(device)])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                loss_sum += float(loss.detach()) * len(index)
        sync.count_flops(PASSES_OF_A_STEP * self.finetune_epochs * len(images) * sync.forward_flops(FULL_MODEL))
        refined = vector.clone()
        refined[: sync.layout.num_params] = torch.cat([value.detach().cpu().reshape(-1) for value in params])
        return refined, {**state, "finetune_loss": loss_sum / len(images)}

    def report(self, state: State) -> ComponentReport:
        """Report the synthesis's last objective, cosine distances, the learned rate, the synthetic images over time."""
        if state["synthetic"] is None:
            return ComponentReport()
        last = state["synthetic"]["trace"][-1]
        metrics = {f"synthesis_{name}": last[name] for name in last if name != "iteration"}
        if state["finetune_loss"] is not None:
            metrics["finetune_loss"] = state["finetune_loss"]
        grids = state["synthetic"]["pictures"]
        pictures = {name: grid.numpy().astype(np.float32) / 255 for name, grid in grids.items()}
        return ComponentReport(metrics=metrics, pictures=pictures)


@with_card(
    Card(
        title="DynaFed",
        source="Pi et al., CVPR 2023",
        needs=("input shape", "no batch norm", "classes"),
        limits=(Limit(given={"snapshots": 10**6, "weights": "size"}),),
        live=("synthesis_objective", "finetune_loss"),
        small={
            "snapshots": 2,
            "horizon_rounds": 1,
            "inner_steps": 3,
            "iterations": 6,
            "images_per_class": 2,
            "finetune_epochs": 3,
            "finetune_learning_rate": 0.05,
            "checkpoint_seconds": 0.0,
        },
    )
)
@takes(TrajectoryDistillation, Synthesis, but=("synthesis",))
def dynafed(
    *, profile: Profile = "default", weights: Literal["uniform", "size"] = "uniform", **parameters: Any
) -> FederatedMethod:
    """FedAvg whose server learns synthetic data from its first rounds and fine-tunes on it in the others.

    Reading: the fine-tuning that the authors' scripts choose by data set (CIFAR-100: 8 epochs; CINIC-10: rate 2.5e-4)
    stands in the presets; all profiles have 20 epochs at 1e-4, since the paper is silent. Reading: the paper's "SGD
    with learning rate 1e-5 on the synthetic data" is the rate with which the inner rate is learned, since 20 such steps
    leave the start where it is.

    Args:
        profile: Where parameters that are null come from: default (the paper's counts, 21 snapshots, horizon 5, 1000
            iterations, with the program's rates, targets and augmentation), paper (rates and targets as printed, too,
            by which nothing is learned) or program (25, 3, 3000: the authors' scripts); all: 20 inner steps, 15 images
            per class.
        weights: How clients are averaged: uniform (Algorithm 2, the authors) or by size (Eq. 2).
    """
    chosen = {name: PROFILES[profile].get(name) if value is None else value for name, value in parameters.items()}
    synthesis = Synthesis(**parameters_of(Synthesis, chosen))
    return FederatedMethod(
        name="dynafed",
        weighting=Uniform() if weights == "uniform" else BySamples(),
        refinements=(TrajectoryDistillation(synthesis=synthesis, **parameters_of(TrajectoryDistillation, chosen)),),
    )
