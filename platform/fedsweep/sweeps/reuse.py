"""Finished runs of other folders, taken over instead of run again: copies, or second names of the same files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, FedsweepError, OutputError
from fedsweep.runs.files import TRACKING
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.sweeps.prepare import PreparedSweep
from fedsweep.sweeps.space import is_listed

_HALF = ".taking-over"


def finished_in(places: Iterable[Path], prepared: PreparedSweep) -> dict[Path, Path]:
    """Folders of trials that are left -> runs below the places that have finished with the same configuration.

    Configurations are compared resolved, but for what changes no result.

    Args:
        places: Run folders, or folders with runs below them.
        prepared: The sweep.

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
