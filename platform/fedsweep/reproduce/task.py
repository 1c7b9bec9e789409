"""Making a table: check what was asked for, run its cells, measure, draw, write.

:func:`reproduce_table` is the whole way for programs; the command line begins a :class:`Task`, shows it, and makes it
under somebody's eyes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.config.overrides import apply_overrides
from fedsweep.errors import ConfigError, FedsweepError, InputError, OutputError, first_line
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.definition.table_file import read_table
from fedsweep.reproduce.given import NotKept, check_runs_are_kept, runs_begun_with, taken_from_files, write_runs
from fedsweep.reproduce.measured.grid import Grid, measured, views_of
from fedsweep.reproduce.measured.table_kind import table_kind
from fedsweep.reproduce.origins import with_origins
from fedsweep.reproduce.outputs import FIGURES, Table, has_outputs, remove_outputs, write_outputs
from fedsweep.reproduce.reproduction import Reproduction, TableRequest, finished_elsewhere, reproduction
from fedsweep.results.view import RunView, load_run
from fedsweep.runs.default_folder import default_folder
from fedsweep.runs.find import find_runs
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.remote_folder import worked_on
from fedsweep.runs.run_folder import MEASURED
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan

if TYPE_CHECKING:
    from fedsweep.sweeps.prepared import PreparedSweep

# Costs' means hardly change after these.
_COSTS_ROUNDS = 80


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """A table that was made.

    Attributes:
        folder: Where its files and runs are.
        grid: Its figures.
        files: The table in all its forms.
        pictures: What was drawn of it.
        problems: What failed, cell by cell and picture by picture.
    """

    folder: Path
    grid: Grid
    files: tuple[Path, ...]
    pictures: tuple[Path, ...]
    problems: tuple[str, ...]

    @property
    def table(self) -> Table:
        """Its figures as a data frame, and as texts have them."""
        return Table(folder=self.folder, grid=self.grid)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A table that is to be made; :func:`begin` has checked that it may.

    Attributes:
        reproduction: The cells.
        folder: Where they go.
        going_on: The folder was begun with them already.
        overwrite: Replace what the folder holds.
        costs_only: Only measures that need no training.
        fresh: Take no runs over from tables beside this one.
        allow_changed_code: Keep the folder's runs that other sources made.
        given_runs: Key of a run -> what it came to elsewhere; such runs are taken as they are.
    """

    reproduction: Reproduction
    folder: SweepFolder
    going_on: bool
    overwrite: bool
    costs_only: bool
    fresh: bool = False
    allow_changed_code: bool = False
    given_runs: Mapping[str, RunView] = field(default_factory=dict)

    @cached_property
    def left(self) -> Reproduction:
        """The same table with the cells whose runs are not given; the folder's plan has these."""
        whole = self.reproduction
        return replace(whole, cells=tuple(cell for cell in whole.cells if whole.keys[cell] not in self.given_runs))

    @property
    def has_runs(self) -> bool:
        """True where every cell is a run of its own."""
        return not self.costs_only and self.reproduction.table.has_runs

    @property
    def finished(self) -> set[Path]:
        """Folders of runs that are left out, since they have finished there or in tables beside this one."""
        own = self.left.by_key.values() if self.going_on else ()
        beside = {} if self.fresh else finished_elsewhere(self.left, self.folder)[0]
        return {self.folder.trial_path(trial) for trial in own if self.folder.has_finished(trial)} | beside.keys()

    def prepared(self) -> PreparedSweep:
        """Return the cells as trials, checked as a sweep's trials are; the data sets are loaded.

        Raises:
            InputError: Something is wrong or not there, or the folder was begun with other cells; nothing was written.
        """
        from fedsweep.sweeps.prepare import prepare

        reproduction = self.left
        if self.going_on:
            reproduction.check_same(self.folder)
        trials = [(trial, reproduction.firsts[key].config) for key, trial in reproduction.by_key.items()]
        prepared = prepare(
            reproduction.config,
            self.folder,
            resume=self.going_on,
            trials=trials,
            allow_changed_code=self.allow_changed_code,
        )
        prepared.plan = replace(prepared.plan, request=reproduction.plan_request)
        return prepared

    def make(
        self,
        *,
        run: Callable[[PreparedSweep, bool], object] | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> Reproduced:
        """Run the cells that are left, measure, draw and write.

        Args:
            run: Runs the trials, given whether their folder holds them already; by default without anybody watching.
            notify: Called for each cell that is measured without a run, and for runs taken over from other tables.

        Raises:
            InputError: Something is wrong or not there.
            KeyboardInterrupt: It was interrupted; running trials wrote checkpoints.
        """
        with sole_writer(self.folder.path):
            return self._made(run or self._run, notify)

    def _made(self, run: Callable[[PreparedSweep, bool], object], notify: Callable[[str], None]) -> Reproduced:
        reproduction, path = self.reproduction, self.folder.path
        pictures: list[Path] = []
        problems: list[str] = []
        if self.costs_only:
            from fedsweep.reproduce.measured.costs import costs_grid

            grid = costs_grid(reproduction.table, reproduction.cells, scale=reproduction.request.scale, done=notify)
        elif not self.has_runs:
            if self.overwrite:
                remove_outputs(path)
            grid = self._measured_alone(notify)
            pictures = sorted((path / FIGURES).glob("*"))
        else:
            self._run_left(run, notify)
            remove_outputs(path)
            views = views_of(reproduction.table, self._runs())
            grid = measured(reproduction.table, views, scale=reproduction.request.scale)
            grid = with_origins(grid, views, path)
            pictures, problems, left_out = _drawn(reproduction, grid, views, folder=path)
            grid = replace(grid, notes=(*grid.notes, *left_out))
        grid = replace(grid, rows=tuple(reproduction.rows), columns=tuple(reproduction.columns))
        files = write_outputs(grid, path)
        if self.has_runs:
            files.append(self._write_finished())
        return Reproduced(
            folder=path,
            grid=grid,
            files=tuple(files),
            pictures=tuple(pictures),
            problems=(*grid.problems, *problems),
        )

    def _run_left(self, run: Callable[[PreparedSweep, bool], object], notify: Callable[[str], None]) -> None:
        """Run, or take over, the cells whose runs are not given; the given ones stay in the folder from then on."""
        path = self.folder.path
        prepared, begun = self.prepared() if self.left.cells else None, self.going_on
        if prepared is not None and not begun and self.folder.has_plan:
            # The new plan first: whoever is killed from here on leaves a table that goes on, not some of two.
            self.folder.create(prepared.plan, config_yaml=prepared.config.to_yaml(), overwrite=self.overwrite)
            begun = True
        if not self.going_on:
            write_runs(self.given_runs, path)
        if prepared is None:
            if not self.going_on:
                plan = SweepPlan(config_tree=self.left.config.given, trials=(), request=self.left.plan_request)
                self.folder.create(plan, config_yaml=None, overwrite=self.overwrite)
            return
        going_on = self.going_on and prepared.is_done
        if not going_on:
            remove_outputs(path)
            going_on = self._take_over(prepared, notify, begun=begun) or begun
        try:
            run(prepared, going_on)
        except KeyboardInterrupt:
            self._write_finished()  # what is finished can go to another machine, although the table is not
            raise

    def _runs(self) -> dict[Cell, Path | RunView]:
        """Return the cells' runs, in the cells' order: those that are given, and the folders of the others."""
        folders, keys = self.left.folders(self.folder.path), self.reproduction.keys
        return {cell: folders.get(cell) or self.given_runs[keys[cell]] for cell in self.reproduction.cells}

    def _write_finished(self) -> Path:
        """Write what all runs came to that have finished, so that another table can take them."""
        path, runs = self.folder.path, dict(self.given_runs)
        for key, trial in self.left.by_key.items():
            if self.folder.has_finished(trial):
                with contextlib.suppress(InputError):  # what is damaged stands among the table's problems
                    view = load_run(path / trial.folder)
                    runs |= {key: view} if view.status == "finished" and view.rounds else {}
        return write_runs(runs, path)

    def _measured_alone(self, notify: Callable[[str], None]) -> Grid:
        """Measure the cells of a kind that has no runs."""
        reproduction, folder = self.reproduction, self.folder
        kind = table_kind(reproduction.table)
        if self.going_on:
            reproduction.check_same(folder)
        else:
            plan = SweepPlan(config_tree=reproduction.config.given, trials=(), request=reproduction.plan_request)
            folder.create(plan, config_yaml=None, overwrite=self.overwrite)
        try:
            return kind.measure(
                reproduction.table,
                reproduction.cells,
                scale=reproduction.request.scale,
                folder=folder.path,
                notify=notify,
            )
        except InputError:
            if not self.going_on and not find_runs(folder.path):  # or --resume could not go on with finished ones
                folder.withdraw()
            raise

    def _take_over(self, prepared: PreparedSweep, notify: Callable[[str], None], *, begun: bool) -> bool:
        """Take over finished runs of tables beside this one; true where there was any, so that the folder is begun."""
        from fedsweep.sweeps.reuse import not_taken, take_over

        if self.fresh:
            return False
        runs, refused = finished_elsewhere(self.left, self.folder)
        if refused:
            notify(not_taken(refused))
        if not runs:
            return False
        take_over(prepared, runs, begun=begun, overwrite=self.overwrite)
        places = ", ".join(dict.fromkeys(path.parent.name for path in runs.values()))
        there = f"{len(runs)} of {len(prepared.entries)} runs have finished in {places} already and are taken over"
        notify(f"{there} (--fresh runs them again)")
        return True

    def _run(self, prepared: PreparedSweep, going_on: bool) -> None:
        from fedsweep.sweeps.tuner import log_rest, run_sweep
        from fedsweep.tracking.terminal.sweep_progress import SweepProgress

        if going_on and prepared.is_done:
            log_rest(prepared)
        else:
            run_sweep(prepared, SweepProgress(), resume=going_on, overwrite=self.overwrite)


def reproduce_table(
    request: TableRequest | str,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    costs_only: bool = False,
    fresh: bool = False,
) -> Reproduced:
    """Make a table of one of the papers, measured beside printed.

    Args:
        request: What is asked for; a table's name or file alone is all of it at its smallest scale.
        out: The folder, or its address; by default ``runs/<paper>-<table>-<scale>-<timestamp>``.
        resume: Go on with what ``out`` holds; finished cells are not run again.
        overwrite: Replace what ``out`` holds.
        costs_only: Only measures that need no training, over at most 80 rounds.
        fresh: Take no runs over from tables beside this one.

    Raises:
        InputError: Something is wrong or not there; nothing was written.
        KeyboardInterrupt: It was interrupted; running trials wrote checkpoints.
    """
    wanted = request
    if isinstance(wanted, str):
        wanted = TableRequest(table=wanted, scale=read_table(wanted).default_scale)
    with worked_on(out, going_on=resume or overwrite) as place:
        folder = None if place is None else SweepFolder(place)
        task = begin(wanted, folder, resume=resume, overwrite=overwrite, costs_only=costs_only)
        return replace(task, fresh=fresh).make()


def begin(
    request: TableRequest,
    folder: SweepFolder | None,
    *,
    resume: bool,
    overwrite: bool,
    costs_only: bool,
    allow_changed_code: bool = False,
) -> Task:
    """Read a table and check that its folder, None for one of its own, may be used; nothing is loaded or written.

    Raises:
        InputError: There is no such table or scale, a setting is wrong, the folder is in use, or runs can't be given.
    """
    if resume and (folder is None or overwrite or costs_only):
        raise ConfigError("--resume goes on with --out DIR; give that, and neither --overwrite nor --costs-only")
    whole = reproduction(request)
    if costs_only:
        whole = _shortened(whole)
    folder = folder or SweepFolder(default_folder(whole.config))
    going_on = resume and folder.has_plan
    if not going_on:
        folder.check_free(overwrite=overwrite)
        if has_outputs(folder.path) and not overwrite:
            raise OutputError(f"{folder.path} is in use already ({MEASURED}); replace it with --overwrite")
    if costs_only:
        _check_costs(whole, folder)
    if request.runs_from and (resume or costs_only or not whole.table.has_runs):
        raise ConfigError(
            "--from begins a table of runs, so neither --resume nor --costs-only goes with it: a folder that was begun"
            " with given runs keeps them"
        )
    if going_on:
        given_runs = runs_begun_with(folder)
    else:
        given_runs = taken_from_files(request.runs_from, whole.sources, allow_changed_code=allow_changed_code)
        if whole.table.has_runs and not (overwrite or costs_only):
            check_runs_are_kept(folder, given_runs)
    return Task(
        reproduction=whole,
        folder=folder,
        going_on=going_on,
        overwrite=overwrite,
        costs_only=costs_only,
        allow_changed_code=allow_changed_code,
        given_runs=given_runs,
    )


def _shortened(whole: Reproduction) -> Reproduction:
    """Return the same over few enough rounds that costs come in seconds, unless the rounds were asked for."""
    if any(text.partition("=")[0].strip() in ("training", "training.rounds") for text in whole.request.overrides):
        return whole
    short = [f"training.rounds={_COSTS_ROUNDS}"]
    cells = (
        replace(cell, config_tree=apply_overrides(cell.config_tree, short))
        if cell.config.training.rounds > _COSTS_ROUNDS
        else cell
        for cell in whole.cells
    )
    return replace(whole, cells=tuple(cells))


def _check_costs(whole: Reproduction, folder: SweepFolder) -> None:
    table = whole.table
    if not any(measure.cost for measure in table.measures):
        names = ", ".join(measure.name for measure in table.measures)
        raise ConfigError(f"--costs-only: {table.name} has no measure of cost (it has: {names})")
    if folder.has_plan:
        raise OutputError(f"{folder.path} holds a whole table, which costs alone can't replace; choose another --out")


def _drawn(
    whole: Reproduction, grid: Grid, views: Mapping[Cell, RunView | str], *, folder: Path
) -> tuple[list[Path], list[str], list[str]]:
    """Draw the table's pictures; also returns which could not be drawn, and which not of given runs, and why."""
    from fedsweep.reproduce.figures.scene import draw

    pictures: list[Path] = []
    problems, left_out = [], []
    for figure in whole.table.figures:
        if not (_meet(figure.shown_rows, whole.rows) and _meet(figure.columns, whole.columns)):
            continue
        try:
            pictures += draw(figure, grid, views, path_stem=folder / FIGURES / figure.name)
        except NotKept as error:
            left_out.append(f"The figure {figure.name} is left out: {first_line(error)}.")
        except FedsweepError as error:
            problems.append(f"the figure {figure.name} can't be drawn: {first_line(error)}")
    return pictures, problems, left_out


def _meet(shown: Sequence[str] | None, left: Sequence[str]) -> bool:
    """Check that a picture of these rows or columns, by default all, has any of those that are measured."""
    return shown is None or not set(shown).isdisjoint(left)
