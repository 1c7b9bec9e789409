"""A table's figures as text, Markdown, LaTeX and HTML."""

from __future__ import annotations

import io
import textwrap
from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedsweep.catalog import resolve
from fedsweep.reproduce.cell_texts import (
    Heading,
    caption,
    cell_text,
    has_labels,
    headings,
    label_of,
    notes,
    setting_line,
    standing_line,
)
from fedsweep.reproduce.cells import cells_of, chosen
from fedsweep.reproduce.definition.sections import FULL, SCALES, Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.latex import as_latex, as_tabular
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.console import plain_console
from fedsweep.results.texts import clean
from fedsweep.results.typeset import markdown_table, markdown_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table


WIDTH = 120
_LONGEST_NAME = 28
_LONGEST_HEADING = 16


# -- text --------------------------------------------------------------------------------------------------------------


def print_grid(grid: Grid, console: Console) -> None:
    """Print a table in the paper's arrangement; below each other what does not fit beside each other.

    Args:
        grid: The table.
        console: Where to; no line is wider than it, or than 120 characters.
    """
    from rich.text import Text

    width = min(console.width, WIDTH)
    console.print(Text(caption(grid), style="bold"), width=width)
    for line in filter(None, (setting_line(grid), standing_line(grid))):
        console.print(Text(line), width=width)
    for table in _fitting(grid, headings(grid), console, width=width):
        console.print()
        console.print(table, width=width)
    console.print()
    for note in notes(grid):
        console.print(Text(note), width=width)


def as_text(grid: Grid) -> str:
    """Return the table as plain text, at most 120 characters wide."""
    sink = io.StringIO()
    print_grid(grid, plain_console(width=WIDTH, file=sink))
    return "".join(f"{line.rstrip()}\n" for line in sink.getvalue().splitlines())


def _fitting(grid: Grid, shown: Sequence[Heading], console: Console, *, width: int) -> list[Table]:
    """Return one table where that fits, else printed figures below measured ones, else half of the columns each."""
    from rich.measure import Measurement

    for is_stacked in (False, True):
        table = _table(grid, shown, is_stacked=is_stacked)
        if Measurement.get(console, console.options.update(max_width=10**4), table).maximum <= width:
            return [table]
    columns = list(dict.fromkeys(heading.column for heading in shown))
    if len(shown) == 1:
        return [table]
    halves = columns[: len(columns) // 2] if len(columns) > 1 else columns
    first = [h for h in shown if h.column in halves] if len(columns) > 1 else list(shown[: len(shown) // 2])
    rest = [heading for heading in shown if heading not in first]
    return [*_fitting(grid, first, console, width=width), *_fitting(grid, rest, console, width=width)]


def _table(grid: Grid, shown: Sequence[Heading], *, is_stacked: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in shown:
        lines = textwrap.wrap(clean(grid.column_label(heading.column)), _LONGEST_HEADING)
        lines += textwrap.wrap(clean(label_of(heading.measure)), _LONGEST_HEADING) if has_labels(grid) else []
        table.add_column(Text("\n".join(lines)), justify="right", overflow="fold")
    for row in grid.rows:
        texts = [cell_text(grid, row, heading) for heading in shown]
        styles = ["red" if text.is_broken else "yellow" if text.is_off else "" for text in texts]
        cells = [f"{t.measured}{t.marks}\n{t.in_brackets}".rstrip() if is_stacked else str(t) for t in texts]
        name = "\n".join(textwrap.wrap(clean(grid.row_label(row)), _LONGEST_NAME))
        table.add_row(Text(name), *(Text(text, style=style) for text, style in zip(cells, styles, strict=True)))
    return table


# -- Markdown ----------------------------------------------------------------------------------------------------------


def as_markdown(grid: Grid) -> str:
    """Return the table as GitHub's Markdown."""
    head = [f"**{markdown_text(caption(grid))}**", "", markdown_text(setting_line(grid)), ""]
    head += [markdown_text(standing_line(grid)), ""] if standing_line(grid) else []
    foot = ["", *(f"- {markdown_text(note)}" for note in notes(grid)), ""]
    return "\n".join([*head, *markdown_table(_frame(grid)), *foot])


def _frame(grid: Grid) -> pd.DataFrame:
    """Return the figures as texts, with two lines of headings where columns show different measures."""
    import pandas as pd

    above = headings(grid)
    names = [(clean(grid.column_label(heading.column)), clean(label_of(heading.measure))) for heading in above]
    return pd.DataFrame(
        [[str(cell_text(grid, row, heading)) for heading in above] for row in grid.rows],
        index=[clean(grid.row_label(row)) for row in grid.rows],
        columns=pd.MultiIndex.from_tuples(names) if has_labels(grid) else [name for name, _ in names],
    )


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
    """Return the table as a page that needs nothing beside itself.

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
    """Return the table, how it was measured and its notes, as HTML without a style; every text is escaped."""
    rows = [
        f'<tr><th scope="row">{escape(clean(grid.row_label(row)))}</th>'
        + "".join(_html_cell(grid, row, heading) for heading in headings(grid))
        + "</tr>\n"
        for row in grid.rows
    ]
    listed = "".join(f"<li>{escape(note)}</li>\n" for note in notes(grid))
    above = f'<p class="lead">{escape(standing_line(grid))}</p>\n' if standing_line(grid) else ""
    return (
        f'<p class="lead">{escape(setting_line(grid))}</p>\n{above}<div class="scroll"><table>\n<thead>\n'
        f"{_html_heads(grid)}</thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table></div>\n"
        f'<ul class="footnotes">\n{listed}</ul>\n'
    )


def _html_heads(grid: Grid) -> str:
    shown = headings(grid)
    lines = [""]
    for column, group in groupby(shown, key=lambda heading: heading.column):
        span = len(list(group))
        scope = f'scope="colgroup" colspan="{span}"' if span > 1 else 'scope="col"'
        lines[0] += f'<th class="number" {scope}>{escape(clean(grid.column_label(column)))}</th>'
    if has_labels(grid):
        labels = (escape(clean(label_of(heading.measure))) for heading in shown)
        lines.append("".join(f'<th class="number" scope="col">{label}</th>' for label in labels))
    return "".join(f"<tr><td></td>{line}</tr>\n" for line in lines)


def _html_cell(grid: Grid, row: str, heading: Heading) -> str:
    text = cell_text(grid, row, heading)
    kind = "number broken" if text.is_broken else "number off" if text.is_off else "number"
    printed = f' <span class="printed">{escape(text.in_brackets)}</span>' if text.printed else ""
    marks = f"<sup>{text.marks}</sup>" if text.marks else ""
    return f'<td class="{kind}">{escape(text.measured)}{marks}{printed}</td>'


FORMS: dict[str, Callable[[Grid], str]] = {
    "table.txt": as_text,
    "table.md": as_markdown,
    "table.tex": as_latex,
    "tabular.tex": as_tabular,
    "table.html": as_html,
}


# -- a table's file ----------------------------------------------------------------------------------------------------


def table_tree(table: TableFile) -> dict[str, Any]:
    """Return a table as plain mappings, lists and scalars, everything that it refers to in its place.

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
    """Describe a table's parts, its scales, and the command that makes it; plain lines."""
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
