from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from fedsweep.errors import InvariantError
from fedsweep.runs.tables.arrow_columns import list_column, number_column


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([1, 2, 3], pa.int64()),
        ([None, 2**62, None, -1] * 5, pa.int64()),
        ([0.5, None, math.inf, 2], pa.float64()),
        ([None, None], pa.float64()),
        ([], pa.int64()),
        ([np.float32(0.5), np.int64(3)], pa.float64()),
    ],
)
def test_numbers_are_what_pyarrow_makes_of_them(cells: list[float | None], kind: pa.DataType) -> None:
    column = number_column(cells, kind)
    column.validate(full=True)
    assert column.equals(pa.array(cells, kind)) and column.null_count == cells.count(None)


def test_nan_is_a_number_and_no_null() -> None:
    column = number_column([math.nan, None], pa.float64())
    assert math.isnan(column[0].as_py()) and column[1].as_py() is None


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.float64())])
@pytest.mark.parametrize("cells", [[(1, 2), (), (3,)], [None, (1,), None, (2, 3)], [None], [], [[4], []] * 9])
def test_lists_are_what_pyarrow_makes_of_them(cells: list[tuple[int, ...] | None], kind: pa.ListType) -> None:
    column = list_column(cells, kind)
    column.validate(full=True)
    assert column.equals(pa.array([None if cell is None else list(cell) for cell in cells], kind))


def test_a_fraction_among_whole_numbers_is_refused() -> None:
    with pytest.raises(InvariantError, match=r"whole numbers has the cell 2\.5"):
        number_column([1, 2.5], pa.int64())


def test_no_column_imports_pandas() -> None:
    code = """
import io, sys
import pyarrow as pa, pyarrow.parquet as pq
from fedsweep.runs.tables.arrow_columns import list_column, number_column
columns = [number_column([1, None], pa.int64()), list_column([(1,), None], pa.list_(pa.float64()))]
pq.write_table(pa.Table.from_arrays(columns, names=["a", "b"]), io.BytesIO())
print("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
