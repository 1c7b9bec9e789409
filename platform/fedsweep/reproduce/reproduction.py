"""A table with the cells that were asked for, each a trial of one sweep; and which of their runs are there already.

Tables of a paper are often cross-sections of the same runs. A run is known by the hash of everything that affects its
results. It is taken over from another table's folder only where it finished, its own configuration has that hash, and
it was made by the sources and libraries that are here now. What is taken over is a copy, or a second name of the
same files, so that each table's folder is whole by itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, FedsweepError, OutputError
from fedsweep.reproduce.cells import Cell, base_of, cells_of, chosen
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.results.texts import canonical
from fedsweep.runs.sources import Sources, sources_of
from fedsweep.sweeps.space import Trial, trial_folder
from fedsweep.sweeps.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from fedsweep.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """A request to reproduce a table, or parts of it.

    Attributes:
        table: A table's name, or its file.
        scale: ``smoke``, ``small`` or ``full``.
        rows: Shell patterns, separated by commas; None: the scale's own.
        columns: Likewise.
        seeds: None: the scale's own.
        overrides: ``KEY=VALUE`` texts, over everything else.
        runs_from: Files ``runs.json`` of other tables, or folders with one, whose runs are taken as they are.
        chosen: Of these cells the ones that are run, each as row, column and seed; None: all.

    Raises:
        ConfigError: ``rows`` or ``columns`` is no text.
    """

    table: str
    scale: str = "smoke"
    rows: str | None = None
    columns: str | None = None
    seeds: tuple[int, ...] | None = None
    overrides: tuple[str, ...] = ()
    runs_from: tuple[str, ...] = ()
    chosen: tuple[tuple[str, str, int], ...] | None = None

    def __post_init__(self) -> None:
        for name, patterns in (("rows", self.rows), ("columns", self.columns)):
            if not isinstance(patterns, str | None):
                raise ConfigError(f"{name} are patterns in one text, as in 'FedAvg,Fed*', but got {patterns!r}")
        if self.seeds is not None:
            seeds: Iterable[Any] = self.seeds  # numpy's perhaps, which no file of the table takes
            plain = tuple(int(seed) if isinstance(seed, Integral) else seed for seed in seeds)
            object.__setattr__(self, "seeds", plain)


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table with the cells that were asked for.

    Attributes:
        request: What was asked for.
        table: The table.
        cells: The cells, row by row.
        config: What the cells are laid over; its name is the reproduction's.
    """

    request: TableRequest
    table: TableFile
    cells: tuple[Cell, ...]
    config: Config

    @property
    def rows(self) -> list[str]:
        """The rows shown, those that are missing included."""
        return chosen("row", self.table, self.request.scale, pattern=self.request.rows)

    @property
    def columns(self) -> list[str]:
        """The columns shown."""
        return chosen("column", self.table, self.request.scale, pattern=self.request.columns)

    @cached_property
    def keys(self) -> Mapping[Cell, str]:
        """The cells' keys: for each the hash of everything that affects its results."""
        return {cell: resolve(cell.config).hash() for cell in self.cells}

    @cached_property
    def firsts(self) -> Mapping[str, Cell]:
        """The first cell of each key, in the order of the cells."""
        first: dict[str, Cell] = {}
        for cell, key in self.keys.items():
            first.setdefault(key, cell)
        return first

    @cached_property
    def by_key(self) -> Mapping[str, Trial]:
        """The trials of the sweep, in the order of the cells; cells that come to the same run share one."""
        return {key: _trial(number, cell) for number, (key, cell) in enumerate(self.firsts.items(), start=1)}

    @cached_property
    def sources(self) -> Mapping[str, Sources]:
        """Hashes of the sources that the results of each key follow from."""
        return {key: sources_of(resolve(cell.config).tree()) for key, cell in self.firsts.items()}

    def folders(self, folder: Path) -> dict[Cell, Path]:
        """Return each cell's run folder below the reproduction's."""
        return {cell: folder / self.by_key[self.keys[cell]].folder for cell in self.cells}

    @property
    def plan_request(self) -> dict[str, Any]:
        """The request as a folder keeps it, so that it can go on, and other tables can find its runs."""
        path = Path(self.request.table).expanduser()
        table = str(path.absolute()) if path.is_file() else self.request.table
        keys = {trial.folder: key for key, trial in self.by_key.items()} if self.table.has_runs else {}
        return {**asdict(self.request), "table": table, "cells": self._digest, "keys": keys}

    def check_same(self, folder: SweepFolder) -> None:
        """Refuse changed cells in a folder: figures of two different tables would stand in one.

        Raises:
            InputError: The folder was begun with other cells, or is damaged.
        """
        if folder.read_plan().request.get("cells") != self._digest:
            raise ConfigError(
                f"{folder.path} was begun with other cells (another table, scale, choice of rows, columns or seeds,"
                " --set, or an earlier form of the table's file); leave TABLE and all other options out to go on with"
                " it, or choose another --out"
            )

    @property
    def _digest(self) -> str:
        cells = [[cell.row, cell.column, dict(cell.values)] for cell in self.cells]
        # Not the name, which is that of the table's file: that may be called otherwise.
        config_tree = {key: value for key, value in self.config.given.items() if key != "name"}
        text = canonical([self.table.kind, config_tree, cells])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def reproduction(request: TableRequest) -> Reproduction:
    """Read a table and make its cells; nothing is loaded or written.

    Raises:
        InputError: There is no such table or scale, a pattern matches nothing, or a setting is wrong.
    """
    table = read_table(request.table)
    table.scale(request.scale)
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', table.name)}-{request.scale}"
    config = load_config({**base_of(table, request.overrides), "name": name})
    cells = cells_of(
        table,
        request.scale,
        rows=request.rows,
        columns=request.columns,
        seeds=request.seeds,
        overrides=request.overrides,
    )
    if request.chosen is not None:
        cells = [cell for cell in cells if (cell.row, cell.column, cell.seed) in request.chosen]
    for cell in cells:
        _ = cell.config
    whole = Reproduction(request=request, table=table, cells=tuple(cells), config=config)
    if not cells:
        reasons = [f"{n}: {table.row(n).why_missing}" for n in whole.rows if table.row(n).why_missing]
        reasons += [f"{n}: {table.column(n).missing}" for n in whole.columns if table.column(n).missing]
        only = {row.name: row.only for row in table.rows if row.name in whole.rows and row.only}
        reasons += [f"{name}: it has cells in {', '.join(columns)} alone" for name, columns in only.items()]
        reasons = reasons or ["the cells that were chosen of it are no longer there"]
        raise ConfigError(f"nothing of {table.name} that was asked for can be measured ({'; '.join(reasons)})")
    return whole


