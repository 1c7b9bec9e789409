"""What a paper prints, as a block of text in the paper's own layout; and a table cut to some of its rows and columns.

    row,    CNN Fix accuracy, CNN Dynamic accuracy, CNN Fix cost
    a-g,    66.2/0.2,         68.9/0.9,             0.221
    FedAvg, 65.0/0.5,         ,                     0.004

A heading is a column's name, followed by a measure's where the table has several. A figure is a number,
``mean/spread``, ``never`` or ``N/A``; an empty place says that nothing is printed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsweep.errors import unknown_name
from fedsweep.reproduce.definition.sections import NEVER, NOT_GIVEN

_CUT = ("rows", "columns", "measures")


def parse_block(section: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Row -> column -> measure -> what is printed, of the section ``table`` with a text as ``printed``.

    Raises:
        ValueError: A heading is not known, a line has too few or too many places, or a figure can't be read.
    """
    lines = [line for line in section["printed"].splitlines() if line.strip()]
    if not lines:
        raise ValueError("table.printed is empty; leave it out")
    head, *body = ([part.strip() for part in line.split(",")] for line in lines)
    places = _places(section)
    for heading in head[1:]:
        if heading not in places:
            raise ValueError(f"table.printed: {unknown_name('heading', heading, list(places))}")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row, *texts in body:
        if len(texts) != len(head) - 1:
            raise ValueError(f"table.printed: {row!r} has {len(texts)} figures below {len(head) - 1} headings")
        if row in found:
            raise ValueError(f"table.printed has the row {row!r} more than once")
        found[row] = {}
        for heading, text in zip(head[1:], texts, strict=True):
            column, measure = places[heading]
            if text:
                found[row].setdefault(column, {})[measure] = _figure(text, f"{row}, {heading}")
    return found


def cut(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``table`` with the rows, columns and measures that its key ``only`` names, and without that key.

    What speaks of the others goes with them: their printed figures, a scale's choice, settings of a column, claims.

    Raises:
        ValueError: A name is not known.
    """
    found = {key: value for key, value in section.items() if key != "only"}
    only = section.get("only")
    if only is None:
        return found
    if not isinstance(only, Mapping) or not {*only} <= {*_CUT}:
        raise ValueError(f"table.only takes lists of names as {', '.join(_CUT)}, but got {only!r}")
    kept: dict[str, list[str]] = {}
    for key in _CUT:
        names = [str(entry["name"]) for entry in section.get(key, [])]
        kept[key] = list(only.get(key) or names)
        for name in kept[key]:
            if name not in names:
                raise ValueError(f"table.only: {unknown_name(key.removesuffix('s'), name, names)}")
        found[key] = [entry for entry in section.get(key, []) if entry["name"] in kept[key]]
    found["rows"] = [_cut_row(row, kept["columns"]) for row in found["rows"]]
    found["scales"] = {name: _cut_lists(scale, kept) for name, scale in section.get("scales", {}).items()}
    found["figures"] = [_cut_lists(figure, kept) for figure in section.get("figures", [])]
    found["claims"] = [_cut_lists(claim, kept) for claim in section.get("claims", []) if _is_left(claim, kept)]
    found["printed"] = {
        row: {
            column: {measure: value for measure, value in of.items() if measure in kept["measures"]}
            for column, of in by_column.items()
            if column in kept["columns"]
        }
        for row, by_column in (section.get("printed") or {}).items()
        if row in kept["rows"]
    }
    return found


def _is_left(claim: Mapping[str, Any], kept: Mapping[str, Sequence[str]]) -> bool:
    """Whether the rows that a claim can't do without and any of its columns are left."""
    alone = [claim[key] for key in ("above", "below") if claim.get(key)]
    together, others = claim.get("column_order") or [], claim.get("others") or kept["rows"]
    columns = claim.get("columns") or kept["columns"]
    return (
        {*(claim.get("order") or ()), *alone} <= {*kept["rows"]}
        and {*together} <= {*kept["columns"]}
        and not {*others}.isdisjoint(kept["rows"])
        and not {*columns}.isdisjoint(kept["columns"])
    )


def _cut_row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    found = {**row, "columns": {name: more for name, more in row.get("columns", {}).items() if name in columns}}
    if "only" in row:
        found["only"] = [name for name in row["only"] if name in columns]
    return found


def _cut_lists(entry: Mapping[str, Any], kept: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A scale, figure or claim with its choices among what is left; a choice of nothing is none."""
    found = dict(entry)
    for key, names in (("rows", "rows"), ("columns", "columns"), ("others", "rows")):
        left = [name for name in entry.get(key) or () if name in kept[names]]
        if key in entry:
            found[key] = left or None
    if "groups" in entry:
        groups = {name: [row for row in rows if row in kept["rows"]] for name, rows in entry["groups"].items()}
        found["groups"] = {name: rows for name, rows in groups.items() if rows}
    return found


def _places(section: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Column and measure by heading."""
    columns = [str(entry["name"]) for entry in section.get("columns", [])]
    measures = [str(entry["name"]) for entry in section.get("measures", [])]
    found = {f"{column} {measure}": (column, measure) for column in columns for measure in measures}
    if len(measures) == 1:
        found |= {column: (column, measures[0]) for column in columns}
    return found


def _figure(text: str, where: str) -> Any:
    if text in (NEVER, NOT_GIVEN):
        return text
    try:
        numbers = [float(part) for part in text.split("/")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(
            f"table.printed: {where}: a figure is a number, mean/spread, {NEVER} or {NOT_GIVEN}, but got {text!r}"
        )
    return numbers if len(numbers) == 2 else numbers[0]
