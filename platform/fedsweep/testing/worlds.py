"""Tiny worlds and conformance suites, for our tests and for contributors'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.catalog import bind_spec
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.client.shards import TrainingData
from fedsweep.components.base import ServerComponent
from fedsweep.components.planning import SubModelPolicy
from fedsweep.engine.engine import Engine
from fedsweep.engine.round import Round
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment, StopLimits, TrainingSettings, World
from fedsweep.experiment.schedules import Constant
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod
from fedsweep.models.network import InputShape, ModelShape, Network
from fedsweep.models.registry import make_network
from fedsweep.records import ClientProfile, RoundContext, RoundRecord, State, best_of
from fedsweep.streams import Stream, stream
from fedsweep.submodel import SubModel
from fedsweep.world.devices import DeviceProfile
from fedsweep.world.transforms import Transform


@dataclass(frozen=True, kw_only=True)
class AsIs(Transform):
    """Inputs reach the model as they are."""

    random: bool = False

    def __call__(self, images: Tensor, *, generator: torch.Generator | None, train: bool) -> Tensor:
        """Return the images, in their own type where that is floating."""
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
        """Return a new module; equal calls give equal values."""
        with stream(self.seed, "model").drawn_globally(bits=56):
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


def build_model(name: str, *, input_shape: InputShape, num_classes: int, stream: Stream, **options: object) -> Network:
    """Make a new network as ``model: {name: ..., options}`` has it, its initial values determined by the stream."""
    spec = bind_spec("model", {"name": name, **options})
    shape = ModelShape(input_shape=input_shape, num_classes=num_classes)
    return make_network(spec.builder, name, spec.parameters, shape=shape, stream=stream)


def linear_model(features: int = 6, num_classes: int = 4) -> nn.Module:
    """Make a linear classifier on flattened inputs."""
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
    """Make an experiment of milliseconds: clusters, a linear model, clients with consecutive slices of the data.

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
        equal_steps: See ``TrainingSettings``.
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
    profiles = _profiles(indices, labels, num_classes)
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
        training=TrainingSettings(
            rounds=rounds,
            cohort_size=cohort_size,
            local_epochs=local_epochs,
            local_steps=local_steps,
            equal_steps=equal_steps,
            batch_size=batch_size,
            optimizer=optimizer or OptimizerSettings(),
            learning_rate=learning_rate,
            schedule=Constant(rate=learning_rate),
            stop=stop or StopLimits(),
        ),
    )


def _profiles(indices: tuple[np.ndarray, ...], labels: np.ndarray, num_classes: int) -> tuple[ClientProfile, ...]:
    counts = [np.bincount(labels[own], minlength=num_classes) for own in indices]
    return tuple(ClientProfile(client=k, num_samples=len(own), label_counts=counts[k]) for k, own in enumerate(indices))


def local_engine(experiment: Experiment) -> Engine:
    """Make an engine with all clients in this process."""
    return Engine(experiment, LocalFleet(experiment))


def run_rounds(engine: Engine, state: RunState | None = None, rounds: int | None = None) -> RunState:
    """Play rounds until the run ends, or a number of them."""
    state = engine.start() if state is None else state
    while engine.finished_by(state) is None and rounds != 0:
        state, limit = engine.advance(state)
        if limit is not None:
            break
        rounds = None if rounds is None else rounds - 1
    return state


def play_round(engine: Engine, state: RunState | None = None) -> Round:
    """Play the next round as it went, before it becomes a row: what each client sent, and what the ledger says."""
    state = engine.start() if state is None else state
    return engine.round_class(engine.planner.plan(state), state, engine.tools).play()


def tiny_pictures(num_samples: int = 12, *, size: int = 32, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Noise: images [S, channels, size, size] and labels [S] of ten classes, for networks that need maps."""
    images = stream(0, "pictures").numpy().normal(size=(num_samples, channels, size, size))
    return images.astype(np.float32), np.arange(num_samples) % 10


def tiny_device(flops_per_s: float, *, overhead_s: float = 0.0, bits_per_s: float = 1e6) -> DeviceProfile:
    """Make a device without latency or jitter, as fast down as up."""
    return DeviceProfile(
        flops_per_s=flops_per_s,
        overhead_s=overhead_s,
        down_bits_per_s=bits_per_s,
        up_bits_per_s=bits_per_s,
        down_latency_s=0.0,
        up_latency_s=0.0,
    )


def with_devices(experiment: Experiment, devices: Sequence[DeviceProfile]) -> Experiment:
    """Return the experiment with these devices, handed out to the clients in turn."""
    world = experiment.world
    profiles = tuple(replace(p, device=devices[p.client % len(devices)]) for p in world.profiles)
    return replace(experiment, world=replace(world, profiles=profiles))


@dataclass(frozen=True, kw_only=True)
class GivenParts(SubModelPolicy):
    """Sub-models named beforehand.

    Attributes:
        rounds: For each round the clients' parts by number, both repeated from the start where they end.
    """

    rounds: tuple[tuple[SubModel, ...], ...]

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        parts = self.rounds[(context.round - 1) % len(self.rounds)]
        return {k: parts[k % len(parts)] for k in context.cohort}, state


def with_parts(*parts: SubModel) -> FederatedMethod:
    """FedAvg where each client always trains its part; the parts are handed out in turn."""
    return FederatedMethod(name="parts", source="", submodels=GivenParts(rounds=(parts,)))


def tiny_record(round: int = 1, **fields: Any) -> RoundRecord:
    """Make a row of two clients that sent 600 bytes each way; what it says besides is up to ``fields``.

    As if all rounds before had sent as much, and had been no better.
    """
    plain = RoundRecord(
        round=round,
        timestamp_ms=1_700_000_000_000 + 1000 * round,
        lr=0.1,
        cohort=(0, 1),
        attendees=(0, 1),
        sync_points=1,
        values_up=150,
        values_down=150,
        bytes_up=600,
        bytes_down=600,
        comm_cost=300,
        comm_ratio=0.5,
        local_steps=4,
        flops=10,
        wall_time_s=0.1,
        eval_time_s=0.1,
        server_time_s=0.1,
        aggregation_weights=(0.5, 0.5),
    )
    made = replace(plain, **fields)
    sums = {"total_bytes": round * (made.bytes_up + made.bytes_down), "best_accuracy": best_of(made.test_accuracy)}
    return replace(made, **(sums | fields))


def component_conforms(component: ServerComponent) -> None:
    """Check what every server component promises: frozen, hashable by value, picklable.

    Raises:
        AssertionError: It breaks one of them.
    """
    import pickle

    copy = pickle.loads(pickle.dumps(component))
    if copy != component or hash(copy) != hash(component):
        raise AssertionError(f"{component!r} does not survive pickling")
    if not type(component).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise AssertionError(f"{type(component).__name__} must be a frozen dataclass")
