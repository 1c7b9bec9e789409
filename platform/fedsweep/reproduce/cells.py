"""The cells of a table: what each row, column and seed comes to as an experiment."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from fedsweep.config.load import load_config
from fedsweep.config.overrides import SELECTORS, apply_overrides, parse_override, set_value
from fedsweep.errors import ConfigError, InputError, unknown_name
from fedsweep.reproduce.definition.sections import FULL
from fedsweep.reproduce.definition.table_file import TableFile

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

# What two configurations may differ in, and still cost the same to train.
_FREE_OF_COST = ("name", "seed", "evaluation", "runtime", "checkpoint", "tracking", "sweep")
# And what they may differ in, and still have the same results.
_FREE_OF_RESULT = ("name", "seed", "runtime", "checkpoint", "tracking", "sweep")
_ROUNDS = ("rounds", "stop")
# Whose settings a cell has: those of the full scale, which is the paper's; the same in all that a round costs, so that
# the number of rounds may differ; others.
Standing = Literal["paper", "costs", "other"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row, a column and a seed. Cells are equal where these three are.

    Attributes:
        row: The row's name.
        column: The column's name.
        seed: The seed.
        values: Dotted key -> value: where it differs from the table's base with the user's own settings; the seed last.
        config_tree: The whole configuration, as a user would write it.
    """

    row: str
    column: str
    seed: int
    values: Mapping[str, Any] = field(compare=False)
    config_tree: Mapping[str, Any] = field(compare=False)

    @property
    def label(self) -> str:
        """Row and column."""
        return f"{self.row} | {self.column}"

    @cached_property
    def config(self) -> Config:
        """The configuration.

        Raises:
            ConfigError: Something in it is wrong; the message names the cell.
        """
        try:
            return load_config(self.config_tree)
        except InputError as error:
            raise type(error)(f"cell {self.label}: {error}") from None


def cells_of(
    table: TableFile,
    scale: str,
    *,
    rows: str | None = None,
    columns: str | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
) -> list[Cell]:
    """Return the cells that are to be measured, row by row; rows and columns that are missing have none.

    Later settings win: base, column, row, the row in this column, scale, the column at this scale, the row at this
    scale, ``overrides``, seed.

    Args:
        table: The table.
        scale: ``smoke``, ``small`` or ``full``.
        rows: Shell patterns on names, separated by commas; they take the place of the scale's own choice.
        columns: Likewise.
        seeds: They take the place of the scale's.
        overrides: ``KEY=VALUE`` texts.

    Raises:
        ConfigError: There is no such scale, a pattern matches nothing, or a setting can't be laid over the others.
    """
    for text in overrides:
        key = parse_override(text)[0]
        if key == "seed":
            raise ConfigError(f"a table has several seeds, so --set {text} can't set one; give --seeds")
        if key.partition(".")[0] == "table":
            raise ConfigError(f"--set {text}: what a table shows stands in its file; --set takes keys of its runs")
    if len(set(seeds or ())) < len(seeds or ()):
        raise ConfigError(f"seeds must differ, but got {', '.join(map(str, seeds or ()))}")
    base = base_of(table, overrides)
    cells = []
    for row in chosen("row", table, scale, pattern=rows):
        for column in chosen("column", table, scale, pattern=columns):
            if not table.has_cell(row, column):
                continue
            tree = _given(table, scale, row=row, column=column, overrides=overrides)
            for seed in seeds or table.seeds_of(scale, row):
                whole = {**tree, "seed": seed}
                values = {**dict(_differences(base, tree)), "seed": seed}
                cells.append(Cell(row=row, column=column, seed=seed, values=values, config_tree=whole))
    return cells


