"""A student on the server: a copy of the model that learns what teachers say of the server's inputs.

Shape letters: B inputs, C classes, V values of a model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import Stream
from fedsweep.components import (
    FULL_MODEL,
    PASSES_OF_A_STEP,
    SyncContext,
    any_of,
    load_vector,
    on_device,
    trained_params,
)

from .ensembles import in_batches, template

BatchNorm = Literal["proxy", "frozen"]


class Student:
    """A model in training on the server.

    Args:
        vector: What it starts from [V].
        sync: Where this is; its stream draws the network's own random numbers.
        batch_norm: ``"proxy"``: batch norm's statistics follow the server's inputs; ``"frozen"``: they stay.
    """

    def __init__(self, vector: Tensor, sync: SyncContext, *, batch_norm: BatchNorm) -> None:
        self._start, self._layout, self._stream = vector, sync.layout, sync.stream.child("student")
        self._device = torch.device(sync.device)
        self.module = template(sync)
        load_vector(self.module, sync.layout, vector)
        self._frozen = batch_norm == "frozen"
        self._spent, self._forward_flops = sync.count_flops, sync.forward_flops(FULL_MODEL)
        self._steps = 0

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        inputs: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        clip_norm: float = math.inf,
    ) -> float:
        """Take one step on ``KL(targets || student)``, the mean over the batch, and return that loss.

        Args:
            optimizer: Over the module's parameters.
            inputs: [B, ...].
            targets: Probabilities [B, C].
            temperature: The student's logits are divided by it.
            clip_norm: Greatest 2-norm of the gradient; infinite: no clipping.
        """
        # At each step, since a test in between leaves the module in evaluation mode.
        self.module.train()
        for part in self.module.modules() if self._frozen else ():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
        with self._own_draws():
            logits = self.module(on_device(inputs, self._device))
        loss = F.kl_div((logits / temperature).log_softmax(dim=1), targets.to(self._device), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if math.isfinite(clip_norm):
            nn.utils.clip_grad_norm_(self.module.parameters(), clip_norm)
        optimizer.step()
        self._steps += 1
        self._spent(PASSES_OF_A_STEP * len(targets) * self._forward_flops)
        return float(loss.detach())

    def _own_draws(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a pass in which dropout draws from the step's own stream."""
        return self._stream.child(self._steps).drawn_globally(bits=56, device=str(self._device))

    def accuracy(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the share of the inputs that it gets right, in evaluation mode."""
        self.module.eval()
        self._spent(len(targets) * self._forward_flops)
        with torch.no_grad():
            logits = in_batches(self.module, inputs, self._device)
        return float((logits.argmax(dim=1) == targets).double().mean())

    def with_statistics(self, vector: Tensor, inputs: Tensor) -> Tensor:
        """Return other parameters [V] with batch norm's statistics read anew from the inputs, at least two."""
        load_vector(self.module, self._layout, vector)
        for path, part in self.module.named_modules():
            # Those of a frozen one are constants, and are not gathered anew.
            moves = f"{path}.running_mean" in self._layout.names
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and moves:
                part.reset_running_stats()
                part.momentum = None  # a plain mean over the batches
        self.module.train()
        self._spent(len(any_of(inputs)) * self._forward_flops)
        with torch.no_grad(), self._own_draws():
            in_batches(self.module, inputs, self._device)
        return self.vector()

    def vector(self) -> Tensor:
        """Return its parameters and float buffers as a new vector [V]; riders are those of the start."""
        vector = self._start.clone()
        views = self._layout.views(vector)
        with torch.no_grad():
            for name, value in (*trained_params(self.module).items(), *self.module.named_buffers()):
                if name in views:
                    views[name].copy_(value.to(vector.device))  # torch's lazy device copies into its own alone
        return vector


def batches(num_inputs: int, batch_size: int, stream: Stream, *, steps: int) -> Iterator[Tensor]:
    """Yield so many batches of positions: passes in new random orders, each cut to whole batches."""
    size = min(batch_size, num_inputs)
    for step in range(steps):
        number, place = divmod(step, num_inputs // size)
        if place == 0:
            order = torch.randperm(num_inputs, generator=stream.child("order", number).torch())
        yield order[place * size : (place + 1) * size]


def cosine_rate(step: int, steps: int) -> float:
    """Return a factor that falls from 1 at step 0 along half a cosine towards 0 at ``steps``."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))
