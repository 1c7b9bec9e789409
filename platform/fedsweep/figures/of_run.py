"""The pictures of one run."""

from __future__ import annotations

from pathlib import Path

from fedsweep.figures.curves import plot_accuracy_against_bytes, plot_learning_curves
from fedsweep.figures.partition import plot_partition
from fedsweep.figures.scenario import plot_scenario
from fedsweep.runs.run_folder import CLIENTS, ROUNDS, RunFolder


def plot_run(folder: Path, into: Path) -> list[Path]:
    """The pictures of a single run: ``learning_curves.png``, ``accuracy_against_bytes.png``, ``partition.png``.

    With drift or availability also those of :func:`~fedsweep.figures.scenario.plot_scenario`.

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
        plot_partition(RunFolder(folder).read_clients().column("label_counts").to_pylist(), drawn[-1])
    return drawn + plot_scenario(folder, into)
