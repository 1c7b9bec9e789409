"""What TensorBoard and Weights & Biases are left in a run's folder, under names that only a run writes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

TENSORBOARD, WANDB = "tensorboard", "wandb"
EVENTS_SUFFIX, ID_PREFIX = ".fedsweep", "fedsweep"


def event_files(folder: Path) -> Sequence[Path]:
    """The event files for TensorBoard in a run's folder."""
    return sorted((folder / TENSORBOARD).glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"))


def offline_runs(folder: Path) -> Sequence[Path]:
    """The folders of offline runs for Weights & Biases in a run's folder, in the order of their beginning."""
    found = sorted((folder / WANDB).glob(f"offline-run-*-{ID_PREFIX}*"))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def clear_doors(folder: Path) -> None:
    """Remove both."""
    for path in event_files(folder):
        path.unlink()
    for path in offline_runs(folder):
        shutil.rmtree(path)
