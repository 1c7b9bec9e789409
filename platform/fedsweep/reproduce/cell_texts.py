"""The texts of a table's cells, and the notes below the table; the same for all of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedsweep.reproduce.definition.sections import FULL, NEVER, Measure
from fedsweep.reproduce.measured.claims import claim_lines
from fedsweep.reproduce.measured.grid import Grid, GridCell, Measured, compared, deviates, is_comparable, lies_within
from fedsweep.results.curves import FIGURES
from fedsweep.results.texts import clean

# Beyond the tolerance; mean ± spread of both apart; another setting, where that is not so throughout.
FAR, APART, OTHER = "*", "†", "‡"
_NOTHING = "-"
_LONGEST_NOTE = 600


@dataclass(frozen=True, kw_only=True)
class CellText:
    """A measure of a cell in words.

    Attributes:
        measured: What was measured; with its spread over seeds, where there is one, and with their number where that is
            not the table's usual one.
        printed: What the paper prints; empty where it prints nothing.
        marks: How the two lie to each other: any of :data:`FAR`, :data:`APART` and :data:`OTHER`.
        is_broken: Whether something failed.
    """

    measured: str
    printed: str
    marks: str = ""
    is_broken: bool = False

    @property
    def is_off(self) -> bool:
        """True where the two lie further apart than the measure's tolerance."""
        return FAR in self.marks

    @property
    def in_brackets(self) -> str:
        """The paper's figure, as it stands beside or below the measured one."""
        return f"({self.printed})" if self.printed else ""

    def __str__(self) -> str:
        return f"{self.measured}{self.marks} {self.in_brackets}".rstrip()


class Heading(NamedTuple):
    """The heading of a column of figures: a column of the table with one of the measures."""

    column: str
    measure: Measure


def label_of(measure: Measure) -> str:
    """Return a measure's label, with its unit."""
    return f"{measure.label} (%)" if measure.percent and "%" not in measure.label else measure.label


def headings(grid: Grid) -> list[Heading]:
    """Return all columns of figures, in order."""
    shown = {column: grid.table.column(column).measures for column in grid.columns}
    return [
        Heading(column, measure)
        for column, names in shown.items()
        for measure in grid.measures
        if names is None or measure.name in names
    ]


def has_labels(grid: Grid) -> bool:
    """Check for columns of figures with different measures, so that each needs its measure's label."""
    return len({heading.measure.name for heading in headings(grid)}) > 1


def cell_text(grid: Grid, row: str, heading: Heading) -> CellText:
    """Return the text in a row below a heading."""
    measure = heading.measure
    printed = _printed(grid, row, heading)
    cell = grid.cell(row, heading.column)
    if cell is None:
        return CellText(measured=_NOTHING, printed=printed)
    figure = cell.measured.get(measure.name)
    if figure is None or not figure.is_told:
        broken = figure is None and bool(cell.problems)
        return CellText(measured="failed" if broken else _NOTHING, printed=printed, is_broken=broken)
    return CellText(
        measured=_measured(figure, measure, usual=grid.usual_count),
        printed=printed,
        marks=_marks_of(grid, cell, measure) if printed else "",
        is_broken=bool(cell.problems),
    )


def _marks_of(grid: Grid, cell: GridCell, measure: Measure) -> str:
    if not is_comparable(cell, measure):
        return "" if grid.is_other_throughout else OTHER
    far, within = deviates(grid, cell, measure), lies_within(grid, cell, measure)
    return (FAR if far else "") + (APART if within is False else "")


def _measured(figure: Measured, measure: Measure, *, usual: int | None) -> str:
    count = figure.count or figure.never
    is_partial = figure.mean is not None and figure.count < figure.of
    seeds = f" [{count}/{figure.of}]" if is_partial else "" if count == usual else f" [{count}]"
    if figure.mean is None:
        return f"{NEVER}{seeds}"
    spread = "" if figure.sd is None else f"±{_number(figure.sd, measure)}"
    return f"{_number(figure.mean, measure)}{spread}{seeds}"


def _printed(grid: Grid, row: str, heading: Heading) -> str:
    measure = heading.measure
    value = grid.table.printed_value(row, heading.column, measure=measure.name)
    if value is None or isinstance(value, str):
        return value or ""
    spread = grid.table.printed_sd(row, heading.column, measure=measure.name)
    return _as_printed(value, measure) + ("" if spread is None else f"±{_as_printed(spread, measure)}")


def _as_printed(value: float, measure: Measure) -> str:
    """Write a printed figure without losing a digit."""
    text = f"{value:.{measure.digits}f}"
    return text if float(text) == value else repr(value)


def _number(value: float, measure: Measure) -> str:
    """With the measure's digits; in powers of ten where that would take more room than a table has."""
    text = f"{round(value, measure.digits) + 0.0:.{measure.digits}f}"  # no -0
    return text if len(text) <= 10 else f"{value:.{max(measure.digits, 2)}e}"


# -- notes -------------------------------------------------------------------------------------------------------------


def caption(grid: Grid) -> str:
    """Return one line on what is shown and where it comes from."""
    return f"{clean(grid.table.source)}: {clean(grid.table.title)}"


