"""Running a table's cells: each is a trial of one sweep, and a finished trial's run folder is all that is read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, InputError, OutputError
from fedsweep.reproduce.cells import Cell, base_of, cells_of, chosen_columns, chosen_rows
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.reproduce.kinds import RUNS, runner_of
from fedsweep.reproduce.measured.grid import FINISHED, Grid, measured, view_of
from fedsweep.runs.find import find_runs
from fedsweep.sweeps.space import Trial, canonical

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.results.view import RunView
    from fedsweep.sweeps.prepare import PreparedSweep
    from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan

_LONGEST_SLUG = 90


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """What is to be reproduced.

    Attributes:
        table: A table's name, or its file.
        scale: ``smoke``, ``small`` or ``full``.
        rows: Shell patterns, separated by commas; None: the scale's own.
        columns: Likewise.
        seeds: None: the scale's own.
        overrides: ``KEY=VALUE`` texts, over everything else.
    """

    table: str
    scale: str = "smoke"
    rows: str | None = None
    columns: str | None = None
    seeds: tuple[int, ...] | None = None
    overrides: tuple[str, ...] = ()


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
        return chosen_rows(self.table, self.request.scale, pattern=self.request.rows)

    @property
    def columns(self) -> list[str]:
        """The columns shown."""
        return chosen_columns(self.table, self.request.scale, pattern=self.request.columns)

    @cached_property
    def keys(self) -> Mapping[Cell, str]:
        """What each cell is known by: the hash of everything that affects its results."""
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

    def folders(self, folder: Path) -> dict[Cell, Path]:
        """Each cell's run folder below the reproduction's."""
        return {cell: folder / self.by_key[self.keys[cell]].folder for cell in self.cells}


def reproduction(request: TableRequest) -> Reproduction:
    """Reads a table and makes its cells; nothing is loaded or written.

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
    for cell in cells:
        _ = cell.config
    found = Reproduction(request=request, table=table, cells=tuple(cells), config=config)
    if not cells:
        reasons = [f"{n}: {table.row(n).why_missing}" for n in found.rows if table.row(n).why_missing]
        reasons += [f"{n}: {table.column(n).missing}" for n in found.columns if table.column(n).missing]
        raise ConfigError(f"nothing of {table.name} that was asked for can be measured ({'; '.join(reasons)})")
    return found


def default_folder(found: Reproduction) -> Path:
    """``runs/<paper>-<table>-<scale>-<timestamp>``."""
    from fedsweep.runs.default_folder import default_folder as folder_of_run

    return folder_of_run(found.config)


def request_of(folder: SweepFolder) -> TableRequest:
    """What a folder was begun for.

    Raises:
        OutputError: It holds no reproduction, or a damaged one.
    """
    said = folder.read_plan().request
    if not said:
        raise OutputError(f"{folder.path} holds a sweep, but no table; go on with fedsweep sweep --resume --out")
    try:
        seeds = said["seeds"]
        return TableRequest(
            table=str(said["table"]),
            scale=str(said["scale"]),
            rows=None if said["rows"] is None else str(said["rows"]),
            columns=None if said["columns"] is None else str(said["columns"]),
            seeds=None if seeds is None else tuple(int(seed) for seed in seeds),
            overrides=tuple(map(str, said["overrides"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(f"{folder.path}: its plan's request is damaged: {error!r}") from error


def prepare_cells(found: Reproduction, folder: SweepFolder, *, resume: bool) -> PreparedSweep:
    """Checks all cells as a sweep's trials are checked; the data sets are loaded.

    Args:
        found: The cells.
        folder: Where they go.
        resume: The folder holds them already.

    Raises:
        InputError: Something is wrong or not there, or the folder was begun with other cells; nothing was written.
    """
    from fedsweep.sweeps.prepare import prepare

    if resume:
        _check_same(found, folder.read_plan(), folder.path)
    trials = [(trial, found.firsts[key].config) for key, trial in found.by_key.items()]
    prepared = prepare(found.config, folder, resume=resume, trials=trials)
    prepared.plan = replace(prepared.plan, request=_request_tree(found))
    return prepared


def measure_kind(found: Reproduction, folder: SweepFolder, *, resume: bool, overwrite: bool, quiet: bool) -> Grid:
    """Measures a table of another kind than ``runs``.

    Args:
        found: The cells.
        folder: Where they go.
        resume: The folder was begun with them already.
        overwrite: Remove what it holds of an earlier table.
        quiet: Without progress.

    Raises:
        InputError: Something is wrong or not there, or the folder was begun with other cells; nothing was written but
            the runs that had finished before.
    """
    run_kind = runner_of(found.table.kind)
    from fedsweep.sweeps.sweep_folder import SweepPlan

    if resume:
        _check_same(found, folder.read_plan(), folder.path)
    else:
        plan = SweepPlan(given=found.config.given, trials=(), request=_request_tree(found))
        folder.create(plan, config_yaml=None, overwrite=overwrite)
    try:
        grid = run_kind(found.table, scale=found.request.scale, cells=found.cells, out=folder.path, quiet=quiet)
    except InputError:
        if not resume and not find_runs(folder.path):  # or --resume could not go on with those that have finished
            folder.withdraw()
        raise
    return replace(grid, rows=tuple(found.rows), columns=tuple(found.columns))


def measured_grid(found: Reproduction, folder: Path) -> Grid:
    """The table as the run folders tell of it."""
    return measured(
        found.table,
        found.cells,
        folders=found.folders(folder),
        scale=found.request.scale,
        rows=found.rows,
        columns=found.columns,
    )


def finished_runs(found: Reproduction, folder: Path) -> dict[Cell, list[RunView]]:
    """The run of each cell; none where it did not finish."""
    runs: dict[Cell, list[RunView]] = {}
    for cell, path in found.folders(folder).items():
        view = view_of(path, found.table.row(cell.row))
        done = not isinstance(view, str) and view.status == FINISHED
        # The run may be another cell's too, which reads it with other targets.
        runs[cell] = [replace(view, config=cell.config.tree())] if done and not isinstance(view, str) else []
    return runs


def _trial(number: int, cell: Cell) -> Trial:
    slug = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", f"{cell.row} {cell.column} seed={cell.seed}")
    if len(slug) > _LONGEST_SLUG:
        digest = hashlib.blake2b(f"{cell.label} {cell.seed}".encode(), digest_size=4).hexdigest()
        slug = f"{slug[: _LONGEST_SLUG - 9]}-{digest}"
    return Trial(number=number, values=dict(cell.values), label=cell.label, folder=f"{number:04d}-{slug}")


def _request_tree(found: Reproduction) -> dict[str, Any]:
    request = found.request
    path = Path(request.table).expanduser()
    table = str(path.absolute()) if path.is_file() else request.table
    keys = {} if found.table.kind != RUNS else {trial.folder: key for key, trial in found.by_key.items()}
    return {**asdict(request), "table": table, "cells": _digest(found), "keys": keys}


def _digest(found: Reproduction) -> str:
    cells = [[cell.row, cell.column, dict(cell.values)] for cell in found.cells]
    return hashlib.blake2b(
        canonical([found.table.kind, found.config.given, cells]).encode(), digest_size=16
    ).hexdigest()


def _check_same(found: Reproduction, plan: SweepPlan, folder: Path) -> None:
    """A folder's cells can't change: figures of two different tables would stand in one."""
    if plan.request.get("cells") != _digest(found):
        raise ConfigError(
            f"{folder} was begun with other cells (another table, scale, choice of rows, columns or seeds, --set, or an"
            " earlier form of the table's file); leave TABLE and all other options out to go on with it, or choose"
            " another --out"
        )
