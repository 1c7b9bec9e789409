"""A client's samples, for measures that test or train a finished run's model on them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsweep.experiment.experiment import Experiment, transformed


def samples_of(experiment: Experiment, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's samples as the model sees them [n, ...], and their classes [n], int64."""
    data, indices = experiment.world.data, experiment.world.indices[client]
    inputs = transformed(experiment.world, data.images[indices], torch.get_default_dtype())
    return inputs, torch.from_numpy(np.array(data.labels[indices], dtype=np.int64))
