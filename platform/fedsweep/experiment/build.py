"""From a configuration to an experiment: the one place where names become objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.catalog import Bound, bound, build_method, build_metrics, method_cards
from fedsweep.client.messages import LaneSettings
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.client.shards import TrainingData
from fedsweep.components.codec import Communication
from fedsweep.config.base import IntegerRange
from fedsweep.config.scenario import Scenario
from fedsweep.config.schema import Config
from fedsweep.errors import ConfigError, DataError, ResourceError
from fedsweep.experiment.clients import check_drawn, client_profiles
from fedsweep.experiment.experiment import Experiment, StopLimits, TrainingSettings, World
from fedsweep.models.adapters import Adapter
from fedsweep.models.initial import read_weights, weights_file, weights_sha256
from fedsweep.models.registry import adapt, make_network
from fedsweep.processes import start_device
from fedsweep.streams import stream
from fedsweep.trees import constants_sha256, layout_of, load_vector, moving_buffers, trained_params
from fedsweep.world.data.datasets import Dataset, load_dataset
from fedsweep.world.drift import Drift
from fedsweep.world.partitions.base import check_parts
from fedsweep.world.population import Built, Drawn
from fedsweep.world.stragglers import WaitForAll

# Lanes where the configuration leaves it open: more idle where a cohort does not divide by them.
_LANES_ON_CPU = 8


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Makes the configured model with the initial values of a seed; picklable.

    Attributes:
        network: What is bound for it.
        input_shape: Channels, height, width.
        num_classes: Outputs.
        seed: The run's.
        adapter: What is trained of it; None: all.
        base: Values of what the adapter freezes [num_values of the network], in place of the seed's.
        initial: Values to begin with [num_values], in place of the seed's.
    """

    network: Bound
    input_shape: tuple[int, int, int]
    num_classes: int
    seed: int
    adapter: Adapter | None = None
    base: Tensor | None = field(default=None, compare=False)
    initial: Tensor | None = field(default=None, compare=False)

    def __call__(self) -> nn.Module:
        """Return a new module; equal builders give equal values."""
        model = make_network(
            self.network.builder,
            self.network.name,
            self.network.parameters,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            stream=stream(self.seed, "model"),
        )
        if self.adapter is not None:
            if self.base is not None:
                tensors = {**trained_params(model), **moving_buffers(model)}
                for name, value in layout_of(model).views(self.base).items():
                    tensors[name].data = value
            adapt(model, self.adapter, stream(self.seed, "adapter"))
            # The frozen values are the builder's own, one in each process; what is trained is each model's.
            for tensor in (*trained_params(model).values(), *moving_buffers(model).values()):
                tensor.data = tensor.data.clone()
        if self.initial is not None:
            load_vector(model, layout_of(model), self.initial)
        return model


def build_experiment(config: Config, dataset: Dataset | None = None, *, config_hash: str | None = None) -> Experiment:
    """Build the experiment that a configuration describes; loads the data.

    Args:
        config: A loaded configuration; what is bound of it already is not bound again.
        dataset: The scenario's data set, where it is loaded already.
        config_hash: Names checkpoints instead of the configuration's own hash.

    Raises:
        InputError: Something that the configuration names is not there, or does not fit with the rest.
    """
    method = build_method(config)
    device, server_device = _devices(config)
    if dataset is None:
        scenario = config.scenario
        dataset = load_dataset(
            scenario.dataset, root=scenario.root, download=scenario.download, image_size=scenario.image_size
        )
    world = build_world(config, dataset)
    channels, height, width = (int(size) for size in dataset.train_images.shape[1:])
    builder = model_builder(config, input_shape=(channels, height, width), num_classes=dataset.num_classes)
    builder = replace(builder, initial=_initial(config, builder))
    experiment = Experiment(
        seed=config.seed,
        world=world,
        build_model=builder,
        method=method,
        training=build_training(config),
        communication=Communication.of(*(_built(config, f"communication.{way}") for way in ("up", "down"))),
        evaluate_every=config.evaluation.every,
        evaluation_batch=config.evaluation.batch_size,
        evaluate_per_client=config.evaluation.per_client,
        targets=tuple(config.evaluation.targets),
        metrics=build_metrics(config),
        device=device,
        server_device=server_device,
        lanes=_lanes(config, device),
        config_hash=config.hash() if config_hash is None else config_hash,
        cards=method_cards(config),
    )
    _ = experiment.template  # a model that does not fit the data is an error here, not in round 1
    return experiment


