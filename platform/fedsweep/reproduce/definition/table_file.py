"""A table or figure of a paper as a YAML file: an experiment's configuration with one more section, ``table:``.

The rest of the file is the base that each cell starts from; ``fedsweep run`` ignores the section. docs/tables.md shows
the format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from fedsweep.config import yaml12
from fedsweep.config.base import Section, Text
from fedsweep.config.includes import read_whole
from fedsweep.config.presets import Preset, find_preset, list_presets
from fedsweep.errors import ConfigError, unknown_name
from fedsweep.reproduce.definition.printed_block import cut, parse_block
from fedsweep.reproduce.definition.sections import (
    FULL,
    SCALES,
    Claim,
    Column,
    FigureSpec,
    Measure,
    Printed,
    Row,
    Scale,
    ScaleName,
    Seeds,
    Settings,
    check_known,
    check_unique,
)
from fedsweep.reproduce.kinds import FIGURE_KINDS, RUNS, TABLE_KINDS, check_kind, check_measure

_SECTION = re.compile(r"^table:", flags=re.MULTILINE)
_SOURCE = re.compile(r"^table:.*?^ +source: *([^\n]*)$", flags=re.MULTILINE | re.DOTALL)


class TableFile(Section):
    """A table or figure.

    Attributes:
        name: ``<paper>/<table>``, or the file's stem.
        base: The configuration that each cell starts from, as given; at full scale.
        title: What it shows.
        source: Authors, year, number.
        kind: The name of how a cell is measured (:mod:`fedsweep.reproduce.kinds`).
        measures: What each cell shows, in order.
        rows: In order.
        columns: In order.
        seeds: At full scale.
        scales: By name.
        printed: Row -> column -> measure -> what the paper prints: a number, ``[mean, spread]``, ``never`` or ``N/A``.
        spread: What the printed spreads are.
        reference: What the printed figures are, where not what the paper prints: those of another table, of a program.
        claims: What the paper claims of its figures, and orders that they have.
        figures: Pictures.
        notes: What a reader must know.
        options: Of the kind, where that is not ``runs``.
    """

    name: Text
    base: Settings
    title: Text
    source: Text
    kind: Text = RUNS
    measures: Annotated[list[Measure], Field(min_length=1)]
    rows: Annotated[list[Row], Field(min_length=1)]
    columns: Annotated[list[Column], Field(min_length=1)]
    seeds: Seeds = Field(default_factory=lambda: [0])
    scales: dict[ScaleName, Scale] = Field(default_factory=dict)
    printed: dict[str, dict[str, dict[str, Printed]]] = Field(default_factory=dict)
    spread: Text = "standard deviation"
    reference: Text = "what the paper prints"
    claims: list[Claim] = Field(default_factory=list)
    figures: list[FigureSpec] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    options: Settings = Field(default_factory=dict)

    @property
    def has_runs(self) -> bool:
        """True where every cell is measured from runs."""
        return self.kind == RUNS

    @property
    def is_papers(self) -> bool:
        """True where scale full has a paper's setting: it prints figures, or a table that ships has its number."""
        return bool(self.printed) or ("/" in self.name and re.search(r"(Table|Figure) \d", self.source) is not None)

    @property
    def row_names(self) -> list[str]:
        """Of all rows, in order."""
        return [row.name for row in self.rows]

    @property
    def column_names(self) -> list[str]:
        """Of all columns, in order."""
        return [column.name for column in self.columns]

    def has_cell(self, row: str, column: str) -> bool:
        """Check that the cell can be measured."""
        at, only = self.row(row), self.row(row).only
        return not at.why_missing and not self.column(column).missing and (only is None or column in only)

    def row(self, name: str) -> Row:
        """Return the row of that name."""
        return next(row for row in self.rows if row.name == name)

    def column(self, name: str) -> Column:
        """Return the column of that name."""
        return next(column for column in self.columns if column.name == name)

    def scale(self, name: str) -> Scale:
        """Return a scale; one that the file does not speak of runs the whole table as the paper has it.

        Raises:
            ConfigError: It is no scale, or the file does not have it.
        """
        if name not in SCALES:
            raise ConfigError(unknown_name("scale", name, SCALES))
        scale = next((scale for key, scale in self.scales.items() if key == name), None)
        if scale is None and name != FULL:
            there = ", ".join(key for key in SCALES if key == FULL or key in self.scales)
            raise ConfigError(f"{self.name} has no scale {name!r} (it has: {there}); give one of these as --scale")
        return scale or Scale()

    @property
    def default_scale(self) -> str:
        """The smallest that the file speaks of."""
        return next((name for name in SCALES if name in self.scales), FULL)

    def seeds_of(self, scale: str, row: str | None = None) -> list[int]:
        """Return the seeds of a scale; of a row, where one is named."""
        own = self.row(row).seeds if row is not None else None
        return list(self.scale(scale).seeds or own or self.seeds)

    def printed_value(self, row: str, column: str, *, measure: str) -> float | Literal["never", "N/A"] | None:
        """Return the paper's figure, without its spread; None where it prints none."""
        figure = self.printed.get(row, {}).get(column, {}).get(measure)
        return figure[0] if isinstance(figure, list) else figure

    def printed_sd(self, row: str, column: str, *, measure: str) -> float | None:
        """Return the spread that the paper prints; None where there is none."""
        figure = self.printed.get(row, {}).get(column, {}).get(measure)
        return figure[1] if isinstance(figure, list) else None

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        rows, columns = self.row_names, self.column_names
        measures = [measure.name for measure in self.measures]
        figures = [figure.name for figure in self.figures]
        for kind, names in (("rows", rows), ("columns", columns), ("measures", measures), ("figures", figures)):
            check_unique(kind, names)
        for key, scale in self.scales.items():
            check_known(f"row of scales.{key}", scale.rows or (), rows)
            check_known(f"column of scales.{key}", scale.columns or (), columns)
            check_unique(f"scales.{key}.seeds", scale.seeds or [])
        check_unique("seeds", self.seeds)
        for figure in self.figures:
            grouped = [name for names in figure.groups.values() for name in names]
            check_known(f"row of figure {figure.name}", [*(figure.rows or ()), *grouped], rows)
            check_known(f"column of figure {figure.name}", figure.columns or (), columns)
        for claim in self.claims:
            check_known("row of claims", claim.row_names, rows)
            check_known("column of claims", [*(claim.columns or ()), *(claim.column_order or ())], columns)
            check_known("measure of claims", [name for name in (claim.measure, claim.cost) if name], measures)
        for column in self.columns:
            check_known(f"measure of column {column.name}", column.measures or (), measures)
        self._check_printed(rows, columns, measures=measures)
        for row in self.rows:
            check_known(f"column of row {row.name}", [*row.columns, *(row.only or ())], columns)
            if row.missing and (row.set or row.columns or row.scales):
                raise ValueError(f"the row {row.name!r} is missing, so it can't set anything; leave one of both out")
        return self

    def _check_printed(self, rows: Sequence[str], columns: Sequence[str], *, measures: Sequence[str]) -> None:
        check_known("row of printed", self.printed, rows)
        for row, by_column in self.printed.items():
            check_known(f"column of printed.{row}", by_column, columns)
            for column, by_measure in by_column.items():
                check_known(f"measure of printed.{row}.{column}", by_measure, measures)


