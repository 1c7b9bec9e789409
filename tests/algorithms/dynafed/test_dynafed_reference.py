"""The synthesis against a second, plain implementation of section 4 of its specification: no code shared but the draws.

The model is written out as functions of one flat vector, Adam as its formulas. A tiny network, 8 snapshots, targets up
to 3 rounds ahead, 5 inner steps, float64, no augmentation.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_sync
from torch import Tensor, nn

from fedsweep.algorithms.dynafed.distillation import dynafed
from fedsweep.algorithms.dynafed.synthesis import Synthesis, Synthesizer
from fedsweep.algorithms.dynafed.trajectory import draw_segment
from fedsweep.records import State
from fedsweep.streams import Stream
from fedsweep.trees import FlatLayout, layout_of

CLASSES, IMAGES, SNAPSHOTS, HORIZON, STEPS, ITERATIONS = 3, 6, 8, 3, 5, 3
STREAM = Stream(("reference", 7))
SHAPES = {
    "0.weight": (4, 2, 3, 3),
    "0.bias": (4,),
    "1.weight": (4,),
    "1.bias": (4,),
    "5.weight": (3, 16),
    "5.bias": (3,),
}


def network() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    return model.double()


def trajectory() -> list[Tensor]:
    """A walk with a direction of its own."""
    generator = STREAM.child("walk").torch()
    size = sum(math.prod(shape) for shape in SHAPES.values())
    walk = [torch.randn(size, generator=generator, dtype=torch.float64) * 0.3]
    drift = torch.randn(size, generator=generator, dtype=torch.float64) * 0.03
    for _ in range(SNAPSHOTS - 1):
        walk.append(walk[-1] + drift + 0.01 * torch.randn(size, generator=generator, dtype=torch.float64))
    return walk


def plain_logits(theta: Tensor, x: Tensor) -> Tensor:
    parts, offset = {}, 0
    for name, shape in SHAPES.items():
        parts[name] = theta[offset : offset + math.prod(shape)].reshape(shape)
        offset += math.prod(shape)
    maps = F.conv2d(x, parts["0.weight"], parts["0.bias"], padding=1)
    mean = maps.mean(dim=(2, 3), keepdim=True)
    variance = ((maps - mean) ** 2).mean(dim=(2, 3), keepdim=True)
    maps = (maps - mean) / torch.sqrt(variance + 1e-5)
    maps = torch.relu(maps * parts["1.weight"][:, None, None] + parts["1.bias"][:, None, None])
    pooled = (maps[..., 0::2, 0::2] + maps[..., 1::2, 0::2] + maps[..., 0::2, 1::2] + maps[..., 1::2, 1::2]) / 4
    return pooled.reshape(len(x), -1) @ parts["5.weight"].T + parts["5.bias"]


class PlainAdam:
    def __init__(self, rate: float) -> None:
        self.rate, self.steps, self.mean, self.square = rate, 0, 0.0, 0.0

    def move(self, gradient: Tensor) -> Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        return -self.rate * mean / (torch.sqrt(torch.as_tensor(square)) + 1e-8)


def plain_synthesis(
    walk: list[Tensor], images: Tensor, *, iterations: int
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    x, y = images.clone(), torch.zeros(IMAGES, CLASSES, dtype=torch.float64)
    rate = torch.tensor(0.04, dtype=torch.float64)
    adams = (PlainAdam(0.05), PlainAdam(0.01), PlainAdam(1e-5))
    objectives = []
    for number in range(1, iterations + 1):
        draws = STREAM.child("iteration", number).child("segment", 0)
        start, picks = draw_segment(len(walk), horizon=HORIZON, last_start=50, target="drawn", stream=draws)
        target = sum(walk[pick] for pick in picks) / len(picks)
        variables = [part.clone().requires_grad_() for part in (x, y, rate)]
        theta = walk[start].clone().requires_grad_()
        for _ in range(STEPS):
            loss = -(torch.softmax(variables[1], 1) * torch.log_softmax(plain_logits(theta, variables[0]), 1)).mean()
            (slope,) = torch.autograd.grad(loss, theta, create_graph=True)
            theta = theta - variables[2] * slope
        objective = ((theta - target) ** 2).sum() / ((walk[start] - target) ** 2).sum()
        slopes = torch.autograd.grad(objective, variables)
        x, y, rate = (part + adam.move(slope) for part, adam, slope in zip((x, y, rate), adams, slopes, strict=True))
        objectives.append(float(objective.detach()))
    return x, y, rate, objectives


def settings(iterations: int) -> Synthesis:
    method = dynafed(
        snapshots=SNAPSHOTS, horizon_rounds=HORIZON, inner_steps=STEPS, iterations=iterations, augment=False
    )
    synthesis = method.refinements[0].synthesis  # type: ignore[attr-defined]
    assert isinstance(synthesis, Synthesis)
    return synthesis


def learned(iterations: int) -> State:
    model = network()
    layout: FlatLayout = layout_of(model)
    assert dict(zip(layout.names, layout.shapes, strict=True)) == SHAPES
    walk = trajectory()
    sync = tiny_sync(model, walk[-1], round=SNAPSHOTS, layout=layout, cohort=(), stream=STREAM)
    return Synthesizer(
        settings(iterations),
        sync,
        snapshots=walk,
        num_images=IMAGES,
        image_shape=(2, 4, 4),
        num_classes=CLASSES,
    ).run()


def initial_images() -> Tensor:
    return torch.randn(IMAGES, 2, 4, 4, generator=STREAM.child("images").torch(), dtype=torch.float64)


@pytest.mark.parametrize("iterations", [1, 3])
def test_synthesis_equals_a_plain_implementation(iterations: int) -> None:
    x, y, rate, objectives = plain_synthesis(trajectory(), initial_images(), iterations=iterations)
    found = learned(iterations)
    assert torch.allclose(found["images"], x, rtol=0, atol=1e-12)
    assert torch.allclose(found["labels"], y, rtol=0, atol=1e-12)
    assert float(found["rate"]) == pytest.approx(float(rate), abs=1e-14)
    assert [entry["objective"] for entry in found["trace"]] == pytest.approx(objectives, rel=1e-10)
    assert float((found["images"] - initial_images()).abs().max()) > 0.01
    assert float(found["labels"].abs().max()) > 0.005
    assert float(found["rate"]) != 0.04


def test_objective_falls_and_the_learned_set_points_closer_to_the_target_than_noise() -> None:
    trace = learned(60)["trace"]
    assert [entry["iteration"] for entry in trace] == [6.0 * k for k in range(1, 11)]
    assert trace[-1]["objective"] < trace[0]["objective"] < 1.0
    assert trace[-1]["cosine_distance"] < trace[-1]["noise_cosine_distance"]
