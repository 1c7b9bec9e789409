"""A table of runs as ``fedsweep reproduce`` makes and prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.reproduce.task import Reproduced, Task
    from fedsweep.sweeps.prepared import PreparedSweep

_FAILED = 1


def make(task: Task, *, dashboard: bool, quiet: bool) -> int:
    """Make a table and print it; return the exit code."""
    from fedsweep.commands.running.trials import run_trials, way_on_told
    from fedsweep.commands.terminal.output import note

    def run(prepared: PreparedSweep, going_on: bool) -> None:
        run_trials(
            prepared, going_on=going_on, overwrite=task.overwrite, dashboard=dashboard, quiet=quiet, called="runs"
        )

    with way_on_told(task.folder, "reproduce", what="the first cell"):
        made = task.make(run=run, notify=(lambda text: None) if quiet else note)
    return _show(made, quiet=quiet)


def _show(made: Reproduced, *, quiet: bool) -> int:
    from fedsweep.commands.terminal.output import command, make_console, note
    from fedsweep.reproduce.formats import print_grid
    from fedsweep.runs.find import find_runs
    from fedsweep.runs.places import place_name

    grid, place = made.grid, place_name(made.folder)
    if not quiet:
        print_grid(grid, make_console())
        print()
        for path in made.pictures:
            print(f"picture: {path}")
    for problem in made.problems:
        if problem not in grid.problems:
            note(f"error: {problem}")
    files = f"{place} ({', '.join(path.name for path in made.files)})"
    page = made.folder.with_suffix(".html").name
    report = f"; report: {command('report', place, '--out', page)}" if find_runs(made.folder) else ""
    print(f"{grid.tally}; in {files}{report}", flush=True)
    return _FAILED if made.problems else 0
