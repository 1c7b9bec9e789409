"""Runs that are there already, kept or taken over instead of run again.

A sweep that gets more trials keeps those whose configuration has a run in its folder; the others are new. Finished runs
of other folders are taken over: copies, or second names of the same files.
"""

from __future__ import annotations

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
from fedsweep.runs.files import TRACKING
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.sweeps.space import Trial, is_listed
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.sweeps.prepare import PreparedSweep

_HALF = ".taking-over"


def extended(config: Config, folder: SweepFolder, asked: Sequence[tuple[Trial, Config]]) -> tuple[SweepPlan, str]:
    """Match a configuration's trials with the runs of a sweep's folder.

    A run is a trial's where its resolved configuration is the trial's, but for what changes no result.

    Args:
        config: The sweep's new configuration.
        folder: Where the sweep is.
        asked: The configuration's trials, each with its resolved configuration.

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
    known = dict(_found(folder, before))
    highest = max((_number(name) for name in before), default=0)
    trials = []
    for trial, wanted in asked:
        name = known.pop(wanted.hash(), None)
        if name is None:
            highest += 1
            name = f"{highest:04d}-{trial.folder.partition('-')[2]}"
        trials.append(replace(trial, number=_number(name), folder=name))
    kept, beside = sum(folder.has_finished(trial) for trial in trials), tuple(known.values())
    aside = f"; {len(beside)} that this configuration has no trial for, beside them" if beside else ""
    told = f"{kept} finished trials kept, {len(trials) - kept} to run{aside}"
    return SweepPlan(given=config.given, trials=tuple(trials), beside=beside), told


def _found(folder: SweepFolder, names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Hash of the configuration and folder of each run that was begun; one that is damaged is no trial's."""
    for name in names:
        path = folder.path / name / CONFIG
        if not path.is_file():
            continue
        try:
            yield resolve(load_config(path)).hash(), name
        except InputError:
            yield f"damaged: {name}", name


def _number(name: str) -> int:
    found = re.match(r"\d{1,9}", name)
    return int(found[0]) if found else 0


def finished_in(places: Iterable[Path], prepared: PreparedSweep) -> dict[Path, Path]:
    """Folders of trials that are left -> runs, at or below the places, that finished with the same configuration.

    Configurations are compared resolved, but for what changes no result.

    Raises:
        ConfigError: There are places, but the trials are not known beforehand.
        OutputError: A place is no such folder.
    """
    places = list(places)
    if places and not is_listed(prepared.config):
        raise ConfigError(
            "--reuse goes with trials that are known beforehand, not with sweep.search=optuna or sweep.scheduler=pbt"
        )
    wanted = {entry.asked.hash(): prepared.folder.trial_path(entry.trial) for entry in prepared.unfinished}
    runs: dict[Path, Path] = {}
    for place in places:
        found = find_runs(place)
        if not found:
            raise OutputError(f"--reuse: {place} is neither a run's folder nor one with runs below it")
        for run in found:
            target = wanted.get(finished_key(run) or "")
            if target is not None and target.resolve() != run.resolve():
                runs.setdefault(target, run)
    return runs


def finished_key(run: Path) -> str | None:
    """The hash of a finished run's configuration; None where it has not finished or can't be read."""
    kept = RunFolder(run)
    try:
        done = not run.is_symlink() and kept.has_result() and kept.read_result()["status"] == "finished"
        return resolve(load_config(run / CONFIG)).hash() if done else None
    except (FedsweepError, KeyError):
        return None


def take_over(prepared: PreparedSweep, runs: Mapping[Path, Path], *, begun: bool, overwrite: bool) -> None:
    """Copies finished runs to where the trials' own would be, and begins the sweep's folder where that is not begun.

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
            prepared.folder.create(prepared.plan, config_yaml=prepared.config.to_yaml(), overwrite=overwrite)
        for target, run in runs.items():
            _copy(run, target)


def _copy(run: Path, target: Path) -> None:
    half = target.with_name(_HALF)
    try:
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(run, half, ignore=_left_out, copy_function=_linked)
        shutil.rmtree(target, ignore_errors=True)
        half.rename(target)
    except OSError as error:
        raise OutputError(f"{run} can't be copied to {target}: {error.strerror or error}") from error


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Its ids in MLflow, which are not the new run's, and links: a foreign folder's may lead anywhere."""
    return [name for name in names if name == TRACKING or os.path.islink(os.path.join(folder, name))]


def _linked(source: str, target: str) -> None:
    """A second name of a file, which takes no room: a run's files are replaced as a whole, never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
