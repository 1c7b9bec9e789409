"""Small whole numbers and places packed to bits, in messages whose length is known before they are made."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers from 0 to ``2 ** bits - 1`` [n] to ``ceil(n * bits / 8)`` bytes."""
    rows = codes.numpy().astype(">u4").view(np.uint8).reshape(-1, 4)
    return torch.from_numpy(np.packbits(np.unpackbits(rows, axis=1)[:, 32 - bits :]))


def unpacked(sent: Tensor, bits: int, number: int) -> Tensor:
    """Return the ``number`` whole numbers that :func:`packed` packed, int64."""
    flags = np.unpackbits(sent.numpy(), count=number * bits).reshape(number, bits)
    rows = np.zeros((number, 32), dtype=np.uint8)
    rows[:, 32 - bits :] = flags
    return torch.from_numpy(np.packbits(rows, axis=1).view(">u4").reshape(-1).astype(np.int64))


def packed_places(places: Tensor, size: int) -> Tensor:
    """Pack ascending places below ``size`` [k]: a bit for each value there is or a number for each place.

    What takes fewer bytes, which k and ``size`` alone decide.
    """
    bits = _place_bits(size)
    if len(places) * bits < size:
        return packed(places, bits)
    marks = torch.zeros(size, dtype=torch.bool)
    marks[places] = True
    return marks


def unpacked_places(sent: Tensor, size: int, number: int) -> Tensor:
    """Return the ``number`` places that :func:`packed_places` packed, ascending, int64."""
    return sent.nonzero().flatten() if sent.dtype == torch.bool else unpacked(sent, _place_bits(size), number)


def _place_bits(size: int) -> int:
    return max(1, (size - 1).bit_length())
