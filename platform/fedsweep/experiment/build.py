"""From a configuration to an experiment: the one place where names become objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedsweep.catalog import build_method
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.client.shards import TrainingData
from fedsweep.config.base import IntegerRange
from fedsweep.config.load import resolve
from fedsweep.config.scenario import Scenario
from fedsweep.config.schema import Config
from fedsweep.config.training import CosineSchedule, ExponentialSchedule
from fedsweep.config.training import Training as TrainingSection
from fedsweep.errors import ConfigError, DataError, ResourceError
from fedsweep.experiment import schedules
from fedsweep.experiment.experiment import Experiment, StopLimits, Training, World
from fedsweep.models.registry import build_model
from fedsweep.records import ClientProfile
from fedsweep.streams import stream
from fedsweep.world.availability import build_availability, capabilities
from fedsweep.world.budgets import build_budget
from fedsweep.world.data.datasets import Dataset, load_dataset
from fedsweep.world.devices import build_devices
from fedsweep.world.drift import Drift, build_drift
from fedsweep.world.label_stats import label_counts
from fedsweep.world.partitions import build_partition, check_parts, partition_builder
from fedsweep.world.stragglers import build_straggler_policy
from fedsweep.world.transforms import build_transform


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Makes the configured model with the initial values of a seed; picklable.

    Attributes:
        name: The model's.
        options: Its options.
        input_shape: Channels, height, width.
        num_classes: Outputs.
        seed: The run's.
    """

    name: str
    options: tuple[tuple[str, object], ...]
    input_shape: tuple[int, int, int]
    num_classes: int
    seed: int

    def __call__(self) -> nn.Module:
        """A new module; equal builders give equal values."""
        return build_model(
            self.name,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            stream=stream(self.seed, "model"),
            **dict(self.options),
        )


def resolve_config(config: Config) -> Config:
    """The configuration with every parameter of its method and its partition; what a run keeps and repeats.

    Raises:
        ConfigError: A name or a parameter is unknown, or a value is of the wrong type.
    """
    return resolve(config, {"scenario.partition": partition_builder})


def build_experiment(config: Config, dataset: Dataset | None = None) -> Experiment:
    """The experiment that a configuration describes; loads the data.

    Args:
        config: A loaded configuration.
        dataset: The scenario's data set, where it is loaded already.

    Raises:
        InputError: Something that the configuration names is not there, or does not fit with the rest.
    """
    method = build_method(config.method)
    device, server_device = _devices(config)
    if dataset is None:
        scenario = config.scenario
        dataset = load_dataset(
            scenario.dataset, root=scenario.root, download=scenario.download, image_size=scenario.image_size
        )
    world = build_world(config, dataset)
    channels, height, width = (int(size) for size in dataset.train_images.shape[1:])
    builder = ModelBuilder(
        name=config.model.name,
        options=tuple(sorted(config.model.parameters.items())),
        input_shape=(channels, height, width),
        num_classes=dataset.num_classes,
        seed=config.seed,
    )
    builder()  # a model that does not fit the data is an error here, not in round 1
    return Experiment(
        seed=config.seed,
        world=world,
        build_model=builder,
        method=method,
        training=build_training(config.training, num_clients=config.scenario.clients),
        evaluate_every=config.evaluation.every,
        evaluation_batch=config.evaluation.batch_size,
        targets=tuple(config.evaluation.targets),
        device=device,
        server_device=server_device,
        config_hash=config.hash(),
    )


def _devices(config: Config) -> tuple[str, str]:
    """Where clients and server compute; ``auto`` is the GPU for whoever has a share of one."""
    runtime = config.runtime
    asked = runtime.device
    if asked == "cuda" and not runtime.address and not torch.cuda.is_available():
        raise ResourceError("runtime.device=cuda, but torch sees no GPU here; use runtime.device=cpu or auto")
    if asked == "cpu":
        if (runtime.gpus_per_client or runtime.gpus_per_server) and not runtime.address:
            raise ConfigError(
                f"runtime.device=cpu uses no GPU, so runtime.gpus_per_client={runtime.gpus_per_client:g},"
                f" runtime.gpus_per_server={runtime.gpus_per_server:g} would take them from this machine for nothing;"
                " set both to 0 (with runtime.address they reserve what the cluster counts as GPUs)"
            )
        return "cpu", "cpu"
    if (runtime.gpus_per_client or runtime.gpus_per_server) and not runtime.address and not torch.cuda.is_available():
        raise ResourceError(
            f"runtime.gpus_per_client={runtime.gpus_per_client:g}, runtime.gpus_per_server="
            f"{runtime.gpus_per_server:g}, but torch sees no GPU here; set both to 0, or join a cluster by"
            " runtime.address"
        )
    client = "cuda" if asked == "cuda" or runtime.gpus_per_client else "cpu"
    server = "cuda" if runtime.gpus_per_server or (asked == "cuda" and runtime.backend == "local") else "cpu"
    return client, server


