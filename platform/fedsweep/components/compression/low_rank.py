"""PowerSGD: matrices as products of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsweep.components.compression.base import PackagedCodec
from fedsweep.parameters.ranges import Count
from fedsweep.records import Payload
from fedsweep.streams import Stream


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
        for number, (values, matrix) in enumerate(self._matrices(move)):
            if matrix is None:
                whole.append(values)
                continue
            draws = stream.child(number).torch()
            first = torch.randn(matrix.shape[1], self.rank, generator=draws, dtype=move.dtype)
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
        for values, matrix in self._matrices(move):
            if matrix is None:
                values.copy_(whole[: len(values)])
                whole = whole[len(values) :]
                continue
            first, second = matrix.shape[0] * self.rank, matrix.shape[1] * self.rank
            left, right, factors = factors[:first], factors[first : first + second], factors[first + second :]
            torch.mm(left.view(-1, self.rank), right.view(-1, self.rank).T, out=matrix)
        return move

    def _matrices(self, move: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each tensor's values, and the same as a matrix where two thin ones of the rank have fewer."""
        shapes = self.shapes or ((len(move),),)
        for shape, values in zip(shapes, torch.split(move, [math.prod(shape) for shape in shapes]), strict=True):
            rows = shape[0] if shape else 1
            columns = math.prod(shape[1:])
            # A basis has at most as many columns as rows.
            is_thin = self.rank <= rows and self.rank * (rows + columns) < rows * columns
            yield values, values.view(rows, columns) if is_thin else None
