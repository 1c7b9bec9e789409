"""Metrics of the test: functions of the test set's outputs and targets, found by name in ``evaluation.metrics``.

A metric of one's own is a function in a module of one's own, ``package.module:callable``. What it measures is a column
of ``rounds.parquet`` under the function's name. Here are also those that need no module.

Shape letters: S test samples, C classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fedsweep.errors import ComponentError, ConfigError, FedsweepError, InvariantError
from fedsweep.guard import as_number, is_failure, placed_error, wrong
from fedsweep.tasks.declaration import SHARE, Declaration

if TYPE_CHECKING:
    from torch import Tensor

# (logits [S, C], targets [S]) -> a number, or the numbers that a declaration names.
Function = Callable[..., Any]
_Declared = TypeVar("_Declared", bound=Function)
_MARK = "__metric__"
# What tables of runs have beside the rounds' columns: a metric of such a name would stand in its place.
TABLE_COLUMNS = (
    *("run", "setting", "method", "seed", "status", "rounds", "folder"),
    *("best_test_accuracy", "group_size", "round_seconds", "round_time_s", "seconds_so_far", "energy_kwh", "money"),
)
# As many as are read back of a folder.
_MOST = 50


def metric(
    *,
    mode: Literal["max", "min"] = "max",
    unit: str = "",
    chance: float | None = None,
    parts: Sequence[str] = (),
) -> Callable[[_Declared], _Declared]:
    """Declare how a function that measures the test is to be read; without it, more is better.

    Args:
        mode: ``max`` where more is better, ``min`` where less is.
        unit: ``share`` for what lies in 0..1 and is shown in percent; any other word stands beside the figure.
        chance: What guessing comes to.
        parts: The keys of what the function returns, where that is a mapping to several numbers. Each is a column
            ``<metric>/<part>``.

    Raises:
        ConfigError: The mode is another word, or a part is no name.
    """
    declaration = Declaration(mode=mode, unit=unit, chance=chance, parts=tuple(parts))

    def declare(function: _Declared) -> _Declared:
        setattr(function, _MARK, declaration)
        return function

    return declare


def column_of(name: str) -> str:
    """Return the column of a metric that a configuration calls so: ``macro_f1`` for ``mine:macro_f1``."""
    return name.rpartition(":")[2].rpartition(".")[2]


def declarations(config: Mapping[str, Any]) -> dict[str, Declaration]:
    """Return the declarations of metrics, by column, as the configuration in a run's folder says: the task's first.

    Nothing is imported for that, and what makes no sense is left out: the folder may be somebody else's.
    """
    declared: dict[str, Declaration] = {}
    for entry in (*_entries(config, "scenario", "task"), *_entries(config, "evaluation")):
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            mode, unit, chance = (entry.get(key) for key in ("mode", "unit", "chance"))
            declared[column_of(entry["name"])] = Declaration(
                mode="min" if mode == "min" else "max",
                unit=unit if isinstance(unit, str) else "",
                chance=chance if isinstance(chance, float) and math.isfinite(chance) else None,
            )
    return declared


def _entries(config: Any, *keys: str) -> Sequence[Any]:
    """Return what stands under ``metrics`` in a section of a configuration that may be anybody's."""
    for key in (*keys, "metrics"):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config[:_MOST] if isinstance(config, list) else ()


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric that a configuration names.

    Attributes:
        name: As the configuration has it.
        function: What measures.
        declaration: How to read it.
    """

    name: str
    function: Function
    declaration: Declaration

    @classmethod
    def of(cls, name: str, function: Function, *, changes: Mapping[str, Any]) -> Metric:
        """A metric as its function declares it, but for what the configuration says otherwise: mode, unit, chance.

        Raises:
            ConfigError: The function does not take what a metric is given.
        """
        try:
            inspect.signature(function).bind("outputs", "targets")
        except TypeError as error:
            rule = f"evaluation.metrics: metric {name!r} must take the outputs and the targets of the test"
            raise ConfigError(f"{rule}, but: {error}") from None
        except ValueError:
            pass  # what is written in C may have no signature
        declared = getattr(function, _MARK, None)
        declaration = declared if isinstance(declared, Declaration) else Declaration()
        changed = {key: value for key, value in changes.items() if value is not None}
        return cls(name=name, function=function, declaration=Declaration(**{**asdict(declaration), **changed}))

    def spec(self) -> dict[str, Any]:
        """As a resolved configuration has it."""
        plain = asdict(self.declaration)
        return {"name": self.name, **{key: plain[key] for key in ("mode", "unit", "chance")}}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its figures."""
        column = column_of(self.name)
        return tuple(f"{column}/{part}" for part in self.declaration.parts) or (column,)

    def figures(self, logits: Tensor, targets: Tensor, *, when: str) -> dict[str, float]:
        """Its figures by column.

        Args:
            logits: Of the test set, on the CPU [S, C]; the function may change them.
            targets: The true classes [S]; the function may change them.
            when: ``in round 3``, for messages.

        Raises:
            ComponentError: The function failed.
            InvariantError: It returned something else than it declares.
        """
        try:
            answer = self.function(logits, targets)
        except (FedsweepError, MemoryError):
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ComponentError(f"the metric {self.name!r} failed {when} ({placed_error(error)})") from error
        parts = self.declaration.parts
        if not parts:
            return {self.columns[0]: self._number(answer, "a number", when=when)}
        must = f"a mapping with the keys {', '.join(parts)}, which it declares as its parts"
        if not isinstance(answer, Mapping) or {*answer} != {*parts}:
            raise self._wrong(answer, must, when=when)
        return {
            column: self._number(answer[part], f"a number for {part}", when=when)
            for column, part in zip(self.columns, parts, strict=True)
        }

    def _number(self, value: Any, must: str, *, when: str) -> float:
        if (number := as_number(value)) is None:
            raise self._wrong(value, must, when=when)
        return number

    def _wrong(self, answer: Any, must: str, *, when: str) -> InvariantError:
        error = wrong(self.function, "__call__", must=must, answer=answer, when=when)
        return InvariantError(f"the metric {self.name!r}: {error}")


