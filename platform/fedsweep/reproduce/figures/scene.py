"""What a figure of a table draws: its cells, its runs, its looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedsweep.errors import ConfigError
from fedsweep.figures.style import (
    Look,
    axis_name,
    is_share,
    looks,
)
from fedsweep.reproduce.cell_texts import label_of
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.definition.sections import FigureSpec, Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Measured, summed_up, value_of
from fedsweep.results.view import RunView

_OVER: Mapping[str, str] = {"test_accuracy": "best", "comm_ratio": "mean", "kl_divergence": "mean", "comm_cost": "mean"}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a picture is drawn from.

    Attributes:
        spec: The entry of ``figures:``.
        table: The table.
        runs: The finished runs of a row and a column, by seed; those of cells that were not run are not there.
    """

    spec: FigureSpec
    table: TableFile
    runs: Mapping[tuple[str, str], Sequence[RunView]]

    @cached_property
    def rows(self) -> list[str]:
        """The rows that are drawn, in the table's order."""
        return [name for name in self.spec.rows or self.table.row_names if any(row == name for row, _ in self.runs)]

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Rows that are drawn together, by their group's name; without groups each row by itself."""
        given = self.spec.groups or {row: [row] for row in self.rows}
        found = {name: [row for row in self.rows if row in rows] for name, rows in given.items()}
        return {name: rows for name, rows in found.items() if rows}

    @cached_property
    def columns(self) -> list[str]:
        """The columns that are drawn, in the table's order."""
        names = self.spec.columns or self.table.column_names
        return [name for name in names if any(column == name and row in self.rows for row, column in self.runs)]

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How rows and groups look; the same in all pictures of the table."""
        return {**looks(self.table.row_names), **looks(list(self.spec.groups))}

    def of(self, row: str, column: str) -> Sequence[RunView]:
        """The runs of a cell, by seed; none where it was not run."""
        return self.runs.get((row, column), ())

    def measured(self, row: str, column: str, *, measure: Measure) -> Measured:
        """A measure of a cell over its seeds."""
        return summed_up([value_of(run, measure) for run in self.of(row, column)], measure)

    def measure(self, axis: str, name: str) -> Measure:
        """The table's measure of that name, or of that figure; otherwise the figure itself.

        Args:
            axis: ``x`` or ``y``, for messages.
            name: As the entry has it.

        Raises:
            ConfigError: The entry names none.
        """
        if not name:
            raise ConfigError(f"figure {self.spec.name}: {self.spec.kind} needs `{axis}`, the name of a measure")
        for known in ("name", "of"):
            found = next((m for m in self.table.measures if getattr(m, known) == name and m.target is None), None)
            if found is not None:
                return found
        found = next((m for m in self.table.measures if m.name == name), None)
        if found is not None:
            return found
        over = _OVER.get(name, "last")
        return Measure.model_validate({"name": name, "over": over, "percent": is_share(name)})

    def label(self, axis: str, measure: Measure) -> str:
        """What an axis with a measure is called."""
        given = self.spec.x_label if axis == "x" else self.spec.y_label
        plain = measure.target is None and measure.label in (measure.name, measure.of)
        return given or (axis_name(measure.of) if plain else label_of(measure))


def scene_of(
    figure: FigureSpec, table: TableFile, *, cells: Sequence[Cell], runs: Mapping[Cell, Sequence[RunView]]
) -> Scene:
    """What a picture is drawn from; arguments as :func:`draw`."""
    found: dict[tuple[str, str], list[RunView]] = {}
    for cell in sorted(cells, key=lambda cell: cell.seed):
        if runs.get(cell):
            found.setdefault((cell.row, cell.column), []).extend(runs[cell])
    return Scene(spec=figure, table=table, runs=found)
