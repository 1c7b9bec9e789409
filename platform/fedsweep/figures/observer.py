"""A run's pictures, drawn when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.runs.run_folder import PICTURES

_LOGGER = logging.getLogger("fedsweep")


class PictureObserver(Observer):
    """Draws a run's pictures into ``pictures/`` of its folder; see :func:`~fedsweep.figures.of_run.plot_run`.

    Args:
        warn: Takes what the user should know, in one line.
    """

    phase = "pictures"

    def __init__(self, *, warn: Callable[[str], None] = _LOGGER.warning) -> None:
        self._warn = warn
        self._folder: Path | None = None

    def started(self, info: RunInfo) -> None:
        self._folder = info.folder

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        if self._folder is None:
            return  # the run failed before it started
        from fedsweep.figures.of_run import plot_run

        try:
            plot_run(self._folder, self._folder / PICTURES)
        except Exception as error:  # whatever matplotlib raises: the run itself is whole
            self._warn(f"{self._folder}: its pictures can't be drawn: {error or type(error).__name__}")
