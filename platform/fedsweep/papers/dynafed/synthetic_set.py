"""The effect of a finished run's synthetic set, from the run's folder and its newest checkpoint.

A network is trained from scratch on it alone; and one more round is played by hand from the run's last global model, in
which the losses on some clients' own samples are followed through local training, averaging and fine-tuning.

Source: Pi et al. 2023 (DynaFed), Figures 3 and 6. Reading: fresh moments of Adam for everybody, no augmentation, and
from scratch 300 passes over the set at 1e-3; the paper is silent on all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.components.evaluation import GlobalModel
from fedsweep.config.load import load_config
from fedsweep.engine.evaluator import Evaluator
from fedsweep.errors import DataError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.figures.style import Look, legend_below, line_handle, looks, name_axes
from fedsweep.finished.saved_model import load_model
from fedsweep.papers.model_measures import once_per_run, samples_of
from fedsweep.reproduce.figures.scene import Scene, panels_of
from fedsweep.results.view import RunView
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.runs.run_folder import CONFIG
from fedsweep.streams import stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCRATCH_PASSES, _SCRATCH_RATE = 300, 1e-3
_SHOWN_CLIENTS = 3
# A client's loss is taken so many times in its local training.
_LOOKS = 8


@dataclass(frozen=True, kw_only=True)
class SyntheticSet:
    """Images with soft labels.

    Attributes:
        images: [S, channels, height, width].
        labels: Logits [S, C].
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class ClientLosses:
    """Losses on clients' own samples in one more round.

    Attributes:
        clients: Which clients.
        local: By client: (steps so far, loss of the client's model) [P, 2].
        tuned: By client: (steps so far, loss of the global model) [Q, 2], from the average on.
        mean: The mean of the global model's loss over all clients, after fine-tuning.
    """

    clients: tuple[int, ...]
    local: Mapping[int, np.ndarray]
    tuned: Mapping[int, np.ndarray]
    mean: float


def scratch_accuracy(run: RunView) -> float:
    """Test accuracy 0..1 of a network that is trained from scratch on a finished run's synthetic set alone.

    Raises:
        InputError: The folder is damaged, has no checkpoint with a synthetic set, or its data set is not there.
    """
    experiment, synthetic = _experiment(run.folder), synthetic_set(run.folder)
    model = experiment.build_model()
    model.train()
    with stream(experiment.seed, "scratch").drawn_globally():
        _descend(model, synthetic, rate=_SCRATCH_RATE, passes=_SCRATCH_PASSES)
    world = experiment.world
    evaluator = Evaluator(replace(experiment, server_device="cpu"), world.test_images, world.test_labels)
    return cast(float, evaluator.test(GlobalModel(), {}, model, ()).accuracy)


@once_per_run
def synthetic_set(folder: Path) -> SyntheticSet:
    """Return the synthetic set of a finished run.

    Raises:
        InputError: The folder is damaged, or its newest checkpoint has no synthetic set.
    """
    experiment = _experiment(folder)
    store = CheckpointStore(folder, keep=1, config_hash=experiment.config_hash)
    state = store.newest(keep_handle=lambda memory: memory).state
    for tree in [] if state is None else _trees(state.components):
        if isinstance(tree.get("synthetic"), Mapping):
            return SyntheticSet(images=tree["synthetic"]["images"], labels=tree["synthetic"]["labels"])
    raise DataError(f"{folder}: its newest checkpoint has no synthetic set")


