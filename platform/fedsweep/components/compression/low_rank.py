"""PowerSGD: matrices as products of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedsweep.components.compression.base import PackagedCodec
from fedsweep.parameters.ranges import Count
from fedsweep.records import Payload
from fedsweep.streams import Stream


class _Part(NamedTuple):
    """A tensor among the values.

    Attributes:
        start: Its first value.
        rows: Of the matrix that it is seen as.
        columns: Likewise.
        thin: Two thin matrices of the rank are fewer values than the tensor.
    """

    start: int
    rows: int
    columns: int
    thin: bool


@dataclass(frozen=True, kw_only=True)
class PowerSgd(PackagedCodec):
    """Sends ``P = orthonormal(M Q0)`` and ``Q = M^T P`` of each matrix M; what is no matrix, or a small one, as it is.

    Tensors of more dimensions are seen as matrices with the first of them as rows. One step of subspace iteration from
    a Q0 that is drawn anew for each message; the paper begins with the last step's Q.

    Source: Vogels et al. (2019): PowerSGD: practical low-rank gradient compression for distributed optimization.
    NeurIPS, Algorithm 1.

    Attributes:
        rank: Columns of P and Q.
    """

    rank: Count = 2

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        thin, whole = [], []
        for number, part in enumerate(self._parts(len(move))):
            values = move[part.start : part.start + part.rows * part.columns]
            if not part.thin:
                whole.append(values)
                continue
            matrix = values.view(part.rows, part.columns)
            draws = stream.child(number).torch()
            first = torch.randn(part.columns, self.rank, generator=draws, dtype=move.dtype)
            product = matrix @ first
            # Nobody factors narrow types.
            wide = product if product.dtype.itemsize >= 4 else product.float()
            basis = torch.linalg.qr(wide).Q.to(product)
            thin += [basis.flatten(), (matrix.T @ basis).flatten()]
        empty = move.new_zeros(0)
        return {"factors": torch.cat([empty, *thin]), "whole": torch.cat([empty, *whole])}

    def decode(self, message: Payload, size: int) -> Tensor:
        move = message["whole"].new_empty(size)
        factors, whole = message["factors"], message["whole"]
        for part in self._parts(size):
            number = part.rows * part.columns
            place = move[part.start : part.start + number]
            if not part.thin:
                place.copy_(whole[:number])
                whole = whole[number:]
                continue
            first, second = part.rows * self.rank, part.columns * self.rank
            left, right, factors = factors[:first], factors[first : first + second], factors[first + second :]
            torch.mm(left.view(-1, self.rank), right.view(-1, self.rank).T, out=place.view(part.rows, part.columns))
        return move

    def _parts(self, number: int) -> Iterator[_Part]:
        start = 0
        for shape in self.shapes or ((number,),):
            rows = shape[0] if shape else 1
            columns = math.prod(shape[1:])
            # A basis has at most as many columns as rows.
            thin = self.rank <= rows and self.rank * (rows + columns) < rows * columns
            yield _Part(start, rows, columns, thin)
            start += rows * columns
