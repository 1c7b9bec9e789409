"""Trajectory matching: gradients of a synthetic set through the training steps that are taken on it.

From an early model, gradient steps on the synthetic set should lead to a later model. The steps are unrolled; where
their graph would not fit into memory, only the models between groups of steps are kept, and each group is computed
again when its gradients are due. The result has the same bits either way: a step's gradients with respect to images,
labels and rate are taken by themselves and added from the last step to the first.

Source: DynaFed (Pi et al., CVPR 2023), Algorithm 2 and Eq. 4-6, and its authors' program.
Legend: B batch, C classes, S synthetic images.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedsweep import Stream
from fedsweep.components import FlatLayout

from .augmentation import augment

Params = tuple[Tensor, ...]
Forward = Callable[[Params, Tensor], Tensor]  # params, inputs [B, ...] -> logits [B, C]
Target = Literal["drawn", "between", "farthest"]


class SyntheticSet(NamedTuple):
    """A synthetic set, which is learned: images, label logits and a rate.

    Attributes:
        images: [S, channels, height, width], as the model sees images: normalised.
        labels: Label logits [S, C]; their softmax is the soft label.
        rate: The inner learning rate, a scalar tensor.
    """

    images: Tensor
    labels: Tensor
    rate: Tensor


@dataclass(frozen=True, kw_only=True)
class Matched:
    """One comparison of the inner steps' end with the target.

    Attributes:
        objective: ``||end - target||^2 / ||start - target||^2``.
        gradients: Of the objective, with respect to images, labels and rate.
        end: The params after the last step.
    """

    objective: Tensor
    gradients: SyntheticSet
    end: Params


def forward_of(model: nn.Module, layout: FlatLayout) -> Forward:
    """Return logits of a template under given params; the template itself stays as it is."""
    names = tuple(layout.params(torch.empty(layout.num_params, device="meta")))

    def forward(params: Params, inputs: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (inputs,))
        return logits

    return forward


def soft_cross_entropy(logits: Tensor, label_logits: Tensor) -> Tensor:
    """Return minus the mean over samples AND classes of ``softmax(label_logits) * log_softmax(logits)``.

    Source: the authors' program. The mean over classes makes it 1/C of the usual cross-entropy; the inner rates
    that are in use presuppose it.

    Args:
        logits: [B, C].
        label_logits: [B, C].
    """
    return -(label_logits.softmax(dim=1) * logits.log_softmax(dim=1)).mean()


def draw_segment(
    num_snapshots: int, *, horizon: int, last_start: int, target: Target, stream: Stream
) -> tuple[int, tuple[int, ...]]:
    """Return the snapshot to start from, and those whose mean is the target, within ``horizon`` rounds after it.

    Source: the authors' program (``drawn``): the start is uniform, the target is the mean of 2 to ``horizon``
    snapshots, drawn with replacement from those after the start, the farthest not always among them. The paper
    (``between``): the farthest "averaged with 2 checkpoints between", which are drawn without replacement here.

    Args:
        num_snapshots: Length of the trajectory, above ``horizon``.
        horizon: How far ahead the target may lie, in rounds, at least 1.
        last_start: Latest start, at least 0.
        target: ``farthest``: the snapshot ``horizon`` rounds ahead alone.
        stream: Of the draws.
    """
    generator = stream.numpy()
    start = int(generator.integers(0, min(last_start, num_snapshots - 1 - horizon) + 1))
    if target == "farthest":
        return start, (start + horizon,)
    if target == "between":
        between = generator.choice(horizon - 1, size=min(2, horizon - 1), replace=False) if horizon > 1 else ()
        return start, (*sorted(start + 1 + int(place) for place in between), start + horizon)
    count = int(generator.integers(min(2, horizon), horizon + 1))
    picks = generator.integers(start + 1, start + horizon + 1, size=count)
    return start, tuple(int(pick) for pick in picks)


def draw_batches(num_images: int, *, batch: int | None, steps: int, stream: Stream) -> tuple[Tensor | None, ...]:
    """Return each inner step's synthetic images, by position; None: all of them.

    Args:
        num_images: S.
        batch: Images per step; None, or at least S: all. A pass ends with what is left.
        steps: Inner steps.
        stream: Of the order, drawn anew for each pass.
    """
    if batch is None or batch >= num_images:
        return (None,) * steps
    chunks: list[Tensor] = []
    passes = 0
    while len(chunks) < steps:
        order = torch.randperm(num_images, generator=stream.child("pass", passes).torch())
        chunks.extend(torch.split(order, batch))
        passes += 1
    return tuple(chunks[:steps])


@dataclass(frozen=True, kw_only=True)
class InnerLoop:
    """Plain gradient steps on a synthetic set.

    Attributes:
        forward: The model.
        batches: What each step sees; their number is the number of steps.
        augments: Whether each step's images are changed at random.
        stream: Of these changes, one child per step.
    """

    forward: Forward
    batches: tuple[Tensor | None, ...]
    augments: bool
    stream: Stream

    @property
    def steps(self) -> int:
        """Their number."""
        return len(self.batches)

    def step(self, number: int, params: Params, synthetic: SyntheticSet) -> Params:
        """Return the params after one step: ``params - rate * gradient``.

        Args:
            number: Of the step, from 0.
            params: They require gradients.
            synthetic: What the step is taken on; gradients can flow back to it.
        """
        images, labels = synthetic.images, synthetic.labels
        index = self.batches[number]
        if index is not None:
            images, labels = images[index.to(images.device)], labels[index.to(labels.device)]
        if self.augments:
            images = augment(images, self.stream.child("augment", number))
        loss = soft_cross_entropy(self.forward(params, images), labels)
        # A param that the logits do not depend on stays where it is.
        gradients = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
        return tuple(value - synthetic.rate * slope for value, slope in zip(params, gradients, strict=True))

    def run(self, start: Params, synthetic: SyntheticSet, *, first: int = 0, last: int | None = None) -> Params:
        """Return the params after steps ``first`` to ``last`` (exclusive), the graph of one step held at a time."""
        params = start
        for number in range(first, self.steps if last is None else last):
            # With a graph other kernels are in use, of other bits: the steps must be those that are learned through.
            moved = self.step(number, _leaves(params), synthetic)
            params = tuple(value.detach() for value in moved)
        return params


def squared_distance(first: Params, second: Params) -> Tensor:
    """Return ``||first - second||^2`` over all params, a scalar tensor."""
    return torch.stack([(a - b).square().sum() for a, b in zip(first, second, strict=True)]).sum()


def cosine_distance(first: Params, second: Params) -> float:
    """Return one minus the cosine of the angle between two moves, 0..2; 1 where one of them is zero."""
    a = torch.cat([part.reshape(-1) for part in first]).double()
    b = torch.cat([part.reshape(-1) for part in second]).double()
    norms = float(a.norm() * b.norm())
    return 1.0 - float(a @ b) / norms if norms else 1.0


def match(loop: InnerLoop, start: Params, target: Params, synthetic: SyntheticSet, *, group: int) -> Matched:
    """Return the objective and its gradients through all inner steps.

    Source: DynaFed, Eq. 5: the distance to the target as a share of the start's.

    Args:
        loop: The inner steps.
        start: Where they start; a constant.
        target: Where they should end; not equal to ``start``.
        synthetic: The synthetic set.
        group: Steps whose graph is held at a time, at least 1; changes no bit of the result.
    """
    scale = squared_distance(start, target)
    starts = list(range(0, loop.steps, group))
    reached = [start]
    for first, last in itertools.pairwise(starts):
        reached.append(loop.run(reached[-1], synthetic, first=first, last=last))
    total, slopes = SyntheticSet(*map(torch.zeros_like, synthetic)), None
    objective, end = squared_distance(start, target) / scale, start
    # From the last group to the first: only now, each with its graph, and from the model that it began with.
    for first in reversed(starts):
        leaves = _leaves(reached.pop())
        # One for each step: their gradients are then added in one order, however many steps a group has.
        copies = [SyntheticSet(*map(_leaf, synthetic)) for _ in range(first, min(first + group, loop.steps))]
        outputs = leaves
        for number, copied in enumerate(copies, start=first):
            outputs = loop.step(number, outputs, copied)
        if slopes is None:
            end = tuple(value.detach() for value in outputs)
            outputs = (squared_distance(outputs, target) / scale,)
            objective = outputs[0].detach()
        inputs = [part for copied in copies for part in copied]
        # The start is a constant, so before the first step there is nothing to go back to.
        wanted = [*inputs, *(leaves if first else ())]
        gradients = torch.autograd.grad(outputs, wanted, grad_outputs=slopes, materialize_grads=True)
        total, slopes = _add_steps(total, gradients[: len(inputs)]), gradients[len(inputs) :]
    return Matched(objective=objective, gradients=total, end=end)


def _add_steps(total: SyntheticSet, gradients: Sequence[Tensor]) -> SyntheticSet:
    """Return the sum with each step's gradients (images, labels, rate in turn), from the last step to the first."""
    for place in range(len(gradients) - 3, -1, -3):
        total = SyntheticSet(*map(torch.add, total, gradients[place : place + 3]))
    return total


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()


def _leaves(params: Params) -> Params:
    return tuple(map(_leaf, params))


# -- memory ------------------------------------------------------------------------------------------------------


def group_within(loop: InnerLoop, start: Params, synthetic: SyntheticSet, *, limit_bytes: float) -> int:
    """Return the number of steps whose graphs fit the memory at a time, from 1 to all.

    Args:
        loop: The inner steps.
        start: Params of the usual size.
        synthetic: The synthetic set.
        limit_bytes: What the graphs and the models between groups may take; a single step is taken in any case.
    """
    if loop.steps < 2:
        return 1
    with _counted_graph() as counted:
        loop.step(0, _leaves(start), SyntheticSet(*map(_leaf, synthetic)))
    model_bytes = sum(value.nbytes for value in start)
    for groups in range(1, loop.steps):
        group = -(-loop.steps // groups)
        if group * counted[0] + groups * model_bytes <= limit_bytes:
            return group
    return 1


@contextmanager
def _counted_graph() -> Iterator[list[int]]:
    """Count the bytes that graphs built inside hold, each memory once."""
    counted, seen = [0], {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen:
            seen[memory.data_ptr()] = memory  # held, so that no other tensor gets its address
            counted[0] += memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield counted
