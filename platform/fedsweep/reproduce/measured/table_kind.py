"""Tables whose cells are no runs: the base of their kinds, and the kind that a table names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedsweep.config.signatures import bind
from fedsweep.plugins import call_builder
from fedsweep.reproduce import kinds
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Grid


class TableKind(ABC):
    """Measures cells of a table that are no runs. A kind is a frozen, keyword-only dataclass of the table's options."""

    @abstractmethod
    def measure(
        self, table: TableFile, cells: Sequence[Cell], *, scale: str, folder: Path, notify: Callable[[str], None]
    ) -> Grid:
        """Measure all cells; other files to show go into the folder, pictures below ``figures``.

        Args:
            table: The table.
            cells: What is to be measured.
            scale: ``smoke``, ``small`` or ``full``.
            folder: The table's, which exists.
            notify: Takes lines on how far it is.

        Raises:
            InputError: Something is wrong or not there; nothing is computed before all is checked.
        """


def table_kind(table: TableFile) -> TableKind:
    """Return the kind of a table that is not :data:`~fedsweep.reproduce.kinds.RUNS`, with its options.

    Raises:
        ConfigError: There is none of that name, or an option is unknown, missing or wrong.
    """
    builder = kinds.TABLE_KINDS.builder(table.kind)
    options = bind("table.options", "", builder, table.options)
    kind: TableKind = call_builder("table", table.kind, partial(builder, **options), gives=TableKind)
    return kind
