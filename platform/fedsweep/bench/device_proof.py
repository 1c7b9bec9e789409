"""The proof of a run's first tile for each network that comes with the package: what a device can be trusted with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedsweep.bench.data import noise
from fedsweep.bench.rounds import plan_of
from fedsweep.client.messages import Stepping
from fedsweep.engine.engine import Engine
from fedsweep.errors import first_line
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.models.registry import MODELS
from fedsweep.world.data.datasets import Dataset, load_dataset

# For networks that don't classify pictures: sets that come with the package.
_OTHER_DATA = {"transformer": "lines", "fcn": "shapes"}
_OTHER_TASKS = {"vae": "generative", "masked_autoencoder": "self_supervised"}
_CLIENTS, _STEPS, _BATCH, _SAMPLES = 4, 3, 4, 200


@dataclass(frozen=True, kw_only=True)
class Proved:
    """A network on a device.

    Attributes:
        network: Its name.
        stepping: What was chosen; None: not even the loop takes a step there.
        problem: Why it does not.
        seconds: The proof took.
    """

    network: str
    stepping: Stepping | None
    problem: str | None
    seconds: float

    def tree(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return asdict(self)


def proofs(device: str, networks: Sequence[str] = tuple(MODELS)) -> Iterator[Proved]:
    """Try each network on a device: four clients, three steps of four samples, of noise shaped like CIFAR-10 mostly."""
    pictures = noise("cifar10", samples=_SAMPLES)
    for network in networks:
        began, stepping, problem = time.perf_counter(), None, None
        try:
            other = _OTHER_DATA.get(network)
            data = pictures if other is None else load_dataset(other, root="", download=False)
            stepping = _stepping(device, network, data)
        except Exception as error:  # whatever it is, it is what is asked about
            problem = first_line(error)
        seconds = round(time.perf_counter() - began, 2)
        yield Proved(network=network, stepping=stepping, problem=problem, seconds=seconds)


def _stepping(device: str, network: str, data: Dataset) -> Stepping:
    """Return what a run would choose; the round that follows is played too, so that the choice is seen to carry it."""
    task = _OTHER_TASKS.get(network)
    sections: dict[str, Any] = {
        "scenario": {"clients": _CLIENTS, **({} if task is None else {"task": {"kind": task}})},
        "model": {"name": network},
        "method": {"name": "fedavg"},
        "training": {
            "cohort_size": _CLIENTS,
            "local_steps": _STEPS,
            "batch_size": _BATCH,
            "optimizer": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
        },
        "runtime": {"backend": "local", "device": device, "executor": "auto"},
    }
    experiment = plan_of(sections, data).experiment
    engine = Engine(experiment, LocalFleet(experiment))
    state, _ = engine.advance(engine.start())
    tried = state.stepping or Stepping(kind="loop")
    return Stepping(kind=tried.kind, width=tried.width, off=tried.off, notes=tuple(engine.notes))
