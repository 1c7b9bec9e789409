"""A paper's figures as a block of text in its own layout; and a table cut to some of its rows and columns.

    row,    CNN Fix accuracy, CNN Dynamic accuracy, CNN Fix cost
    a-g,    66.2/0.2,         68.9/0.9,             0.221
    FedAvg, 65.0/0.5,         ,                     0.004

A heading is a column's name, followed by a measure's where the table has several. A figure is a number,
``mean/spread``, ``never`` or ``N/A``; an empty place says that nothing is printed there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedsweep.errors import unknown_name
from fedsweep.reproduce.definition.sections import NEVER, NOT_GIVEN, check_unique

_CUT = ("rows", "columns", "measures")


def parse_block(section: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Parse row -> column -> measure -> printed figure, of the section ``table`` with a text as ``printed``.

    Raises:
        ValueError: A heading is not known, a line has too few or too many places, or a figure can't be read.
    """
    lines = [line for line in section["printed"].splitlines() if line.strip()]
    if not lines:
        raise ValueError("table.printed is empty; leave it out")
    head, *body = ([part.strip() for part in line.split(",")] for line in lines)
    places = _places(section)
    check_unique("headings of table.printed", head[1:])
    for heading in head[1:]:
        if heading not in places:
            raise ValueError(f"table.printed: {unknown_name('heading', heading, list(places))}")
    printed: dict[str, dict[str, dict[str, Any]]] = {}
    for row, *texts in body:
        if len(texts) != len(head) - 1:
            raise ValueError(f"table.printed: {row!r} has {len(texts)} figures below {len(head) - 1} headings")
        if row in printed:
            raise ValueError(f"table.printed has the row {row!r} more than once")
        printed[row] = {}
        for heading, text in zip(head[1:], texts, strict=True):
            column, measure = places[heading]
            if text:
                printed[row].setdefault(column, {})[measure] = _figure(text, f"{row}, {heading}")
    return printed


def cut(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``table`` with the rows, columns and measures of its key ``only``, and without that key.

    What speaks of the others goes with them: their printed figures, a scale's choice, settings of a column, claims,
    pictures.

    Raises:
        ValueError: A name is not known.
    """
    shortened = {key: value for key, value in section.items() if key != "only"}
    only = section.get("only")
    if only is None:
        return shortened
    if not isinstance(only, Mapping) or not {*only} <= {*_CUT}:
        raise ValueError(f"table.only takes lists of names as {', '.join(_CUT)}, but got {only!r}")
    chosen: dict[str, list[str]] = {}
    for key in _CUT:
        names = _names(section, key)
        chosen[key] = list(only.get(key) or names)
        for name in chosen[key]:
            if name not in names:
                raise ValueError(f"table.only: {unknown_name(key.removesuffix('s'), name, names)}")
        shortened[key] = [entry for entry in section.get(key, []) if entry["name"] in chosen[key]]
    try:
        return shortened | _cut_rest(section, shortened, chosen)
    except (AttributeError, KeyError, TypeError):
        return shortened  # something else has a wrong shape: whoever checks all of the section says which


def _cut_rest(
    section: Mapping[str, Any], shortened: Mapping[str, Any], chosen: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return what speaks of the rows, columns and measures that are left, and these without what speaks of others."""
    measures = _names(section, "measures")
    claims = [claim for claim in section.get("claims", []) if _is_left(claim, chosen, first=measures[:1])]
    gone = {*measures} - {*chosen["measures"]}
    figures = [figure for figure in section.get("figures", []) if _is_drawn(figure, chosen, gone=gone)]
    return {
        "columns": [_cut_lists(column, chosen) for column in shortened["columns"]],
        "rows": [_cut_row(row, chosen["columns"]) for row in shortened["rows"]],
        "scales": {name: _cut_lists(scale, chosen) for name, scale in section.get("scales", {}).items()},
        "figures": [_cut_lists(figure, chosen) for figure in figures],
        "claims": [_cut_lists(claim, chosen) for claim in claims],
        "printed": {
            row: {
                column: {measure: value for measure, value in of.items() if measure in chosen["measures"]}
                for column, of in by_column.items()
                if column in chosen["columns"]
            }
            for row, by_column in (section.get("printed") or {}).items()
            if row in chosen["rows"]
        },
    }


def _is_drawn(figure: Mapping[str, Any], chosen: Mapping[str, Sequence[str]], *, gone: Collection[str]) -> bool:
    """Check that a picture's axes have measures that are left, and some of each list that it names."""
    lists = {key: figure.get(key) for key in _CUT}
    grouped = [row for rows in (figure.get("groups") or {}).values() for row in rows]
    every = [*lists.items(), ("rows", grouped)]
    axes = set() if figure.get("kind") == "curves" else {figure.get("x"), figure.get("y")}  # those have columns of runs
    return axes.isdisjoint(gone) and all(not {*names}.isdisjoint(chosen[key]) for key, names in every if names)


def _is_left(claim: Mapping[str, Any], chosen: Mapping[str, Sequence[str]], *, first: Sequence[str]) -> bool:
    """Check that what a claim can't do without is left: rows, measures (by default the first), a column, a row."""
    alone = [claim[key] for key in ("above", "below") if claim.get(key)]
    together, others = claim.get("column_order") or [], claim.get("others") or chosen["rows"]
    columns, rows = claim.get("columns") or chosen["columns"], claim.get("rows") or chosen["rows"]
    measures = [claim["measure"]] if claim.get("measure") else first
    return (
        {*(claim.get("order") or ()), *alone} <= {*chosen["rows"]}
        and {*together} <= {*chosen["columns"]}
        and {*measures, *filter(None, [claim.get("cost")])} <= {*chosen["measures"]}
        and not {*others}.isdisjoint(chosen["rows"])
        and not {*rows}.isdisjoint(chosen["rows"])
        and not {*columns}.isdisjoint(chosen["columns"])
    )


def _cut_row(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    shortened = {**row, "columns": {name: more for name, more in row.get("columns", {}).items() if name in columns}}
    if "only" in row:
        shortened["only"] = [name for name in row["only"] if name in columns]
    return shortened


def _cut_lists(entry: Mapping[str, Any], chosen: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a column, scale, figure or claim with its choices among the names left; an empty choice is none."""
    shortened = dict(entry)
    for key, names in (("rows", "rows"), ("columns", "columns"), ("measures", "measures"), ("others", "rows")):
        left = [name for name in entry.get(key) or () if name in chosen[names]]
        if key in entry:
            shortened[key] = left or None
    if "groups" in entry:
        groups = {name: [row for row in rows if row in chosen["rows"]] for name, rows in entry["groups"].items()}
        shortened["groups"] = {name: rows for name, rows in groups.items() if rows}
    return shortened


def _places(section: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return column and measure by heading."""
    columns, measures = _names(section, "columns"), _names(section, "measures")
    places = {f"{column} {measure}": (column, measure) for column in columns for measure in measures}
    if len(measures) == 1:
        places |= {column: (column, measures[0]) for column in columns}
    return places


def _names(section: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of the entries of a list of the section."""
    entries = section.get(key, [])
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, Mapping) or "name" not in entry:
            raise ValueError(f"table.{key}: each entry is a mapping with a name, but one is {entry!r}")
    return [str(entry["name"]) for entry in entries]


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