def base_of(table: TableFile, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the configuration that a table's cells are laid over: its base with the user's own settings.

    Raises:
        ConfigError: An override is malformed or can't be laid over the base.
    """
    tree = apply_overrides(table.base, overrides)
    tree.pop("seed", None)
    return tree


def chosen(kind: Literal["row", "column"], table: TableFile, scale: str, *, pattern: str | None = None) -> list[str]:
    """Return names of the rows, or the columns, that are shown, those that are missing included.

    Args:
        kind: Which of both.
        table: The table.
        scale: ``smoke``, ``small`` or ``full``.
        pattern: Shell patterns on names, separated by commas; None: the scale's own choice.

    Raises:
        ConfigError: A pattern matches none.
    """
    at = table.scale(scale)
    names, own = (table.row_names, at.rows) if kind == "row" else (table.column_names, at.columns)
    if pattern is None:
        return [name for name in names if own is None or name in own]
    parts = [pattern] if pattern in names else [part.strip() for part in pattern.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"--{kind}s must name a {kind}, but is {pattern!r} (there are: {', '.join(names)})")
    matches = {name for part in parts for name in _matching(kind, names, part)}
    return [name for name in names if name in matches]


def stand_in_of(table: TableFile, cell: Cell) -> str:
    """Return a cell's data set and network where they replace those that its column is called by; else empty."""
    column, full = table.column(cell.column), _at_full_scale(table, cell)
    heading = re.sub(r"[^a-z0-9]", "", cell.column.lower())
    pairs = {"scenario.dataset": (cell.config.scenario.dataset, full.scenario.dataset)}
    pairs["model"] = (cell.config.model.name, full.model.name)
    called = {key: re.sub(r"[^a-z0-9]", "", there) for key, (_, there) in pairs.items()}
    called["model"] = called["model"].rstrip("0123456789") or called["model"]  # papers say LeNet, not LeNet-5
    return ", ".join(
        here for key, (here, there) in pairs.items() if here != there and (key in column.set or called[key] in heading)
    )


def standing_of(table: TableFile, cell: Cell) -> Standing:
    """Whose settings a cell of a table has, the seed apart."""
    full = _at_full_scale(table, cell)
    if _compared(cell.config, costs_alone=False) == _compared(full, costs_alone=False):
        return "paper"
    return "costs" if _compared(cell.config, costs_alone=True) == _compared(full, costs_alone=True) else "other"


def _at_full_scale(table: TableFile, cell: Cell) -> Config:
    return load_config(_given(table, FULL, row=cell.row, column=cell.column, overrides=()))


def _compared(config: Config, *, costs_alone: bool) -> dict[str, Any]:
    free = _FREE_OF_COST if costs_alone else _FREE_OF_RESULT
    tree = {key: value for key, value in config.tree().items() if key not in free}
    tree["scenario"] = {k: v for k, v in tree["scenario"].items() if k not in ("root", "download")}
    if costs_alone:
        tree["training"] = {k: v for k, v in tree["training"].items() if k not in _ROUNDS}
    return tree


def _given(table: TableFile, scale: str, *, row: str, column: str, overrides: Sequence[str]) -> dict[str, Any]:
    tree = base_of(table)
    by_row, by_column = table.row(row), table.column(column)
    layers = (
        by_column.set,
        by_row.set,
        by_row.columns.get(column, {}),
        table.scale(scale).set,
        {k: v for name, more in by_column.scales.items() if name == scale for k, v in more.items()},
        {k: v for name, more in by_row.scales.items() if name == scale for k, v in more.items()},
    )
    try:
        for layer in layers:
            for key, value in layer.items():
                set_value(tree, key, value=value)
    except ConfigError as error:
        raise ConfigError(f"cell {row} | {column}: {error}") from None
    return apply_overrides(tree, overrides)


def _differences(base: Mapping[str, Any], changed: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values that turn one into the other; a mapping with ``name`` or ``kind`` stays whole."""
    for key, value in changed.items():
        before = base.get(key)
        if key in base and before == value and type(before) is type(value):
            continue
        if isinstance(before, dict) and isinstance(value, dict) and not SELECTORS & value.keys():
            yield from _differences(before, value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _matching(kind: str, names: Sequence[str], part: str) -> list[str]:
    """Return the name itself where there is one, even with a pattern's characters (``a*``); else those that match."""
    low = part.lower()
    matches = [name for name in names if name.lower() == low]
    matches = matches or [name for name in names if fnmatch.fnmatchcase(name.lower(), low)]
    if not matches:
        raise ConfigError(f"--{kind}s: {unknown_name(kind, part, names)}")
    return matches
