"""The count sketch: a table into which every value is added at a few places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsweep.components.compression.base import PackagedCodec
from fedsweep.errors import ConfigError
from fedsweep.parameters.ranges import Count, PositiveShare
from fedsweep.records import Payload
from fedsweep.streams import Stream


@dataclass(frozen=True, kw_only=True)
class CountSketch(PackagedCodec):
    """Adds each value, with a sign, to one cell of each row; reads the largest values off the sum of all tables.

    Tables add up as values do, so the server adds the clients' and reads the mean's largest values alone. Cells and
    signs are the same in every message.

    Source: Charikar et al. (2002): Finding frequent items in data streams; Rothchild et al. (2020): FetchSGD:
    communication-efficient federated learning with sketching. ICML (without its memory on the server).

    Attributes:
        error_feedback: Must be false: what is read is the mean's, so no client knows what its own message left out.
        share: Cells of the table over values.
        rows: Of the table; a value is read as the median over them.
        keep: Share of the values that are read: the largest; the others are 0.
    """

    decodes_sums: ClassVar[bool] = True

    share: PositiveShare = 0.1
    rows: Count = 5
    keep: PositiveShare = 0.01

    def __post_init__(self) -> None:
        """Refuse a memory of what one client's table did not say."""
        super().__post_init__()
        if self.error_feedback:
            raise ConfigError(
                "communication: a count sketch is read from the sum of all clients' tables, so none of them knows what"
                " its own left out; set error_feedback=false"
            )

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        values, columns = _array(move), self._columns(len(move))
        rows = [
            np.bincount(cells, weights=values * signs, minlength=columns) for cells, signs in self._places(len(move))
        ]
        return {"table": torch.from_numpy(np.stack(rows)).to(move.dtype)}

    def decode(self, message: Payload, size: int) -> Tensor:
        table = message["table"]
        read = zip(_array(table), self._places(size), strict=True)
        rows = [torch.from_numpy(row[cells] * signs) for row, (cells, signs) in read]
        values = _median(torch.stack(rows)).to(table.dtype)
        number = min(size, max(1, math.ceil(self.keep * size - 1e-9)))
        places = values.abs().topk(number, sorted=False).indices
        return values.new_zeros(size).index_copy_(0, places, values[places])

    def _columns(self, size: int) -> int:
        return max(1, math.ceil(self.share * size / self.rows - 1e-9))

    def _places(self, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each row's cells [size] and signs [size] of the values: hashed, by odd numbers modulo 2^64."""
        numbers = np.arange(size, dtype=np.uint64)
        draws = Stream(("count sketch",)).numpy().integers(0, 2**63, size=(self.rows, 4), dtype=np.uint64)
        places = []
        for factor, offset, sign_factor, sign_offset in draws * np.uint64(2) + np.uint64(1):
            cells = (((numbers * factor + offset) >> np.uint64(32)) * np.uint64(self._columns(size))) >> np.uint64(32)
            negative = (numbers * sign_factor + sign_offset) >> np.uint64(63)
            places.append((cells.astype(np.int64), 1.0 - 2.0 * negative.astype(np.float32)))
        return places


def _array(values: Tensor) -> np.ndarray:
    """Return the values for numpy, which has no bfloat16."""
    array: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def _median(rows: Tensor) -> Tensor:
    """Return the median over the rows; of an even number of them the mean of the two in the middle."""
    middle = rows.median(dim=0).values  # the lower one of two
    return middle if len(rows) % 2 else (middle - (-rows).median(dim=0).values) / 2
