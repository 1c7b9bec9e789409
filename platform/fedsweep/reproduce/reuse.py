"""Runs that another table beside this one has finished already: they are taken over instead of run again.

Tables of a paper are often cross-sections of the same runs. A run is known by the hash of everything that affects its
results. It is taken over only where it finished, its own configuration has that hash, and it was made with the same
versions and git commit as are here now. What is taken over is a copy, or a second name of the same files, so that each
table's folder is whole by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import FedsweepError
from fedsweep.runs.facts import run_facts
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.sweeps.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from fedsweep.reproduce.reproduction import Reproduction


def finished_elsewhere(found: Reproduction, folder: SweepFolder) -> dict[Path, Path]:
    """Where runs that are left would be -> runs that are the same and have finished in tables' folders beside this one.

    Args:
        found: The table's cells.
        folder: Where they go; it need not exist.
    """
    wanted = {key: folder.trial_path(t) for key, t in found.by_key.items() if not folder.has_finished(t)}
    runs: dict[Path, Path] = {}
    here = run_facts()
    for run, key in _runs_beside(folder.path):
        if key in wanted and wanted[key] not in runs and _is_that_run(run, key, here):
            runs[wanted[key]] = run
    return runs


def _runs_beside(path: Path) -> Iterator[tuple[Path, str]]:
    """Run folders of the tables in the folders beside a path, each with its key."""
    if not path.parent.is_dir():
        return
    for other in sorted(path.parent.iterdir()):
        folder = SweepFolder(other)
        if folder.path == path or other.is_symlink() or not folder.has_plan:
            continue
        try:
            plan = folder.read_plan()
        except FedsweepError:
            continue
        keys = plan.request.get("keys", {})
        for trial in plan.trials:
            if isinstance(keys, Mapping) and trial.folder in keys:
                yield folder.trial_path(trial), str(keys[trial.folder])


def _is_that_run(run: Path, key: str, here: Mapping[str, Any]) -> bool:
    """Whether a folder holds a finished run of the configuration with that hash, made by the software that is here."""
    kept = RunFolder(run)
    try:
        if run.is_symlink() or not kept.has_result():
            return False
        result = kept.read_result()
        alike = all(result.get(name) == here[name] for name in ("versions", "git_commit"))
        return bool(result["status"] == "finished" and alike and resolve(load_config(run / CONFIG)).hash() == key)
    except (FedsweepError, KeyError):
        return False
