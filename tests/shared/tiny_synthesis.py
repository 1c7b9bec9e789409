"""DynaFed's refinement in milliseconds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedsweep.algorithms.dynafed.distillation import TrajectoryDistillation, dynafed
from fedsweep.method import FederatedMethod

# Three rounds of trajectory (four snapshots), then fine-tuning from round 4 on.
SMALL: dict[str, Any] = {
    "snapshots": 4,
    "horizon_rounds": 2,
    "inner_steps": 3,
    "iterations": 12,
    "images_per_class": 2,
    "finetune_epochs": 3,
    "finetune_learning_rate": 0.05,
    "checkpoint_seconds": 0.0,
}


class TinyNetwork(nn.Module):
    """A linear classifier that tells the shape of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.input_shape = (1, 1, 6)
        self.classifier = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(inputs.flatten(1))
        return logits


def small(**more: Any) -> FederatedMethod:
    return dynafed(**{**SMALL, **more})


def distillation(method: FederatedMethod) -> TrajectoryDistillation:
    refinement = method.refinements[0]
    assert isinstance(refinement, TrajectoryDistillation)
    return refinement
