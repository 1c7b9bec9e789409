"""The reference: the same clients, network, optimiser and batches in plain PyTorch, without a framework."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.driver.plan import Plan
from fedsweep.errors import InvariantError, RunError
from fedsweep.world.data.datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class PlainWork:
    """A plain loop's work in a round; N clients of n samples.

    Attributes:
        build: Makes the network.
        images: [N, n, C, H, W] uint8.
        labels: [N, n].
        constants: What pixels are divided by, and mean and deviation by channel after that.
        cohort: Clients in a round.
        steps: Of each.
        batch_size: Samples per step.
        learning_rate: SGD's.
        device: ``"cpu"`` or ``"cuda"``.
    """

    build: Callable[[], nn.Module]
    images: np.ndarray
    labels: np.ndarray
    constants: tuple[float, tuple[float, ...], tuple[float, ...]]
    cohort: int
    steps: int
    batch_size: int
    learning_rate: float
    device: str = "cpu"

    def share(self, part: int, parts: int) -> PlainWork:
        """Return the work of one of several processes."""
        return replace(
            self,
            images=self.images[part::parts],
            labels=self.labels[part::parts],
            cohort=len(range(part, self.cohort, parts)),
        )


def work_of(plan: Plan, dataset: Dataset) -> PlainWork:
    """Return a run's work, taken out of fedsweep's hands.

    Args:
        plan: A run with clients of equal size, a number of local steps, and SGD without momentum.
        dataset: What it trains on.
    """
    experiment = plan.experiment
    training, indices = experiment.training, np.stack(experiment.world.indices)
    steps, batch_size = training.local_steps, training.batch_size
    if not (isinstance(steps, int) and isinstance(batch_size, int)):
        raise InvariantError("a plain loop knows a number of local steps and one size of batches alone")
    if training.optimizer != OptimizerSettings():
        raise InvariantError(f"a plain loop knows plain SGD alone, but got {training.optimizer}")
    return PlainWork(
        build=partial(_as_torch_has_it, experiment.new_model),
        images=dataset.train_images[indices],
        labels=dataset.train_labels[indices],
        constants=(dataset.scale, dataset.mean, dataset.std),
        cohort=training.cohort_size,
        steps=steps,
        batch_size=batch_size,
        learning_rate=training.learning_rate,
        device=experiment.device,
    )


def _as_torch_has_it(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the network without what fedsweep does to its images on a CPU."""
    model = build()
    model.pixels_last = False  # type: ignore[assignment]
    return model


class PlainLoop:
    """Rounds of federated averaging, one client after the other.

    Args:
        work: What is done.
        readies_clients: All of a client's images are made ready when its turn comes, however few it looks at.
    """

    def __init__(self, work: PlainWork, *, readies_clients: bool = False) -> None:
        self._readies_clients = readies_clients
        self._work, self._drawn = work, np.random.default_rng(0)
        self._images = torch.from_numpy(work.images).to(work.device)
        self._labels = torch.from_numpy(work.labels).to(work.device)
        self._scale, mean, std = work.constants
        self._mean, self._std = (torch.tensor(v, device=work.device).view(-1, 1, 1) for v in (mean, std))
        self._model = work.build().to(work.device).train()
        self._server = [p.detach().clone() for p in self._model.parameters()]

    def play(self, rounds: int) -> float:
        """Return seconds of so many rounds."""
        return self._timed(rounds, self._average)

    def play_in_step(self, rounds: int) -> float:
        """Return seconds of so many rounds in which the clients' models are averaged after every step."""
        return self._timed(rounds, self._average_each_step)

    def _timed(self, rounds: int, play: Callable[[], None]) -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            play()
        if self._work.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _average(self) -> None:
        cohort = self._cohort()
        means = [torch.zeros_like(value) for value in self._server]
        params = list(self._model.parameters())
        for client in cohort:
            self._load(self._model)
            optimizer = torch.optim.SGD(params, lr=self._work.learning_rate)
            for inputs, labels in self._batches(client):
                _step(self._model, optimizer, inputs, labels)
            with torch.no_grad():
                for mean, param in zip(means, params, strict=True):
                    mean.add_(param, alpha=1 / len(cohort))
        self._server = means

    def _average_each_step(self) -> None:
        cohort, work = self._cohort(), self._work
        models = [copy.deepcopy(self._model) for _ in cohort]
        for model in models:
            self._load(model)
        optimizers = [torch.optim.SGD(model.parameters(), lr=work.learning_rate) for model in models]
        for batches in zip(*(self._batches(client) for client in cohort), strict=True):
            for model, optimizer, (inputs, labels) in zip(models, optimizers, batches, strict=True):
                _step(model, optimizer, inputs, labels)
            with torch.no_grad():
                for values in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(values).mean(dim=0)
                    for value in values:
                        value.copy_(mean)
        self._server = [value.detach() for value in models[0].parameters()]

    def _load(self, model: nn.Module) -> None:
        with torch.no_grad():
            for param, value in zip(model.parameters(), self._server, strict=True):
                param.copy_(value)

    def _cohort(self) -> list[int]:
        return [int(k) for k in self._drawn.choice(len(self._labels), self._work.cohort, replace=False)]

    def _batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and labels of a client's steps; its images are made ready once where that is less work."""
        work, size = self._work, self._labels.shape[1]
        passes = -(-work.steps * work.batch_size // size)
        order = torch.from_numpy(np.concatenate([self._drawn.permutation(size) for _ in range(passes)]))
        order = order.to(work.device)
        images, labels = self._images[client], self._labels[client]
        whole = self._readies_clients or work.steps * work.batch_size >= size
        ready = self._ready(images) if whole else None
        for position in range(work.steps):
            index = order[position * work.batch_size : (position + 1) * work.batch_size]
            yield self._ready(images[index]) if ready is None else ready[index], labels[index]

    def _ready(self, images: Tensor) -> Tensor:
        return (images.float() / self._scale - self._mean) / self._std


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@contextlib.contextmanager
def plain_processes(work: PlainWork, number: int) -> Iterator[Callable[[int], float]]:
    """Processes that each play a share of every round and never speak with each other.

    Yields:
        A function that plays so many rounds and returns the seconds until the last of them is done.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for part in range(number):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, work.share(part, number)), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    def play(rounds: int) -> float:
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(rounds)
        for pipe in pipes:
            pipe.recv()
        return time.perf_counter() - began

    try:
        for pipe in pipes:
            pipe.recv()
        yield play
    except EOFError as error:
        raise RunError("a plain process of the benchmark died; is there memory enough?") from error
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.terminate()
            process.join()


def _serve(pipe: Connection, work: PlainWork) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for it is told
    torch.set_num_threads(1)
    loop = PlainLoop(work)
    pipe.send(None)
    while True:
        try:
            rounds = pipe.recv()
        except EOFError:
            return
        loop.play(rounds)
        pipe.send(None)
