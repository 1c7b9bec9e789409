from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsweep.client.shards import Shard
from fedsweep.streams import stream
from fedsweep.world.transforms import Normalize


def shard(images: np.ndarray, indices: np.ndarray, *, num_visits: int) -> Shard:
    channels = images.shape[1]
    return Shard(
        images,
        np.arange(len(images)) % 3,
        indices,
        transform=Normalize(scale=255.0, mean=(0.4,) * channels, std=(0.3,) * channels),
        device="cpu",
        dtype=torch.float32,
        num_visits=num_visits,
    )


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
