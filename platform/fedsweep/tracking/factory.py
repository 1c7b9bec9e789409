"""The observers that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.driver.observers import Observer
from fedsweep.figures.of_run import PictureObserver
from fedsweep.tracking.doors.registry import further_doors
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_store import resolve_uri

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.tracking.mlflow_keeper import MlflowKeeper


def make_observers(config: Config, folder: Path, *, keeper: MlflowKeeper | None = None) -> list[Observer]:
    """The observers of a run, in the order in which they must learn of its end: MLflow logs what was drawn.

    Args:
        config: Its configuration.
        folder: Its folder.
        keeper: Writes to MLflow; None: this process does.

    Raises:
        ConfigError: ``tracking.uri`` names no usable store, or ``tracking.also`` a door that is not there.
    """
    uri = resolve_uri(config.tracking.uri, out=folder)
    tracking = [] if uri is None else [MlflowObserver(uri, experiment=config.tracking.experiment, keeper=keeper)]
    return [PictureObserver(), *tracking, *further_doors(config, folder)]