def read_table(name_or_path: str | Path) -> TableFile:
    """Read a table from its name (``dynamicfl/table4``) or its file.

    Raises:
        ConfigError: It is not there, has no section ``table:``, or something in it is wrong; the message names the
            file and the key.
    """
    path, name = _find(str(name_or_path))
    tree = read_whole(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("table"), dict):
        raise ConfigError(f"{path}: no table: it lacks the section table: (fedsweep list tables lists those there are)")
    section = dict(tree.pop("table"))
    for key in ("name", "base"):
        if key in section:
            raise ConfigError(f"{path}: table.{key} can't be given: the {key} is what stands outside of table:")
    try:
        if isinstance(section.get("printed"), str):
            section["printed"] = parse_block(section)
        table = TableFile.model_validate({**cut(section), "name": name, "base": tree})
        _check_kinds(table)
        return table
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explained(error)}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_kinds(table: TableFile) -> None:
    """Looks up what a table names; a table that is read back, which somebody else may have written, is spared that."""
    checks = [("kind", partial(check_kind, table.kind, TABLE_KINDS, also=(RUNS,)))]
    checks += [(f"measures: {each.name}", partial(check_measure, each.of)) for each in table.measures]
    checks += [(f"figures: {each.name}", partial(check_kind, each.kind, FIGURE_KINDS)) for each in table.figures]
    for where, check in checks:
        try:
            check()
        except ConfigError as error:
            raise ConfigError(f"table.{where}: {error}") from None


def table_names() -> list[str]:
    """Return names of all tables that ship with the package, sorted."""
    return [preset.name for preset in list_presets() if has_table(preset.path)]


def has_table(path: Path) -> bool:
    """Check for a section ``table:`` in a YAML file; its text alone is looked at."""
    return _SECTION.search(path.read_text(encoding="utf-8")) is not None


def listed_tables() -> list[tuple[Preset, str]]:
    """Return each table that ships with its source, sorted by name; files are searched for that, not parsed."""
    return [(preset, _source(preset)) for preset in list_presets() if has_table(preset.path)]


def _source(preset: Preset) -> str:
    match = _SOURCE.search(preset.path.read_text(encoding="utf-8"))
    value = yaml12.parse(match[1], source=str(preset.path)) if match else None
    return value if isinstance(value, str) else read_table(preset.name).source


def _find(name: str) -> tuple[Path, str]:
    path = Path(name).expanduser()
    if path.is_file():
        shipped = next((p.name for p in list_presets() if p.path == path.resolve()), None)
        return path, shipped or path.stem
    preset = find_preset(name)
    if preset is None:
        message, _, _ = unknown_name("table", name, table_names()).partition(" (known: ")
        raise ConfigError(f"no file {name!r} is there; {message} (all names: fedsweep list tables)")
    return preset, name.removesuffix(".yaml")


def _explained(error: ValidationError) -> str:
    """Explain in one line the first thing that is wrong; an unknown key comes first."""
    errors = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    details = errors[0]
    where = ".".join(["table", *(str(part) for part in details["loc"])])
    if details["type"] == "extra_forbidden":
        model = _model_at(details["loc"][:-1])
        return unknown_name("key", where, [".".join([where.rpartition(".")[0], key]) for key in model.model_fields])
    if details["type"] == "value_error":
        return f"{where}: {details['ctx']['error']}"
    value = repr(details["input"])
    if details["type"] == "missing":
        return f"{where} is missing"
    message = details["msg"][:1].lower() + details["msg"][1:]
    return f"{where}: {message}, but got {value if len(value) <= 80 else value[:77] + '...'}"


def _model_at(path: Sequence[Any]) -> type[Section]:
    models: dict[str, type[Section]] = {
        "measures": Measure,
        "rows": Row,
        "columns": Column,
        "scales": Scale,
        "figures": FigureSpec,
        "claims": Claim,
    }
    return models.get(str(path[0]), TableFile) if path else TableFile