def model_builder(config: Config, *, input_shape: tuple[int, int, int], num_classes: int) -> ModelBuilder:
    """Return what makes the configured model, with its base's values, but without those to begin with.

    Args:
        config: A loaded configuration.
        input_shape: Channels, height, width.
        num_classes: Outputs.

    Raises:
        InputError: The adapter, or the file of its base, is wrong.
    """
    builder = ModelBuilder(
        network=bound(config, "model"), input_shape=input_shape, num_classes=num_classes, seed=config.seed
    )
    adapter: Adapter | None = _built(config, "model.adapter")
    if adapter is None or adapter.base is None:
        return replace(builder, adapter=adapter)
    key = "model.adapter.base"
    file = weights_file(adapter.base, key=key)
    base = read_weights(file, layout_of(builder()), sha256=adapter.base_sha256, model=config.model.name, key=key)
    return replace(builder, adapter=adapter, base=base)


def _initial(config: Config, builder: ModelBuilder) -> Tensor | None:
    """Return the values that the configuration takes from a file."""
    if config.model.init_from is None:
        return None
    file = weights_file(config.model.init_from)
    sha256 = config.model.init_sha256 or weights_sha256(file)
    model = builder()
    base = constants_sha256(model)
    return read_weights(file, layout_of(model), sha256=sha256, model=config.model.name, base=base)


def _devices(config: Config) -> tuple[str, str]:
    """Return the devices of clients and server; ``auto`` is the GPU for whoever has a share of one."""
    runtime = config.runtime
    device = runtime.device
    if device == "cuda" and not runtime.address and not torch.cuda.is_available():
        raise ResourceError("runtime.device=cuda, but torch sees no GPU here; use runtime.device=cpu or auto")
    if device == "lazy":
        if runtime.gpus_per_client or runtime.gpus_per_server:
            raise ConfigError("runtime.device=lazy has no GPU: set runtime.gpus_per_client and gpus_per_server to 0")
        start_device(device)
        return "lazy", "lazy" if runtime.backend == "local" else "cpu"
    if device == "cpu":
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
    client = "cuda" if device == "cuda" or runtime.gpus_per_client else "cpu"
    server = "cuda" if runtime.gpus_per_server or (device == "cuda" and runtime.backend == "local") else "cpu"
    return client, server


def _lanes(config: Config, device: str) -> LaneSettings | None:
    """Return the settings by which a worker steps clients at once; None: one after another."""
    runtime = config.runtime
    if runtime.executor == "loop" or (runtime.executor == "auto" and device == "cpu"):
        return None
    cohort = build_training(config).cohort_size
    if device == "cpu":
        # Known: tests hold what lanes compute on a CPU to the loop.
        return LaneSettings(width=runtime.lanes if isinstance(runtime.lanes, int) else min(_LANES_ON_CPU, cohort))
    if isinstance(runtime.lanes, int):
        return LaneSettings(width=runtime.lanes, proves=True, records=True)
    return LaneSettings(width=cohort, fits_memory=True, proves=True, records=True)


# -- training ----------------------------------------------------------------------------------------------------


def build_training(config: Config) -> TrainingSettings:
    """Return the training section as the engine reads it."""
    section = config.training
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
        # The slack keeps 0.07 x 100 at 7, where the product is a hair above.
        size = max(1, math.ceil((section.cohort_fraction or 0.0) * config.scenario.clients - 1e-9))
    stop = section.stop
    return TrainingSettings(
        rounds=section.rounds,
        cohort_size=size,
        local_epochs=_number(section.local_epochs) or 1,
        local_steps=None if section.local_steps == "auto" else _number(section.local_steps),
        equal_steps=True if section.local_steps == "auto" else section.equal_steps,
        batch_size=_number(section.batch_size) or 1,
        optimizer=settings,
        learning_rate=optimizer.lr,
        schedule=bound(config, "training.schedule").build(rate=optimizer.lr, num_rounds=section.rounds),
        stop=StopLimits(
            target_accuracy=stop.target_accuracy,
            total_bytes=stop.total_bytes,
            sim_time_s=stop.sim_time_s,
            wall_time_s=stop.wall_time_s,
        ),
    )


def _number(value: int | IntegerRange | None) -> int | tuple[int, int] | None:
    return value.range if isinstance(value, IntegerRange) else value


# -- the world ---------------------------------------------------------------------------------------------------


