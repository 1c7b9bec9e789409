"""``rounds.parquet``: the columns that users and checks rely on, to and from :class:`RoundRecord`.

A method's own figures (``RoundRecord.extra``) follow the fixed columns as further columns of floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedsweep.errors import InvariantError, OutputError
from fedsweep.records import RoundRecord
from fedsweep.runs.tables.arrow_columns import list_column, number_column

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["int", "float", "ints", "floats"]


@dataclass(frozen=True, kw_only=True)
class RoundColumn:
    """One column.

    Attributes:
        name: Its name, also the field's name in :class:`RoundRecord`.
        kind: What a cell holds: an int64, a float64, or a list of them.
        nullable: Whether a method may have no such thing.
    """

    name: str
    kind: Kind
    nullable: bool = False

    @property
    def is_scalar(self) -> bool:
        """True where a cell holds one number, so that it can be a metric."""
        return self.kind in ("int", "float")


def _columns(kind: Kind, *names: str) -> tuple[RoundColumn, ...]:
    return tuple(RoundColumn(name=name.rstrip("?"), kind=kind, nullable=name.endswith("?")) for name in names)


# A question mark: nullable.
ROUND_COLUMNS: tuple[RoundColumn, ...] = (
    *_columns("int", "round"),
    *_columns("float", "test_accuracy?", "test_loss?", "validation_accuracy?", "train_loss?", "lr"),
    *_columns("ints", "cohort", "high_frequency?"),
    *_columns("float", "kl_divergence?"),
    *_columns("ints", "attendees", "present?"),
    *_columns("int", "sync_points", "values_up", "values_down", "bytes_up", "bytes_down", "over_budget?", "comm_cost"),
    *_columns("float", "comm_ratio?"),
    *_columns("int", "local_steps", "flops"),
    *_columns("float", "fwd_macs_per_sample?", "sim_time_s?", "wall_time_s", "eval_time_s", "server_time_s"),
    *_columns("float", "full_time_s?"),
    *_columns("floats", "aggregation_weights"),
    *_columns("ints", "staleness?"),
    *_columns("float", "best_accuracy?"),
    *_columns("int", "total_bytes"),
    *_columns("int", "timestamp_ms"),
    *_columns("floats", "class_accuracies?", "client_scores?", "personal_accuracies?"),
)
# Rows that are new to a table that grows are made into columns each time until there are so many of them.
_ROWS_AT_ONCE = 100
_NAMES = frozenset(column.name for column in ROUND_COLUMNS)
# The axes, and what adds up other columns, is no figure of a round.
_NOT_FIGURES = frozenset({"round", "timestamp_ms", "best_accuracy", "total_bytes"})


def scalar_figures(record: RoundRecord) -> dict[str, float]:
    """Return a round's figures that are single numbers, by column name, extras included; what is None is left out."""
    names = [column.name for column in ROUND_COLUMNS if column.is_scalar and column.name not in _NOT_FIGURES]
    figures = {name: getattr(record, name) for name in names} | dict(record.extra)
    return {name: float(value) for name, value in figures.items() if value is not None}


def records_to_table(records: Sequence[RoundRecord]) -> pa.Table:
    """Return the records as a table, one row each, in their order.

    Raises:
        InvariantError: Rounds are not ascending, or an extra figure has the name of a column.
    """
    import pyarrow as pa

    _check_ascending([record.round for record in records])
    extras = sorted({name for record in records for name in record.extra})
    if clash := sorted(_NAMES & set(extras)):
        raise InvariantError(f"a component reports {', '.join(clash)}, which rounds.parquet has already; rename it")
    types = _arrow_types()
    arrays = [
        (number_column if column.is_scalar else list_column)(
            [getattr(record, column.name) for record in records], types[column.kind]
        )
        for column in ROUND_COLUMNS
    ]
    arrays += [number_column([record.extra.get(name) for record in records], pa.float64()) for name in extras]
    fields = [pa.field(column.name, types[column.kind], nullable=column.nullable) for column in ROUND_COLUMNS]
    fields += [pa.field(name, pa.float64()) for name in extras]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


class GrowingTable:
    """The table of a run's rounds, of which only those that came since are made into columns when it is asked for."""

    def __init__(self) -> None:
        self._table: pa.Table | None = None
        self._count = 0
        self._last: RoundRecord | None = None

    def of(self, records: Sequence[RoundRecord]) -> pa.Table:
        """Return the records as :func:`records_to_table` has them; they need not begin with those of the last call."""
        count = self._count
        # A run that went back to a checkpoint has played its last rounds anew.
        if self._table is None or count > len(records) or records[count - 1] is not self._last:
            self._table, count = None, 0
        rest = records_to_table(records[count:])
        table = rest if self._table is None else _joined(self._table, rest)
        if len(records) - count >= _ROWS_AT_ONCE:
            self._table, self._count, self._last = table, len(records), records[-1]
        return table


def _joined(first: pa.Table, second: pa.Table) -> pa.Table:
    """Join two tables of a run's rounds, one below the other; a figure that only one has is null in the other."""
    import pyarrow as pa

    _check_ascending([*first.column("round").to_pylist()[-1:], *second.column("round").to_pylist()[:1]])
    whole = pa.concat_tables([first, second], promote_options="default")
    extras = sorted(name for name in whole.column_names if name not in _NAMES)
    return whole.select([*(column.name for column in ROUND_COLUMNS), *extras]).combine_chunks()


def table_to_records(table: pa.Table) -> list[RoundRecord]:
    """Return the records of a table that :func:`check_round_table` has passed."""
    extras = [name for name in table.column_names if name not in _NAMES]
    records = []
    for row in table.to_pylist():
        extra = {name: row.pop(name) for name in extras}
        figures: dict[str, Any] = {name: tuple(cell) if isinstance(cell, list) else cell for name, cell in row.items()}
        records.append(RoundRecord(**figures, extra={name: x for name, x in extra.items() if x is not None}))
    return records


def check_round_table(table: pa.Table, source: object) -> None:
    """Refuse a table that is not one of rounds.

    Raises:
        OutputError: A column is missing or of another type, a cell or a list's number that must be there is null, or
            the rounds do not ascend from 1 or more.
    """
    types, names = _arrow_types(), table.column_names  # made anew each time that it is asked for
    for column in ROUND_COLUMNS:
        if column.name not in names:
            raise OutputError(f"{source}: the column {column.name!r} is missing, so this is not a table of rounds")
        cells = table.column(column.name)
        if not cells.type.equals(types[column.kind]):
            expected = types[column.kind]
            raise OutputError(f"{source}: the column {column.name!r} must hold {expected}, but it holds {cells.type}")
        empty = 0 if column.nullable else cells.null_count
        empty += 0 if column.is_scalar else sum(chunk.flatten().null_count for chunk in cells.chunks)
        if empty:
            raise OutputError(f"{source}: the column {column.name!r} has {empty} empty cells")
    for name in names:
        if name not in _NAMES and not table.column(name).type.equals(types["float"]):
            raise OutputError(f"{source}: the column {name!r} must hold double, but it holds {table.column(name).type}")
    try:
        _check_ascending(table.column("round").to_pylist())
    except InvariantError as error:
        raise OutputError(f"{source}: {error}") from error


def _arrow_types() -> dict[Kind, pa.DataType]:
    import pyarrow as pa

    return {
        "int": pa.int64(),
        "float": pa.float64(),
        "ints": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
    }


def _check_ascending(rounds: Sequence[int]) -> None:
    for before, after in zip([0, *rounds], rounds, strict=False):
        if after <= before:
            raise InvariantError(f"rounds must ascend from 1, but round {after} follows round {before}")
