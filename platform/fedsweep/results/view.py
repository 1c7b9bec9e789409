"""Runs as their folders tell of them, for tables and pictures; unfinished runs included."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from os.path import commonpath
from pathlib import Path
from statistics import median
from typing import Any

from fedsweep.components.metrics import declarations
from fedsweep.config.yaml12 import parse
from fedsweep.errors import OutputError
from fedsweep.records import RoundRecord
from fedsweep.results.seed_statistics import finite, mean
from fedsweep.results.texts import is_accuracy
from fedsweep.runs.find import find_runs
from fedsweep.runs.places import place_name
from fedsweep.runs.run_folder import CLIENTS, CONFIG, RESULT, ROUNDS, UNFINISHED, RunFolder
from fedsweep.runs.tables.rounds import ROUND_COLUMNS
from fedsweep.runs.targets import reaches
from fedsweep.tasks.declaration import SHARE, Declaration

# Columns that only a replay gives, up to each round's end; and what they are called.
ENERGY, MONEY = "energy_kwh", "money"
SPENT: Mapping[str, str] = {ENERGY: "energy (kWh)", MONEY: "money"}
_COLUMN = re.compile(r"[\w-]{1,60}(/\w{1,60})?")
# Which rounds become one figure, and how.
OVER: Mapping[str, tuple[slice, Callable[[Sequence[float]], float]]] = {
    "last": (slice(-1, None), mean),
    "first": (slice(0, 1), mean),
    "best": (slice(None), max),
    "mean": (slice(None), mean),
    "sum": (slice(None), math.fsum),
    "last5": (slice(-5, None), mean),
    "later": (slice(1, None), median),  # the first round loads what all others have
}
_LOSSES = ("test_loss", "train_loss")
# What is no number where a model has diverged.
_SOUND = ("test_accuracy", *_LOSSES)
_OF_ROUNDS = ("flops", "local_steps", "sync_points", "over_budget", "comm_cost")
_OF_MESSAGES = ("values_up", "values_down", "bytes_up", "bytes_down")
# A run's figure -> the column that it comes from, and how; all others are the last that is known.
_FIGURES: Mapping[str, tuple[str, str]] = {
    **{name: (name, "sum") for name in (*_OF_ROUNDS, *_OF_MESSAGES)},
    "best_test_accuracy": ("test_accuracy", "best"),
    "comm_ratio": ("comm_ratio", "mean"),
    "wall_time_s": ("seconds_so_far", "last"),
    "round_time_s": ("round_seconds", "later"),
}


def over_rounds(name: str) -> str:
    """Return how a figure of a run comes of its rounds, one of :data:`OVER`."""
    return _FIGURES.get(name, (name, "last"))[1]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run that may still be going on.

    Attributes:
        folder: Its folder.
        config: Its configuration as it stands in the folder.
        result: What ``result.json`` holds; empty for an unfinished run.
        columns: The columns of ``rounds.parquet`` by name; empty where there is no such file yet.
        notes: What of the folder was passed over, in sentences.
    """

    folder: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name; its folder's where the configuration has none."""
        return str(self.config.get("name") or self.folder.name)

    @property
    def method(self) -> str:
        """The method's name; of merged ones all, with a plus between."""
        spec = self.config.get("method")
        if not isinstance(spec, Mapping):
            return str(spec or "?")
        merged = spec.get("merge")
        parts = merged if merged and isinstance(merged, list) else [spec]
        return "+".join(str(part.get("name", "?")) if isinstance(part, Mapping) else str(part) for part in parts)

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def status(self) -> str:
        """``finished``, ``failed``, ``killed``, or ``unfinished``: going on, or broken off without a word.

        A run whose model computes no numbers in the end has failed, whatever it says itself.
        """
        return "failed" if self.divergence else str(self.result.get("status", UNFINISHED))

    @property
    def reason(self) -> str | None:
        """Why it failed, in a sentence; None where it says nothing of it."""
        reason = self.result.get("reason")
        return str(reason) if reason else self.divergence

    @cached_property
    def divergence(self) -> str | None:
        """Which figure is NaN or infinite in the last round that has it, as a sentence; None for a sound run."""
        for name in _SOUND:
            cells = [cell for cell in self.columns.get(name, ()) if cell is not None]
            if cells and finite(cells[-1]) is None:
                return f"diverged: its last {name} is {cells[-1]}, so its model counts as failed"
        return None

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return len(self.column("round"))

    @cached_property
    def _derived(self) -> Mapping[str, Sequence[Any]]:
        """Columns that follow from those in the file."""

        def together(*names: str) -> list[Any]:
            counted = [self.columns[name] for name in names if name in self.columns]
            return list(map(sum, zip(*counted, strict=True)))

        def so_far(*names: str) -> list[Any]:
            return list(accumulate(together(*names)))

        def sound(accuracy: Any, loss: Any) -> Any:
            # The largest of scores that are NaN is the first class: an accuracy of chance, which is none.
            return math.nan if accuracy is not None and loss is not None and finite(loss) is None else accuracy

        groups = self.columns.get("high_frequency")
        sizes = None if groups is None else [None if group is None else len(group) for group in groups]
        accuracies = self.columns.get("test_accuracy", ())
        losses = self.columns.get("test_loss", [None] * len(accuracies))
        return {
            "test_accuracy": list(map(sound, accuracies, losses)),
            "seconds_so_far": so_far("wall_time_s", "eval_time_s"),
            "round_seconds": together("wall_time_s", "eval_time_s"),
            "group_size": self.columns.get("group_size", ()) if sizes is None else sizes,
        }

    @cached_property
    def metrics(self) -> Mapping[str, Declaration]:
        """Return the declarations of the test's metrics, by column."""
        return {
            column: declaration
            for name, declaration in declarations(self.config).items()
            for column in self.columns
            if (column == name or column.startswith(f"{name}/")) and _COLUMN.fullmatch(column)
        }

    @cached_property
    def client_metrics(self) -> Mapping[str, Declaration]:
        """Return those of what the test found by client, by column: the mean over clients, and the tenths."""
        return {
            f"client_{name}{part}": replace(declaration, chance=None)
            for name, declaration in declarations(self.config).items()
            for part in ("", "_worst10", "_best10")
            if f"client_{name}{part}" in self.columns
        }

    def column(self, name: str) -> Sequence[Any]:
        """Return a column's cells, one per round; none where there is no table.

        ``test_accuracy`` is NaN where the round's test loss is no finite number.
        Beside those of ``rounds.parquet`` there are ``round_seconds``, of each round, evaluation included, and
        ``seconds_so_far``, of all up to and with each; ``group_size``, the high-frequency group's length.
        """
        return self._derived[name] if name in self._derived else self.columns.get(name, ())

    def last(self, name: str) -> float | None:
        """The last cell of a column that holds a number, NaN as it is; None where none does."""
        return next((float(cell) for cell in reversed(self.column(name)) if isinstance(cell, int | float)), None)

    def over(self, name: str, how: str) -> float | None:
        """Return a column as one figure; None where no round has it, or one that counts is NaN or infinite.

        The best is that of the rounds in which it is a number: the largest; of losses, and where a metric says
        so, the smallest.

        Args:
            name: A column.
            how: One of :data:`OVER`.
        """
        cells = [cell for cell in self.column(name) if isinstance(cell, int | float)]
        which, reduce = OVER[how]
        declared = {**self.metrics, **self.client_metrics}
        if how == "best" and (declared[name].mode == "min" if name in declared else name in _LOSSES):
            reduce = min
        used = [finite(cell) for cell in cells[which] if how != "best" or cell == cell]
        whole = [value for value in used if value is not None]
        return reduce(whole) if whole and len(whole) == len(used) else None

    def figure(self, name: str) -> float | None:
        """Compute a figure of the whole run: the one place that every table, report and summary asks.

        The rounds come first; what they do not have is looked for in ``result.json``.

        Args:
            name: A column of :meth:`column`, also as ``extra/<name>``, or ``best_test_accuracy``. Counts are summed
                over the rounds, the communication ratio is their mean, ``wall_time_s`` is that of all rounds with
                evaluation, ``round_time_s`` the median of all rounds but the first, and everything else is the last
                that is known.
        """
        column, how = _FIGURES.get(name, (name.removeprefix("extra/"), "last"))
        is_measured = any(cell is not None for cell in self.column(column))
        return self.over(column, how) if is_measured else finite(self.result.get(name))

    def lists_participants_alone(self) -> bool:
        """Tell whether the table of clients has those who took part, as of a drawn population, and not everybody.

        Raises:
            OutputError: It is damaged.
        """
        if not (self.folder / CLIENTS).is_file():
            return False
        clients: list[int] = RunFolder(self.folder).read_clients().column("client").to_pylist()
        scenario = self.config.get("scenario")
        everybody = finite(scenario.get("clients")) if isinstance(scenario, Mapping) else None
        return clients != list(range(len(clients))) or len(clients) < (everybody or 0)

    def judged_by(self, column: str) -> RunView:
        """Return the run with a column in the place of ``test_accuracy``: for its best, and for targets, too."""
        result = {name: value for name, value in self.result.items() if not name.endswith("test_accuracy")}
        return replace(self, result=result, columns={**self.columns, "test_accuracy": self.column(column)})

    def reaching(self, target: float) -> RunView | None:
        """Return the run up to and with the first round that reached a target; None where none did.

        Its figures are what it took.

        Args:
            target: A test accuracy, 0..1.
        """
        accuracies = self.column("test_accuracy")
        place = next((place for place, accuracy in enumerate(accuracies) if reaches(accuracy, target)), None)
        if place is None:
            return None
        return replace(self, result={}, columns={name: cells[: place + 1] for name, cells in self.columns.items()})


