"""What a cell of a table says, and the notes below the table; the same for all of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedsweep.reproduce.definition.sections import FULL, NEVER, Measure
from fedsweep.reproduce.measured.claims import findings
from fedsweep.reproduce.measured.grid import Grid, GridCell, Measured, compared, deviates, is_comparable, lies_within
from fedsweep.results.curves import FIGURES
from fedsweep.results.texts import clean

MARK = "*"
OTHER_SETTING = "other setting"
_NOTHING = "-"
_LONGEST_NOTE = 600


@dataclass(frozen=True, kw_only=True)
class CellText:
    """A measure of a cell in words.

    Attributes:
        measured: What was measured; with its spread over seeds, where there is one, and their number.
        printed: What the paper prints; empty where it prints nothing.
        verdict: Whether the two lie within both spreads; empty where there is nothing to compare.
        is_off: Whether the two lie further apart than the measure's tolerance.
        is_broken: Whether something failed.
    """

    measured: str
    printed: str
    verdict: str = ""
    is_off: bool = False
    is_broken: bool = False

    @property
    def beside(self) -> str:
        """What stands in brackets beside the measured figure."""
        return f"{self.printed}, {self.verdict}" if self.verdict else self.printed

    def __str__(self) -> str:
        printed = f" ({self.beside})" if self.printed else ""
        return f"{self.measured}{printed}{MARK if self.is_off else ''}"


class Heading(NamedTuple):
    """The heading of a column of figures: a column of the table with one of the measures."""

    column: str
    measure: Measure


def label_of(measure: Measure) -> str:
    """A measure's label, with its unit."""
    return f"{measure.label} (%)" if measure.percent and "%" not in measure.label else measure.label


def headings(grid: Grid) -> list[Heading]:
    """All columns of figures, in order."""
    return [Heading(column, measure) for column in grid.columns for measure in grid.measures]


def cell_text(grid: Grid, row: str, heading: Heading) -> CellText:
    """What stands in a row below a heading."""
    measure = heading.measure
    printed = _printed(grid, row, heading)
    cell = grid.cell(row, heading.column)
    if cell is None:
        return CellText(measured=_NOTHING, printed=printed)
    found = cell.measured.get(measure.name)
    if found is None or (found.count == 0 and not found.never):
        broken = bool(cell.problems)
        return CellText(measured="failed" if broken else _NOTHING, printed=printed, is_broken=broken)
    return CellText(
        measured=_measured(found, measure),
        printed=printed,
        verdict=_verdict(grid, cell, measure) if printed else "",
        is_off=deviates(grid, cell, measure),
        is_broken=bool(cell.problems),
    )


def _verdict(grid: Grid, cell: GridCell, measure: Measure) -> str:
    if not is_comparable(cell, measure):
        return OTHER_SETTING
    within = lies_within(grid, cell, measure)
    return "" if within is None else "within" if within else "outside"


def _measured(found: Measured, measure: Measure) -> str:
    seeds = f" [{found.count}/{found.of}]" if found.count < found.of else f" [{found.count}]"
    if found.mean is None:
        return f"{NEVER} [{found.never}]" if found.never == found.of else f"{NEVER}{seeds}"
    spread = "" if found.sd is None else f"±{_number(found.sd, measure)}"
    return f"{_number(found.mean, measure)}{spread}{seeds}"


def _printed(grid: Grid, row: str, heading: Heading) -> str:
    measure = heading.measure
    value = grid.table.printed_value(row, heading.column, measure=measure.name)
    if value is None or isinstance(value, str):
        return value or ""
    spread = grid.table.printed_sd(row, heading.column, measure=measure.name)
    return _number(value, measure) + ("" if spread is None else f"±{_number(spread, measure)}")


def _number(value: float, measure: Measure) -> str:
    """With the measure's digits; in powers of ten where that would take more room than a table has."""
    text = f"{value:.{measure.digits}f}"
    return text if len(text) <= 10 else f"{value:.{max(measure.digits, 2)}e}"


# -- notes -------------------------------------------------------------------------------------------------------------


def caption(grid: Grid) -> str:
    """One line on what is shown and where it comes from."""
    return f"{clean(grid.table.source)}: {clean(grid.table.title)}"


