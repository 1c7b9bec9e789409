"""Runs that are there already, kept or taken over instead of run again.

A sweep that gets more trials keeps those whose configuration has a run in its folder; the others are new. Finished runs
of other folders are taken over: copies, or second names of the same files.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, FedsweepError, InputError, OutputError
from fedsweep.experiment.build import build_training
from fedsweep.finished.growth import grow
from fedsweep.runs.checkpoints.checkpoint import newest_config_hash
from fedsweep.runs.facts import run_facts
from fedsweep.runs.files import TAKEN_OVER, TRACKING, atomic_write, read_note
from fedsweep.runs.find import find_runs
from fedsweep.runs.mirror import MARK
from fedsweep.runs.places import is_address, place_name
from fedsweep.runs.run_folder import BY_SCHEDULER, CONFIG, RunFolder
from fedsweep.runs.source_log import ALLOW, changed_since
from fedsweep.runs.sources import Sources, misfit
from fedsweep.sweeps.space import is_listed
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.sweeps.trial import POPULATION

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.sweeps.prepared import PreparedSweep
    from fedsweep.sweeps.prepared_trial import PreparedTrial

_HALF = ".taking-over"
# Limits that a study's budget lowers for a trial whose costs were estimated.
_BUDGETED = ("total_bytes", "sim_time_s")


def extended(
    config: Config, folder: SweepFolder, entries: Sequence[PreparedTrial], *, allow_changed_code: bool = False
) -> tuple[SweepPlan, str]:
    """Match a configuration's trials with the runs of a sweep's folder.

    A run is a trial's where its resolved configuration is the trial's, but for what changes no result, and the sources
    that played it are those that are here.

    Args:
        config: The sweep's new configuration.
        folder: Where the sweep is.
        entries: The configuration's trials.
        allow_changed_code: Runs of other sources are trials', too.

    Returns:
        All trials in their order, with numbers and folders of those that were there before, and the folders of runs
        that the configuration has no trial for, which stay as they are; and what becomes of the trials, in a line.

    Raises:
        ConfigError: The trials are not known beforehand.
        OutputError: The folder holds no sweep, or a damaged one.
    """
    if not is_listed(config):
        raise ConfigError(
            "--extend goes with trials that are known beforehand; with sweep.search=optuna or sweep.scheduler=pbt begin"
            " a sweep of its own with another --out"
        )
    plan = folder.read_plan()
    if plan.request:
        raise ConfigError(f"{folder.path} holds a table; fedsweep reproduce --resume goes on with it")
    before = [*(trial.folder for trial in plan.trials), *plan.beside]
    # Several: one that other code made stays beside the run that took its place.
    folders_by_hash: dict[str, list[str]] = {}
    for digest, name in _found(folder, before):
        folders_by_hash.setdefault(digest, []).append(name)
    # Without what ended it a whole run is wanted.
    cut = {n: by for n in before if (by := cut_by(folder.path / n)) and getattr(config.sweep, by) is None}
    highest = max((_number(name) for name in before), default=0)
    trials, others = [], dict[str, str]()
    for entry in entries:
        trial, there = entry.trial, folders_by_hash.get(entry.user_config.hash(), [])
        changed = {n: "" if allow_changed_code else other_code(folder.path / n, entry.sources) for n in there}
        own_name = next((name for name in there if not changed[name] and name not in cut), None)
        if own_name is not None:
            there.remove(own_name)
        else:
            others |= {name: text for name, text in changed.items() if text}
            highest += 1
        name = own_name or f"{highest:04d}-{trial.folder.partition('-')[2]}"
        trials.append(replace(trial, number=_number(name), folder=name))
    num_finished = sum(folder.has_finished(trial) for trial in trials)
    beside = tuple(itertools.chain.from_iterable(folders_by_hash.values()))
    ended = "".join(f" or that a {by} ended" for by in sorted({cut[name] for name in beside if name in cut}))
    aside = f"; {len(beside)} that this configuration has no trial for{ended}, beside them" if beside else ""
    if others:
        aside += f"; {len(others)} of them by other code ({next(iter(others.values()))}), which {ALLOW} would keep"
    summary = f"{num_finished} finished trials kept, {len(trials) - num_finished} to run{aside}"
    return SweepPlan(config_tree=config.given, trials=tuple(trials), beside=beside), summary


def _found(folder: SweepFolder, names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield hash of the configuration and folder of each run that was begun; a damaged or a moved one is no trial's."""
    for name in names:
        path = folder.path / name / CONFIG
        if not path.is_file():
            continue
        try:
            yield f"moved: {name}" if is_moved(path.parent) else resolve(load_config(path)).hash(), name
        except InputError:
            yield f"damaged: {name}", name