def metrics_of(views: Iterable[RunView], *, by_client: bool = False) -> dict[str, Declaration]:
    """Return the declarations of metrics in these runs, by column, each from the first run that has it.

    Args:
        views: The runs.
        by_client: Those of what was found by client, too.
    """
    declared: dict[str, Declaration] = {}
    for view in views:
        declared = {**view.metrics, **(view.client_metrics if by_client else {}), **declared}
    return declared


def is_share(figure: str, views: Iterable[RunView]) -> bool:
    """Tell whether a figure of runs is shown in percent: accuracies, and metrics that say so."""
    metrics = {} if is_accuracy(figure) else metrics_of(views, by_client=True)
    return is_accuracy(figure) or (figure in metrics and metrics[figure].unit == SHARE)


def spent_of(views: Iterable[RunView]) -> dict[str, str]:
    """Return those of :data:`SPENT` that are known of some run."""
    seen = list(views)
    return {name: title for name, title in SPENT.items() if any(view.last(name) is not None for view in seen)}


def run_so_far(folder: Path, records: Sequence[RoundRecord]) -> RunView:
    """Return a run as its rows alone tell of it, while it goes on."""
    columns = {column.name: [getattr(record, column.name) for record in records] for column in ROUND_COLUMNS}
    return RunView(folder=folder, config={}, result={}, columns=columns)


