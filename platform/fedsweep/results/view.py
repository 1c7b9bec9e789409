"""Runs as their folders tell of them, for tables and pictures; unfinished runs included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from os.path import commonpath
from pathlib import Path
from typing import Any

from fedsweep.config.yaml12 import parse
from fedsweep.errors import OutputError
from fedsweep.runs.run_folder import CONFIG, RunFolder, find_runs

UNFINISHED = "unfinished"


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run that may still be going on.

    Attributes:
        folder: Its folder.
        config: Its configuration as it stands in the folder.
        result: What ``result.json`` holds; empty for an unfinished run.
        columns: The columns of ``rounds.parquet`` by name; empty where there is no such file yet.
    """

    folder: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]

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
        """``finished``, ``failed``, ``killed``, or ``unfinished``: going on, or broken off without a word."""
        return str(self.result.get("status", UNFINISHED))

    @cached_property
    def total_bytes(self) -> list[int]:
        """Bytes both ways up to and with each round, registration apart."""
        return list(accumulate(map(sum, zip(self.column("bytes_up"), self.column("bytes_down"), strict=True))))

    def column(self, name: str) -> Sequence[Any]:
        """A column's cells, one per round; none where there is no table."""
        return self.columns.get(name, ())

    def series(self, name: str, *, against: str) -> tuple[list[float], list[float]]:
        """The rounds that have a figure: what it is drawn against, and the figure.

        Args:
            name: A column.
            against: Another column, or ``total_bytes``.
        """
        places = self.total_bytes if against == "total_bytes" else self.column(against)
        pairs = zip(places, self.column(name), strict=True)
        known = [(x, y) for x, y in pairs if x is not None and y is not None and y == y]
        return [float(x) for x, _ in known], [float(y) for _, y in known]


def load_run(folder: Path) -> RunView:
    """The run in a run folder.

    Raises:
        InputError: A file in it is damaged; the message names the file.
    """
    run = RunFolder(folder)
    config = parse(run.read_config(), source=str(folder / CONFIG))
    if not isinstance(config, Mapping):
        raise OutputError(f"{folder / CONFIG}: not a configuration: its top must be keys with values")
    columns = run.rounds_table().to_pydict() if run.has_rounds() else {}
    return RunView(folder=folder, config=config, result=run.read_result() if run.has_result() else {}, columns=columns)


def load_runs(folders: Iterable[str | Path]) -> list[RunView]:
    """The runs in or below some folders, each once, in the order given.

    Raises:
        OutputError: One of the folders does not exist or holds no run.
        InputError: A run's file is damaged.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        runs = find_runs(folder)
        if not runs:
            raise OutputError(f"{folder}: neither a run's folder nor one with runs below it (a run has a {CONFIG})")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return [load_run(folder) for folder in found.values()]


def run_labels(runs: Sequence[RunView], *, with_seeds: bool = True) -> list[str]:
    """A label for each run: its name, with what is needed to tell it from the others.

    Args:
        runs: The runs.
        with_seeds: Write a seed that tells runs apart into the label; otherwise it stands elsewhere.
    """
    if with_seeds:
        labels = [run.name for run in runs]
        labels = _told_apart(labels, keys=labels, longer=[f"{run.name} (seed {run.seed})" for run in runs])
        keys: list[object] = list(labels)
    else:
        labels = [run.name for run in runs]
        keys = [(run.name, run.seed) for run in runs]
    if len(set(keys)) < len(keys):
        above = commonpath([run.folder.resolve() for run in runs])
        places = [str(run.folder.resolve().relative_to(above)) for run in runs]
        labels = _told_apart(labels, keys=keys, longer=places)
    return labels


def _told_apart(labels: Sequence[str], *, keys: Sequence[object], longer: Sequence[str]) -> list[str]:
    return [more if keys.count(key) > 1 else label for label, key, more in zip(labels, keys, longer, strict=True)]
