"""A table's figures as text, Markdown, LaTeX and HTML."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedsweep.catalog import resolve
from fedsweep.reproduce.cell_texts import CellText, Heading, caption, cell_text, headings, label_of, notes, setting_line
from fedsweep.reproduce.cells import cells_of, chosen
from fedsweep.reproduce.definition.sections import FULL, SCALES, Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.texts import clean
from fedsweep.results.typeset import latex_tabular, latex_text, markdown_table, markdown_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table


WIDTH = 120
_GAP = 2
_LONGEST_NAME = 36
_LONGEST_HEADING = 24


# -- text --------------------------------------------------------------------------------------------------------------


def print_grid(grid: Grid, console: Console) -> None:
    """Prints a table, its columns in as many blocks as the width asks for.

    Args:
        grid: The table.
        console: Where to; no line is wider than it, or than 120 characters.
    """
    from rich.text import Text

    width = min(console.width, WIDTH)
    console.print(Text(caption(grid), style="bold"), width=width)
    console.print(Text(setting_line(grid)), width=width)
    for block in _blocks(grid, width):
        console.print()
        console.print(_block(grid, block), width=width)
    console.print()
    for note in notes(grid):
        console.print(Text(note), width=width)


def as_text(grid: Grid) -> str:
    """The table as plain text, at most 120 characters wide."""
    from rich.console import Console

    sink = io.StringIO()
    print_grid(grid, Console(file=sink, width=WIDTH, force_terminal=False, color_system=None, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in sink.getvalue().splitlines())


def _blocks(grid: Grid, width: int) -> list[list[Heading]]:
    """The columns of figures, cut where a line would be too long; a column's measures stay together if they can."""
    room = width - min(max(len(name) for name in grid.rows), _LONGEST_NAME)
    blocks: list[list[Heading]] = [[]]
    left = room
    for _, group in groupby(headings(grid), key=lambda heading: heading.column):
        members = list(group)
        sizes = [_GAP + _width(grid, heading) for heading in members]
        if sum(sizes) > left and blocks[-1]:
            blocks.append([])
            left = room
        for heading, size in zip(members, sizes, strict=True):
            if size > left and blocks[-1]:
                blocks.append([])
                left = room
            blocks[-1].append(heading)
            left -= size
    return blocks


def _width(grid: Grid, heading: Heading) -> int:
    texts = [str(cell_text(grid, row, heading)) for row in grid.rows]
    return max(map(len, (*texts, *(line[:_LONGEST_HEADING] for line in _heading_lines(grid, heading)))))


def _heading_lines(grid: Grid, heading: Heading) -> list[str]:
    column = clean(heading.column)
    return [column] if len(grid.measures) == 1 else [column, clean(label_of(heading.measure))]


def _block(grid: Grid, block: Sequence[Heading]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("", overflow="fold", max_width=_LONGEST_NAME)
    for heading in block:
        title = Text("\n".join(_heading_lines(grid, heading)), overflow="fold")
        width = _width(grid, heading)
        table.add_column(title, justify="right", min_width=width, max_width=width, overflow="fold")
    for row in grid.rows:
        texts = [cell_text(grid, row, heading) for heading in block]
        styles = ["red" if text.is_broken else "yellow" if text.is_off else "" for text in texts]
        cells = [Text(str(text), style=style) for text, style in zip(texts, styles, strict=True)]
        table.add_row(Text(clean(row)), *cells)
    return table


# -- Markdown and LaTeX ------------------------------------------------------------------------------------------------


def as_markdown(grid: Grid) -> str:
    """The table as GitHub's Markdown."""
    head = [f"**{markdown_text(caption(grid))}**", "", markdown_text(setting_line(grid)), ""]
    foot = ["", *(f"- {markdown_text(note)}" for note in notes(grid)), ""]
    return "\n".join([*head, *markdown_table(_frame(grid, str)), *foot])


def as_latex(grid: Grid) -> str:
    """The table as LaTeX, for the package ``booktabs``."""
    head = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{latex_text(caption(grid))}. {latex_text(setting_line(grid))}.}}",
    ]
    foot = [
        r"\par\smallskip\begin{minipage}{\linewidth}\footnotesize",
        *(rf"{latex_text(note)}\par" for note in notes(grid)),
        r"\end{minipage}",
        r"\end{table}",
    ]
    return "\n".join([*head, *latex_tabular(_frame(grid, _latex_cell)), *foot, ""])


