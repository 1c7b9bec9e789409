"""What a tracking store lacks of a run that has ended: logged from the run's folder, each point once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.driver.observers import RunInfo, run_tags
from fedsweep.errors import OutputError
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import RunFolder
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_run import is_complete
from fedsweep.tracking.mlflow_store import resolve_uri

if TYPE_CHECKING:
    from fedsweep.config.schema import Config


def catch_up(folder: Path, config: Config) -> tuple[str, bool]:
    """Log what the store lacks.

    Args:
        folder: The folder of a run that has ended.
        config: Its configuration, resolved.

    Returns:
        What was done, in words, and whether nothing is missing now.

    Raises:
        ResourceError: The store cannot be used.
        OutputError: The folder has no result, or a damaged one; or another process writes it.
    """
    uri = resolve_uri(config.tracking.uri, out=folder)
    if uri is None:
        return "nothing is tracked (tracking.uri is none)", True
    if is_complete(folder, uri):
        return "MLflow has everything of it", True
    if (folder.parent / "sweep.json").exists():
        return f"fedsweep sweep --resume --out {folder.parent} logs what MLflow lacks of it", False
    with sole_writer(folder):
        observer = MlflowObserver(uri, experiment=config.tracking.experiment)
        _log(folder, config, observer)
    if not observer.is_complete:
        return "MLflow still lacks some of it", False
    return "MLflow has everything of it now", True


def _log(folder: Path, config: Config, observer: MlflowObserver) -> None:
    run = RunFolder(folder)
    if not run.has_result():
        raise OutputError(f"{folder}: the run has not ended; go on with fedsweep run --resume {folder}")
    result = run.read_result()
    records = run.read_rounds() if run.has_rounds() else []
    observer.check()
    observer.started(
        RunInfo(
            name=config.name,
            folder=folder,
            config=config.flat(),
            tags=run_tags(config, method=str(result.get("method", "unknown")), git_commit=result.get("git_commit")),
            planned_rounds=config.training.rounds,
            records=records,
            targets=config.evaluation.targets,
        )
    )
    observer.finished(result["status"], result)
