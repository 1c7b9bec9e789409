"""Sparsifiers: some values travel; and signs, of all or of some."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsweep.components.compression.base import PackagedCodec, spread
from fedsweep.components.compression.packing import packed_places, unpacked_places
from fedsweep.parameters.ranges import PositiveShare
from fedsweep.records import Payload
from fedsweep.streams import Stream


@dataclass(frozen=True, kw_only=True)
class _Some(PackagedCodec):
    """Sends a share of the values.

    Attributes:
        share: Of the values, rounded up; at least one.
    """

    share: PositiveShare = 0.1

    def number(self, size: int) -> int:
        """Return how many of ``size`` values travel."""
        # The slack keeps 0.07 x 100 at 7, where the product is a hair above.
        return min(size, max(1, math.ceil(self.share * size - 1e-9)))

    def largest(self, move: Tensor) -> Tensor:
        """Return places of the largest values, ascending."""
        return move.abs().topk(self.number(len(move)), sorted=False).indices.sort().values


@dataclass(frozen=True, kw_only=True)
class TopK(_Some):
    """Sends the largest values of all tensors together, with their places.

    Source: Aji and Heafield (2017): Sparse communication for distributed gradient descent; Stich et al. (2018):
    Sparsified SGD with memory.
    """

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        places = self.largest(move)
        return {"values": move[places], "places": packed_places(places, len(move))}

    def decode(self, message: Payload, size: int) -> Tensor:
        values = message["values"]
        places = unpacked_places(message["places"], size, len(values))
        return values.new_zeros(size).index_copy_(0, places, values)


@dataclass(frozen=True, kw_only=True)
class RandomK(_Some):
    """Sends values at places that a seed of eight bytes draws, anew for each message.

    Without error feedback divided by the share that travels, so that the mean is right; with it as they are.

    Source: Konečný et al. (2016): Federated learning: strategies for improving communication efficiency, section 2
    (random mask); Stich et al. (2018): Sparsified SGD with memory.
    """

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        seed = stream.seed(64) >> 1  # fits a signed number
        values = move[self._places(seed, len(move))]
        if not self.error_feedback:
            values = values * (len(move) / len(values))
        return {"values": values, "seed": torch.tensor([seed])}

    def decode(self, message: Payload, size: int) -> Tensor:
        values = message["values"]
        return values.new_zeros(size).index_copy_(0, self._places(int(message["seed"]), size), values)

    def _places(self, seed: int, size: int) -> Tensor:
        drawn = Stream(("random places", seed)).numpy().choice(size, self.number(size), replace=False, shuffle=False)
        return torch.from_numpy(np.sort(drawn))


@dataclass(frozen=True, kw_only=True)
class Sign(PackagedCodec):
    """A bit a value, its sign, and one scale a tensor: the mean of its values' sizes.

    Source: Karimireddy et al. (2019): Error feedback fixes SignSGD and other gradient compression schemes. ICML, with
    the blocks of its section 6; signs alone: Bernstein et al. (2018): signSGD.
    """

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        parts = torch.split(move.abs(), self.sizes(len(move)))
        scales = torch.stack([part.mean() if len(part) else move.new_zeros(()) for part in parts])
        return {"signs": move >= 0, "scales": scales}

    def decode(self, message: Payload, size: int) -> Tensor:
        scales = spread(message["scales"], self.sizes(size))
        return torch.where(message["signs"], scales, -scales)


@dataclass(frozen=True, kw_only=True)
class Ternary(_Some):
    """Sends the places and signs of the largest values, and the mean of their sizes.

    Source: Sattler et al. (2019): Robust and communication-efficient federated learning from non-i.i.d. data, Algorithm
    1 (sparse ternary compression). Here places have as many bits each, so that lengths follow from shapes, where the
    paper has Golomb codes.
    """

    share: PositiveShare = 0.01

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        places = self.largest(move)
        values = move[places]
        return {
            "signs": values >= 0,
            "places": packed_places(places, len(move)),
            "mean": values.abs().mean().reshape(1),
        }

    def decode(self, message: Payload, size: int) -> Tensor:
        signs, mean = message["signs"], message["mean"]
        places = unpacked_places(message["places"], size, len(signs))
        return mean.new_zeros(size).index_copy_(0, places, torch.where(signs, mean, -mean))