def as_tabular(grid: Grid) -> str:
    """The lines of figures alone, for a table environment of one's own."""
    return "\n".join([r"% needs \usepackage{booktabs}", *latex_tabular(_frame(grid, _latex_cell)), ""])


def _frame(grid: Grid, written: Callable[[CellText], str]) -> pd.DataFrame:
    """The figures as written, with two lines of headings where a column has several measures."""
    import pandas as pd

    above = headings(grid)
    names = [(clean(heading.column), clean(label_of(heading.measure))) for heading in above]
    return pd.DataFrame(
        [[written(cell_text(grid, row, heading)) for heading in above] for row in grid.rows],
        index=[clean(row) for row in grid.rows],
        columns=pd.MultiIndex.from_tuples(names) if len(grid.measures) > 1 else [name for name, _ in names],
    )


def _latex_cell(text: CellText) -> str:
    measured = latex_text(text.measured)
    printed = f" ({latex_text(text.beside)})" if text.printed else ""
    return rf"\textbf{{{measured}}}{printed}\textsuperscript{{*}}" if text.is_off else f"{measured}{printed}"


# -- HTML --------------------------------------------------------------------------------------------------------------

# Written here: pandas' styler gives headings no ``scope``, which screen readers go by, and puts an id and a style
# element into each table, or no classes; a page has many tables under one style, and CSS of its own for their cells.

_STYLE = """
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #d9dee5; white-space: nowrap; text-align: right; }
th[scope="row"], caption { text-align: left; }
.printed { color: #5b6675; }
.off { font-weight: 600; color: #8a5a00; }
.broken { color: #b3261e; }
ul { font-size: .9rem; color: #5b6675; padding-left: 1.1rem; }
figure { margin: 2rem 0; }
img { max-width: 100%; height: auto; }
"""


def as_html(grid: Grid, *, pictures: Sequence[Path] = (), runs: Sequence[Path] = ()) -> str:
    """The table as a page that needs nothing beside itself.

    Args:
        grid: The table.
        pictures: PNG files, which become part of the page.
        runs: Run folders in the page's own folder, which it links to.

    Raises:
        OSError: A picture can't be read.
    """
    title = escape(caption(grid))
    shown = "".join(
        f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{escape(path.stem)}</figcaption></figure>\n"
        for path in pictures
    )
    linked = "".join(f'<li><a href="{quote(path.name)}/">{escape(clean(path.name))}</a></li>\n' for path in runs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{html_fragment(grid)}{shown}"
        f"{f'<h2>Runs</h2><ul>{linked}</ul>' if linked else ''}</body>\n</html>\n"
    )


def html_fragment(grid: Grid) -> str:
    """The table, how it was measured and its notes, as HTML without a style; every text is escaped."""
    rows = [
        f'<tr><th scope="row">{escape(clean(row))}</th>'
        + "".join(_html_cell(grid, row, heading) for heading in headings(grid))
        + "</tr>\n"
        for row in grid.rows
    ]
    listed = "".join(f"<li>{escape(note)}</li>\n" for note in notes(grid))
    return (
        f'<p class="lead">{escape(setting_line(grid))}</p>\n<div class="scroll"><table>\n<thead>\n{_html_heads(grid)}'
        f"</thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
        f'<ul class="footnotes">\n{listed}</ul>\n'
    )