def setting_line(grid: Grid) -> str:
    """Describe in one line the setting of the measurements."""
    setting = grid.setting
    parts = [f"scale {grid.scale}"]
    if datasets := setting.get("datasets"):
        parts.append(", ".join(clean(name) for name in datasets))
    if networks := setting.get("networks"):
        parts.append(", ".join(clean(name) for name in networks))
    rounds = setting.get("rounds") or []
    if rounds and grid.table.has_runs:
        low, high = rounds[0], rounds[-1]
        parts.append(f"{low} rounds" if low == high else f"{low} to {high} rounds")
    if seeds := setting.get("seeds"):
        parts.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return clean("; ".join(parts), longest=_LONGEST_NOTE)


def standing_line(grid: Grid) -> str:
    """Return one line, above the table, where all of it has another setting than the paper's; else empty."""
    if not grid.table.is_papers or not grid.is_other_throughout:
        return ""
    place = ", which stand in brackets" if grid.table.printed else ""
    return f"{_not_the(grid)} paper's setting: its figures say nothing about the paper's{place}."


def notes(grid: Grid) -> list[str]:
    """Return the notes for a reader, most important first."""
    every = [
        *_how_to_read(grid),
        *_judged(grid),
        *claim_lines(grid),
        *_scale_notes(grid),
        *_missing(grid),
        *_lacking(grid),
        *grid.problems,
        *grid.untold,
    ]
    return [clean(note, longest=_LONGEST_NOTE) for note in (*every, *grid.table.notes, *grid.notes)]


def _how_to_read(grid: Grid) -> list[str]:
    every = grid.figures
    marks = {mark for row in grid.rows for heading in headings(grid) for mark in cell_text(grid, row, heading).marks}
    has_printed = any(_printed(grid, row, heading) for row in grid.rows for heading in headings(grid))
    beside = f"; in brackets {grid.table.reference}" if has_printed else "; the paper prints no figures"
    names = ", ".join(dict.fromkeys(label_of(heading.measure) for heading in headings(grid)))
    sentences = [f"Each cell: {names}, as measured{beside if grid.table.printed else ''}."]
    usual = grid.usual_count
    if usual is not None:
        whose = "of one seed" if usual == 1 else f"the mean over {usual} seeds"
        varies = any((figure.count or figure.never) != usual or 0 < figure.count < figure.of for _, _, figure in every)
        but = ", but where [n] says of n, [k/n] of the k of n seeds that have it" if varies else ""
        sentences.append(f"Each figure is {whose}{but}.")
    if any(figure.sd is not None for _, _, figure in every):
        sentences.append("±, measured: sample standard deviation over seeds.")
    if any(isinstance(v, list) for r in grid.table.printed.values() for c in r.values() for v in c.values()):
        sentences.append(f"±, printed: {grid.table.spread}.")
    judged = [m for m in grid.measures if m.tolerance is not None]
    within = f"the tolerance ({', '.join(f'{label_of(m)} {m.tolerance:g}' for m in judged)})"
    comparable = [c for c in grid.cells for m in judged if compared(grid, c, m) is not None]
    if FAR in marks:
        sentences.append(f"{FAR}: further from what is printed than {within}.")
    elif comparable:
        sentences.append(f"All {len(comparable)} figures that can be compared lie within {within} of what is printed.")
    if APART in marks:
        sentences.append(f"{APART}: mean ± spread of measured and printed do not overlap.")
    if OTHER in marks:
        sentences.append(
            f"{OTHER}: the settings are not the paper's, or no run has finished, so the two are not compared."
        )
    return sentences


def _judged(grid: Grid) -> list[str]:
    """Note the rows whose accuracy is not the common model's."""
    columns: dict[str, list[str]] = {}
    for row in grid.table.rows:
        if row.accuracy and row.name in grid.rows:
            columns.setdefault(row.accuracy, []).append(row.name)
    return [
        f"{', '.join(rows)}: accuracy, and targets, by {FIGURES.get(of, of)} ({of})." for of, rows in columns.items()
    ]


def _scale_notes(grid: Grid) -> list[str]:
    note = grid.table.scale(grid.scale).note
    sentences = [note] if note else []
    if grid.costs_only:
        return [*sentences, "Costs alone: nothing was trained."]
    is_partly_other = any(cell.standing != "paper" for cell in grid.cells) and not grid.is_other_throughout
    if not grid.table.printed or not is_partly_other:
        return sentences  # a table of one's own, or all is said above
    return [
        *sentences,
        f"{_not_the(grid)} paper's setting; only what follows from settings that are the paper's is compared.",
    ]


def _not_the(grid: Grid) -> str:
    """Return the beginning of a sentence on a setting that is not the paper's, to its article."""
    if grid.scale != FULL:
        return f"The scale {grid.scale} is not the"
    return "With --set, or of runs that have not finished, this is not the"


def _missing(grid: Grid) -> list[str]:
    table = grid.table
    places: Sequence[tuple[str, str]] = [
        *((name, table.row(name).why_missing) for name in grid.rows),
        *((name, table.column(name).missing) for name in grid.columns),
    ]
    return [f"{name} is missing: {reason}" for name, reason in places if reason]


def _lacking(grid: Grid) -> list[str]:
    """Note the measures that no run has, as where the name of a column is misspelt."""
    if not grid.table.has_runs:
        return []
    measured_names = {name for cell in grid.cells if not cell.untold for name in cell.measured}
    lacking = [m for m in grid.measures if m.name in measured_names - {m.name for _, m, _ in grid.figures}]
    if grid.costs_only:
        return [f"{label_of(m)}: {m.of} is not told without training." for m in lacking]
    return [f"{label_of(m)}: no run has {m.of if m.target is None else 'the accuracy of its target'}." for m in lacking]
