"""The section ``sweep``: which values of which keys are tried, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Strict, field_validator, model_validator

from fedsweep.config.base import Auto, Section, Text
from fedsweep.parameters.byte_counts import BYTE_UNITS, Bytes
from fedsweep.parameters.ranges import Count, Positive

SPACE_KINDS = ("grid", "choice", "uniform", "loguniform", "randint", "rungs")

_Floats = Annotated[tuple[float, float], Strict(False)]
_Integers = Annotated[tuple[int, int], Strict(False)]
_UNITS = {"": 1.0, **BYTE_UNITS, "%": 0.01, "s": 1.0}
# Parts of a figure's name that say that it is in the unit; all others are of bytes.
_MEASURED = {"%": {"accuracy", "ratio"}, "s": {"s"}}
_CONSTRAINT = re.compile(
    rf"([\w/-]+)\s*(<=|>=)\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*({'|'.join(filter(None, _UNITS))})?"
)
_Mode = Literal["max", "min"]


class SpaceEntry(Section):
    """The values of one key: exactly one of six forms."""

    grid: Annotated[list[Any], Field(min_length=1)] | None = Field(default=None, description="Each of these.")
    choice: Annotated[list[Any], Field(min_length=1)] | None = Field(default=None, description="One of these, drawn.")
    uniform: _Floats | None = Field(default=None, description="[low, high): drawn evenly.")
    loguniform: _Floats | None = Field(default=None, description="[low, high), low > 0: drawn evenly in the logarithm.")
    randint: _Integers | None = Field(default=None, description="[low, high): an integer, high excluded.")

    rungs: Annotated[list[Any], Field(min_length=2)] | None = Field(
        default=None, description="The first of these; the best third of the settings goes on to the next."
    )

    @property
    def kind(self) -> str:
        """Return the name of its form, one of six."""
        return next(kind for kind in SPACE_KINDS if getattr(self, kind) is not None)

    @property
    def is_list(self) -> bool:
        """Tell a list of values from a range."""
        return self.kind in ("grid", "choice", "rungs")

    @property
    def values(self) -> list[Any] | tuple[float, float] | tuple[int, int]:
        """The list, or the two ends."""
        entry: list[Any] | tuple[float, float] | tuple[int, int] = getattr(self, self.kind)
        return entry

    @model_validator(mode="after")
    def _exactly_one(self) -> SpaceEntry:
        kinds = [kind for kind in SPACE_KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            listing = " and ".join(kinds) or "none"
            raise ValueError(f"exactly one of {', '.join(SPACE_KINDS)} must be given, but got {listing}")
        numbers = [value for value in self.rungs or () if isinstance(value, int | float)]
        if len(numbers) == len(self.rungs or ()) and sorted(numbers) != numbers:
            raise ValueError(f"rungs go from little to much, but are {numbers}; write {sorted(numbers)}")
        if kinds[0] in ("uniform", "loguniform", "randint"):
            low, high = self.values
            if low >= high:
                raise ValueError(f"{kinds[0]} needs low < high, but got [{low}, {high}]")
            if kinds[0] == "loguniform" and low <= 0:
                raise ValueError(f"loguniform needs low > 0, but got [{low}, {high}]")
        return self


class NamedSetting(Section):
    """One setting of a study, by the name that it has in tables and pictures."""

    name: Text = Field(description="What it is called.")
    set: dict[str, Any] = Field(default_factory=dict, description="Dotted key -> value, laid over the configuration.")
    space: dict[str, SpaceEntry] = Field(
        default_factory=dict, description="Keys that this setting alone varies, laid over sweep.space."
    )

    @field_validator("name")
    @classmethod
    def _is_one_line(cls, name: str) -> str:
        if not name.isprintable() or not name.strip():
            raise ValueError(f"it stands in tables and names of folders, so it must be one line, but is {name!r}")
        return name


class Constraint(NamedTuple):
    """A condition on a figure.

    Attributes:
        metric: The figure.
        is_most: The limit is the most that it may be; otherwise the least.
        limit: In the figure's unit.
        unit: What it was written in; empty where no unit was.
    """

    metric: str
    is_most: bool
    limit: float
    unit: str = ""

    @property
    def has_a_fitting_unit(self) -> bool:
        """Tell whether the figure may be in the unit; of figures beside the engine's own nobody knows."""
        measured = _MEASURED.get(self.unit, {"bytes"})
        return not self.unit or "/" in self.metric or not measured.isdisjoint(self.metric.split("_"))

    def excess(self, value: float) -> float:
        """Return how far a value is beyond the limit; at most 0 where it holds."""
        return value - self.limit if self.is_most else self.limit - value

    def holds(self, value: float) -> bool:
        """Check a value; NaN holds nothing."""
        return self.excess(value) <= 0


def parse_constraint(text: str) -> Constraint:
    """Read ``NAME <= NUMBER UNIT``; kB, MB and GB are powers of 1000, % is a hundredth, s is 1.

    Raises:
        ValueError: It is no such condition.
    """
    matched = _CONSTRAINT.fullmatch(text.strip())
    if matched is None:
        raise ValueError(
            f"a constraint is NAME <= NUMBER or NAME >= NUMBER, e.g. total_bytes <= 2 MB, but got {text!r}"
        )
    name, sign, number, unit = matched.groups()
    return Constraint(metric=name, is_most=sign == "<=", limit=float(number) * _UNITS[unit or ""], unit=unit or "")