def _html_heads(grid: Grid) -> str:
    span = len(grid.measures)
    scope = f'scope="colgroup" colspan="{span}"' if span > 1 else 'scope="col"'
    lines = ["".join(f'<th class="number" {scope}>{escape(clean(name))}</th>' for name in grid.columns)]
    if span > 1:
        labels = (escape(clean(label_of(heading.measure))) for heading in headings(grid))
        lines.append("".join(f'<th class="number" scope="col">{label}</th>' for label in labels))
    return "".join(f"<tr><td></td>{line}</tr>\n" for line in lines)


def _html_cell(grid: Grid, row: str, heading: Heading) -> str:
    text = cell_text(grid, row, heading)
    kind = "number broken" if text.is_broken else "number off" if text.is_off else "number"
    printed = f' <span class="printed">({escape(text.beside)})</span>' if text.printed else ""
    mark = "<sup>*</sup>" if text.is_off else ""
    return f'<td class="{kind}">{escape(text.measured)}{printed}{mark}</td>'


FORMS: dict[str, Callable[[Grid], str]] = {
    "table.txt": as_text,
    "table.md": as_markdown,
    "table.tex": as_latex,
    "tabular.tex": as_tabular,
    "table.html": as_html,
}


# -- a table's file ----------------------------------------------------------------------------------------------------


def table_tree(table: TableFile) -> dict[str, Any]:
    """A table as plain mappings, lists and scalars, everything that it refers to in its place.

    ``settings`` has for each row and column that can be measured the resolved configuration at full scale, without the
    seed; ``base`` is what the rows' and columns' own ``set`` is laid over.
    """
    tree = table.model_dump(mode="json")
    for entry, row in zip(tree["rows"], table.rows, strict=True):
        entry["missing"] = row.why_missing
    settings: dict[str, dict[str, Any]] = {}
    for cell in cells_of(table, FULL):
        if cell.column not in settings.setdefault(cell.row, {}):
            resolved = resolve(cell.config).tree()
            settings[cell.row][cell.column] = {k: v for k, v in resolved.items() if k not in ("seed", "sweep")}
    return {**tree, "settings": settings}


def table_text(table: TableFile) -> str:
    """What a table consists of, at which scales, and how it is made; plain lines."""
    listed = {
        "measures": [_measure_line(measure) for measure in table.measures],
        "rows": [_place_line(row.name, row.why_missing) for row in table.rows],
        "columns": [_place_line(column.name, column.missing) for column in table.columns],
        "scales": [_scale_line(table, name) for name in SCALES if name == FULL or name in table.scales],
        "figures": [f"{figure.name} ({figure.kind})" for figure in table.figures],
        "notes": table.notes,
    }
    lines = [line for name, texts in listed.items() if texts for line in (f"{name}:", *(f"  {t}" for t in texts))]
    return "\n".join(["", table.title, "", *lines, "", f"make it: fedsweep reproduce {table.name} --scale smoke"])


def _measure_line(measure: Measure) -> str:
    what = f"{measure.of}, {measure.over} over rounds"
    if measure.target is not None:
        target = "the cell's evaluation.targets" if measure.target == "cell" else f"{measure.target:g}"
        what = f"{measure.of} at the first round with a test accuracy of {target}"
    cost = "; needs no training" if measure.cost else ""
    tolerance = "" if measure.tolerance is None else f"; tolerance {measure.tolerance:g}"
    return f"{measure.name}: {label_of(measure)} ({what}{tolerance}{cost})"


def _place_line(name: str, why_missing: str) -> str:
    return f"{name} (missing: {why_missing})" if why_missing else name


def _scale_line(table: TableFile, name: str) -> str:
    rows, columns, seeds = chosen("row", table, name), chosen("column", table, name), table.seeds_of(name)
    count = sum(len(table.seeds_of(name, row)) for row in rows for column in columns if table.has_cell(row, column))
    size = f"{len(rows)} rows x {len(columns)} columns, seeds {', '.join(map(str, seeds))}"
    note = table.scale(name).note
    return f"{name}: {size}: {count} {'runs' if table.has_runs else 'cells'}{f'; {note}' if note else ''}"