def measured(
    metrics: Sequence[Metric], logits: Tensor, targets: Tensor, *, when: str, diverged: bool = False
) -> dict[str, float]:
    """All figures of a test by column; see :meth:`Metric.figures`.

    Args:
        metrics: Whose.
        logits: [S, C].
        targets: [S].
        when: ``in round 3``, for messages.
        diverged: The model computes NaN, of which a class could be made all the same; all figures are NaN then.
    """
    if diverged:
        return dict.fromkeys((column for metric in metrics for column in metric.columns), math.nan)
    # To each its own copies: what one does to them in place is nothing to the next.
    each = (metric.figures(logits.clone(), targets.clone(), when=when) for metric in metrics)
    return {column: value for figures in each for column, value in figures.items()}


# -- built in --------------------------------------------------------------------------------------------------------


@metric(unit=SHARE)
def macro_f1(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over classes of F1, the harmonic mean of precision and recall.

    Over the classes that are true or predicted for some sample, as scikit-learn's ``f1_score(average="macro")``.
    """
    predicted, num_classes = logits.argmax(1), logits.shape[1]
    hits_C = targets[predicted == targets].bincount(minlength=num_classes)
    both_C = targets.bincount(minlength=num_classes) + predicted.bincount(minlength=num_classes)
    return (2 * hits_C[both_C > 0].double() / both_C[both_C > 0]).mean()


@metric(unit=SHARE)
def balanced_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the test set's classes of recall, as scikit-learn's ``balanced_accuracy_score``."""
    num_classes = logits.shape[1]
    hits_C = targets[logits.argmax(1) == targets].bincount(minlength=num_classes)
    counts_C = targets.bincount(minlength=num_classes)
    return (hits_C[counts_C > 0].double() / counts_C[counts_C > 0]).mean()


@metric(unit=SHARE)
def top5_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Share of samples whose class is among the five with the highest scores."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return (best == targets[:, None]).any(1).double().mean()


@metric(mode="min")
def brier_score(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean squared distance, 0..2, of the probabilities from the truth, summed over classes (Brier, 1950)."""
    shares = logits.double().softmax(1)
    return (shares.square().sum(1) - 2 * shares.gather(1, targets[:, None])[:, 0] + 1).mean()


METRICS: Mapping[str, Function] = {
    function.__name__: function for function in (macro_f1, balanced_accuracy, top5_accuracy, brier_score)
}
