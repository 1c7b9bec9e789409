"""A table or figure of a paper as a YAML file: an experiment's configuration with one more section, ``table:``.

The rest of the file is the base that each cell starts from; ``fedsweep run`` ignores the section. docs/tables.md shows
the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from fedsweep.config import yaml12
from fedsweep.config.base import Section, Text
from fedsweep.config.presets import Preset, find_preset, list_presets
from fedsweep.errors import ConfigError, unknown_name

ScaleName = Literal["smoke", "small", "full"]
SCALES: tuple[ScaleName, ...] = ("smoke", "small", "full")
FULL: ScaleName = "full"
NEVER = "never"
# Figures that a finished run's model has to be tested for, see :mod:`fedsweep.reproduce.loss_gap`.
GAP_FIGURES = ("gap_pearson", "gap_spearman", "gap_pearson_signed")
_SECTION = re.compile(r"^table:", flags=re.MULTILINE)
_SOURCE = re.compile(r"^table:.*?^ +source: *([^\n]*)$", flags=re.MULTILINE | re.DOTALL)

FigureKind = Literal[
    "scatter", "curves", "bars", "lines", "membership", "group_labels", "classes", "participation", "loss_gap"
]
Settings = dict[str, Any]
Printed = float | Annotated[list[float], Field(min_length=2, max_length=2)] | Literal["never"]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Names = Annotated[list[Text], Field(min_length=1)]


class Measure(Section):
    """A figure that every cell shows.

    Attributes:
        name: Its name in ``printed``.
        label: Its heading; by default the name.
        of: A column of ``rounds.parquet``, a key of ``result.json``, ``group_size``, or ``gap_pearson`` and the like
            (docs/tables.md); by default the name.
        over: How a column's rounds become one figure.
        percent: A share 0..1 that is shown in percent.
        digits: After the decimal point.
        tolerance: How far measured may lie from printed without a mark, in the unit shown.
        cost: It follows from configuration and seed without training.
        target: Test accuracy 0..1; the measure is then the figure at the first evaluated round that reaches it.
            ``cell``: the first of the cell's own ``evaluation.targets``.
        per: What one unit shown is: 1e6 shows millions.
    """

    name: Text
    label: str = ""
    of: str = ""
    over: Literal["last", "best", "mean", "sum", "last5", "first"] = "last"
    percent: bool = False
    digits: Annotated[int, Field(ge=0, le=10)] = 3
    tolerance: Annotated[float, Field(ge=0)] | None = None
    cost: bool = False
    target: Annotated[float, Field(gt=0, le=1)] | Literal["cell"] | None = None
    per: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _named_by_default(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            return given
        name = given["name"]
        digits = {"digits": 1} if given.get("percent") is True else {}
        return {**digits, **given, "label": given.get("label") or name, "of": given.get("of") or name}

    @model_validator(mode="after")
    def _gap_is_known(self) -> Self:
        if self.of.startswith("gap_"):
            _check_known("measure of the gap in loss", [self.of], GAP_FIGURES)
        return self


class Row(Section):
    """A row: what it sets, or why it is missing.

    Attributes:
        name: Its heading.
        set: Dotted key -> value, laid over the base and the column.
        columns: Column -> more of the same, for that cell alone.
        scales: Scale -> more of the same, laid over everything else.
        missing: Why it cannot be measured; it then stands in the table with this reason.
    """

    name: Text
    set: Settings = Field(default_factory=dict)
    columns: dict[str, Settings] = Field(default_factory=dict)
    scales: dict[ScaleName, Settings] = Field(default_factory=dict)
    missing: str = ""


class Column(Section):
    """A column: what it sets.

    Attributes:
        name: Its heading.
        set: Dotted key -> value, laid over the base.
        scales: Scale -> more of the same, laid over the row and the scale.
        x: Where it stands on the x axis of a ``lines`` figure.
        missing: Why it cannot be measured.
    """

    name: Text
    set: Settings = Field(default_factory=dict)
    scales: dict[ScaleName, Settings] = Field(default_factory=dict)
    x: float | None = None
    missing: str = ""


class Scale(Section):
    """How much of a table is run, and how long.

    Attributes:
        seeds: By default the table's.
        rows: Names; by default all.
        columns: Names; by default all.
        set: Dotted key -> value, laid over base, column and row.
        note: What a reader must know of it.
    """

    seeds: Seeds | None = None
    rows: Names | None = None
    columns: Names | None = None
    set: Settings = Field(default_factory=dict)
    note: str = ""


class FigureSpec(Section):
    """A picture that is drawn from the cells' runs.

    Attributes:
        name: Its files' name.
        kind: What is drawn.
        title: Above it.
        x: What is drawn from left to right.
        y: What is drawn upwards.
        log_x: Whether the x axis is logarithmic.
        log_y: Whether the y axis is.
        x_label: Below the x axis.
        y_label: Beside the y axis.
        rows: Names of the rows drawn; by default all that were measured.
        columns: Names of the columns drawn.
        options: What only its kind knows.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    kind: Literal[
        "scatter", "curves", "bars", "lines", "membership", "group_labels", "classes", "participation", "loss_gap"
    ]
    title: str = ""
    x: str = ""
    y: str = ""
    log_x: bool = False
    log_y: bool = False
    x_label: str = ""
    y_label: str = ""
    rows: Names | None = None
    columns: Names | None = None
    options: Settings = Field(default_factory=dict)


