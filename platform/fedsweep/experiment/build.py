"""From a configuration to an experiment: the one place where names become objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.catalog import Bound, bound, build_method, build_metrics, method_cards, task_metrics
from fedsweep.client.compute_device import start_device
from fedsweep.client.messages import LaneSettings
from fedsweep.client.optimizer import OptimizerGroup, OptimizerSettings
from fedsweep.components.codec import Communication
from fedsweep.config.base import IntegerRange
from fedsweep.config.load import load_config, with_sections
from fedsweep.config.schema import Config
from fedsweep.config.training import EXCLUSIVE_KEYS
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.experiment.build_world import build_world, built, dataset_of
from fedsweep.experiment.experiment import Experiment, Option, StopLimits, TrainingSettings
from fedsweep.models.adapters import Adapter
from fedsweep.models.initial import read_weights, weights_file, weights_sha256
from fedsweep.models.network import ModelShape
from fedsweep.models.registry import adapt, make_network
from fedsweep.models.user_network import check_types
from fedsweep.streams import stream
from fedsweep.tasks.base import Task
from fedsweep.trees import are_equal, constants_sha256, layout_of, load_vector, moving_buffers, trained_params, zeros
from fedsweep.world.data.datasets import Dataset

# Lanes where the configuration leaves it open: more idle where a cohort does not divide by them.
_LANES_ON_CPU = 8


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Makes the configured model with the initial values of a seed; picklable.

    Attributes:
        network: What is bound for it.
        shape: Of what it takes and gives.
        seed: The run's.
        adapter: What is trained of it; None: all.
        base: Values of what the adapter freezes [num_values of the network], in place of the seed's.
        initial: Values to begin with [num_values], in place of the seed's.
    """

    network: Bound
    shape: ModelShape
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
            shape=self.shape,
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
        check_types(model, name=self.network.name)
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
        dataset = dataset_of(config.scenario)
    world = build_world(config, dataset)
    builder = model_builder(config, inputs=dataset.train.inputs, task=world.data.learned)
    builder = replace(builder, initial=_initial(config, builder))
    experiment = Experiment(
        seed=config.seed,
        world=world,
        build_model=builder,
        method=method,
        training=build_training(config),
        communication=Communication.of(*(built(config, f"communication.{way}") for way in ("up", "down"))),
        evaluate_every=config.evaluation.every,
        evaluation_batch=config.evaluation.batch_size,
        evaluate_per_client=config.evaluation.per_client,
        targets=tuple(config.evaluation.targets),
        metrics=build_metrics(config),
        device=device,
        server_device=server_device,
        tf32=config.runtime.tf32,
        config_hash=config.hash() if config_hash is None else config_hash,
        cards=method_cards(config),
    )
    if config.planner is not None:
        experiment = with_options(config, experiment)
    experiment = replace(experiment, lanes=_lanes(config, device, cohort=experiment.most_in_cohort))
    # A model that does not fit the data is an error here, not in round 1.
    experiment.training.optimizer.check(experiment.layout)
    return experiment


def with_options(config: Config, experiment: Experiment) -> Experiment:
    """Return the experiment with the ways of playing a round that its planner may choose.

    Raises:
        ConfigError: There is no limit to plan for, or a choice would change more than how rounds are planned.
    """
    assert config.planner is not None
    stop = experiment.training.stop
    if stop.total_bytes is None and stop.sim_time_s is None:
        raise ConfigError("planner needs a budget to spend: set scenario.budgets={total_bytes: 20 MB}, say")
    options = tuple(
        Option(values=values, experiment=_option(config, experiment, values)) for values in config.planner.options
    )
    for way in ("up", "down"):
        if len({getattr(option.experiment.communication, way).error_feedback for option in options}) > 1:
            raise ConfigError(
                "planner.choices: with error feedback the sender remembers what its messages left out, so all codecs of"
                f" communication.{way} need it, or none"
            )
    return replace(experiment, spending=built(config, "planner"), options=options)


