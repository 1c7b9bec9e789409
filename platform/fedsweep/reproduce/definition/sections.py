"""The parts of a ``table:`` section: measures, rows, columns, scales, figures and claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedsweep.catalog import is_method
from fedsweep.config.base import Section, Text
from fedsweep.errors import unknown_name

ScaleName = Literal["smoke", "small", "full"]
SCALES: tuple[ScaleName, ...] = ("smoke", "small", "full")
FULL: ScaleName = "full"
# What the paper prints where a target was not reached, and where it gives no figure.
NEVER, NOT_GIVEN = "never", "N/A"
Settings = dict[str, Any]
Printed = float | Annotated[list[float], Field(min_length=2, max_length=2)] | Literal["never", "N/A"]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Names = Annotated[list[Text], Field(min_length=1)]


class Measure(Section):
    """A figure that every cell shows.

    Attributes:
        name: Its name in ``printed``.
        label: Its heading; by default the name.
        of: A column of ``rounds.parquet``, a key of ``result.json``, ``group_size``, or the name of a function of a run
            (:mod:`fedsweep.reproduce.kinds`); by default the measure's name.
        over: How a column's rounds become one figure; ``at_best``: the figure of the most accurate round; None: as
            ``compare`` has it.
        share_of: A column: the figure is the sum over the rounds as a share of that column's.
        percent: A share 0..1 that is shown in percent.
        digits: After the decimal point.
        tolerance: How far measured may lie from printed without a mark, in the unit shown.
        cost: It follows from configuration and seed without training.
        target: Test accuracy 0..1; the measure is then the figure at the first evaluated round that reaches it.
            ``cell``: the first of the cell's own ``evaluation.targets``.
        per: What one unit shown is: 1e6 shows millions.
        where: Of a table whose kind is not ``runs``: which part of a cell it is taken of; the kind says what it knows.
    """

    name: Text
    label: str = ""
    of: str = ""
    over: Literal["last", "best", "mean", "sum", "last5", "first", "at_best"] | None = "last"
    share_of: str = ""
    percent: bool = False
    digits: Annotated[int, Field(ge=0, le=10)] = 3
    tolerance: Annotated[float, Field(ge=0)] | None = None
    cost: bool = False
    target: Annotated[float, Field(gt=0, le=1)] | Literal["cell"] | None = None
    per: Annotated[float, Field(gt=0)] = 1.0
    where: Settings = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named_by_default(cls, section: Any) -> Any:
        if not isinstance(section, dict) or not isinstance(section.get("name"), str):
            return section
        name = section["name"]
        digits = {"digits": 1} if section.get("percent") is True else {}
        columns = {"of": section.get("of") or name, "share_of": section.get("share_of", "")}
        # Sweeps and logs call a component's figure so; the column has its name alone.
        columns = {k: v.removeprefix("extra/") if isinstance(v, str) else v for k, v in columns.items()}
        return {**digits, **section, "label": section.get("label") or name, **columns}

    @model_validator(mode="after")
    def _is_one_figure(self) -> Self:
        if self.share_of and (self.target is not None or self.over == "at_best"):
            raise ValueError("share_of is of all rounds, so neither target nor over: at_best goes with it")
        return self


class Row(Section):
    """A row: what it sets, or why it is missing.

    Attributes:
        name: Its heading.
        set: Dotted key -> value, laid over the base and the column.
        columns: Column -> more of the same, for that cell alone.
        only: Names of the columns in which it has cells; by default all.
        seeds: At full scale, in the place of the table's.
        scales: Scale -> more of the same, laid over everything else.
        missing: Why it cannot be measured; it then stands in the table with this reason.
        accuracy: A column in the place of ``test_accuracy``, for targets too: ``personal_accuracy`` where clients have
            models of their own. A note of the table says so.
        labels: Scale -> its heading there, where the name says what that scale does not run.
    """

    name: Text
    labels: dict[ScaleName, Text] = Field(default_factory=dict)
    set: Settings = Field(default_factory=dict)
    columns: dict[str, Settings] = Field(default_factory=dict)
    only: Names | None = None
    seeds: Seeds | None = None
    scales: dict[ScaleName, Settings] = Field(default_factory=dict)
    missing: str = ""
    accuracy: str = ""

    @cached_property
    def why_missing(self) -> str:
        """Why it cannot be measured: as the file says, or since a method that it names is not there; else empty."""
        lacking = [name for name in dict.fromkeys(self._methods()) if not is_method(name)]
        verb = "are" if len(lacking) > 1 else "is"
        return self.missing or (f"{' and '.join(lacking)} {verb} not there yet" if lacking else "")

    def _methods(self) -> Iterator[str]:
        for settings in (self.set, *self.columns.values()):
            method = settings.get("method")
            if isinstance(method, Mapping):
                parts = method.get("merge", [method])
                # What is no list of methods is refused by whoever loads a cell's configuration.
                parts = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
                yield from (str(part["name"]) for part in parts if "name" in part)


class Column(Section):
    """A column: what it sets.

    Attributes:
        name: Its heading.
        set: Dotted key -> value, laid over the base.
        scales: Scale -> more of the same, laid over the row and the scale.
        x: Where it stands on the x axis of a ``lines`` figure.
        missing: Why it cannot be measured.
        labels: Scale -> its heading there, where the name says what that scale does not run.
        measures: Names of the measures that it shows; by default all.
    """

    name: Text
    labels: dict[ScaleName, Text] = Field(default_factory=dict)
    measures: Names | None = None
    set: Settings = Field(default_factory=dict)
    scales: dict[ScaleName, Settings] = Field(default_factory=dict)
    x: float | None = None
    missing: str = ""


class Scale(Section):
    """A scale of a table: the part of it that is run, and its rounds.

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
        kind: The name of what is drawn (:mod:`fedsweep.reproduce.kinds`).
        title: Above it.
        x: What is drawn from left to right.
        y: What is drawn upwards.
        log_x: Whether the x axis is logarithmic.
        log_y: Whether the y axis is.
        x_label: Below the x axis.
        y_label: Beside the y axis.
        rows: Names of the rows drawn; by default all that were measured.
        columns: Names of the columns drawn.
        measures: Names of measures that ``bars`` shows side by side of one row, in the place of ``y``.
        groups: Label -> names of rows that belong together: ``scatter`` joins them by a line, ``curves`` gives each
            group a panel. By default each row stands for itself.
        ordered: Rows or groups are levels in their order, coloured from dark to light; names that differ in a number
            alone are so without being told.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    kind: Text
    title: str = ""
    x: str = ""
    y: str = ""
    log_x: bool = False
    log_y: bool = False
    x_label: str = ""
    y_label: str = ""
    rows: Names | None = None
    columns: Names | None = None
    measures: Names | None = None
    groups: dict[str, Names] = Field(default_factory=dict)
    ordered: bool = False

    @property
    def shown_rows(self) -> list[str] | None:
        """Names of the rows that it can show; None: any."""
        grouped = dict.fromkeys(name for names in self.groups.values() for name in names)
        return [name for name in self.rows or grouped if name in grouped] if grouped else self.rows


