"""``fedsweep sweep``: many experiments on Ray Tune, from the ``sweep:`` section of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.commands.terminal.options import (
    AllowChangedCode,
    Dashboard,
    DryRun,
    Out,
    Overrides,
    Overwrite,
    Quiet,
    examples,
)
from fedsweep.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.sweeps.prepared import PreparedSweep
    from fedsweep.sweeps.summary import Summary
    from fedsweep.sweeps.sweep_folder import SweepFolder

EXAMPLES = examples(
    "fedsweep sweep sweeps/dynamicfl_intervals --out runs/intervals",
    "fedsweep sweep my.yaml --set 'sweep.space.seed={grid: [0, 1, 2]}' --dry-run",
    "fedsweep sweep --resume --out runs/intervals",
    "fedsweep sweep more.yaml --out runs/intervals --extend",
    "fedsweep sweep other.yaml --out runs/other --reuse runs/intervals",
    "fedsweep compare runs/intervals",
)
_FAILED = 1


def sweep(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A YAML file or a preset's name; may be left out with --resume."),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", metavar="", help="Go on with the sweep in --out; finished trials are not run again."),
    ] = False,
    extend: Annotated[
        bool,
        typer.Option("--extend", metavar="", help="Add to the sweep in --out what has no finished run there yet."),
    ] = False,
    reuse: Annotated[
        list[str] | None,
        typer.Option(
            "--reuse",
            metavar="DIR",
            help="Take over finished runs of the same configuration from a run's folder or one with runs below it, or"
            " from its address; may be repeated.",
        ),
    ] = None,
    allow_changed_code: AllowChangedCode = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    dashboard: Dashboard = False,
    quiet: Quiet = False,
) -> None:
    """Run the sweep: section of a configuration: live table of trials, and last what they came to.

    A trial that breaks down is tried again from its last checkpoint; the exit code is 1 where one failed in the end.
    """
    from fedsweep.runs.remote_folder import read_from, worked_on
    from fedsweep.sweeps.sweep_folder import SweepFolder

    if resume and (out is None or overwrite):
        raise ConfigError("--resume goes on with the sweep in --out DIR; give that, and no --overwrite")
    if extend and (config is None or out is None or overwrite or resume):
        raise ConfigError(
            "--extend adds CONFIG's trials to the sweep in --out DIR; give both, and neither --resume nor --overwrite"
        )
    options = Asked(
        resume=resume,
        extend=extend,
        allow_changed_code=allow_changed_code,
        dry_run=dry_run,
        overwrite=overwrite,
        dashboard=dashboard,
        quiet=quiet,
    )
    going_on = resume or extend or overwrite
    with read_from(reuse or ()) as places, worked_on(out, going_on=going_on, dry=dry_run) as place:
        folder = SweepFolder(place) if place is not None else None
        options = replace(options, reuse=tuple(map(Path, places)))
        begin(_load(config, overrides or [], folder, resume=resume), folder, options)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the same names."""

    resume: bool = False
    extend: bool = False
    reuse: tuple[Path, ...] = ()
    allow_changed_code: bool = False
    dry_run: bool
    overwrite: bool
    dashboard: bool
    quiet: bool


def begin(config: Config, folder: SweepFolder | None, options: Asked) -> None:
    """Run a sweep, or go on with or add to what its folder holds (by default one below ``runs``); end with its code."""
    from fedsweep.commands.running.trials import print_sweep, run_trials, taken_over, way_on_told
    from fedsweep.runs.default_folder import default_folder
    from fedsweep.sweeps.prepare import prepare
    from fedsweep.sweeps.reuse import check_apart, take_over
    from fedsweep.sweeps.sweep_folder import SweepFolder

    folder = folder or SweepFolder(default_folder(config))
    going_on = options.extend or (options.resume and folder.has_plan)
    if not going_on:
        folder.check_free(overwrite=options.overwrite)
        if options.overwrite:
            check_apart(options.reuse, folder)
    prepared = prepare(
        config,
        folder,
        resume=going_on and not options.extend,
        extend=options.extend,
        allow_changed_code=options.allow_changed_code,
    )
    _tell_plan(prepared, options)
    reused = taken_over(prepared, options.reuse, dry_run=options.dry_run)
    if options.dry_run:
        own = {folder.trial_path(e.trial) for e in prepared.entries if going_on and folder.has_finished(e.trial)}
        print_sweep(prepared, there=own | reused.keys())
        return
    if options.extend:
        prepared.write_extension()
    if reused:
        take_over(prepared, reused, begun=going_on, overwrite=options.overwrite)
        going_on = True
    with way_on_told(folder, "sweep", what="the sweep"):
        how = {"overwrite": options.overwrite, "dashboard": options.dashboard, "quiet": options.quiet}
        summary = run_trials(prepared, going_on=going_on, called="trials", **how)
    if code := _tell(summary, folder, quiet=options.quiet):
        raise typer.Exit(code)


def _tell_plan(prepared: PreparedSweep, options: Asked) -> None:
    from fedsweep.commands.terminal.output import note

    for text in ([prepared.extended] if options.extend else []) + [f"note: {text}" for text in prepared.notes]:
        note(text)


def _load(config: str | None, overrides: Sequence[str], folder: SweepFolder | None, *, resume: bool) -> Config:
    from fedsweep.config.load import load_config
    from fedsweep.sweeps.sweep_folder import BUDGET, PLACE

    if config is not None:
        loaded = load_config(config, overrides)
        if resume and folder is not None and folder.has_plan:
            folder.check_same(loaded.given)
        return loaded
    if not resume or folder is None:
        raise ConfigError("CONFIG is missing: give a YAML file or a preset's name, or --resume with --out DIR")
    if any(not text.startswith((f"{PLACE}=", f"{BUDGET}=", f"{BUDGET}.")) for text in overrides):
        raise ConfigError(
            f"--resume without CONFIG goes by the sweep's own plan: of --set it takes {PLACE} and {BUDGET} alone"
        )
    if not folder.path.is_dir():
        raise OutputError(f"{folder.path}: there is no such folder")
    return load_config(folder.read_plan().config_tree, overrides)


def _tell(summary: Summary, folder: SweepFolder, *, quiet: bool) -> int:
    from fedsweep.commands.terminal.output import command, make_console
    from fedsweep.reports.sweep_table import best_text, print_summary
    from fedsweep.runs.places import place_name

    console, place = make_console(), place_name(folder.path)
    if not quiet:
        print_summary(summary, console)
    done, failed = len(summary.trials) - len(summary.failed), len(summary.failed)
    counts = f"{done} of {len(summary.trials)} trials finished" + (f", {failed} failed" if failed else "")
    print(f"{counts}{best_text(summary)}; in {place}; compare: {command('compare', place)}", flush=True)
    return _FAILED if failed else 0