# -- training ----------------------------------------------------------------------------------------------------


def build_training(section: TrainingSection, *, num_clients: int) -> Training:
    """The training section as the engine reads it."""
    optimizer = section.optimizer
    settings = OptimizerSettings(
        name=optimizer.name,
        momentum=getattr(optimizer, "momentum", 0.0),
        nesterov=getattr(optimizer, "nesterov", False),
        weight_decay=optimizer.weight_decay,
        clip_norm=section.clip_norm,
        betas=(getattr(optimizer, "mean_decay", 0.9), getattr(optimizer, "square_decay", 0.999)),
        eps=getattr(optimizer, "epsilon", 1e-8),
        keep=section.optimizer_state,
    )
    size = section.cohort_size
    if size is None:
        size = max(1, math.ceil((section.cohort_fraction or 0.0) * num_clients - 1e-9))
    stop = section.stop
    return Training(
        rounds=section.rounds,
        cohort_size=size,
        local_epochs=_number(section.local_epochs) or 1,
        local_steps=None if section.local_steps == "auto" else _number(section.local_steps),
        equal_steps=True if section.local_steps == "auto" else section.equal_steps,
        batch_size=_number(section.batch_size) or 1,
        optimizer=settings,
        learning_rate=optimizer.lr,
        schedule=build_schedule(section),
        stop=StopLimits(
            target_accuracy=stop.target_accuracy,
            total_bytes=stop.total_bytes,
            sim_time_s=stop.sim_time_s,
            wall_time_s=stop.wall_time_s,
        ),
    )


def _number(value: int | IntegerRange | None) -> int | tuple[int, int] | None:
    return value.range if isinstance(value, IntegerRange) else value


def build_schedule(section: TrainingSection) -> Callable[[int], float]:
    """The learning rate by round."""
    rate, given = section.optimizer.lr, section.schedule
    if isinstance(given, CosineSchedule):
        if given.floor > rate:
            raise ConfigError(
                f"training.schedule.floor must not exceed training.optimizer.lr, but got floor={given.floor:g},"
                f" lr={rate:g}; lower the floor"
            )
        return schedules.Cosine(rate=rate, floor=given.floor, num_rounds=section.rounds)
    if isinstance(given, ExponentialSchedule):
        return schedules.Exponential(rate=rate, decay=given.decay)
    if given == "fedstg":
        return schedules.FedStgSchedule(rate=rate, num_rounds=section.rounds)
    return schedules.Constant(rate=rate)


# -- the world ---------------------------------------------------------------------------------------------------


def build_world(config: Config, dataset: Dataset) -> World:
    """The scenario as objects.

    Raises:
        InputError: A part of the scenario is wrong or does not fit the data.
    """
    scenario, seed, rounds = config.scenario, config.seed, config.training.rounds
    validation, proxy, rest = server_share(dataset, scenario, seed)
    drift = build_drift(
        _tree(scenario.drift), num_classes=dataset.num_classes, num_rounds=rounds, num_clients=scenario.clients
    )
    indices = _split(scenario, dataset, rest, seed, drift)
    availability = None
    if scenario.availability is not None:
        availability = build_availability(_tree(scenario.availability), num_rounds=rounds, num_clients=scenario.clients)
    plan = None
    if scenario.budgets is not None:
        plan = build_budget(_tree(scenario.budgets)).assign(scenario.clients, stream(seed, "budgets"))
    images, labels = dataset.train_images, dataset.train_labels
    return World(
        data=TrainingData(
            images=images,
            labels=labels,
            transform=build_transform(scenario.transform, dataset),
            num_classes=dataset.num_classes,
        ),
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
        indices=indices,
        profiles=_profiles(scenario, dataset, indices, seed),
        validation=None if validation is None else (images[validation], labels[validation]),
        proxy=_proxy(scenario, dataset, proxy, seed),
        drift=drift,
        availability=availability,
        budgets=plan,
        stragglers=build_straggler_policy((_tree(scenario.devices) or {}).get("stragglers")),
    )