def request_of(folder: SweepFolder) -> TableRequest:
    """Return the request that a folder was begun for.

    Raises:
        OutputError: It holds no reproduction, or a damaged one.
    """
    entries = folder.read_plan().request
    if not entries:
        raise OutputError(f"{folder.path} holds a sweep, but no table; go on with fedsweep sweep --resume --out")
    try:
        seeds, cells = entries["seeds"], entries.get("chosen")
        return TableRequest(
            table=str(entries["table"]),
            scale=str(entries["scale"]),
            rows=None if entries["rows"] is None else str(entries["rows"]),
            columns=None if entries["columns"] is None else str(entries["columns"]),
            seeds=None if seeds is None else tuple(int(seed) for seed in seeds),
            overrides=tuple(map(str, entries["overrides"])),
            chosen=None if cells is None else tuple((str(row), str(column), int(seed)) for row, column, seed in cells),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(f"{folder.path}: its plan's request is damaged: {error!r}") from error


def finished_elsewhere(whole: Reproduction, folder: SweepFolder) -> tuple[dict[Path, Path], dict[Path, str]]:
    """Return finished runs in tables' folders beside this one that stand for runs that are left.

    Returns:
        Where such runs would be -> where they are; and runs of the same configuration by other code -> what has changed
        since, of those that no other run makes up for.
    """
    from fedsweep.sweeps.reuse import finished_key, other_code

    wanted = {key: folder.trial_path(t) for key, t in whole.by_key.items() if not folder.has_finished(t)}
    runs: dict[Path, Path] = {}
    refused: dict[Path, tuple[Path, str]] = {}
    for run, key in _runs_beside(folder.path):
        if key not in wanted or wanted[key] in runs or finished_key(run) != key:
            continue
        if changed := other_code(run, whole.sources[key]):
            refused[wanted[key]] = run, changed
        else:
            runs[wanted[key]] = run
    return runs, {run: changed for target, (run, changed) in refused.items() if target not in runs}


def _runs_beside(path: Path) -> Iterator[tuple[Path, str]]:
    """Run folders of the tables in the folders beside a path, each with its key."""
    if not path.parent.is_dir():
        return
    for other in sorted(path.parent.iterdir()):
        folder = SweepFolder(other)
        if folder.path == path or other.is_symlink() or not folder.has_plan:
            continue
        try:
            plan = folder.read_plan()
        except FedsweepError:
            continue
        keys = plan.request.get("keys", {})
        for trial in plan.trials:
            if isinstance(keys, Mapping) and trial.folder in keys:
                yield folder.trial_path(trial), str(keys[trial.folder])


def _trial(number: int, cell: Cell) -> Trial:
    row = cell.row.replace("*", "-star")  # or a and a* would have folders of one name
    folder = trial_folder(number, f"{row} {cell.column} seed={cell.seed}", whole=f"{cell.label} {cell.seed}")
    return Trial(number=number, values=dict(cell.values), label=cell.label, folder=folder)
