"""A table in words, for ``fedsweep show``."""

from __future__ import annotations

from collections.abc import Sequence

from fedsweep.reproduce.cell_texts import label_of
from fedsweep.reproduce.cells import chosen_columns, chosen_rows
from fedsweep.reproduce.table_file import FULL, SCALES, Column, Measure, Row, TableFile


def table_text(table: TableFile) -> str:
    """What a table consists of, at which scales, and how it is made; plain lines."""
    lines = ["", table.title, "", "measures:", *_listed([_measure_line(measure) for measure in table.measures])]
    lines += ["rows:", *_listed([_place_line(row) for row in table.rows])]
    lines += ["columns:", *_listed([_place_line(column) for column in table.columns])]
    lines += [
        "scales:",
        *_listed([_scale_line(table, name) for name in SCALES if name == FULL or name in table.scales]),
    ]
    if table.figures:
        lines += ["figures:", *_listed([f"{figure.name} ({figure.kind})" for figure in table.figures])]
    if table.notes:
        lines += ["notes:", *_listed(table.notes)]
    return "\n".join([*lines, "", f"make it: fedsweep reproduce {table.name} --scale smoke"])


def _listed(texts: Sequence[str]) -> list[str]:
    return [f"  {text}" for text in texts]


def _measure_line(measure: Measure) -> str:
    what = f"{measure.of}, {measure.over} over rounds"
    if measure.target is not None:
        target = "the cell's evaluation.targets" if measure.target == "cell" else f"{measure.target:g}"
        what = f"{measure.of} at the first round with a test accuracy of {target}"
    cost = "; needs no training" if measure.cost else ""
    tolerance = "" if measure.tolerance is None else f"; tolerance {measure.tolerance:g}"
    return f"{measure.name}: {label_of(measure)} ({what}{tolerance}{cost})"


def _place_line(place: Row | Column) -> str:
    return f"{place.name} (missing: {place.missing})" if place.missing else place.name


def _scale_line(table: TableFile, name: str) -> str:
    rows, columns, seeds = chosen_rows(table, name), chosen_columns(table, name), table.seeds_of(name)
    here = sum(not table.row(row).missing for row in rows) * sum(not table.column(c).missing for c in columns)
    count = here * len(seeds)
    size = f"{len(rows)} rows x {len(columns)} columns, seeds {', '.join(map(str, seeds))}"
    note = table.scale(name).note
    return f"{name}: {size}: {count} {'runs' if table.kind == 'runs' else 'cells'}{f'; {note}' if note else ''}"
