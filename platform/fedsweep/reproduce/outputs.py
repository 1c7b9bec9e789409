"""A table's files: ``measured.json``, and the same for people and programs; what is read back is checked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from fedsweep import __version__
from fedsweep.errors import ConfigError, OutputError
from fedsweep.reproduce.cell_texts import headings
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.formats import FORMS, as_html, html_fragment
from fedsweep.reproduce.measured.claims import findings
from fedsweep.reproduce.measured.grid import Grid, GridCell, deviates, lies_within
from fedsweep.runs.files import atomic_write, read_json
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import MEASURED

if TYPE_CHECKING:
    import pandas as pd

FIGURES = "figures"
_FORMAT, _VERSION = "fedsweep table", 1
# A page that somebody else made must not fill the memory.
_MOST_BYTES, _MOST_FIGURES = 2**25, 200_000
_LISTS = ("seeds", "rounds", "datasets", "networks")
_CELLS = TypeAdapter(list[GridCell])


def write_outputs(grid: Grid, folder: Path) -> list[Path]:
    """Replace a folder's table in all of its forms.

    Raises:
        OutputError: The folder can't be written.
    """
    texts = {MEASURED: json.dumps(grid_tree(grid), indent=1, ensure_ascii=False, allow_nan=False) + "\n"}
    texts |= {name: form(grid) for name, form in FORMS.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = [path for path in sorted(_pictures(folder)) if path.suffix == ".png"]
        runs = [path for path in find_runs(folder) if path.parent == folder]
        texts["table.html"] = as_html(grid, pictures=pictures, runs=runs)
        for name, text in texts.items():
            atomic_write(folder / name, text.encode())
    except OSError as error:
        raise OutputError(f"{folder}: the table cannot be written: {error.strerror or error}") from error
    return [folder / name for name in texts]


def remove_outputs(folder: Path) -> None:
    """Remove a table's files and pictures, so that none of an earlier one stays."""
    for path in (folder / MEASURED, *(folder / name for name in FORMS), *_pictures(folder)):
        path.unlink(missing_ok=True)


def _pictures(folder: Path) -> list[Path]:
    return [path for path in (folder / FIGURES).glob("*") if path.suffix in (".png", ".pdf")]


def has_outputs(folder: Path) -> bool:
    """Check that a table was written here."""
    return (folder / MEASURED).is_file()


def grid_tree(grid: Grid) -> dict[str, Any]:
    """Return the table as plain mappings, lists and scalars."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "fedsweep": __version__,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "name": grid.table.name,
        "title": grid.table.title,
        "source": grid.table.source,
        "scale": grid.scale,
        "costs_only": grid.costs_only,
        "setting": dict(grid.setting),
        "rows": list(grid.rows),
        "columns": list(grid.columns),
        "cells": [_cell_tree(grid, cell) for cell in grid.cells],
        "claims": [asdict(finding) for finding in findings(grid)],
        "notes": list(grid.notes),
        "table": grid.table.model_dump(mode="json"),
    }


def read_grid(folder: Path) -> Grid:
    """Read the table in a folder's ``measured.json``, which somebody else may have written.

    Raises:
        OutputError: It can't be read, is damaged or of another version.
    """
    path = folder / MEASURED
    tree = read_json(path, max_bytes=_MOST_BYTES)
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT or tree.get("version") != _VERSION:
        raise OutputError(f"{path}: not a table that fedsweep {__version__} wrote")
    try:
        return _grid(tree)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        what = f"{error.error_count()} entries are wrong" if isinstance(error, ValidationError) else str(error)
        raise OutputError(f"{path}: damaged: {what}") from error


def _cell_tree(grid: Grid, cell: GridCell) -> dict[str, Any]:
    figures = {}
    for measure in grid.measures:
        if measure.name not in cell.measured:
            continue
        places = {"row": cell.row, "column": cell.column, "measure": measure.name}
        figures[measure.name] = {
            **asdict(cell.measured[measure.name]),
            "printed": grid.table.printed_value(**places),
            "printed_sd": grid.table.printed_sd(**places),
            "deviates": deviates(grid, cell, measure),
            "within_both_spreads": lies_within(grid, cell, measure),
        }
    return {**asdict(cell), "problems": list(cell.problems), "untold": list(cell.untold), "measured": figures}


def _grid(tree: Mapping[str, Any]) -> Grid:
    table = TableFile.model_validate(tree["table"])
    cells = _CELLS.validate_python(tree["cells"])
    rows, columns = [str(name) for name in tree["rows"]], [str(name) for name in tree["columns"]]
    setting = tree["setting"]
    table.scale(str(tree["scale"]))
    if not isinstance(setting, dict):
        raise TypeError("setting must be a mapping")
    if not rows or not columns:
        raise ValueError("it shows no rows or no columns")
    if not {*rows} <= {*table.row_names} or not {*columns} <= {*table.column_names}:
        raise ValueError("it shows rows or columns that its table does not have")
    if len(rows) * len(columns) * len(table.measures) > _MOST_FIGURES:
        raise ValueError(f"it shows more than {_MOST_FIGURES} figures")
    grid = Grid(
        table=table,
        scale=str(tree["scale"]),
        rows=tuple(rows),
        columns=tuple(columns),
        cells=tuple(cells),
        setting={key: value for key, value in setting.items() if key not in _LISTS or isinstance(value, list)},
        costs_only=tree["costs_only"] is True,
        notes=tuple(str(note) for note in tree["notes"]),
    )
    if not headings(grid):
        raise ValueError("it shows no measures")
    return grid


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a paper, or of one's own, measured.

    Attributes:
        folder: Where its files and runs are.
        grid: Its figures.
    """

    folder: Path
    grid: Grid

    @classmethod
    def read(cls, folder: Path) -> Table:
        """Return the table in a folder that ``reproduce`` wrote; errors are those of :func:`read_grid`."""
        return cls(folder=folder, grid=read_grid(folder))

    def to_pandas(self) -> pd.DataFrame:
        """Return a line for each row, column and measure: mean, deviation, number of seeds, and the paper's figure."""
        import pandas as pd

        lines: list[dict[str, Any]] = []
        for cell in self.grid.cells:
            for name, figure in cell.measured.items():
                places = {"row": cell.row, "column": cell.column, "measure": name}
                figures = {"mean": figure.mean, "sd": figure.sd, "seeds": figure.count}
                lines.append({**places, **figures, "printed": self.grid.table.printed_value(**places)})
        return pd.DataFrame(lines, columns=["row", "column", "measure", "mean", "sd", "seeds", "printed"])

    def written(self, form: str = "txt") -> str:
        """Return the table as its file has it.

        Args:
            form: ``txt``, ``md``, ``tex``, ``html``, or ``tabular``, which is LaTeX without what is around the figures.

        Raises:
            ConfigError: There is no such form.
        """
        forms = {name.removeprefix("table.").removesuffix(".tex"): make for name, make in FORMS.items()}
        if form not in forms:
            raise ConfigError(f"a table is written as one of {', '.join(forms)}, but not as {form!r}")
        return forms[form](self.grid)

    def _repr_html_(self) -> str:
        return html_fragment(self.grid)