def check_code(folder: SweepFolder, entries: Sequence[PreparedTrial]) -> None:
    """Refuse to go on with a sweep some of whose runs other sources played.

    Raises:
        ConfigError: There are such runs; the message names the first.
    """
    # A table has no --extend; a trial whose folder is gone is run again.
    again = "remove their folders" if folder.read_plan().request else "--extend with the configuration"
    for entry in entries:
        path = folder.trial_path(entry.trial)
        if changed := other_code(path, entry.sources):
            raise ConfigError(
                f"{path} was made by other code or files ({changed}), so its figures and those of trials to come can't"
                " stand beside each other; begin another sweep, bring those back, run such trials again"
                f" ({again}) or keep them with {ALLOW}"
            )


def other_code(run: Path, sources: Sources) -> str:
    """Describe changes since a run was made or begun, in words; empty: nothing, or none of its rounds was played."""
    run_folder = RunFolder(run)
    try:
        if (result := run_folder.result_if_any()).get("status") == "finished":
            return misfit(result, sources, run_facts()["versions"])
        return changed_since(run, sources)
    except FedsweepError:
        return ""  # what is damaged is no run to keep, and whoever goes on with it says so


def _number(name: str) -> int:
    digits = re.match(r"\d{1,9}", name)
    return int(digits[0]) if digits else 0


def finished_in(places: Iterable[Path], prepared: PreparedSweep) -> tuple[dict[Path, Path], dict[Path, str]]:
    """Return the finished runs, at or below the places, of trials that are left to run.

    Configurations are compared resolved, but for what changes no result; sources and libraries by their hashes and
    versions.

    Returns:
        Folders of trials -> such runs; and runs of the same configuration by other code -> what has changed since. A
        search gets those of its space as trials, whatever sweep they were of.

    Raises:
        ConfigError: There are places, but the trials are not known beforehand.
        OutputError: A place is no such folder.
    """
    places = list(places)
    sweep = prepared.config.sweep
    if places and (sweep.scheduler == "pbt" or sweep.rungs is not None):
        what = "rungs are gone through one after the other" if sweep.rungs else "sweep.scheduler=pbt changes them"
        raise ConfigError(f"--reuse goes with a search, or trials known beforehand, but {what}")
    if not is_listed(prepared.config):
        _begin_warm(places, prepared)
    wanted = {entry.user_config.hash(): entry for entry in prepared.unfinished}
    runs: dict[Path, Path] = {}
    refused: dict[Path, str] = {}
    for place in places:
        runs_below = find_runs(place)
        if not runs_below:
            raise OutputError(f"--reuse: {place} is neither a run's folder nor one with runs below it")
        for run in runs_below:
            entry = wanted.get(finished_key(run) or "")
            if entry is not None and (by := cut_by(run)) and getattr(sweep, by) is None:
                continue  # a whole run is wanted
            target = None if entry is None else prepared.folder.trial_path(entry.trial)
            if entry is None or target is None or target.resolve() == run.resolve():
                continue
            if changed := other_code(run, entry.sources):
                refused[run] = changed
            else:
                runs.setdefault(target, run)
    return runs, refused


def check_apart(places: Iterable[Path], folder: SweepFolder) -> None:
    """Refuse to take over runs from a folder that is to be overwritten: they go before they are copied.

    Raises:
        ConfigError: One of the places has runs there.
    """
    for place in places:
        if any(run.resolve().is_relative_to(folder.path.resolve()) for run in find_runs(place)):
            raise ConfigError(
                f"--overwrite removes the sweep in {folder.path}, so --reuse can't take over its runs from {place};"
                " --extend keeps them, or choose another --out"
            )


def _begin_warm(places: Sequence[Path], prepared: PreparedSweep) -> None:
    """Give a search the trials of its space that have finished at or below the places, of whatever sweep they were."""
    hashes = {entry.user_config.hash() for entry in prepared.entries}
    for run in itertools.chain.from_iterable(map(find_runs, places)):
        if (key := finished_key(run)) is None or key in hashes or cut_by(run):
            continue
        if (entry := prepared.point_of(load_config(run / CONFIG).tree(), key)) is not None:
            hashes.add(key)
            prepared.add(entry)