def _tree(section: object) -> dict[str, object] | None:
    return None if section is None else section.model_dump(mode="python")  # type: ignore[attr-defined]


def server_share(
    dataset: Dataset, scenario: Scenario, seed: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray]:
    """Indices that the server keeps for validation and as proxy data, and the rest; drawn class by class."""
    held = scenario.server_data
    generator = stream(seed, "server data").numpy()
    validation: list[np.ndarray] = []
    proxy: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for label in range(dataset.num_classes):
        members = generator.permutation(np.flatnonzero(dataset.train_labels == label))
        num_validation = round(held.validation * len(members))
        num_proxy = (held.proxy.per_class if held.proxy is not None else None) or 0
        if num_validation + num_proxy > len(members):
            raise DataError(
                f"scenario.server_data keeps {num_validation} + {num_proxy} samples of class {label}, but the training"
                f" set has {len(members)}; lower validation or proxy.per_class"
            )
        validation.append(members[:num_validation])
        proxy.append(members[num_validation : num_validation + num_proxy])
        rest.append(members[num_validation + num_proxy :])
    joined = [np.sort(np.concatenate(part)) for part in (validation, proxy, rest)]
    return (
        joined[0] if held.validation else None,
        joined[1] if held.proxy is not None and held.proxy.per_class is not None else None,
        joined[2],
    )


def _split(
    scenario: Scenario, dataset: Dataset, rest: np.ndarray, seed: int, drift: Drift | None
) -> tuple[np.ndarray, ...]:
    """Each client's samples, as indices into the training set."""
    if drift is not None and drift.pool == "all":
        return (rest,) * scenario.clients
    partition = build_partition(scenario.partition.model_dump(mode="python"))
    parts = partition.split(
        dataset.train_labels[rest],
        scenario.clients,
        stream(seed, "partition"),
        num_classes=dataset.num_classes,
        writers=None if dataset.writers is None else dataset.writers[rest],
    )
    check_parts(parts, num_samples=len(rest), num_clients=scenario.clients)
    return tuple(rest[part] for part in parts)


def _profiles(
    scenario: Scenario, dataset: Dataset, indices: tuple[np.ndarray, ...], seed: int
) -> tuple[ClientProfile, ...]:
    counts_NC = label_counts(dataset.train_labels, indices, dataset.num_classes)
    fleet = None
    if scenario.devices is not None:
        fleet = build_devices(_tree(scenario.devices) or {}, scenario.clients, seed)
    able = capabilities(scenario.clients)
    return tuple(
        ClientProfile(
            client=k,
            num_samples=len(indices[k]),
            label_counts=counts_NC[k],
            capability=float(able[k]),
            device=None if fleet is None else fleet.devices[k],
        )
        for k in range(scenario.clients)
    )


def _proxy(
    scenario: Scenario, dataset: Dataset, chosen: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray | None] | None:
    given = scenario.server_data.proxy
    if given is None:
        return None
    if given.dataset is not None and given.samples is not None:
        return _foreign(scenario, dataset, name=given.dataset, samples=given.samples, seed=seed), None
    return dataset.train_images[chosen], dataset.train_labels[chosen] if given.labelled else None


def _foreign(scenario: Scenario, dataset: Dataset, *, name: str, samples: int, seed: int) -> np.ndarray:
    """Images of another data set, in the shape of this one's; its classes mean nothing here."""
    size = int(dataset.train_images.shape[-1])
    found = load_dataset(name, root=scenario.root, download=scenario.download, image_size=size)
    same = found.train_images.shape[1:] == dataset.train_images.shape[1:] and found.scale == dataset.scale
    if not same or samples > len(found.train_images):
        raise DataError(
            f"scenario.server_data.proxy: {samples} samples of {name} can't stand beside {dataset.name}: it has"
            f" {len(found.train_images)} of shape {found.train_images.shape[1:]} and scale {found.scale:g}, but"
            f" {dataset.train_images.shape[1:]} and {dataset.scale:g} are needed; choose another set, or fewer samples"
        )
    chosen = stream(seed, "proxy data").numpy().choice(len(found.train_images), size=samples, replace=False)
    return found.train_images[np.sort(chosen)]