@once_per_run
def client_losses(folder: Path) -> ClientLosses:
    """Return three random clients' losses through one more round after a finished run.

    Raises:
        InputError: As :func:`synthetic_set`.
    """
    experiment, synthetic, model = _experiment(folder), synthetic_set(folder), load_model(folder)
    draws = stream(experiment.seed, "client-losses").numpy()
    cohort = draws.choice(len(experiment.world.indices), size=experiment.training.cohort_size, replace=False)
    shown = tuple(int(client) for client in cohort[:_SHOWN_CLIENTS])
    local, ends, steps = {}, [], 0
    for client in map(int, cohort):
        own = copy.deepcopy(model)
        trace = np.array(_trained(experiment, own, client))
        ends.append(own.state_dict())
        if client in shown:
            local[client], steps = trace, max(steps, int(trace[-1, 0]))
    model.load_state_dict({name: torch.stack([end[name] for end in ends]).mean(dim=0) for name in ends[0]})
    passes, rate = _fine_tuning(experiment)
    tuned: dict[int, list[tuple[int, float]]] = {client: [] for client in shown}
    for number in range(passes + 1):
        if number:
            _descend(model, synthetic, rate=rate, passes=1)
        for client in shown:
            tuned[client].append((steps + number, _loss_on(experiment, model, client)))
    every = [_loss_on(experiment, model, client) for client in range(len(experiment.world.indices))]
    return ClientLosses(
        clients=shown,
        local=local,
        tuned={client: np.array(points) for client, points in tuned.items()},
        mean=float(np.mean(every)),
    )


@once_per_run
def _experiment(folder: Path) -> Experiment:
    return build_experiment(load_config(folder / CONFIG))


def _trees(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all mappings of a state tree."""
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _trees(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _trees(item)


def _fine_tuning(experiment: Experiment) -> tuple[int, float]:
    """Passes and rate of the method's fine-tuning; no passes where it has none."""
    for part in experiment.method.refinements:
        passes, rate = getattr(part, "finetune_epochs", None), getattr(part, "finetune_learning_rate", None)
        if passes is not None and rate is not None:
            return int(passes), float(rate)
    return 0, 0.0


def _descend(model: nn.Module, synthetic: SyntheticSet, *, rate: float, passes: int) -> None:
    """Train a model by Adam on the whole set."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    for _ in range(passes):
        optimizer.zero_grad()
        F.cross_entropy(model(synthetic.images), synthetic.labels.softmax(dim=1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _trained(experiment: Experiment, model: nn.Module, client: int) -> list[tuple[int, float]]:
    """Play a round's local training of a client, and return its loss on the way."""
    inputs, targets = samples_of(experiment, client)
    steps, size, _ = experiment.local_steps(client, len(inputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=experiment.training.learning_rate, foreach=False)
    order = stream(experiment.seed, "client-losses", 1, client).torch()
    passes = [torch.randperm(len(inputs), generator=order) for _ in range(1 + steps * size // len(inputs))]
    batches = [batch for indices in passes for batch in torch.split(indices, size)][:steps]
    losses = [(0, _loss_on(experiment, model, client))]
    for number, batch in enumerate(batches, start=1):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number == len(batches) or number % max(1, len(batches) // _LOOKS) == 0:
            losses.append((number, _loss_on(experiment, model, client)))
    return losses


def _loss_on(experiment: Experiment, model: nn.Module, client: int) -> float:
    inputs, targets = samples_of(experiment, client)
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs), targets))


def losses_figure(scene: Scene) -> Figure:
    """Clients' losses on their own samples: their own models in local training, then the global one in fine-tuning."""
    figure, shown = panels_of(scene, lambda run: client_losses(run.folder), "clients")
    own = looks([f"client {place}" for place in ("a", "b", "c")])  # clients are no levels
    for axes, _, losses in shown:
        for client, look in zip(losses.clients, own.values(), strict=False):
            colour = look.colour
            axes.plot(*losses.local[client].T, color=colour)
            axes.plot(*losses.tuned[client].T, color=colour, linestyle="--")
        last = max(float(points[-1, 0]) for points in losses.tuned.values())
        axes.plot(last, losses.mean, color="#000000", marker="*", markersize=9, linestyle="none")
        name_axes(axes, x="steps", y="loss on own samples (nats)")
    line, star = Look(colour="#000000", marker=""), Look(colour="#000000", marker="*")
    handles = [
        *(line_handle(name, look, marker="") for name, look in own.items()),
        line_handle("own model, local training", line),
        line_handle("global model, fine-tuning", line, linestyle="--"),
        line_handle("global model, mean of all clients", star, linestyle="none"),
    ]
    legend_below(figure, handles)
    return figure