class Claim(Section):
    """A claim on figures' order, checked over seeds that they share; one of ``order`` to ``column_order``.

    Attributes:
        says: The paper's own words, as quoted.
        sense: What its text says, in our words, where they are no quotation. An order that the printed figures have and
            the text does not claim has neither.
        order: Names of rows, the one with the largest figure first.
        above: The name of a row whose figure is larger than that of each of the ``others``.
        below: Likewise, smaller.
        others: Names of rows; by default all others that have cells.
        within: Of ``above`` and ``below``: or on the other side of them by less than this, in the unit shown.
        cost: Of ``above`` and ``below``: besides, this measure is less than ``of_cost`` times that of the others.
        of_cost: See there; by default 1.
        column_order: Names of columns, the one with the largest figure first, in each row that has them all.
        rows: Of ``column_order``: names of rows; by default all.
        measure: By default the first.
        columns: Names of the columns that it holds for; by default all that show the measure.
        apart: Of ``order``: neighbours lie apart by less than this, in the unit shown, in place of their order.
    """

    says: str = ""
    sense: str = ""
    order: Annotated[list[Text], Field(min_length=2)] | None = None
    above: str = ""
    below: str = ""
    others: Names | None = None
    within: Annotated[float, Field(gt=0)] | None = None
    cost: str = ""
    of_cost: Annotated[float, Field(gt=0)] = 1.0
    column_order: Annotated[list[Text], Field(min_length=2)] | None = None
    rows: Names | None = None
    measure: str = ""
    columns: Names | None = None
    apart: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = {"order": self.order, "above": self.above, "below": self.below, "column_order": self.column_order}
        if sum(map(bool, kinds.values())) != 1:
            raise ValueError(f"a claim has one of {', '.join(kinds)}")
        if (self.within is not None or self.cost) and not (self.above or self.below):
            raise ValueError("within and cost go with above or below")
        if self.apart is not None and (self.above or self.below):
            raise ValueError("apart goes with an order; above and below take within")
        if self.says and self.sense:
            raise ValueError("a claim has the paper's words (says) or ours (sense), not both")
        return self

    @property
    def text(self) -> str:
        """The claim in a line."""
        if self.above or self.below:
            many = f"each of {', '.join(self.others)}" if self.others else "all others"
            side = "above" if self.above else "below"
            near = f", or within {self.within:g} of them" if self.within is not None else ""
            cost = f", at less than {self.of_cost:g} of their {self.cost}" if self.cost else ""
            return f"{self.above or self.below} {side} {many}{near}{cost}"
        names = self.order or self.column_order or []
        if self.apart is None:
            return " > ".join(names)
        return f"{' and '.join(names)} lie apart by less than {self.apart:g}"

    @property
    def row_names(self) -> list[str]:
        """Names of all rows that it speaks of."""
        alone = [name for name in (self.above, self.below) if name]
        return [*(self.order or ()), *alone, *(self.others or ()), *(self.rows or ())]


def check_unique(kind: str, names: Sequence[Any]) -> None:
    """Raise a ValueError where a name stands twice."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"{kind} must differ, but {twice!r} is there more than once")


def check_known(kind: str, names: Iterable[str], choices: Sequence[str]) -> None:
    """Raise a ValueError with the nearest name where one is not known."""
    for name in names:
        if name not in choices:
            raise ValueError(unknown_name(kind, name, choices))
