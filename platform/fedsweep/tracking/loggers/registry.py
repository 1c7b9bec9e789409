"""The observers of a run by its configuration: pictures, MLflow, TensorBoard, Weights & Biases, CSV, those of users.

A logger, MLflow's too, is an :class:`~fedsweep.driver.observers.Observer`. It writes anew from the first round when a
run goes on, or knows what is there already: no point is there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.errors import ConfigError, FedsweepError, ResourceError
from fedsweep.figures.of_run import PictureObserver
from fedsweep.guard import is_failure, named_error, place_of
from fedsweep.plugins import call_builder, find_plugin
from fedsweep.tracking.loggers.csv_logger import CsvLogger
from fedsweep.tracking.loggers.tensorboard_logger import TensorBoardLogger
from fedsweep.tracking.loggers.wandb_logger import WandbLogger
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_store import resolve_uri

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.records import RoundRecord

    MakeLogger = Callable[[Config, Path], Observer]

_LOGGER = logging.getLogger("fedsweep")


LOGGERS: Mapping[str, MakeLogger] = {
    "tensorboard": lambda config, folder: TensorBoardLogger(),
    "wandb": lambda config, folder: WandbLogger(project=config.tracking.experiment),
    "csv": lambda config, folder: CsvLogger(),
}


def make_observers(config: Config, folder: Path) -> list[Observer]:
    """Make the observers of a run, in the order in which they must learn of its end: MLflow logs what was drawn.

    Raises:
        ConfigError: ``tracking.uri`` names no usable store, or ``tracking.also`` a logger that is not there.
    """
    uri = resolve_uri(config.tracking.uri, out=folder)
    tracking = [] if uri is None else [MlflowObserver(uri, experiment=config.tracking.experiment)]
    return [PictureObserver(), *tracking, *further_loggers(config, folder)]


def further_loggers(config: Config, folder: Path) -> list[Observer]:
    """Return the loggers of a run by ``tracking.also``, in its order.

    Raises:
        ConfigError: There is no such logger, or it cannot be made.
    """
    return [_made(name, config, folder) for name in dict.fromkeys(config.tracking.also)]


def _made(name: str, config: Config, folder: Path) -> Observer:
    if name == "mlflow":
        raise ConfigError("tracking.also: where MLflow keeps a run is said by tracking.uri; leave mlflow out here")
    make = LOGGERS.get(name)
    if make is None:
        try:
            make = find_plugin("observer", name, LOGGERS)
        except ConfigError as error:
            raise ConfigError(f"tracking.also: {error}") from None
    observer = call_builder("observer", name, lambda: make(config, folder), gives=Observer)
    return Sheltered(name, observer)


class Sheltered(Observer):
    """A logger whose trouble ends no run: it is told once, in one line, and the logger is left out from there on.

    Args:
        name: What the configuration calls it.
        observer: The logger.
        warn: Takes what the user should know, in one line.
    """

    def __init__(self, name: str, observer: Observer, *, warn: Callable[[str], None] = _LOGGER.warning) -> None:
        self._name, self._observer, self._warn = name, observer, warn
        self._is_open = False

    def check(self) -> None:
        try:
            self._observer.check()
        except FedsweepError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ResourceError(f"tracking.also: {self._name} can't be used: {_words(error)}") from error
        self._is_open = True

    def started(self, info: RunInfo) -> None:
        self._is_open = True
        self._tell(self._observer.started, info)

    def round_done(self, record: RoundRecord) -> None:
        self._tell(self._observer.round_done, record)

    def checkpointed(self, round: int) -> None:
        self._tell(self._observer.checkpointed, round)

    def message(self, text: str) -> None:
        self._tell(self._observer.message, text)

    def progress(self, text: str) -> None:
        self._tell(self._observer.progress, text)

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        self._tell(self._observer.finished, status, result)

    def _tell(self, call: Callable[..., None], *what: Any) -> None:
        if not self._is_open:
            return
        try:
            call(*what)
        except BaseException as error:  # the logger's own, of whatever library
            if not is_failure(error):
                raise
            self._is_open = False
            self._warn(
                f"{self._name}: {_words(error)}; it is left out from here on, and the run's folder has everything"
            )


def _words(error: BaseException) -> str:
    where = place_of(error)
    return " ".join(named_error(error).split()) + ("" if where is None else f", at {where}")