class TableFile(Section):
    """A table or figure.

    Attributes:
        name: ``<paper>/<table>``, or the file's stem.
        base: The configuration that each cell starts from, as given; at full scale.
        title: What it shows.
        source: Authors, year, number.
        kind: How a cell is measured.
        measures: What each cell shows, in order.
        rows: In order.
        columns: In order.
        seeds: At full scale.
        scales: By name.
        printed: Row -> column -> measure -> what the paper prints: a number, ``[mean, sd]`` or ``never``.
        figures: Pictures.
        notes: What a reader must know.
        groups: Options of the kind ``groups``.
    """

    name: Text
    base: Settings
    title: Text
    source: Text
    kind: Literal["runs", "groups"] = "runs"
    measures: Annotated[list[Measure], Field(min_length=1)]
    rows: Annotated[list[Row], Field(min_length=1)]
    columns: Annotated[list[Column], Field(min_length=1)]
    seeds: Seeds = Field(default_factory=lambda: [0])
    scales: dict[ScaleName, Scale] = Field(default_factory=dict)
    printed: dict[str, dict[str, dict[str, Printed]]] = Field(default_factory=dict)
    figures: list[FigureSpec] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    groups: Settings = Field(default_factory=dict)

    @property
    def row_names(self) -> list[str]:
        """Of all rows, in order."""
        return [row.name for row in self.rows]

    @property
    def column_names(self) -> list[str]:
        """Of all columns, in order."""
        return [column.name for column in self.columns]

    @property
    def options(self) -> Mapping[str, Any]:
        """What the table's kind alone knows."""
        found: Mapping[str, Any] = {} if self.kind == "runs" else getattr(self, self.kind)
        return found

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.columns if column.name == name)

    def measure(self, name: str) -> Measure:
        """The measure of that name."""
        return next(measure for measure in self.measures if measure.name == name)

    def scale(self, name: str) -> Scale:
        """A scale; one that the file does not speak of runs the whole table as the paper has it.

        Raises:
            ConfigError: It is no scale, or the file does not have it.
        """
        if name not in SCALES:
            raise ConfigError(unknown_name("scale", name, SCALES))
        found = next((scale for key, scale in self.scales.items() if key == name), None)
        if found is None and name != FULL:
            there = ", ".join(key for key in SCALES if key == FULL or key in self.scales)
            raise ConfigError(f"{self.name} has no scale {name!r} (it has: {there}); give one of these as --scale")
        return found or Scale()

    def seeds_of(self, scale: str) -> list[int]:
        """The seeds of a scale."""
        return list(self.scale(scale).seeds or self.seeds)

    def printed_value(self, row: str, column: str, *, measure: str) -> float | Literal["never"] | None:
        """What the paper prints, without its spread; None where nothing is known."""
        found = self.printed.get(row, {}).get(column, {}).get(measure)
        return found[0] if isinstance(found, list) else found

    def printed_sd(self, row: str, column: str, *, measure: str) -> float | None:
        """The spread that the paper prints; None where there is none."""
        found = self.printed.get(row, {}).get(column, {}).get(measure)
        return found[1] if isinstance(found, list) else None

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        rows, columns = self.row_names, self.column_names
        measures = [measure.name for measure in self.measures]
        figures = [figure.name for figure in self.figures]
        for kind, names in (("rows", rows), ("columns", columns), ("measures", measures), ("figures", figures)):
            _check_unique(kind, names)
        for key, scale in self.scales.items():
            _check_known(f"row of scales.{key}", scale.rows or (), rows)
            _check_known(f"column of scales.{key}", scale.columns or (), columns)
            _check_unique(f"scales.{key}.seeds", scale.seeds or [])
        _check_unique("seeds", self.seeds)
        for figure in self.figures:
            _check_known(f"row of figure {figure.name}", figure.rows or (), rows)
            _check_known(f"column of figure {figure.name}", figure.columns or (), columns)
        self._check_printed(rows, columns, measures=measures)
        for row in self.rows:
            _check_known(f"column of row {row.name}", row.columns, columns)
            if row.missing and (row.set or row.columns or row.scales):
                raise ValueError(f"the row {row.name!r} is missing, so it can't set anything; leave one of both out")
        return self

    def _check_printed(self, rows: Sequence[str], columns: Sequence[str], *, measures: Sequence[str]) -> None:
        _check_known("row of printed", self.printed, rows)
        for row, by_column in self.printed.items():
            _check_known(f"column of printed.{row}", by_column, columns)
            for column, by_measure in by_column.items():
                _check_known(f"measure of printed.{row}.{column}", by_measure, measures)


