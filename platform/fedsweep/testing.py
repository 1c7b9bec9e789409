"""Tiny worlds and conformance suites, for our tests and for contributors'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.components.base import ServerComponent
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientProfile
from fedsweep.runtime.engine import Engine, experiment_layout
from fedsweep.runtime.experiment import Experiment, StopLimits, Training, World, client_side
from fedsweep.runtime.fleet import LocalFleet
from fedsweep.runtime.messages import OptimizerSettings
from fedsweep.runtime.state import RunState
from fedsweep.runtime.worker import TrainingData, Worker
from fedsweep.streams import stream
from fedsweep.world.transforms import Transform


@dataclass(frozen=True, kw_only=True)
class AsIs(Transform):
    """Inputs reach the model as they are."""

    random: bool = False

    def __call__(self, images: Tensor, *, generator: torch.Generator | None, train: bool) -> Tensor:
        """The images, in their own type where that is floating."""
        del generator, train
        return images if images.is_floating_point() else images.float()


@dataclass(frozen=True, kw_only=True)
class ModelFactory:
    """Makes a model with its initial values; picklable.

    Attributes:
        build: ``build() -> module``; called under a generator of its own.
        seed: Of that generator.
        double: The model is float64.
    """

    build: Callable[[], nn.Module]
    seed: int = 0
    double: bool = False

    def __call__(self) -> nn.Module:
        """A new module; equal calls give equal values."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(self.seed, "model").seed(56))
            model = self.build()
        return model.double() if self.double else model


def tiny_data(
    *, num_samples: int = 96, num_classes: int = 4, features: int = 6, seed: int = 0, dtype: type = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Separable clusters: images [S, 1, 1, features] and labels [S]."""
    generator = stream(seed, "tiny data").numpy()
    centres = generator.normal(size=(num_classes, features)) * 2.0
    labels = np.arange(num_samples) % num_classes
    noise = generator.normal(size=(num_samples, features))
    return (centres[labels] + noise).astype(dtype).reshape(num_samples, 1, 1, features), labels.astype(np.int64)


def linear_model(features: int = 6, num_classes: int = 4) -> nn.Module:
    """A linear classifier on flattened inputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, num_classes))


def tiny_experiment(
    method: FederatedMethod,
    *,
    num_clients: int = 6,
    cohort_size: int = 3,
    rounds: int = 3,
    seed: int = 0,
    learning_rate: float = 0.1,
    batch_size: int = 4,
    local_epochs: int = 1,
    local_steps: int | None = None,
    equal_steps: bool | None = None,
    optimizer: OptimizerSettings | None = None,
    build: Callable[[], nn.Module] = linear_model,
    double: bool = False,
    sizes: Sequence[int] | None = None,
    images: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    stop: StopLimits | None = None,
    **world: object,
) -> Experiment:
    """An experiment of milliseconds: clusters, a linear model, clients with consecutive slices of the data.

    Without ``sizes`` the data is sorted by label first, so that clients have one class or two each.

    Args:
        method: What is run.
        num_clients: Clients in the federation.
        cohort_size: Clients a round.
        rounds: Rounds.
        seed: The run's.
        learning_rate: Constant.
        batch_size: Samples per step.
        local_epochs: Passes per round.
        local_steps: Steps per round instead.
        equal_steps: See ``Training``.
        optimizer: The clients'; plain SGD by default.
        build: Makes the model.
        double: Everything in float64.
        sizes: Samples per client; equal by default.
        images: The training set instead of the clusters.
        labels: Its labels.
        stop: Limits.
        world: Further fields of ``World`` (``budgets``, ``drift``, ...).
    """
    dtype = np.float64 if double else np.float32
    if images is None or labels is None:
        images, labels = tiny_data(seed=seed, dtype=dtype)
    num_classes = int(labels.max()) + 1
    order = np.argsort(labels, kind="stable") if sizes is None else np.arange(len(labels))
    sizes = list(sizes) if sizes is not None else [len(labels) // num_clients] * num_clients
    starts = np.concatenate([[0], np.cumsum(sizes)])
    indices = tuple(order[starts[k] : starts[k + 1]] for k in range(num_clients))
    profiles = tuple(
        ClientProfile(
            client=k,
            num_samples=len(indices[k]),
            label_counts=np.bincount(labels[indices[k]], minlength=num_classes),
        )
        for k in range(num_clients)
    )
    data = TrainingData(images=images, labels=labels, transform=AsIs(), num_classes=num_classes)
    return Experiment(
        seed=seed,
        world=World(
            data=data,
            test_images=images,
            test_labels=labels,
            indices=indices,
            profiles=profiles,
            **world,  # type: ignore[arg-type]
        ),
        build_model=ModelFactory(build=build, seed=seed, double=double),
        method=method,
        training=Training(
            rounds=rounds,
            cohort_size=cohort_size,
            local_epochs=local_epochs,
            local_steps=local_steps,
            equal_steps=equal_steps,
            batch_size=batch_size,
            optimizer=optimizer or OptimizerSettings(),
            learning_rate=learning_rate,
            schedule=ConstantRate(learning_rate),
            stop=stop or StopLimits(),
        ),
    )


@dataclass(frozen=True)
class ConstantRate:
    """The same learning rate in every round."""

    rate: float

    def __call__(self, round: int) -> float:
        """The rate."""
        del round
        return self.rate


def local_engine(experiment: Experiment) -> Engine:
    """An engine with all clients in this process."""
    worker = Worker(
        client_side(experiment),
        experiment.world.data,
        experiment.build_model(),
        layout=experiment_layout(experiment),
    )
    return Engine(experiment, LocalFleet(worker))


def run_rounds(engine: Engine, state: RunState | None = None, rounds: int | None = None) -> RunState:
    """Play rounds until the run ends, or a number of them."""
    state = engine.start() if state is None else state
    while engine.finished_by(state) is None and rounds != 0:
        state, limit = engine.advance(state)
        if limit is not None:
            break
        rounds = None if rounds is None else rounds - 1
    return state


def component_conforms(component: ServerComponent) -> None:
    """Check what every server component promises: frozen, hashable by value, picklable.

    Raises:
        AssertionError: It breaks one of them.
    """
    import pickle

    copy = pickle.loads(pickle.dumps(component))
    if copy != component:
        raise AssertionError(f"{component!r} does not survive pickling")
    if not type(component).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise AssertionError(f"{type(component).__name__} must be a frozen dataclass")