def _option(config: Config, experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """Return the experiment with other values."""
    names = [key.removeprefix("training.") for key in values]
    pairs = [pair for pair in EXCLUSIVE_KEYS if set(pair) & set(names)]
    sections = {f"training.{name}": None for pair in pairs for name in pair} | dict(values)
    if "merge" in config.method and any(key.startswith("method.") for key in values):
        raise ConfigError("planner.choices: parameters of methods that are merged can't be chosen round by round")
    codecs = {way: sections.pop(f"communication.{way}") for way in ("up", "down") if f"communication.{way}" in values}
    if codecs:
        sections["communication"] = config.tree().get("communication", {}) | codecs
    # Not what is bound already: it is of the values that these replace.
    changed = load_config(with_sections(config, sections).tree())
    other = replace(
        experiment,
        method=build_method(changed),
        training=build_training(changed),
        communication=Communication.of(*(built(changed, f"communication.{way}") for way in ("up", "down"))),
    )
    whole = experiment.method
    # Each at its own pace: a training lasts over rounds of others, and is planned as that in which it ends.
    if whole.pacing.has_hubs and whole.pacing.draws_candidates and {"local_epochs", "local_steps"} & set(names):
        raise ConfigError(
            f"planner.choices: {values} would change how long clients of method {whole.name} train in the midst of it,"
            " since their training goes on over rounds of others; choose other keys"
        )
    if replace(other.method, selection=whole.selection, pacing=whole.pacing) != whole:
        raise ConfigError(
            f"planner.choices: {values} changes more than how rounds are planned, so it is another method"
        )
    other.__dict__["template"] = experiment.template
    if not are_equal(other.initial_states, experiment.initial_states):
        raise ConfigError(
            f"planner.choices: {values} is in the state that the run begins with, so it can't change later"
        )
    return other


def model_builder(config: Config, *, inputs: np.ndarray, task: Task) -> ModelBuilder:
    """Return what makes the configured model, with its base's values, but without those to begin with.

    Args:
        config: A loaded configuration.
        inputs: Of the data set [S, ...]; shape and type alone count.
        task: What is learned.

    Raises:
        InputError: The adapter, or the file of its base, is wrong.
    """
    names = inputs.dtype.names
    is_picture = names is None and inputs.ndim == 4 and inputs.dtype in (np.uint8, np.float32)
    shape = ModelShape(
        input_shape=tuple(inputs.shape[1:]) if names is None else {name: inputs.dtype[name].shape for name in names},
        num_classes=task.num_outputs,
        outputs=() if task.has_classes else task.outputs,
        sample=None if is_picture else zeros(inputs, 1),
    )
    builder = ModelBuilder(network=bound(config, "model"), shape=shape, seed=config.seed)
    adapter: Adapter | None = built(config, "model.adapter")
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


def _lanes(config: Config, device: str, *, cohort: int) -> LaneSettings | None:
    """Return the settings by which a worker steps clients at once; None: one after another."""
    runtime = config.runtime
    if runtime.executor == "loop" or (runtime.executor == "auto" and device == "cpu"):
        return None
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
        groups=tuple(OptimizerGroup(**group.model_dump()) for group in optimizer.groups),
    )
    size = section.cohort_size
    if size is None:
        # The slack keeps 0.07 x 100 at 7, where the product is a hair above.
        size = max(1, math.ceil((section.cohort_fraction or 0.0) * config.scenario.clients - 1e-9))
    stop, budget = section.stop, built(config, "scenario.budgets")
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
            target=_target(config),
            target_accuracy=stop.target_accuracy,
            total_bytes=_least(stop.total_bytes, getattr(budget, "total_bytes", None)),
            sim_time_s=_least(stop.sim_time_s, getattr(budget, "sim_time_s", None)),
            wall_time_s=stop.wall_time_s,
        ),
    )


def _target(config: Config) -> tuple[str, float, str] | None:
    """Return the figure of the test that ends the run, its value, and which way is better."""
    target = config.training.stop.target
    if target is None:
        return None
    modes = {entry["name"]: str(entry["mode"]) for entry in task_metrics(config)}
    modes |= {column: metric.declaration.mode for metric in build_metrics(config) for column in metric.columns}
    if target.metric not in modes:
        named = f"known: {', '.join(modes)}" if modes else "evaluation.metrics names none"
        raise ConfigError(
            f"training.stop.target.metric: the test has no figure {target.metric!r} ({named}); name it in"
            " evaluation.metrics, or set target_accuracy for the accuracy"
        )
    return target.metric, target.value, modes[target.metric]


def _least(*limits: Any) -> Any:
    """Return the lowest limit; None: there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def _number(value: int | IntegerRange | None) -> int | tuple[int, int] | None:
    return value.range if isinstance(value, IntegerRange) else value
