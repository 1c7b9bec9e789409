"""The pictures of one run, which are drawn when it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsweep.config.yaml12 import parse
from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.driver.phases import TIMING
from fedsweep.errors import first_line
from fedsweep.figures.curves import plot_accuracy_against_bytes, plot_learning_curves
from fedsweep.figures.links import LINKS_PICTURE, plot_links
from fedsweep.figures.partition import plot_partition
from fedsweep.figures.scenario import plot_scenario
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import CLIENTS, CONFIG, PICTURES, ROUNDS, RunFolder
from fedsweep.tasks.kinds import stratum_of

_LOGGER = logging.getLogger("fedsweep")


def plot_run(folder: Path, into: Path) -> list[Path]:
    """Draw the pictures of a single run: ``learning_curves.png``, ``accuracy_against_bytes.png``, ``partition.png``.

    With drift or availability also those of :func:`~fedsweep.figures.scenario.plot_scenario`, and ``links.png`` where
    not all talked with the server alone.

    Args:
        folder: A run folder.
        into: Where the pictures go.

    Returns:
        The pictures; those that the run has nothing for are left out.
    """
    drawn = []
    if (folder / ROUNDS).is_file():
        drawn += [into / "learning_curves.png", into / "accuracy_against_bytes.png"]
        plot_learning_curves([folder], drawn[0])
        plot_accuracy_against_bytes([folder], drawn[1])
    if (folder / CLIENTS).is_file():
        drawn.append(into / "partition.png")
        run = RunFolder(folder)
        config = parse(run.read_config(), source=str(folder / CONFIG)) if (folder / CONFIG).is_file() else {}
        stratum = stratum_of(config if isinstance(config, Mapping) else {})
        plot_partition(run.read_clients().column("label_counts").to_pylist(), drawn[-1], stratum=stratum)
    if plot_links(folder, into / LINKS_PICTURE):
        drawn.append(into / LINKS_PICTURE)
    return drawn + plot_scenario(folder, into)


class PictureObserver(Observer):
    """Draws a run's pictures into ``pictures/`` of its folder; see :func:`plot_run`."""

    phase = "pictures"
    _folder: Path | None = None

    def started(self, info: RunInfo) -> None:
        self._folder = info.folder

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        if self._folder is None:
            return  # the run failed before it started
        _draw(self._folder)


def draw_missing(folder: Path) -> None:
    """Draw the pictures of a finished run whose process was killed at its end: how long all took is known last.

    Raises:
        OutputError: Another process writes the folder, or it can't be written.
    """
    if TIMING not in RunFolder(folder).read_result():
        with sole_writer(folder):  # which removes what the killed one left
            _draw(folder)


def _draw(folder: Path) -> None:
    try:
        plot_run(folder, folder / PICTURES)
    except Exception as error:  # whatever matplotlib raises: the run itself is whole
        _LOGGER.warning(f"{folder}: its pictures can't be drawn: {first_line(error)}")
