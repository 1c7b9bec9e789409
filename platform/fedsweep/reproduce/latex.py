"""A table's figures as LaTeX that fits a column or a page, in the paper's arrangement.

How wide a tabular comes out is estimated from the widths of Computer Modern's characters; the largest type in which it
fits is taken, with what is printed beside what is measured or below it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from fedsweep.reproduce.cell_texts import (
    CellText,
    caption,
    cell_text,
    has_labels,
    headings,
    label_of,
    notes,
    setting_line,
    standing_line,
)
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.texts import clean
from fedsweep.results.typeset import latex_row_name, latex_text

# Points: of a column of two, and of a page.
COLUMN, PAGE = 240.0, 500.0
# Width of a digit in points, by size; the sizes are those of a document at 10 points.
_DIGITS = {"small": 4.63, "footnotesize": 4.25, "scriptsize": 3.99}
# Of other characters, in digits.
_WIDE, _NARROW, _MARK = 1.56, 0.6, 0.75
_WIDE_ONES, _NARROW_ONES = frozenset("mwMWGOQDHNUK%±@&=+<>†‡"), frozenset(".,;:!|'ijlIt ")
_CAPITAL, _LETTER = 1.4, 1.0
_SEPARATION = 3.0
_LONGEST_NAME, _LONGEST_HEADING = 24, 12


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The layout of a tabular.

    Attributes:
        size: A size of type.
        is_stacked: Whether what is printed stands below what is measured.
        width: Of the tabular, estimated, in points.
    """

    size: str
    is_stacked: bool
    width: float


def as_tabular(grid: Grid) -> str:
    """Return the lines of figures alone, for a table environment of one's own."""
    return "\n".join([*_remarks(grid), *_tabular(grid), ""])


def as_latex(grid: Grid) -> str:
    """Write the table as LaTeX, for the package ``booktabs``; it goes over both columns where one is too narrow."""
    environment = "table" if _shape(grid).width <= COLUMN else "table*"
    lines = filter(None, (caption(grid), setting_line(grid), standing_line(grid)))
    text = ". ".join(latex_text(line.rstrip(".")) for line in lines)
    head = [rf"\begin{{{environment}}}", r"\centering", rf"\caption{{{text}.}}"]
    foot = [
        r"\par\smallskip\begin{minipage}{\linewidth}\scriptsize\raggedright",
        *(rf"{latex_text(note)}\par" for note in notes(grid)),
        r"\end{minipage}",
        rf"\end{{{environment}}}",
    ]
    return "\n".join([*_remarks(grid), *head, *_tabular(grid), *foot, ""])


def _remarks(grid: Grid) -> list[str]:
    width = _shape(grid).width
    fits = "fits a column" if width <= COLUMN else "fits a page (table*)" if width <= PAGE else "wider than a page"
    return [r"% needs \usepackage{booktabs}", f"% about {width:.0f} pt wide: {fits}"]


def _shape(grid: Grid) -> _Shape:
    """Return the largest type in which the tabular fits a column, or a page; the smallest where it fits neither."""
    shapes = [
        _Shape(size=size, is_stacked=is_stacked, width=_width(grid, size, is_stacked=is_stacked))
        for size, is_stacked in (
            *(("small", False), ("footnotesize", False), ("small", True), ("footnotesize", True)),
            *(("scriptsize", False), ("scriptsize", True)),
        )
    ]
    return next((shape for room in (COLUMN, PAGE) for shape in shapes if shape.width <= room), shapes[-1])


