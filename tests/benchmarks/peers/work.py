"""What every side of a comparison is given: networks and clients' data. Imports torch and numpy alone.

The data lie in two files: images [N, n, C, H, W] as float32, normalised, and labels [N, n]. They are mapped, so that
processes share them.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Work:
    """A set-up.

    Attributes:
        network: ``"speed_cnn"`` or ``"lenet5"``.
        cohort: Clients a round.
        rounds: Rounds.
        steps: Of each client.
        batch_size: Samples per step.
        learning_rate: SGD's.
        processes: That train at the same time.
    """

    network: str
    cohort: int
    rounds: int
    steps: int
    batch_size: int
    learning_rate: float
    processes: int

    def write(self, folder: Path) -> None:
        (folder / "work.json").write_text(json.dumps(asdict(self)))


def read(folder: str) -> tuple[Work, np.ndarray, np.ndarray]:
    """The set-up and its data, which lie above a side's folder."""
    above = Path(folder).parent
    images, labels = (np.load(above / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return Work(**json.loads((above / "work.json").read_text())), images, labels


def samples(images: np.ndarray, labels: np.ndarray, client: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many samples of a client, in random order; again from the start where it has fewer."""
    size = labels.shape[1]
    order = np.concatenate([np.random.permutation(size) for _ in range(-(-number // size))])[:number]
    return torch.from_numpy(images[client][order]), torch.from_numpy(labels[client][order])


class Turns:
    """Begins a round when it is told to, and says how long it took: sides that are compared take turns.

    Whoever compares makes a file ``go-K`` in the side's folder, and finds ``done-K`` there with the seconds.

    Args:
        folder: The side's.
        speaks: Of a side's processes one answers.
    """

    def __init__(self, folder: str | Path, *, speaks: bool = True) -> None:
        self._folder, self._speaks = Path(folder), speaks
        self._round, self._began = 1, 0.0

    def begins(self) -> None:
        """Wait for the round's turn."""
        while not (self._folder / f"go-{self._round}").exists():
            time.sleep(0.01)
        self._began = time.perf_counter()

    def ends(self) -> None:
        """The round is over."""
        seconds = time.perf_counter() - self._began
        if self._speaks:
            unfinished = self._folder / "unfinished"
            unfinished.write_text(str(seconds))
            unfinished.rename(self._folder / f"done-{self._round}")
        self._round += 1


def network(name: str) -> nn.Module:
    """For 3x32x32 and 10 classes; the same layers as fedsweep's."""
    if name == "lenet5":
        return nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def one_thread() -> None:
    """As in fedsweep's actors."""
    torch.set_num_threads(1)
