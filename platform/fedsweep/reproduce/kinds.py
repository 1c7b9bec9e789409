"""How the cells of a table are measured, by the table's ``kind``.

``runs`` is what :mod:`fedsweep.reproduce.reproduction` does: an experiment per cell. Another kind has a function

    run_kind(table, *, scale, cells, out, quiet) -> Grid

    table: TableFile          what is asked for; ``table.options`` is the section that the kind alone knows
    scale: str                ``smoke``, ``small`` or ``full``; ``table.scale(scale)`` is its entry
    cells: Sequence[Cell]     what is to be measured: row x column x seed; ``cell.given`` and ``cell.config`` are the
                              cell's configuration, with the scale's and the user's settings laid over it
    out: Path                 the folder, which exists; the function may write files of its own below it, not the
                              table's (``table.*``, ``measured.json``), which the caller writes from the grid
    quiet: bool               whether to leave progress out; progress goes to standard error

which raises an InputError before anything is computed where the input is wrong, and gives a cell's failure as a problem
in its :class:`~fedsweep.reproduce.measured.grid.GridCell`. ``rows`` and ``columns`` of the grid are those that it has
cells for; the caller shows missing ones beside them. :func:`~fedsweep.reproduce.measured.grid.summed_up` makes a
measure from one value per seed, :func:`~fedsweep.reproduce.measured.grid.setting_of` the grid's ``setting``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Grid

RUNS = "runs"
# Module by kind; imported when a table of that kind is measured.
KINDS: Mapping[str, str] = {
    "groups": "fedsweep.reproduce.group_tables",
}


class RunKind(Protocol):
    """Measures the cells of a table of one kind; see the module's docstring."""

    def __call__(self, table: TableFile, *, scale: str, cells: Sequence[Cell], out: Path, quiet: bool) -> Grid: ...


def runner_of(kind: str) -> RunKind:
    """The function that measures tables of a kind other than ``runs``.

    Raises:
        ConfigError: There is no such kind.
    """
    if kind not in KINDS:
        raise ConfigError(unknown_name("kind of table", kind, [RUNS, *KINDS]))
    return cast(RunKind, importlib.import_module(KINDS[kind]).run_kind)
