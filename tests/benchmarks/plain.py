"""Plain PyTorch references for the benchmarks: no framework, the same model, optimiser, batches and averages."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.models.registry import build_model
from fedsweep.streams import stream

NUM_CLIENTS, SAMPLES, COHORT, BATCH, STEPS = 100, 500, 10, 10, 250


def images_and_labels(num_clients: int = NUM_CLIENTS, samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-shaped noise: uint8 [S, 3, 32, 32] and labels [S]."""
    generator = stream(0, "benchmark").numpy()
    total = num_clients * samples
    return (
        generator.integers(0, 256, size=(total, 3, 32, 32), dtype=np.uint8),
        generator.integers(0, 10, size=total).astype(np.int64),
    )


def lenet() -> nn.Module:
    """LeNet-5 for 3x32x32 images and 10 classes."""
    return build_model("lenet5", input_shape=(3, 32, 32), num_classes=10, stream=stream(0, "model"))


class PlainClient:
    """One client's data as ready float tensors, and an optimiser."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.inputs = (torch.from_numpy(images).float() / 255 - 0.5) / 0.25
        self.labels = torch.from_numpy(labels)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, index: Tensor) -> None:
        """One SGD step."""
        optimizer.zero_grad()
        loss = F.cross_entropy(model(self.inputs[index]), self.labels[index])
        loss.backward()
        optimizer.step()


def long_rounds(images: np.ndarray, labels: np.ndarray, *, clients: list[int], rounds: int) -> float:
    """Seconds that one process needs for rounds in which each of ``clients`` takes 250 steps in turn."""
    torch.set_num_threads(1)
    model = lenet()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    began = time.perf_counter()
    for number in range(rounds):
        for client in clients:
            part = slice(client * SAMPLES, (client + 1) * SAMPLES)
            data = PlainClient(images[part], labels[part])
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            order = torch.from_numpy(stream(0, "order", number, client).numpy().permutation(SAMPLES * 5) % SAMPLES)
            for position in range(STEPS):
                data.step(model, optimizer, order[position * BATCH : (position + 1) * BATCH])
    return time.perf_counter() - began


def synchronous_round(images: np.ndarray, labels: np.ndarray, *, steps: int) -> float:
    """Seconds for a round of ten clients that one process steps in turn, averaging after every step."""
    torch.set_num_threads(1)
    models = [lenet() for _ in range(COHORT)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    clients = [
        PlainClient(images[k * SAMPLES : (k + 1) * SAMPLES], labels[k * SAMPLES : (k + 1) * SAMPLES])
        for k in range(COHORT)
    ]
    orders = [
        torch.from_numpy(stream(0, "order", 0, k).numpy().permutation(SAMPLES * 5) % SAMPLES) for k in range(COHORT)
    ]
    began = time.perf_counter()
    for position in range(steps):
        for client, model, optimizer, order in zip(clients, models, optimizers, orders, strict=True):
            client.step(model, optimizer, order[position * BATCH : (position + 1) * BATCH])
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in parameters]).mean(dim=0)
                for parameter in parameters:
                    parameter.copy_(mean)
    return time.perf_counter() - began
