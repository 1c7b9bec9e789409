"""Keyed random streams: everything random in a run follows from the seed and a purpose.

A stream is named by (seed, purpose, round, client, position), never by the order in which draws happen. So a
draw does not depend on where a client runs, on how a round is cut into sync points, or on which other draws a
method makes; two methods that draw for the same purpose in the same round see the same numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stream:
    """A source of random numbers with a fixed key.

    Each call of :meth:`numpy` or :meth:`torch` starts the stream anew: the same stream gives the same numbers.

    Attributes:
        key: What names the stream; strings and integers.
    """

    key: tuple[str | int, ...]

    def child(self, *more: str | int) -> Stream:
        """Return a stream of its own below this one."""
        return Stream((*self.key, *more))

    def seed(self, bits: int = 64) -> int:
        """Return an unsigned integer of ``bits`` bits (a multiple of 8, at most 512) that the key determines."""
        text = "\x1f".join(f"{type(part).__name__}:{part}" for part in self.key)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=bits // 8).digest(), "little")

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator (Philox, counter based)."""
        return np.random.Generator(np.random.Philox(key=self.seed(128)))

    def torch(self) -> torch.Generator:
        """Return a fresh torch generator on the CPU."""
        import torch

        generator = torch.Generator()
        generator.manual_seed(self.seed(64))
        return generator

    @contextlib.contextmanager
    def drawn_globally(self, *, bits: int = 64, device: str = "cpu") -> Iterator[None]:
        """Have torch's global generators draw from the stream, and put them back: layers and dropout take no other.

        Args:
            bits: Of the seed.
            device: Where is drawn, beside the CPU.
        """
        import torch

        gpus = [device] if torch.device(device).type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            # Directly: torch.manual_seed seeds every GPU, and takes milliseconds where none has been used yet.
            torch.default_generator.manual_seed(self.seed(bits))
            if gpus:
                torch.cuda.manual_seed(self.seed(bits))
            yield


def stream(seed: int, purpose: str, round: int = 0, client: int = -1, position: int = -1) -> Stream:
    """Return the stream for a purpose.

    Args:
        seed: The run's seed.
        purpose: What the numbers are for, e.g. ``"batches"``; a word per use.
        round: The round, from 1; 0 for what happens before the first.
        client: The client's id, from 0; -1 where the draw is nobody's own.
        position: The local step within the round, from 0; -1 where that does not matter.
    """
    return Stream((int(seed), purpose, int(round), int(client), int(position)))
