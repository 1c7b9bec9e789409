"""A table that was made, for programs: as a data frame, and in the forms that texts take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ConfigError
from fedsweep.reproduce.formats import FORMS, html_fragment
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.reproduce.outputs import read_grid

if TYPE_CHECKING:
    import pandas as pd


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
        """The table in a folder that ``reproduce`` wrote.

        Raises:
            OutputError: It can't be read, is damaged or of another version.
        """
        return cls(folder=folder, grid=read_grid(folder))

    def to_pandas(self) -> pd.DataFrame:
        """A line for each row, column and measure: mean, deviation and number of seeds, and what the paper prints."""
        import pandas as pd

        lines: list[dict[str, Any]] = []
        for cell in self.grid.cells:
            for name, found in cell.measured.items():
                places = {"row": cell.row, "column": cell.column, "measure": name}
                figures = {"mean": found.mean, "sd": found.sd, "seeds": found.count}
                lines.append({**places, **figures, "printed": self.grid.table.printed_value(**places)})
        return pd.DataFrame(lines, columns=["row", "column", "measure", "mean", "sd", "seeds", "printed"])

    def written(self, form: str = "txt") -> str:
        """The table as its file has it.

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