def not_taken(refused: Mapping[Path, str]) -> str:
    """Return a sentence on runs of other code, one or more, by what changed since."""
    count, places = len(refused), ", ".join(dict.fromkeys(Path(place_name(run)).parent.name for run in refused))
    whose = "a finished run" if count == 1 else f"{count} finished runs"
    return f"{whose} of the same configuration in {places} not taken over: other code ({next(iter(refused.values()))})"


def finished_key(run: Path) -> str | None:
    """Return the hash of a finished run's configuration; None: it has not finished, can't be read, or was moved."""
    try:
        done = not run.is_symlink() and RunFolder(run).has_finished() and not is_moved(run)
        return resolve(load_config(run / CONFIG)).hash() if done else None
    except (FedsweepError, KeyError):
        return None


def cut_by(run: Path) -> str:
    """Return what of a sweep ended a run before its own end, ``scheduler`` or ``budget``; empty: nothing that is known.

    A budget lowers a run's limits, which its configuration does not tell of.
    """
    try:
        stopped_by = RunFolder(run).result_if_any().get("stopped_by")
        if stopped_by in _BUDGETED:
            own = build_training(resolve(load_config(run / CONFIG))).stop
            return "budget" if getattr(own, stopped_by) is None else ""
    except FedsweepError:
        return ""
    return "scheduler" if stopped_by == BY_SCHEDULER else ""


def is_moved(run: Path) -> bool:
    """Check if a scheduler moved a run's values while it was played (``pbt``): its configuration has the last alone."""
    try:
        name = RunFolder(run).result_if_any().get("config_hash") or newest_config_hash(run)
    except FedsweepError:
        return False
    return str(name).startswith(POPULATION)


def take_over(prepared: PreparedSweep, runs: Mapping[Path, Path], *, begun: bool, overwrite: bool) -> None:
    """Copy finished runs to where the trials' own would be, and begin the sweep's folder where that is not begun.

    Args:
        prepared: The sweep.
        runs: Where each is to be -> where it is. What a trial had begun there goes.
        begun: The folder holds the sweep already.
        overwrite: Remove an earlier sweep from it.

    Raises:
        OutputError: The folder can't be made, or a run can't be copied.
    """
    with prepared.writing():
        if not begun:
            prepared.create_folder(overwrite=overwrite)
        for target, run in runs.items():
            _copy(run, target)
            name = place_name(run)
            place = name if is_address(name) else os.path.relpath(run, prepared.folder.path.parent)
            atomic_write(target / TAKEN_OVER, f"{json.dumps({'from': place})}\n".encode())
        prepared.rename_finished()


def taken_from(run: Path) -> str | None:
    """Return the folder from which a finished run was taken over; None where it was played in its own."""
    origin = read_note(run / TAKEN_OVER).get("from")
    return None if origin is None else str(origin)


def _copy(run: Path, target: Path) -> None:
    half = target.with_name(_HALF)
    try:
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(run, half, ignore=_left_out, copy_function=_linked)
        shutil.rmtree(target, ignore_errors=True)
        half.rename(target)
    except OSError as error:
        raise OutputError(f"{run} can't be copied to {target}: {error.strerror or error}") from error


def go_on_from(run: Path, target: Path, *, rounds: int, allow_changed_code: bool = False) -> None:
    """Begin a trial with a finished run of fewer rounds, where those are the first rounds of the trial's own run.

    Args:
        run: The finished run's folder.
        target: The trial's; what is there goes.
        rounds: The trial's.
        allow_changed_code: Also where other sources played them.
    """
    _copy(run, target)
    try:
        grow(target, rounds=rounds, allow_changed_code=allow_changed_code)
    except ConfigError:
        # The longer run would have played them otherwise, as under a schedule that goes by the number of rounds.
        shutil.rmtree(target)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Return what is not the new run's: its ids in MLflow, its address, and links, which may lead anywhere."""
    own = (TRACKING, TAKEN_OVER, MARK)
    return [name for name in names if name in own or os.path.islink(os.path.join(folder, name))]


def _linked(source: str, target: str) -> None:
    """Give a file a second name, which takes no room: a run's files are replaced as a whole, never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
