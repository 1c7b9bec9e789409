"""The kinds of tables, measures and figures that a table's file can name, each a function found by its name.

A name is built in, ``package.module:callable``, or an installed package's entry point (``fedsweep.tables``,
``fedsweep.measures``, ``fedsweep.figures``). What they are called with:

    kind of a table    a :class:`~fedsweep.reproduce.measured.table_kind.TableKind`, with the table's ``options``
    measure            (run: RunView) -> float | None
    figure             (scene: Scene) -> matplotlib Figure

Names of a table that is read back from ``measured.json`` are not looked up: that file may be somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from fedsweep.config.tables import Table
from fedsweep.errors import ConfigError, FedsweepError, unknown_name
from fedsweep.guard import is_failure, placed_error
from fedsweep.plugins import find_plugin, is_reference

# Figures that go with any table; a cell is a point, a bar or a point on a line, or a panel shows its rounds.
FIGURES: Mapping[str, str] = {
    **{name: f"fedsweep.reproduce.figures.of_cells:{name}" for name in ("scatter", "bars", "lines")},
    **{
        name: f"fedsweep.reproduce.figures.of_runs:{name}"
        for name in ("curves", "classes", "participation", "pictures")
    },
}
# A table of this kind has a run in every cell and is measured from the runs' folders.
RUNS = "runs"
TABLE_KINDS = Table(
    word="table", builders="fedsweep.papers.registry:TABLES", gives="fedsweep.reproduce.measured.table_kind:TableKind"
)
_MEASURES = Table(word="measure", builders="fedsweep.papers.registry:MEASURES", gives="builtins:object")
FIGURE_KINDS = Table(word="figure", builders="fedsweep.papers.registry:FIGURES", gives="matplotlib.figure:Figure")
# A name of a column as near as this to a measure's is a slip of the pen.
_ALIKE = 0.85


@lru_cache
def measure_function(name: str) -> Callable[..., float | None] | None:
    """Return the function of a run in a measure's ``of``; None where that is a column or a figure of the run.

    Raises:
        ConfigError: The name is a reference that leads nowhere.
    """
    if name in _MEASURES.names() or is_reference(name):
        return _MEASURES.builder(name)
    is_installed = any(point.name == name for point in entry_points(group="fedsweep.measures"))
    return _MEASURES.builder(name) if is_installed else None


def check_measure(name: str) -> None:
    """Raise a ConfigError where a measure's ``of`` leads nowhere, or is nearly a measure's name."""
    if measure_function(name) is None and get_close_matches(name, _MEASURES.names(), cutoff=_ALIKE):
        raise ConfigError(unknown_name("measure", name, _MEASURES.names()))


def check_kind(name: str, among: Table, *, also: tuple[str, ...] = ()) -> None:
    """Raise a ConfigError where there is no kind of that name; of built-in ones, which are there, none is imported."""
    if name not in among.names() and name not in also:
        find_plugin(among.word, name, (*among.names(), *also))


def call(word: str, name: str, function: Callable[..., Any], *args: Any, gives: tuple[type, ...]) -> Any:
    """Return the value of a function that a table names; its failures as errors that name it.

    Args:
        word: What it is, for messages.
        name: Its name in the table's file.
        function: The function.
        args: Its arguments.
        gives: Types of its value.

    Raises:
        ConfigError: It failed, or gave something else. The package's own errors pass as they are.
    """
    try:
        value = function(*args)
    except FedsweepError:
        raise
    except BaseException as failure:
        if not is_failure(failure):
            raise
        raise ConfigError(f"the {word} {name!r} failed ({placed_error(failure)})") from failure
    if isinstance(value, bool) or not isinstance(value, gives):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in gives)
        raise ConfigError(f"the {word} {name!r} must give {wanted}, but gives {type(value).__name__}")
    return value
