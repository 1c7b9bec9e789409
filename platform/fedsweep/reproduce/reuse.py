"""Runs that another table beside this one has finished already: they are taken over instead of run again.

Tables of a paper are often cross-sections of the same runs. A run is known by the hash of everything that affects its
results. It is taken over only where it finished, its own configuration has that hash, and it was made with the same
versions and git commit as are here now. What is taken over is a copy, or a second name of the same files, so that each
table's folder is whole by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.errors import FedsweepError
from fedsweep.runs.facts import run_facts
from fedsweep.sweeps.reuse import finished_key
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
    facts = run_facts()
    for run, key in _runs_beside(folder.path):
        if key in wanted and wanted[key] not in runs:
            if finished_key(run, versions=facts["versions"], git_commit=facts["git_commit"]) == key:
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
