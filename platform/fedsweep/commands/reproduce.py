"""``fedsweep reproduce``: a table or figure of one of the papers, measured beside printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.commands.interrupts import INTERRUPTED
from fedsweep.commands.options import Dashboard, DryRun, Overrides, Overwrite, Quiet, examples
from fedsweep.errors import ConfigError, FedsweepError, OutputError

if TYPE_CHECKING:
    from fedsweep.reproduce.grid import Grid
    from fedsweep.reproduce.reproduction import Reproduction, Request
    from fedsweep.sweeps.prepare import PreparedSweep
    from fedsweep.sweeps.sweep_folder import SweepFolder

EXAMPLES = examples(
    "fedsweep list tables",
    "fedsweep reproduce dynamicfl/table4",
    "fedsweep reproduce dynamicfl/table4 --scale small --rows 'a-*,DynamicSGD' --out runs/table4",
    "fedsweep reproduce dynamicfl/table4 --costs-only",
    "fedsweep reproduce --resume --out runs/table4",
    "fedsweep report runs/table4 --out table4.html",
)
_DEFAULT_SCALE = "smoke"
_FAILED = 1
_COSTS_SCALE = "full"
_COSTS_ROUNDS = 80


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLE",
            help="A table's name ([b]fedsweep list tables[/b]) or its YAML file; left out with --resume.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            metavar="smoke|small|full",
            help="smoke: about a minute on built-in data; small: real data, tens of minutes on two cores; full: the"
            " paper's setting. [dim]smoke[/dim]",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            metavar="PATTERN",
            help="Rows by name: shell patterns, several by commas, upper and lower case alike. They take the place of"
            " the scale's own choice.",
        ),
    ] = None,
    columns: Annotated[str | None, typer.Option("--columns", metavar="PATTERN", help="Columns, likewise.")] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", metavar="N[,N...]", help="Seeds in place of the scale's own, e.g. 0,1,2."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The folder. [dim]runs/<paper>-<table>-<scale>-<timestamp>[/dim]"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Go on with what --out holds; finished cells are not run again."),
    ] = False,
    overwrite: Overwrite = False,
    costs_only: Annotated[
        bool,
        typer.Option(
            "--costs-only",
            metavar="",
            help="Only measures that need no training, by default at scale full over at most 80 rounds; more by"
            " --set training.rounds=N.",
        ),
    ] = False,
    dry_run: DryRun = False,
    dashboard: Dashboard = False,
    quiet: Quiet = False,
) -> None:
    """Make a table or figure of one of the papers: what is measured here beside what is printed there.

    Every row, column and seed is a run, and the runs are trials of one sweep. The table is printed and written as
    text, Markdown, LaTeX, HTML and JSON. The exit code is 1 where a cell failed; the rest is shown all the same.
    """
    from fedsweep.reproduce.reproduction import Request, default_folder, reproduction
    from fedsweep.sweeps.sweep_folder import SweepFolder

    if resume and (out is None or overwrite or costs_only):
        raise ConfigError("--resume goes on with --out DIR; give that, and neither --overwrite nor --costs-only")
    folder = SweepFolder(out) if out is not None else None
    if table is None:
        request = _begun(folder, given=(scale, rows, columns, seeds, overrides), resume=resume)
    else:
        request = Request(
            table=table,
            scale=scale or (_COSTS_SCALE if costs_only else _DEFAULT_SCALE),
            rows=rows,
            columns=columns,
            seeds=_seeds(seeds),
            overrides=tuple(overrides or ()),
        )
    found = reproduction(request)
    if costs_only:
        found = _shortened(found)
    folder = folder or SweepFolder(default_folder(found))
    going_on = resume and folder.has_plan
    if not going_on:
        _check_free(folder, overwrite=overwrite)
    if costs_only:
        code = _costs(found, folder, dry_run=dry_run, quiet=quiet)
    elif found.table.kind != "runs":
        code = _of_another_kind(found, folder, going_on=going_on, dry_run=dry_run, overwrite=overwrite, quiet=quiet)
    else:
        code = _with_runs(
            found, folder, going_on=going_on, dry_run=dry_run, overwrite=overwrite, dashboard=dashboard, quiet=quiet
        )
    if code:
        raise typer.Exit(code)


# -- the command line --------------------------------------------------------------------------------------------------


def _begun(folder: SweepFolder | None, *, given: Sequence[object], resume: bool) -> Request:
    """What ``--out`` was begun for."""
    from fedsweep.reproduce.reproduction import request_of

    if not resume or folder is None:
        raise ConfigError(
            "TABLE is missing: give a table's name (fedsweep list tables) or file, or --resume with --out"
        )
    if any(given):
        raise ConfigError(
            "--resume without TABLE goes by what --out was begun with, so --scale, --rows, --columns, --seeds and --set"
            " can't be given"
        )
    if not folder.path.is_dir():
        raise OutputError(f"{folder.path}: there is no such folder")
    return request_of(folder)


def _seeds(texts: Sequence[str] | None) -> tuple[int, ...] | None:
    if not texts:
        return None
    parts = [part for text in texts for part in text.replace(",", " ").split()]
    found = tuple(int(part) for part in parts if part.removeprefix("-").isdecimal())
    if not parts or len(found) < len(parts) or min(found) < 0:
        raise ConfigError(f"--seeds takes whole numbers from 0, e.g. 0,1,2, but got {' '.join(texts)!r}")
    return found


def _check_free(folder: SweepFolder, *, overwrite: bool) -> None:
    from fedsweep.reproduce.outputs import MEASURED, has_outputs

    folder.check_free(overwrite=overwrite)
    if has_outputs(folder.path) and not overwrite:
        raise OutputError(f"{folder.path} is in use already ({MEASURED}); replace it with --overwrite")


def _shortened(found: Reproduction) -> Reproduction:
    """The same over few enough rounds that costs come in seconds: their means hardly change after these."""
    from dataclasses import replace

    from fedsweep.reproduce.reproduction import reproduction

    request = found.request
    if any(text.partition("=")[0].strip() in ("training", "training.rounds") for text in request.overrides):
        return found
    if max(cell.config.training.rounds for cell in found.cells) <= _COSTS_ROUNDS:
        return found
    return reproduction(replace(request, overrides=(*request.overrides, f"training.rounds={_COSTS_ROUNDS}")))


# -- carrying it out ---------------------------------------------------------------------------------------------------


def _costs(found: Reproduction, folder: SweepFolder, *, dry_run: bool, quiet: bool) -> int:
    """Measures that need no training."""
    from fedsweep.commands.output import note
    from fedsweep.reproduce.costs import costs_grid

    table = found.table
    if not any(measure.cost for measure in table.measures):
        names = ", ".join(measure.name for measure in table.measures)
        raise ConfigError(f"--costs-only: {table.name} has no measure of cost (it has: {names})")
    if folder.has_plan and not dry_run:
        raise OutputError(f"{folder.path} holds a whole table, which costs alone can't replace; choose another --out")
    if dry_run:
        return _print_cells(found, note="nothing is trained")
    grid = costs_grid(
        table,
        found.cells,
        scale=found.request.scale,
        rows=found.rows,
        columns=found.columns,
        done=(lambda text: None) if quiet else note,
    )
    return _show(grid, folder, pictures=[], problems=grid.problems, quiet=quiet)


def _of_another_kind(
    found: Reproduction, folder: SweepFolder, *, going_on: bool, dry_run: bool, overwrite: bool, quiet: bool
) -> int:
    from fedsweep.reproduce.outputs import FIGURES, remove_outputs
    from fedsweep.reproduce.reproduction import measure_kind

    if dry_run:
        return _print_cells(found)
    if overwrite:
        remove_outputs(folder.path)
    try:
        grid = measure_kind(found, folder, resume=going_on, overwrite=overwrite, quiet=quiet)
    except KeyboardInterrupt:
        _tell_interrupted(folder)
        return INTERRUPTED
    pictures = sorted((folder.path / FIGURES).glob("*"))
    return _show(grid, folder, pictures=pictures, problems=grid.problems, quiet=quiet)


def _with_runs(
    found: Reproduction,
    folder: SweepFolder,
    *,
    going_on: bool,
    dry_run: bool,
    overwrite: bool,
    dashboard: bool,
    quiet: bool,
) -> int:
    from fedsweep.commands.trials import run_trials
    from fedsweep.reproduce.outputs import remove_outputs
    from fedsweep.reproduce.reproduction import measured_grid, prepare_cells

    prepared = prepare_cells(found, folder, resume=going_on)
    if dry_run:
        return _print_trials(found, prepared)
    try:
        run_trials(
            prepared,
            going_on=going_on,
            overwrite=overwrite,
            dashboard=dashboard,
            quiet=quiet,
            called="runs",
            before=lambda: remove_outputs(folder.path),
        )
    except KeyboardInterrupt:
        _tell_interrupted(folder)
        return INTERRUPTED
    grid = measured_grid(found, folder.path)
    pictures, problems = _draw(found, folder)
    return _show(grid, folder, pictures=pictures, problems=[*grid.problems, *problems], quiet=quiet)


def _draw(found: Reproduction, folder: SweepFolder) -> tuple[list[Path], list[str]]:
    """The table's pictures; and which could not be drawn, and why."""
    if not found.table.figures:
        return [], []
    from fedsweep.reproduce.figures import draw
    from fedsweep.reproduce.outputs import FIGURES
    from fedsweep.reproduce.reproduction import finished_runs

    runs = finished_runs(found, folder.path)
    pictures: list[Path] = []
    problems = []
    for figure in found.table.figures:
        stem = folder.path / FIGURES / figure.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        try:
            pictures += draw(figure, found.table, cells=found.cells, runs=runs, path_stem=stem)
        except FedsweepError as error:
            problems.append(f"the figure {figure.name} can't be drawn: {error}")
    return pictures, problems


