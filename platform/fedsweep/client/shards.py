"""A client's training samples, and the order in which it sees them.

The order follows from (seed, round, client) alone: neither the sync points of a round nor the method change it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedsweep.client.compute_device import compute_lazily_asked
from fedsweep.records import ClientWork
from fedsweep.streams import Stream, stream
from fedsweep.tasks.base import Task
from fedsweep.tasks.kinds import Classification
from fedsweep.trees import Inputs, any_of, as_tensors, concatenated, each, placed, sample_values, taken, targets_of
from fedsweep.world.transforms import Augmentation, Transform

# Shards of up to this many bytes are transformed once; larger ones batch by batch.
_CACHE_BYTES = 64 * 2**20
# A client's batches that are laid out ahead take up to this many bytes, as long as its round is open.
_AHEAD_BYTES = 32 * 2**20
_MOST_STEPS_AHEAD = 64


def steps_ahead(step_bytes: int, *, within: int = _AHEAD_BYTES) -> int:
    """Return of how many steps, at least 1, a GPU lays out the batches at once: each operation is a launch there.

    Args:
        step_bytes: What the batches of one step take.
        within: What all of them may take, in bytes.
    """
    return max(1, min(_MOST_STEPS_AHEAD, within // step_bytes))


def batch_order(work: ClientWork, order_stream: Stream) -> list[np.ndarray]:
    """Return the batches of a round as arrays of positions in the client's shard.

    Passes over the data are independent random permutations. With ``whole_batches`` they are joined and cut into
    batches of exactly ``batch_size``, so a batch may cross from one pass into the next and a sample may come twice
    in it where the shard is smaller; otherwise each pass ends with a batch of what is left.

    Source: DynamicFL, section 8 of its specification, for ``whole_batches``.
    """
    generator = order_stream.numpy()
    n, size = work.num_samples, work.batch_size
    if work.whole_batches:
        passes = math.ceil(work.steps * size / n)
        joined = np.concatenate([generator.permutation(n) for _ in range(passes)])
        return [joined[k * size : (k + 1) * size] for k in range(work.steps)]
    batches: list[np.ndarray] = []
    while len(batches) < work.steps:
        order = generator.permutation(n)
        batches.extend(order[start : start + size] for start in range(0, n, size))
    return batches[: work.steps]


def pass_accuracies(hits: Sequence[tuple[int, int]], num_samples: int) -> tuple[float, ...]:
    """Return accuracy of each pass over the data; a last, partial pass counts as one.

    Args:
        hits: For each batch how many samples were told right, and how many it had.
        num_samples: Samples of a pass.
    """
    accuracies: list[float] = []
    right = seen = 0
    for hit, size in hits:
        right, seen = right + hit, seen + size
        if seen >= num_samples:
            accuracies.append(right / seen)
            right = seen = 0
    return (*accuracies, right / seen) if seen else tuple(accuracies)


def seed_draws(seed: int, device: str) -> None:
    """Key what a network draws in its next forward pass: dropout takes no generator, but draws from the global one."""
    if device == "lazy":
        compute_lazily_asked()  # with the draws of the last step, before they are another's
    # Directly, since torch.manual_seed costs as much as a small step.
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


class Shard:
    """The samples of one client in one round.

    Args:
        images: The inputs of the whole training set [S, ...]; may be read-only shared memory, or tensors on the device.
        labels: Its targets [S, ...].
        indices: The client's samples.
        transform: What is done to a batch before the model sees it.
        device: Where batches go.
        dtype: The model's floating type.
        num_visits: Samples that batches will hold, repeats counted. Where that is less than the shard, its samples are
            made ready batch by batch: most of them are never looked at.

    Attributes:
        device: Where batches go.
        targets: The targets of all [n, ...], on the device.
    """

    def __init__(
        self,
        images: np.ndarray | Inputs,
        labels: np.ndarray,
        indices: np.ndarray,
        *,
        transform: Transform,
        device: str,
        dtype: torch.dtype,
        num_visits: int,
    ) -> None:
        self._images, self._indices = images, indices
        self._transform = transform
        self.device = device
        self._dtype = dtype
        self.targets = targets_of(labels[indices]).to(device)
        self._ready: Inputs | None = None
        # Of several inputs the bytes of one sample are known; those on a device are there already.
        size = 0 if isinstance(images, dict) else math.prod(images.shape[1:]) * max(4, images.itemsize)
        is_small = 0 < len(indices) * size <= _CACHE_BYTES
        if is_small and not transform.random and num_visits >= len(indices):
            self._ready = self._convert(self._raw(indices), None, train=True)

    def __len__(self) -> int:
        return int(self.targets.shape[0])

    @property
    def sample_bytes(self) -> int:
        """Return what a sample takes on the device, as far as it has the form that it comes in."""
        return max(1, sample_values(self._images)) * self._dtype.itemsize

    def batch(self, positions: np.ndarray, augment: Callable[[], Stream]) -> tuple[Any, Tensor]:
        """Return inputs [B, ...] and targets [B, ...] of a training batch."""
        index = torch.from_numpy(positions)
        if self.device != "cpu":
            index = index.to(self.device)
        if self._ready is not None:
            ready, targets = self._ready, self.targets.index_select(0, index)
            if isinstance(ready, Tensor):
                return ready.index_select(0, index), targets
            return {name: values.index_select(0, index) for name, values in ready.items()}, targets
        generator = augment().torch() if self._transform.random else None
        inputs = self._convert(self._raw(self._indices[positions]), generator, train=True)
        return inputs, self.targets.index_select(0, index)

    def batches(self, positions: Sequence[np.ndarray], augment: Callable[[int], Stream]) -> tuple[Any, Tensor]:
        """Return inputs and targets of several training batches, one after another [sum of B, ...]."""
        transform, joined = self._transform, np.concatenate(positions)
        if len(positions) == 1 or not transform.random:
            return self.batch(joined, lambda: augment(0))
        if not isinstance(transform, Augmentation) or type(transform).__call__ is not Augmentation.__call__:
            parts = [self.batch(at, functools.partial(augment, number)) for number, at in enumerate(positions)]
            inputs, targets = zip(*parts, strict=True)
            return concatenated(inputs), torch.cat(targets)
        raw = cast(Tensor, self._raw(self._indices[joined]))
        draws = [
            transform.draw(torch.Size((len(at), *raw.shape[1:])), augment(number).torch())
            for number, at in enumerate(positions)
        ]
        images = transform.augmented(raw, tuple(torch.cat(drawn) for drawn in zip(*draws, strict=True)))
        index = torch.from_numpy(joined).to(self.device)
        return images.to(device=self.device, dtype=self._dtype), self.targets.index_select(0, index)

    def everything(self) -> tuple[Any, Tensor]:
        """Return all inputs [n, ...], without augmentation, and all targets [n, ...]."""
        return self._convert(self._raw(self._indices), None, train=False), self.targets

    def _raw(self, indices: np.ndarray) -> Inputs:
        """Return samples of the training set as they are there."""
        if not isinstance(self._images, np.ndarray):
            index = torch.from_numpy(indices).to(any_of(self._images).device)
            return each(lambda values: values.index_select(0, index), self._images)
        raw = self._images[indices]
        return torch.from_numpy(raw) if raw.dtype == np.uint8 or raw.dtype == np.float32 else as_tensors(raw)

    def _convert(self, raw: Inputs, generator: torch.Generator | None, *, train: bool) -> Inputs:
        inputs = self._transform(raw, generator=generator, train=train)
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            return inputs.to(device=self.device, dtype=self._dtype)
        return placed(inputs, device=self.device, dtype=self._dtype)


class Batches:
    """A client's batches of a round, by the number of their step, from 0.

    Args:
        shard: The client's samples.
        work: How much it does.
        seed: The run's.
        round: From 1.
        client: Its id.
    """

    def __init__(self, shard: Shard, work: ClientWork, *, seed: int, round: int, client: int) -> None:
        self._shard, self._key = shard, (round, client)
        self._seed = seed
        self._order = batch_order(work, stream(seed, "batches", round, client))
        on_cpu = shard.device == "cpu"
        self._num_ahead = 1 if on_cpu else steps_ahead(shard.sample_bytes * work.batch_size)
        self._ahead: dict[int, tuple[Any, Tensor]] = {}

    def sizes(self, first: int, steps: int) -> list[int]:
        """Return samples of each of some steps."""
        return [len(positions) for positions in self._order[first : first + steps]]

    def seed(self, position: int) -> int:
        """Return the key of the network's own draws (dropout) in a step."""
        return stream(self._seed, "dropout", *self._key, position).seed(56)

    def at(self, position: int) -> tuple[Any, Tensor]:
        """Return inputs [B, ...] and targets [B, ...] of a step, of those that follow one another."""
        if self._num_ahead == 1:
            return self._shard.batch(self._order[position], lambda: stream(self._seed, "augment", *self._key, position))
        if position not in self._ahead:
            inputs, targets = self.joined(position, self._num_ahead)
            ends = np.cumsum([0, *self.sizes(position, self._num_ahead)]).tolist()
            parts = [slice(*pair) for pair in itertools.pairwise(ends)]
            self._ahead = {position + k: (taken(inputs, part), targets[part]) for k, part in enumerate(parts)}
        return self._ahead.pop(position)

    def joined(self, first: int, steps: int) -> tuple[Any, Tensor]:
        """Return inputs and targets of some steps, one after another [sum of B, ...]."""
        order = self._order[first : first + steps]
        return self._shard.batches(order, lambda number: stream(self._seed, "augment", *self._key, first + number))


