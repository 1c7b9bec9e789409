"""How large a table of a run may be, judged by what its file says of itself: a few bytes stand for millions of rows."""

from __future__ import annotations

from typing import Any

from fedsweep.errors import OutputError

MOST_TABLE_BYTES = 256 * 2**20
# What is more was not written by a run; values in lists count, too.
_MOST_ROWS, _MOST_VALUES = 1_000_000, 20_000_000
# With rows for each client of each round; larger ones are read in pieces, with pyarrow.
MOST_CLIENT_ROWS = 5_000_000


def check_table_size(metadata: Any, source: object, *, most_rows: int = _MOST_ROWS) -> None:
    """Refuse a parquet file by its metadata, before its rows are read.

    Args:
        metadata: As pyarrow gives it.
        source: The file, for the message.
        most_rows: Rows that it may have.

    Raises:
        OutputError: It has too many rows or values, or a column twice.
    """
    if metadata.num_rows > most_rows:
        raise OutputError(f"{source}: it has {metadata.num_rows} rows, more than {most_rows}")
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    values = sum(group.column(j).num_values for group in groups for j in range(metadata.num_columns))
    if values > (most := max(_MOST_VALUES, 6 * most_rows)):
        raise OutputError(f"{source}: it has {values} values, more than {most}")
    names = metadata.schema.to_arrow_schema().names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OutputError(f"{source}: the column {twice[0]!r} is there twice")