class StudyBudget(Section):
    """The most that the trials of a sweep may spend together; a trial begins only where all of it fits."""

    total_bytes: Bytes | None = Field(
        default=None, description="Bytes sent, both ways, before round 1 included: a number, or 50 MB, 2 GB, ..."
    )
    sim_time_s: Positive | None = Field(default=None, description="Virtual seconds, of all trials one after another.")
    hours: Positive | None = Field(
        default=None, description="Real time under way; at its end trials write checkpoints, and --resume goes on."
    )
    trials: Count | None = Field(default=None, description="Trials begun.")

    @model_validator(mode="after")
    def _limits_something(self) -> StudyBudget:
        if not self.limits:
            raise ValueError(
                f"a budget limits one of {', '.join(type(self).model_fields)}, but none is given; e.g. {{total_bytes:"
                " 50 MB}, or leave it out"
            )
        return self

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    @property
    def costs(self) -> dict[str, float]:
        """Return the limits on what each trial adds to: all but the hours."""
        return {name: value for name, value in self.limits.items() if name != "hours"}


class Sweep(Section):
    """Values that ``fedsweep sweep`` tries; a single run ignores it."""

    settings: list[NamedSetting] = Field(
        default_factory=list,
        description="[{name: FedAvg, set: {method: {name: fedavg}}, space: {...}}, ...]: settings by name; each goes"
        " through space and its own.",
    )
    space: dict[str, SpaceEntry] = Field(
        default_factory=dict, description="Dotted key -> {grid, choice, uniform, loguniform or randint: values}."
    )
    samples: Count = Field(default=1, description="Draws from the space; each goes through the whole grid.")
    metric: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        default="test_accuracy", description="What is compared; a list for a Pareto search."
    )
    mode: _Mode | Annotated[list[_Mode], Field(min_length=1)] = Field(
        default="max", description="Whether more is better; a list beside a list of metrics."
    )
    constraints: list[Text] = Field(
        default_factory=list,
        description="[total_bytes <= 2 MB, ...]: met by tested rounds on the front; a search looks for them.",
    )
    scheduler: Literal["asha", "median", "pbt", "front"] | None = Field(
        default=None, description="Ends poor trials early."
    )
    resource: Literal["round", "total_bytes", "sim_time_s", "flops"] = Field(
        default="round", description="What a scheduler rations."
    )
    search: Literal["random", "optuna"] | None = Field(default=None, description="How values are proposed.")
    sampler: Literal["tpe", "gp", "random"] = Field(
        default="tpe", description="A search's, of Optuna: estimated densities, a Gaussian process, or at random."
    )
    points: list[dict[str, Any]] = Field(
        default_factory=list,
        description="[{KEY: VALUE, ...}, ...]: tried first by a search; {setting: NAME, ...} of named settings.",
    )
    seeds: Count = Field(default=5, description="A search: the most seeds of a setting, from the key seed upwards.")
    budget: StudyBudget | None = Field(
        default=None, description="{total_bytes: 50 MB, ...}: the most that all trials may spend together."
    )
    max_concurrent: Auto | Count = Field(default="auto", description="Trials at a time.")
    together: Auto | Count = Field(
        default=1,
        description="Trials of a process that are played side by side, their clients in the same lanes: those that"
        " have network, optimizer, batch size and what clients minimise in common, with runtime.executor=lanes; auto:"
        " as many as fill them, and with runtime.executor=auto in lanes where the network is small.",
    )

    @model_validator(mode="after")
    def _settings_differ(self) -> Sweep:
        columns: Mapping[str, list[Any]] = {
            "are named": [setting.name for setting in self.settings],
            "set": [(setting.set, setting.space) for setting in self.settings],
        }
        for what, values in columns.items():
            if twice := [item for place, item in enumerate(values) if item in values[:place]]:
                shown = twice[0] if isinstance(twice[0], str) else twice[0][0]
                raise ValueError(f"settings must differ, but several {what} {shown!r}")
        return self

    @field_validator("constraints")
    @classmethod
    def _are_conditions(cls, constraints: list[str]) -> list[str]:
        for text in constraints:
            parse_constraint(text)
        return constraints

    @property
    def rungs(self) -> tuple[str, list[Any]] | None:
        """Return the key whose values are rungs, and these; None: there is none."""
        return next(((key, entry.rungs) for key, entry in self.space.items() if entry.rungs is not None), None)

    @property
    def proposes(self) -> bool:
        """Tell whether later trials follow from what earlier ones came to."""
        return self.search == "optuna" or self.rungs is not None

    @property
    def limits(self) -> list[Constraint]:
        """Return the constraints, read."""
        return [parse_constraint(text) for text in self.constraints]

    @property
    def aims(self) -> dict[str, str]:
        """Return the metrics, each with its mode."""
        metrics = [self.metric] if isinstance(self.metric, str) else self.metric
        modes = [self.mode] if isinstance(self.mode, str) else self.mode
        return dict(zip(metrics, modes, strict=True))

    @model_validator(mode="after")
    def _metrics_have_modes(self) -> Sweep:
        if isinstance(self.metric, list):
            if not isinstance(self.mode, list) or len(self.mode) != len(self.metric):
                raise ValueError(
                    f"mode must list max or min for each of the {len(self.metric)} metrics, but is {self.mode!r}"
                )
            if twice := [name for place, name in enumerate(self.metric) if name in self.metric[:place]]:
                raise ValueError(f"metric lists {twice[0]} more than once; leave it out, and its mode")
        elif isinstance(self.mode, list):
            raise ValueError(f"mode is a list, so metric must be one too, but is {self.metric!r}")
        return self