def _show(grid: Grid, folder: SweepFolder, *, pictures: Sequence[Path], problems: Sequence[str], quiet: bool) -> int:
    from fedsweep.commands.output import command, make_console, note
    from fedsweep.reproduce.formats import print_grid
    from fedsweep.reproduce.outputs import write_outputs
    from fedsweep.runs.run_folder import find_runs

    written = write_outputs(grid, folder.path)
    if not quiet:
        print_grid(grid, make_console())
        print()
        for path in pictures:
            print(f"picture: {path}")
    for problem in problems:
        if problem not in grid.problems:
            note(f"error: {problem}")
    failed = sum(bool(cell.problems) for cell in grid.cells)
    counts = f"{len(grid.cells) - failed} of {len(grid.cells)} cells measured"
    files = f"{folder.path} ({', '.join(path.name for path in written)})"
    has_runs = bool(find_runs(folder.path))
    page = folder.path.with_suffix(".html").name
    report = f"; report: {command('report', folder.path, '--out', page)}" if has_runs else ""
    print(f"{counts}{f', {failed} failed' if failed else ''}; in {files}{report}", flush=True)
    return _FAILED if problems else 0


def _tell_interrupted(folder: SweepFolder) -> None:
    from fedsweep.commands.output import command, note

    if folder.has_plan:
        note(f"interrupted; this goes on with it: {command('reproduce', '--resume', '--out', folder.path)}")
    else:
        note("interrupted before the first cell began; nothing was written")


# -- dry runs ----------------------------------------------------------------------------------------------------------


def _print_trials(found: Reproduction, prepared: PreparedSweep) -> int:
    from fedsweep.commands.trials import print_trials

    print_trials(prepared.entries, heading="row | column")
    rounds = sum(entry.config.training.rounds for entry in prepared.entries)
    print(f"{found.table.name} at scale {found.request.scale}: {len(prepared.entries)} runs, {rounds} rounds in all")
    return 0


def _print_cells(found: Reproduction, *, note: str = "") -> int:
    from fedsweep.commands.output import make_console, make_table

    table = make_table("row | column", "seed")
    for cell in found.cells:
        table.add_row(cell.label, str(cell.seed))
    make_console().print(table, markup=False)
    print(f"{found.table.name} at scale {found.request.scale}: {len(found.cells)} cells{f'; {note}' if note else ''}")
    return 0