def load_run(folder: Path) -> RunView:
    """Load the run in a run folder; one whose table lacks rounds that it has played counts as failed.

    Raises:
        InputError: A file in it is damaged; the message names the file.
    """
    run = RunFolder(folder)
    config = parse(run.read_config(), source=str(folder / CONFIG))
    if not isinstance(config, Mapping):
        raise OutputError(f"{folder / CONFIG}: not a configuration: its top must be keys with values")
    columns = run.rounds_table().to_pydict() if run.has_rounds() else {}
    result = run.result_if_any()
    # What is there, but is no file: a pipe, a folder, a link that leads nowhere.
    odd = [path for name in (RESULT, ROUNDS) if os.path.lexists(path := folder / name) and not path.is_file()]
    notes = [f"{place_name(path)} is no regular file, so it is passed over" for path in odd]
    played, rows = finite(result.get("rounds")) or 0, len(columns.get("round", ()))
    if result.get("status") == "finished" and rows < played:
        notes.append(f"{place_name(folder / ROUNDS)} has {rows} of {played:.0f} rounds, so its copy is not whole")
        result |= {"status": "failed", "reason": notes[-1]}
    return RunView(folder=folder, config=config, result=result, columns=columns, notes=tuple(notes))


def load_runs(folders: Iterable[str | Path]) -> list[RunView]:
    """Load the runs in or below some folders, each once, in the order given.

    Raises:
        OutputError: One of the folders does not exist or holds no run.
        InputError: A run's file is damaged.
    """
    return [load_run(folder) for folder in once(run for folder in folders for run in runs_below(folder)).values()]


def runs_below(folder: str | Path) -> list[Path]:
    """Return the run folders that a folder is or holds.

    Raises:
        OutputError: It does not exist or holds no run.
    """
    runs = find_runs(folder)
    if not runs:
        raise OutputError(f"{folder}: neither a run's folder nor one with runs below it (a run has a {CONFIG})")
    return runs


def once(folders: Iterable[Path]) -> dict[Path, Path]:
    """Return each folder once, as it was called first, by where it really lies."""
    first: dict[Path, Path] = {}
    for folder in folders:
        first.setdefault(folder.resolve(), folder)
    return first


def run_labels(runs: Sequence[RunView]) -> list[str]:
    """Return a label for each run: its name; its place among the folders where another has its name and seed."""
    keys = [(run.name, run.seed) for run in runs]
    if len(set(keys)) == len(keys):
        return [run.name for run in runs]
    # Of an address without its options; as all have one beginning, it goes with paths.
    paths = [Path("/", place_name(run.folder.resolve() / CONFIG)).parent for run in runs]
    above = commonpath(paths)
    places = [str(path.relative_to(above)) for path in paths]
    return [place if keys.count(key) > 1 else key[0] for key, place in zip(keys, places, strict=True)]
