"""Columns of tables from plain cells; ``pyarrow.array`` would import pandas, a third of a second in each process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.errors import InvariantError

if TYPE_CHECKING:
    import pyarrow as pa


def number_column(cells: Sequence[float | None] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Make a column of numbers; None is null, NaN stays a number.

    Args:
        cells: One for each row.
        kind: ``int64`` or ``float64``.

    Raises:
        InvariantError: A column of whole numbers has another cell.
    """
    import pyarrow as pa

    if isinstance(cells, np.ndarray):
        present, numbers = np.ones(len(cells), dtype=bool), cells
    else:
        present = np.fromiter((cell is not None for cell in cells), dtype=bool, count=len(cells))
        numbers = np.array([0 if cell is None else cell for cell in cells])
    is_whole = pa.types.is_integer(kind)
    values = numbers.astype(np.int64 if is_whole else np.float64)
    if is_whole and not np.array_equal(values, numbers):
        raise InvariantError(f"a column of whole numbers has the cell {numbers[values != numbers][0]}")
    return pa.Array.from_buffers(kind, len(cells), [_bits(present), pa.py_buffer(values)])


def list_column(cells: Sequence[Sequence[float] | None] | np.ndarray, kind: pa.ListType) -> pa.Array:
    """Make a column of lists of numbers; None is null.

    Args:
        cells: One for each row.
        kind: A list of what :func:`number_column` takes.
    """
    import pyarrow as pa

    if isinstance(cells, np.ndarray):
        rows, width = cells.shape
        starts = np.arange(0, (rows + 1) * width, width, dtype=np.int32) if width else np.zeros(rows + 1, np.int32)
        flat = number_column(np.ascontiguousarray(cells).reshape(-1), kind.value_type)
        return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(starts)], children=[flat])
    present = np.fromiter((cell is not None for cell in cells), dtype=bool, count=len(cells))
    ends = np.cumsum([0, *(0 if cell is None else len(cell) for cell in cells)], dtype=np.int32)
    flat = number_column([*chain.from_iterable(cell for cell in cells if cell is not None)], kind.value_type)
    return pa.Array.from_buffers(kind, len(cells), [_bits(present), pa.py_buffer(ends)], children=[flat])


def _bits(present: np.ndarray) -> Any:
    """Return the buffer that says which rows are not null; None where all are."""
    import pyarrow as pa

    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