@dataclass(frozen=True, kw_only=True)
class ClientTests:
    """The test samples for clients' own models.

    Attributes:
        images: Inputs of the test set [T, ...]; may be read-only shared memory.
        labels: Its targets [T, ...].
        indices: Each client's part of it.
    """

    images: np.ndarray
    labels: np.ndarray
    indices: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The training set as a worker has it.

    Attributes:
        images: Inputs [S, ...]; may be read-only shared memory.
        labels: Targets [S, ...].
        transform: What is done to a batch.
        num_classes: How many strata there are: classes, where targets are classes; 1 where there are none.
        strata: For each sample what stands for its class where classes are counted, its stratum [S]; None: its label.
        task: What is learned; None: classification.
    """

    images: np.ndarray
    labels: np.ndarray
    transform: Transform
    num_classes: int
    strata: np.ndarray | None = None
    task: Task | None = None

    @property
    def learned(self) -> Task:
        """The task."""
        return self.task or Classification(num_classes=self.num_classes)

    def transformed(self, images: np.ndarray, dtype: torch.dtype) -> Any:
        """Return inputs as a model sees them when it is tested: transformed, without augmentation, on the CPU."""
        inputs = self.transform(as_tensors(np.ascontiguousarray(images)), generator=None, train=False)
        return placed(inputs, device="cpu", dtype=dtype)

    @property
    def stratum_of(self) -> np.ndarray:
        """Each sample's stratum [S]."""
        return self.labels if self.strata is None else self.strata