def _width(grid: Grid, size: str, *, is_stacked: bool) -> float:
    shown = headings(grid)
    widths = [max(_length(line) for row in grid.rows for line in _name(grid, row))]
    for heading in shown:
        texts = [cell_text(grid, row, heading) for row in grid.rows]
        lines = [_length(text.measured) + _MARK * len(text.marks) for text in texts]
        beside = [_length(text.in_brackets) for text in texts]
        cells = [max(pair) if is_stacked else sum(pair) + _NARROW for pair in zip(lines, beside, strict=True)]
        widths.append(max([*cells, *map(_length, _label(grid, label_of(heading.measure)))]))
    digit = _DIGITS[size]
    for column, group in groupby(range(len(shown)), key=lambda place: shown[place].column):
        places = [place + 1 for place in group]
        above = max(map(_length, _heading(grid, column, span=len(places)))) - sum(widths[place] for place in places)
        if above > 0:  # TeX gives what a spanning heading lacks to the last column that it spans
            widths[places[-1]] += above
    return digit * sum(widths) + 2 * _SEPARATION * len(shown)


def _length(text: str) -> float:
    """Return the width of a text in digits."""
    widths = (
        _WIDE if c in _WIDE_ONES else _NARROW if c in _NARROW_ONES else _CAPITAL if c.isupper() else _LETTER
        for c in text
    )
    return sum(widths)


def _name(grid: Grid, row: str) -> list[str]:
    return textwrap.wrap(clean(grid.row_label(row)), _LONGEST_NAME) or [""]


def _heading(grid: Grid, column: str, *, span: int) -> list[str]:
    return textwrap.wrap(clean(grid.column_label(column)), _LONGEST_HEADING * span) or [""]


def _label(grid: Grid, label: str) -> list[str]:
    return textwrap.wrap(clean(label), _LONGEST_HEADING) if has_labels(grid) else []


def _tabular(grid: Grid) -> list[str]:
    shape, shown = _shape(grid), headings(grid)
    lines = [
        rf"{{\{shape.size}\setlength{{\tabcolsep}}{{{_SEPARATION:g}pt}}%",
        rf"\begin{{tabular}}{{@{{}}l{'r' * len(shown)}@{{}}}}",
        r"\toprule",
        *_head(grid),
        r"\midrule",
    ]
    for number, row in enumerate(grid.rows):
        lines += [r"\addlinespace[2pt]"] if shape.is_stacked and number else []
        cells = [_cell(cell_text(grid, row, heading), is_stacked=shape.is_stacked) for heading in shown]
        names = [latex_row_name(line) for line in _name(grid, row)]
        lines += [_line(parts) for parts in zip_longest(names, *cells, fillvalue="") if any(parts)]
    return [*lines, r"\bottomrule", r"\end{tabular}}"]


def _head(grid: Grid) -> list[str]:
    shown = headings(grid)
    spans = [(column, len(list(group))) for column, group in groupby(shown, key=lambda heading: heading.column)]
    above = [
        [rf"\multicolumn{{{span}}}{{c}}{{{latex_text(line)}}}" for line in _heading(grid, name, span=span)]
        for name, span in spans
    ]
    depth = max(map(len, above))
    padded = [
        ["" if span == 1 else rf"\multicolumn{{{span}}}{{c}}{{}}"] * (depth - len(own)) + own
        for (_, span), own in zip(spans, above, strict=True)
    ]
    lines = [_line(["", *parts]) for parts in zip(*padded, strict=True)]
    if not has_labels(grid):
        return lines
    rules, start = "", 2
    for _, span in spans:
        rules += rf"\cmidrule(lr){{{start}-{start + span - 1}}}"
        start += span
    labels = [[latex_text(line) for line in _label(grid, label_of(heading.measure))] for heading in shown]
    depth = max(map(len, labels))
    raised = [[""] * (depth - len(own)) + own for own in labels]
    return [*lines, rules, *(_line(["", *parts]) for parts in zip(*raised, strict=True))]


def _cell(text: CellText, *, is_stacked: bool) -> list[str]:
    measured = latex_text(text.measured)
    measured += rf"\textsuperscript{{{latex_text(text.marks)}}}" if text.marks else ""
    printed = latex_text(text.in_brackets)
    return [measured, printed] if is_stacked else [f"{measured} {printed}".rstrip()]


def _line(parts: Sequence[str]) -> str:
    return rf"{' & '.join(parts)} \\"
