from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsweep.client.shards import Batches, Shard, steps_ahead
from fedsweep.records import ClientWork
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


@pytest.mark.parametrize("ahead", [2, 3, 64])
@pytest.mark.parametrize("transform", [FlipCrop(normalize=NORMALIZE), Noisy(), None], ids=["augmented", "own", "plain"])
def test_a_steps_batch_is_the_same_one_laid_out_alone_or_ahead(
    transform: Transform | None, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = stream(0, "shard test").numpy().integers(0, 256, size=(60, 1, 9, 11), dtype=np.uint8)
    work = ClientWork(steps=9, batch_size=5, whole_batches=False, num_samples=17)  # batches of 5, 5, 5, 2, 5, ...

    def batches() -> Batches:
        own = shard(images, np.arange(20, 37), num_visits=45, transform=transform)
        return Batches(own, work, seed=0, round=2, client=3)

    alone = [batches().at(position) for position in range(9)]
    laid_out = batches()
    monkeypatch.setattr(laid_out, "_num_ahead", ahead)
    # A client that goes on in a later round with what it has left of its steps begins anywhere.
    for position in (*range(2, 9), 0):
        for one, other in zip(laid_out.at(position), alone[position], strict=True):
            assert torch.equal(one, other)
    assert [len(targets) for _, targets in alone] == [5, 5, 5, 2, 5, 5, 5, 2, 5]


def test_batches_are_laid_out_ahead_on_a_gpu_as_far_as_they_fit() -> None:
    assert [steps_ahead(size) for size in (1, 2**20, 2**24, 2**26)] == [64, 32, 2, 1]
    assert steps_ahead(2**20, within=2**22) == 4
