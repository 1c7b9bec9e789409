"""Shared by measures of a finished run's model: clients' samples, a stream to draw from, a memory of what was read."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsweep.experiment.experiment import Experiment
from fedsweep.reproduce.given import NotKept
from fedsweep.runs.run_folder import CONFIG

Read = TypeVar("Read")


def once_per_run(read: Callable[[Path], Read]) -> Callable[[Path], Read]:
    """Remember what is read of a run's folder, until another run lies there.

    What it returns raises NotKept where the run has no folder, as those of ``--from``.
    """
    remembered = lru_cache(maxsize=32)(lambda folder, _: read(folder))

    @wraps(read)
    def asked(folder: Path) -> Read:
        if not folder.is_dir():
            raise NotKept("it takes the run's model, which is not here; a run given by --from has none")
        config = folder / CONFIG
        return remembered(folder, os.stat(config).st_mtime_ns if os.path.isfile(config) else None)

    return asked


def samples_of(experiment: Experiment, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's samples as the model sees them [n, ...], and their classes [n], int64."""
    data, indices = experiment.world.data, experiment.world.indices[client]
    inputs = experiment.world.data.transformed(data.images[indices], torch.get_default_dtype())
    return inputs, torch.from_numpy(np.array(data.labels[indices], dtype=np.int64))