def build_world(config: Config, dataset: Dataset) -> World:
    """Build the scenario as objects.

    Raises:
        InputError: A part of the scenario is wrong or does not fit the data.
    """
    scenario, seed, rounds = config.scenario, config.seed, config.training.rounds
    validation, proxy, rest = server_share(dataset, scenario, seed)
    sizes = {"num_classes": dataset.num_classes, "num_rounds": rounds, "num_clients": scenario.clients}
    drift = _built(config, "scenario.drift", **sizes)
    indices, availability = _split(config, dataset, rest, drift), _built(config, "scenario.availability", **sizes)
    if isinstance(indices, Drawn):
        check_drawn(config, drift, availability)
    budget = _built(config, "scenario.budgets")
    images, labels = _skewed(config, dataset, indices, drift), dataset.train_labels
    return World(
        data=TrainingData(
            images=images,
            labels=labels,
            transform=bound(config, "scenario.transform").build(dataset),
            num_classes=dataset.num_classes,
        ),
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
        indices=indices,
        profiles=client_profiles(
            dataset, indices, _built(config, "scenario.devices", num_clients=scenario.clients, run_seed=seed)
        ),
        validation=None if validation is None else (images[validation], labels[validation]),
        proxy=_proxy(scenario, dataset, proxy, seed),
        drift=drift,
        availability=availability,
        budgets=None if budget is None else budget.assign(scenario.clients, stream(seed, "budgets")),
        stragglers=_built(config, "scenario.devices.stragglers") or WaitForAll(),
    )


def _built(config: Config, key: str, **provided: Any) -> Any:
    """Build the object that a key names; None where it is null."""
    item = bound(config, key)
    return None if item is None else item.build(**provided)


def server_share(
    dataset: Dataset, scenario: Scenario, seed: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray]:
    """Return indices that the server keeps for validation and as proxy data, and the rest; drawn class by class."""
    server_data = scenario.server_data
    generator = stream(seed, "server data").numpy()
    validation: list[np.ndarray] = []
    proxy: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for label in range(dataset.num_classes):
        members = generator.permutation(np.flatnonzero(dataset.train_labels == label))
        num_validation = round(server_data.validation * len(members))
        num_proxy = (server_data.proxy.per_class if server_data.proxy is not None else None) or 0
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
        joined[0] if server_data.validation else None,
        joined[1] if server_data.proxy is not None and server_data.proxy.per_class is not None else None,
        joined[2],
    )


def _split(config: Config, dataset: Dataset, rest: np.ndarray, drift: Drift | None) -> Sequence[np.ndarray]:
    """Return each client's samples, as indices into the training set."""
    scenario, partition = config.scenario, bound(config, "scenario.partition").build()
    if drift is not None and drift.pool == "all" and not partition.draws_clients:
        return (rest,) * scenario.clients
    parts = partition.split(
        dataset.train_labels[rest],
        scenario.clients,
        stream(config.seed, "partition"),
        num_classes=dataset.num_classes,
        writers=None if dataset.writers is None else dataset.writers[rest],
    )
    if partition.draws_clients:
        return Built(length=scenario.clients, build=lambda k: rest[parts[k]])
    check_parts(parts, num_samples=len(rest), num_clients=scenario.clients)
    return tuple(rest[part] for part in parts)


def _skewed(config: Config, dataset: Dataset, indices: Sequence[np.ndarray], drift: Drift | None) -> np.ndarray:
    """Return the training images, those of each client as ``scenario.feature_skew`` has them."""
    skew = _built(config, "scenario.feature_skew")
    if skew is None:
        return dataset.train_images
    if drift is not None and drift.pool == "all":
        raise ConfigError(
            f"scenario.feature_skew gives each client pictures of its own, but under scenario.drift kind"
            f" {config.scenario.drift.kind!r} all clients draw from the same; set one of them to null"  # type: ignore[union-attr]
        )
    draws = stream(config.seed, "feature skew")
    changed: np.ndarray = skew.apply(dataset.train_images, indices, scale=dataset.scale, stream=draws)
    return changed


def _proxy(
    scenario: Scenario, dataset: Dataset, chosen: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray | None] | None:
    proxy = scenario.server_data.proxy
    if proxy is None:
        return None
    if proxy.dataset is not None and proxy.samples is not None:
        return _foreign(scenario, dataset, name=proxy.dataset, samples=proxy.samples, seed=seed), None
    return dataset.train_images[chosen], dataset.train_labels[chosen] if proxy.labelled else None


def _foreign(scenario: Scenario, dataset: Dataset, *, name: str, samples: int, seed: int) -> np.ndarray:
    """Return images of another data set, in the shape of this one's; its classes mean nothing here."""
    size = int(dataset.train_images.shape[-1])
    foreign = load_dataset(name, root=scenario.root, download=scenario.download, image_size=size)
    same = foreign.train_images.shape[1:] == dataset.train_images.shape[1:] and foreign.scale == dataset.scale
    if not same or samples > len(foreign.train_images):
        raise DataError(
            f"scenario.server_data.proxy: {samples} samples of {name} can't stand beside {dataset.name}: it has"
            f" {len(foreign.train_images)} of shape {foreign.train_images.shape[1:]} and scale {foreign.scale:g}, but"
            f" {dataset.train_images.shape[1:]} and {dataset.scale:g} are needed; choose another set, or fewer samples"
        )
    chosen = stream(seed, "proxy data").numpy().choice(len(foreign.train_images), size=samples, replace=False)
    return foreign.train_images[np.sort(chosen)]