def read_table(name_or_path: str | Path) -> TableFile:
    """A table from its name (``dynamicfl/table4``) or its file.

    Raises:
        ConfigError: It is not there, has no section ``table:``, or something in it is wrong; the message names the
            file and the key.
    """
    path, name = _find(str(name_or_path))
    tree = yaml12.read(path)
    if not isinstance(tree, dict) or not isinstance(tree.get("table"), dict):
        raise ConfigError(f"{path}: no table: it lacks the section table: (fedsweep list tables lists those there are)")
    section = dict(tree.pop("table"))
    for key in ("name", "base"):
        if key in section:
            raise ConfigError(f"{path}: table.{key} can't be given: the {key} is what stands outside of table:")
    try:
        return TableFile.model_validate({**section, "name": name, "base": tree})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explained(error)}") from None


def table_names() -> list[str]:
    """Names of all tables that ship with the package, sorted."""
    return [preset.name for preset in list_presets() if has_table(preset.path)]


def has_table(path: Path) -> bool:
    """Whether a YAML file has a section ``table:``; its text alone is looked at."""
    return _SECTION.search(path.read_text(encoding="utf-8")) is not None


def listed_tables() -> list[tuple[Preset, str]]:
    """Each table that ships with its source, sorted by name; files are searched for that, not parsed."""
    found = []
    for preset in list_presets():
        text = preset.path.read_text(encoding="utf-8")
        if _SECTION.search(text):
            found.append((preset, _source(preset, text)))
    return found


def _source(preset: Preset, text: str) -> str:
    found = _SOURCE.search(text)
    value = yaml12.parse(found[1], source=str(preset.path)) if found else None
    return value if isinstance(value, str) else read_table(preset.name).source


def _find(name: str) -> tuple[Path, str]:
    path = Path(name).expanduser()
    if path.is_file():
        shipped = next((p.name for p in list_presets() if p.path == path.resolve()), None)
        return path, shipped or path.stem
    preset = find_preset(name)
    if preset is None:
        said, _, _ = unknown_name("table", name, table_names()).partition(" (known: ")
        raise ConfigError(f"no file {name!r} is there; {said} (all names: fedsweep list tables)")
    return preset, name.removesuffix(".yaml")


def _check_unique(kind: str, names: Sequence[Any]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"{kind} must differ, but {twice!r} is there more than once")


def _check_known(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(kind, name, known))


def _explained(error: ValidationError) -> str:
    """One line on the first thing that is wrong; an unknown key comes first."""
    found = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    details = found[0]
    where = ".".join(["table", *(str(part) for part in details["loc"])])
    if details["type"] == "extra_forbidden":
        model = _model_at(details["loc"][:-1])
        return unknown_name("key", where, [".".join([where.rpartition(".")[0], key]) for key in model.model_fields])
    if details["type"] == "value_error":
        return f"{where}: {details['ctx']['error']}"
    value = repr(details["input"])
    if details["type"] == "missing":
        return f"{where} is missing"
    said = details["msg"][:1].lower() + details["msg"][1:]
    return f"{where}: {said}, but got {value if len(value) <= 80 else value[:77] + '...'}"


def _model_at(path: Sequence[Any]) -> type[Section]:
    models: dict[str, type[Section]] = {
        "measures": Measure,
        "rows": Row,
        "columns": Column,
        "scales": Scale,
        "figures": FigureSpec,
    }
    return models.get(str(path[0]), TableFile) if path else TableFile