def setting_line(grid: Grid) -> str:
    """One line on how it was measured."""
    said = grid.setting
    parts = [f"scale {grid.scale}"]
    if datasets := said.get("datasets"):
        parts.append(", ".join(clean(name) for name in datasets))
    rounds = said.get("rounds") or []
    if rounds and grid.table.has_runs:
        low, high = rounds[0], rounds[-1]
        parts.append(f"{low} rounds" if low == high else f"{low} to {high} rounds")
    if seeds := said.get("seeds"):
        parts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return clean("; ".join(parts), longest=_LONGEST_NOTE)


def notes(grid: Grid) -> list[str]:
    """What a reader must know, most important first."""
    claims = [finding.text for finding in findings(grid)]
    found = [
        *_how_to_read(grid),
        *_judged(grid),
        *_marks(grid),
        *claims,
        *_scale_notes(grid),
        *_missing(grid),
        *grid.problems,
        *grid.untold,
    ]
    return [clean(note, longest=_LONGEST_NOTE) for note in (*found, *grid.table.notes, *grid.notes)]


def _how_to_read(grid: Grid) -> list[str]:
    names = ", ".join(label_of(measure) for measure in grid.measures)
    has_printed = any(_printed(grid, row, heading) for row in grid.rows for heading in headings(grid))
    beside = "with what the paper prints in brackets" if has_printed else "the paper prints no figures"
    said = [f"Each cell: {names}, as measured{f'; {beside}' if grid.table.printed else ''}."]
    every = [cell.measured[m.name] for cell in grid.cells for m in grid.measures if m.name in cell.measured]
    if any(found.sd is not None for found in every):
        said.append("±, measured: sample standard deviation over seeds.")
    if any(isinstance(v, list) for r in grid.table.printed.values() for c in r.values() for v in c.values()):
        said.append(f"±, printed: {grid.table.spread}.")
    if every:
        said.append("[n]: of n seeds; [k/n]: k of n seeds have the figure, and the mean is over those.")
    if has_printed and any(cell.measured for cell in grid.cells):
        said.append(
            f"within, outside: whether mean ± spread of measured and printed overlap; {OTHER_SETTING}: the settings are"
            " not the paper's, so the two are not compared."
        )
    return said


def _judged(grid: Grid) -> list[str]:
    """Which rows' accuracy is not the common model's."""
    columns: dict[str, list[str]] = {}
    for row in grid.table.rows:
        if row.accuracy and row.name in grid.rows:
            columns.setdefault(row.accuracy, []).append(row.name)
    return [
        f"{', '.join(rows)}: accuracy, and targets, by {FIGURES.get(of, of)} ({of})." for of, rows in columns.items()
    ]


def _marks(grid: Grid) -> list[str]:
    judged = [m for m in grid.measures if m.tolerance is not None]
    comparable = [c for c in grid.cells for m in judged if compared(grid, c, m) is not None]
    if not comparable:
        return []
    within = f"the tolerance ({', '.join(f'{label_of(m)} {m.tolerance:g}' for m in judged)})"
    if any(deviates(grid, cell, measure) for cell in grid.cells for measure in grid.measures):
        return [f"{MARK}: further from what is printed than {within}."]
    return [f"All {len(comparable)} figures that can be compared lie within {within} of what is printed."]


def _scale_notes(grid: Grid) -> list[str]:
    note = grid.table.scale(grid.scale).note
    said = [note] if note else []
    if grid.costs_only:
        return [*said, "Costs alone: nothing was trained."]
    if not grid.table.printed:
        return said  # a table of one's own: there is no paper that it could differ from
    alike = [cell for cell in grid.cells if cell.standing == "paper"]
    if len(alike) == len(grid.cells) or not grid.table.has_runs:
        return said
    costs = any(measure.cost for measure in grid.measures) and any(c.standing == "costs" for c in grid.cells)
    where = f"The scale {grid.scale} is not" if grid.scale != FULL else "With --set this is not"
    but = "; only costs are compared, where the settings that they follow from are the paper's" if costs else ""
    return [*said, f"{where} the paper's setting: its figures say nothing about the paper's{but}."]


def _missing(grid: Grid) -> list[str]:
    table = grid.table
    places: Sequence[tuple[str, str]] = [
        *((name, table.row(name).why_missing) for name in grid.rows),
        *((name, table.column(name).missing) for name in grid.columns),
    ]
    return [f"{name} is missing: {reason}" for name, reason in places if reason]
