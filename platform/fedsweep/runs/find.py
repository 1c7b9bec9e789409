"""Which folders below a folder are runs."""

from __future__ import annotations

from pathlib import Path

from fedsweep.bounded import MOST_LEVELS
from fedsweep.errors import OutputError
from fedsweep.runs.run_folder import CHECKPOINTS, CLIENTS, CONFIG, RESULT, ROUNDS

# Copies of a run's files lie among the artifacts of a tracking store; they are no runs.
_NO_RUNS_IN = frozenset({CHECKPOINTS, "mlartifacts", "mlruns"})


def find_runs(path: str | Path) -> list[Path]:
    """Return the folder itself where it is a run's, otherwise the run folders below it, sorted.

    A folder that has no more than a configuration is a run that broke off early, unless runs lie below it: then it
    is a sweep's. Hidden folders, links and the artifacts of tracking stores are passed over.

    Args:
        path: A folder.

    Raises:
        OutputError: There is no such folder, or one in it may not be read.
    """
    try:
        return _find_runs(Path(path), 0)
    except PermissionError as error:
        raise OutputError(f"{error.filename}: permission denied; name folders that may be read") from error


def _find_runs(folder: Path, level: int) -> list[Path]:
    if not folder.is_dir():
        raise OutputError(f"{folder}: there is no such folder")
    if level > MOST_LEVELS:
        raise OutputError(f"{str(folder)[:200]}...: more than {MOST_LEVELS} folders in one another; name an inner one")
    has_config = (folder / CONFIG).is_file()
    if has_config and any((folder / name).exists() for name in (ROUNDS, RESULT, CLIENTS, CHECKPOINTS)):
        return [folder]
    below = [child for child in sorted(folder.iterdir()) if _may_hold_runs(child)]
    return [run for child in below for run in _find_runs(child, level + 1)] or ([folder] if has_config else [])


def _may_hold_runs(folder: Path) -> bool:
    hidden = folder.name.startswith(".")
    return not hidden and folder.name not in _NO_RUNS_IN and folder.is_dir() and not folder.is_symlink()
