from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsweep.client.shards import Shard
from fedsweep.streams import stream
from fedsweep.world.transforms import FlipCrop, FlipRotateJitterCrop, Normalize, Transform

NORMALIZE = Normalize(scale=255.0, mean=(0.4,), std=(0.3,))


def shard(images: np.ndarray, indices: np.ndarray, *, num_visits: int, transform: Transform | None = None) -> Shard:
    channels = images.shape[1]
    own = Normalize(scale=255.0, mean=(0.4,) * channels, std=(0.3,) * channels)
    return Shard(
        images,
        np.arange(len(images)) % 3,
        indices,
        transform=transform or own,
        device="cpu",
        dtype=torch.float32,
        num_visits=num_visits,
    )


@dataclass(frozen=True, kw_only=True)
class Noisy(Transform):
    """A user's own, of which nothing is known."""

    random: bool = True

    def __call__(self, images: torch.Tensor, *, generator: torch.Generator | None, train: bool) -> torch.Tensor:
        return images.float() + torch.rand(images.shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Brighter(FlipCrop):
    """A user's own that adds to one of the package's."""

    def __call__(self, images: torch.Tensor, *, generator: torch.Generator | None, train: bool) -> torch.Tensor:
        return super().__call__(images, generator=generator, train=train) + 1


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (1, 7, 5), (3, 32, 32), (3, 9, 11)])
def test_samples_are_the_same_bits_made_ready_at_once_or_batch_by_batch(shape: tuple[int, int, int]) -> None:
    generator = stream(0, "shard test").numpy()
    images = generator.integers(0, 256, size=(60, *shape), dtype=np.uint8)
    indices = generator.permutation(60)[:41]
    at_once, by_batch = (shard(images, indices, num_visits=visits) for visits in (41, 40))
    assert at_once._ready is not None and by_batch._ready is None
    for size in (1, 3, 10, 41):
        positions = generator.permutation(41)[:size]
        for one, other in zip(*(s.batch(positions, lambda: stream(0, "")) for s in (at_once, by_batch)), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(at_once.everything()[0], by_batch.everything()[0])


@pytest.mark.parametrize(
    "transform",
    [
        NORMALIZE,
        FlipCrop(normalize=NORMALIZE),
        FlipCrop(normalize=NORMALIZE, black=True, max_degrees=15.0),
        FlipRotateJitterCrop(normalize=NORMALIZE),
        Brighter(normalize=NORMALIZE),
        Noisy(),
    ],
    ids=lambda transform: type(transform).__name__,
)
@pytest.mark.parametrize("num_visits", [0, 1000])
def test_several_batches_at_once_are_the_batches_one_after_another(transform: Transform, num_visits: int) -> None:
    """Of uneven sizes, with each batch's own random numbers."""
    generator = stream(0, "shard test").numpy()
    images = generator.integers(0, 256, size=(60, 3, 12, 12), dtype=np.uint8)
    samples = shard(images, generator.permutation(60)[:41], num_visits=num_visits, transform=transform)
    positions = [generator.permutation(41)[:size] for size in (5, 5, 2, 41, 1)]
    apart = [samples.batch(at, lambda k=k: stream(0, "augment", k)) for k, at in enumerate(positions)]
    for joined, parts in zip(
        samples.batches(positions, lambda k: stream(0, "augment", k)), zip(*apart, strict=True), strict=True
    ):
        assert torch.equal(joined, torch.cat(parts))
