"""Trials of ``sweep`` and ``reproduce``: those that would be run, and running them under somebody's eyes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedsweep.commands.terminal.interrupts import INTERRUPTED, is_interrupted
from fedsweep.errors import ClusterLost, FedsweepError, RunError, lacks_room
from fedsweep.runs.places import place_name

if TYPE_CHECKING:
    from fedsweep.engine.forecast import Forecast
    from fedsweep.sweeps.prepared import PreparedSweep
    from fedsweep.sweeps.prepared_trial import PreparedTrial
    from fedsweep.sweeps.summary import Summary
    from fedsweep.sweeps.sweep_folder import SweepFolder


def print_trials(
    entries: Sequence[PreparedTrial], *, heading: str, costs: Mapping[str, Forecast] | None = None
) -> None:
    """Print a table of trials with each one's reservation, and its costs where they are given by trials' folders."""
    from fedsweep.commands.terminal.output import make_console, make_table

    spent = [] if costs is None else ["steps", "bytes", "FLOPs"]
    table = make_table(heading, "seed", "client actors", "CPU", "GPU", "rounds", *spent)
    for entry in entries:
        bundles = entry.share.bundles
        table.add_row(
            entry.trial.label,
            str(entry.config.seed),
            str(entry.share.actors) if entry.share.actors else "in process",
            *(f"{sum(bundle.get(kind, 0.0) for bundle in bundles):g}" for kind in ("CPU", "GPU")),
            str(entry.config.training.rounds),
            *([] if costs is None else _cost_cells(costs.get(entry.trial.folder))),
        )
    make_console().print(table, markup=False)


def _cost_cells(cost: Forecast | None) -> list[str]:
    from fedsweep.results.texts import bytes_text

    if cost is None:
        return ["-"] * 3
    about = "" if cost.exact else "~"
    return [f"{about}{cost.local_steps:,}", f"{about}{bytes_text(cost.total_bytes)}", f"{about}{cost.flops:.3g}"]


def print_sweep(prepared: PreparedSweep, *, there: Collection[Path]) -> None:
    """Print the trials of a sweep with their costs, and about how long they will take.

    Args:
        prepared: The sweep.
        there: Folders of trials that are not run, since they have finished.
    """
    from fedsweep.driver.backend import reckoned_seconds
    from fedsweep.results.texts import seconds_text
    from fedsweep.sweeps.prepare import trial_costs

    if prepared.allowance is not None:
        print_budget(prepared)
    entries = [e for e in prepared.entries or prepared.samples if prepared.folder.trial_path(e.trial) not in there]
    costs = trial_costs(prepared, entries)
    print_trials(entries, heading="trial", costs=costs)
    each = sum(map(reckoned_seconds, costs.values())) / max(1, len(costs))
    proposed = "" if prepared.entries else "; those above are examples of what the search may propose"
    left = max(0, prepared.total - len(there))
    beside = f" beside {len(there)} that have finished" if there else ""
    print(f"{left} trials{beside}, about {seconds_text(left * each)} of training on one core{proposed}")


def print_budget(prepared: PreparedSweep) -> None:
    """Print which trials the study's budget has room for, and what they are planned to spend of it."""
    allowance, budget = prepared.allowance, prepared.config.sweep.budget
    assert allowance is not None and budget is not None
    texts = [f"{budget.hours:g} hours under way"] if budget.hours is not None else []
    if prepared.entries:
        begun = allowance.affordable()
        planned = allowance.committed(begun, {e.trial.number for e in begun if prepared.folder.has_finished(e.trial)})
        left_out = [entry.trial.folder for entry in prepared.entries if entry not in begun]
        how = (
            "told exactly before training" if planned.is_exact else "estimated; trials end where they would spend more"
        )
        texts += [f"{planned.in_words(budget)} ({how})"] if budget.costs else []
        rest = f", {len(left_out)} are left out, the first of them {left_out[0]}" if left_out else ""
        texts.append(f"{len(begun)} of {len(prepared.entries)} trials fit{rest}")
    elif budget.costs:
        texts.append(f"about {prepared.total} trials, each begun only where all of it fits")
    print(f"budget: {'; '.join(texts)}")


def taken_over(prepared: PreparedSweep, places: Sequence[Path], *, dry_run: bool) -> dict[Path, Path]:
    """Return trials' folders -> finished runs in or below the places that are taken over, which is said."""
    from fedsweep.commands.terminal.output import note
    from fedsweep.sweeps.reuse import finished_in, not_taken

    reused, refused = finished_in(places, prepared)
    if places:
        there = f"{len(reused)} of {len(prepared.unfinished)} trials to run have finished there"
        note(f"{there} and {'would be' if dry_run else 'are'} taken over")
    if refused:
        note(f"note: {not_taken(refused)}")
    return reused


def run_trials(
    prepared: PreparedSweep,
    *,
    going_on: bool,
    overwrite: bool,
    dashboard: bool,
    quiet: bool,
    called: str,
) -> Summary:
    """Run the trials left, with progress in the terminal; where none is, the tracking store gets what it lacks.

    In messages the trials are ``called`` so.

    Raises:
        InputError: The folder, the cluster or a store can't be used.
        KeyboardInterrupt: It was interrupted; running trials wrote checkpoints.
    """
    from fedsweep.commands.terminal.output import is_plain, note
    from fedsweep.sweeps.tuner import log_rest, run_sweep
    from fedsweep.tracking.terminal.sweep_progress import make_sweep_progress

    if going_on and prepared.is_done:
        left, place = len(prepared.left_out), place_name(prepared.folder.path)
        note(
            f"{place}: its budget has no room for the {left} {called} left; nothing is run, but --set"
            " sweep.budget.KEY=VALUE raises it"
            if left
            else f"{place}: all {len(prepared.entries)} {called} have finished already; nothing is run"
        )
        return log_rest(prepared)
    progress = make_sweep_progress(prepared.metrics[0], quiet=quiet, plain=is_plain(), is_interrupted=is_interrupted)
    with progress:
        return run_sweep(prepared, progress, resume=going_on, overwrite=overwrite, dashboard=dashboard)[1]


@contextlib.contextmanager
def way_on_told(folder: SweepFolder, word: str, *, what: str) -> Iterator[None]:
    """Tell how the command of this name goes on after an early end; where nothing was written, ``what`` had not begun.

    Raises:
        typer.Exit: It was interrupted.
        RunError: The cluster was lost, or a disk is full.
    """
    from fedsweep.commands.terminal.output import command, note

    try:
        yield
    except KeyboardInterrupt:
        if folder.has_plan:
            note(f"interrupted; this goes on with it: {command(word, '--resume', '--out', place_name(folder.path))}")
        else:
            note(f"interrupted before {what} began; nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        place = place_name(folder.path)
        way_on = f"go on with {command(word, '--resume', '--out', place)}" if folder.has_plan else "try again"
        if isinstance(error, ClusterLost):
            raise RunError(f"{error}, so no trial can go on by itself; {way_on}") from error
        # Tune's own files are there, too: its error is a traceback, or the end of a file that was left empty.
        if lacks_room(error) or isinstance(error, EOFError):
            why = error if isinstance(error, FedsweepError) else f"no space is left for {folder.path}, it seems"
            raise RunError(f"{why}; make room there, then {way_on}") from error
        raise
