"""``fedsweep reproduce``: a table or figure of one of the papers, measured beside printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.commands.running.one_table import make
from fedsweep.commands.terminal.options import (
    AllowChangedCode,
    CostsOnly,
    Dashboard,
    DryRun,
    Fresh,
    Out,
    Overrides,
    Overwrite,
    Quiet,
    examples,
    parse_seeds,
)
from fedsweep.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from fedsweep.reproduce.reproduction import TableRequest
    from fedsweep.sweeps.sweep_folder import SweepFolder

EXAMPLES = examples(
    "fedsweep list tables",
    "fedsweep reproduce dynamicfl/table4",
    "fedsweep reproduce dynamicfl/table4 --scale small --rows 'a-*,FedAvg' --out runs/table4",
    "fedsweep reproduce dynamicfl/table4 --costs-only",
    "fedsweep reproduce feddhad/table7 --scale full --dry-run",
    "fedsweep reproduce dynamicfl/table1 --scale full --within 10h --out runs/table1",
    "fedsweep reproduce --resume --out runs/table4",
    "fedsweep report runs/table4 --out table4.html",
)


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
            " paper's setting. [dim]the first of these that the table has[/dim]",
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
        typer.Option("--seeds", metavar="SEEDS", help="Seeds in place of the scale's own, e.g. 0-4 or 0,3,7."),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Go on with what --out holds; finished cells are not run again."),
    ] = False,
    overwrite: Overwrite = False,
    costs_only: CostsOnly = False,
    within: Annotated[
        str | None,
        typer.Option(
            "--within",
            metavar="TIME",
            help="Only runs that fit into so much time here, in the table's order: 90m, 10h, 2d; --dry-run says which.",
        ),
    ] = None,
    runs_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Take finished runs as they are from another table's runs.json, e.g. of another machine; repeatable.",
        ),
    ] = None,
    fresh: Fresh = False,
    allow_changed_code: AllowChangedCode = False,
    dry_run: DryRun = False,
    dashboard: Dashboard = False,
    quiet: Quiet = False,
) -> None:
    """Make a table or figure of one of the papers: what is measured here beside what is printed there.

    Every row, column and seed is a run, and the runs are trials of one sweep. The table is printed and written as
    text, Markdown, LaTeX, HTML and JSON. The exit code is 1 where a cell failed; the rest is shown all the same.
    """
    from fedsweep.commands.terminal.costs import print_dry
    from fedsweep.reproduce.definition.table_file import read_table
    from fedsweep.reproduce.reproduction import TableRequest
    from fedsweep.reproduce.task import begin
    from fedsweep.runs.remote_folder import worked_on
    from fedsweep.sweeps.sweep_folder import SweepFolder

    with worked_on(out, going_on=resume or overwrite, dry=dry_run) as place:
        folder = SweepFolder(place) if place is not None else None
        if table is None:
            request = _begun(folder, options=(scale, rows, columns, seeds, overrides, runs_from), resume=resume)
        else:
            request = TableRequest(
                table=table,
                scale=scale or ("full" if costs_only else read_table(table).default_scale),
                rows=rows,
                columns=columns,
                seeds=None if not seeds else tuple(parse_seeds(",".join(seeds))),
                overrides=tuple(overrides or ()),
                runs_from=tuple(map(str, runs_from or ())),
            )
        if within is not None:
            request = _fitting(request, within, is_free=not (resume or costs_only))
        task = begin(
            request,
            folder,
            resume=resume,
            overwrite=overwrite,
            costs_only=costs_only,
            allow_changed_code=allow_changed_code,
        )
        task = replace(task, fresh=fresh)
        if dry_run:
            print_dry(task)
        elif code := make(task, dashboard=dashboard, quiet=quiet):
            raise typer.Exit(code)


def _begun(folder: SweepFolder | None, *, options: Sequence[object], resume: bool) -> TableRequest:
    """Read for which table ``--out`` was begun."""
    from fedsweep.reproduce.reproduction import request_of

    if not resume or folder is None:
        raise ConfigError(
            "TABLE is missing: give a table's name (fedsweep list tables) or file, or --resume with --out"
        )
    if any(options):
        raise ConfigError(
            "--resume without TABLE goes by what --out was begun with, so --scale, --rows, --columns, --seeds, --set"
            " and --from can't be given"
        )
    if not folder.path.is_dir():
        raise OutputError(f"{folder.path}: there is no such folder")
    return request_of(folder)


def _fitting(request: TableRequest, within: str, *, is_free: bool) -> TableRequest:
    """Return the request with the cells that fit into a time."""
    from fedsweep.reproduce.costs import fitting, parse_duration

    if not is_free:
        raise ConfigError("--within chooses the runs of a new table, so neither --resume nor --costs-only goes with it")
    return fitting(request, parse_duration(within))
