"""An experiment as objects: what the configuration describes, ready to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedsweep.card import Card
from fedsweep.client.messages import ClientSide, LaneSettings
from fedsweep.client.optimizer import OptimizerSettings, optimizer_riders
from fedsweep.client.shards import TrainingData
from fedsweep.components.codec import Codec, Communication
from fedsweep.components.metrics import Metric
from fedsweep.components.spending import SpendingPlanner
from fedsweep.errors import ConfigError
from fedsweep.experiment.clients import ClientColumns, asks_singly
from fedsweep.method import FederatedMethod
from fedsweep.models.cost import Counted, counted
from fedsweep.records import ClientProfile, RoundRecord, ServerContext, State
from fedsweep.streams import stream
from fedsweep.trees import FlatLayout, copied, layout_of, model_vector, targets_of
from fedsweep.world.availability import Availability
from fedsweep.world.budgets import BudgetPlan
from fedsweep.world.drift import Drift, RoundClasses
from fedsweep.world.label_stats import test_shares
from fedsweep.world.partitions.draws import parts_by_owner
from fedsweep.world.population import Drawn
from fedsweep.world.stragglers import StragglerPolicy, WaitForAll
from fedsweep.world.topology import Star, Topology

# Proxy data and validation data, each inputs and labels; None where there are none.
ServerTensors = tuple[tuple[Tensor, Tensor | None] | None, tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, kw_only=True)
class StopLimits:
    """When a run ends before its last round; None: no such limit.

    Attributes:
        target: A column of the test, the value that ends the run after the round that reached it, and whether ``max``
            or ``min`` is better.
        target_accuracy: Ends after the round that reached it.
        total_bytes: Ends before the first round that would pass it.
        sim_time_s: Ends before the first round that would pass it.
        wall_time_s: Ends after the round that reached it.
    """

    target: tuple[str, float, str] | None = None
    target_accuracy: float | None = None
    total_bytes: int | None = None
    sim_time_s: float | None = None
    wall_time_s: float | None = None

    def reached_by(self, record: RoundRecord) -> str | None:
        """Return the target that a round reached; None: none."""
        accuracy = record.test_accuracy
        if self.target_accuracy is not None and accuracy is not None and accuracy >= self.target_accuracy:
            return "target_accuracy"
        if self.target is not None:
            name, value, mode = self.target
            figure = record.extra.get(name)
            if figure is not None and (figure >= value if mode == "max" else figure <= value):
                return "target"
        return None

    def passed_by(self, total_bytes: int, sim_time_s: float | None) -> str | None:
        """Return the limit that a round would pass with so many bytes sent, at such a virtual time; None: none."""
        if self.total_bytes is not None and total_bytes > self.total_bytes:
            return "total_bytes"
        if self.sim_time_s is not None and sim_time_s is not None and sim_time_s > self.sim_time_s:
            return "sim_time_s"
        return None


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The training section as the engine reads it.

    Attributes:
        rounds: Rounds of the run.
        cohort_size: Clients asked for in each round.
        local_epochs: Passes over its data per client and round; a pair is the range of a draw per client.
        local_steps: Steps per client and round; None: by ``local_epochs``.
        equal_steps: All clients take the same number of steps; None: as the method asks.
        batch_size: Samples per step; a pair is the range of a draw per client.
        optimizer: The clients' optimiser.
        learning_rate: The rate before the schedule.
        schedule: ``schedule(round) -> rate``.
        stop: Limits.
    """

    rounds: int
    cohort_size: int
    local_epochs: int | tuple[int, int]
    local_steps: int | tuple[int, int] | None
    equal_steps: bool | None
    batch_size: int | tuple[int, int]
    optimizer: OptimizerSettings
    learning_rate: float
    schedule: Callable[[int], float]
    stop: StopLimits = field(default_factory=StopLimits)


@dataclass(frozen=True, kw_only=True)
class World:
    """The scenario as objects: the same for every method in a fair comparison.

    Attributes:
        data: What clients train on.
        test_images: Inputs [T, ...].
        test_labels: Targets [T, ...].
        test_owners: The client whose each test sample really is [T], -1: nobody's; None where they are not told apart.
        indices: For each client the indices of its training samples; of a drawn population made when asked for.
        profiles: All clients, likewise.
        validation: Images and labels held out on the server, or None.
        proxy: Images and labels (None: unlabelled) on the server for methods that need them, or None.
        drift: How the clients' classes change, or None.
        availability: Who is there, or None: everybody.
        budgets: Who affords what, or None.
        stragglers: When the server stops waiting for slow or lost devices.
        topology: Who talks with whom.
        notes: What a reader should know of the samples, in sentences.
    """

    data: TrainingData
    test_images: np.ndarray
    test_labels: np.ndarray
    indices: Sequence[np.ndarray]
    profiles: Sequence[ClientProfile]
    test_owners: np.ndarray | None = None
    validation: tuple[np.ndarray, np.ndarray] | None = None
    proxy: tuple[np.ndarray, np.ndarray | None] | None = None
    drift: Drift | None = None
    availability: Availability | None = None
    budgets: BudgetPlan | None = None
    stragglers: StragglerPolicy = field(default_factory=WaitForAll)
    topology: Topology = Star()
    notes: tuple[str, ...] = ()

    @property
    def is_drawn(self) -> bool:
        """True where clients are made when they are asked for, so that nobody should ask all of them."""
        return isinstance(self.profiles, Drawn)

    @property
    def asks_singly(self) -> bool:
        """True where clients are asked one by one who is there, see ``asks_singly`` of ``experiment.clients``."""
        return asks_singly(self.profiles, self.drift, self.availability)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A way of playing rounds that a planner may choose.

    Attributes:
        values: What it sets, by dotted key of the configuration.
        experiment: The experiment that is set so.
    """

    values: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a run follows from.

    Attributes:
        seed: Everything random follows from it.
        world: The scenario.
        build_model: Makes the full model with its initial values; deterministic.
        method: What is run.
        training: How clients train.
        communication: The codecs that the configuration names.
        evaluate_every: Rounds between two evaluations; the last round is always evaluated.
        evaluation_batch: Samples per forward pass of an evaluation.
        evaluate_per_client: Accuracies by class and by client are kept.
        targets: Test accuracies whose first crossing is told in the result.
        metrics: Further figures of each test.
        device: ``"cpu"`` or ``"cuda"`` for the clients.
        server_device: The same for the server.
        tf32: On a GPU convolutions and products of float32 read rounded factors, the clients' and the server's.
        lanes: How a worker steps clients together; None: one after another.
        config_hash: Names the configuration; checkpoints of another one are refused.
        cards: The cards of the methods, each with the parameters that its method was built with; for forecasts.
        spending: Chooses among the options, round by round; None: there are none.
        options: Ways of playing a round.
    """

    seed: int
    world: World
    build_model: Callable[[], nn.Module]
    method: FederatedMethod
    training: TrainingSettings
    communication: Communication = Communication()
    evaluate_every: int = 1
    evaluation_batch: int = 1000
    evaluate_per_client: bool = False
    targets: tuple[float, ...] = ()
    metrics: tuple[Metric, ...] = ()
    device: str = "cpu"
    server_device: str = "cpu"
    tf32: bool = False
    lanes: LaneSettings | None = None
    config_hash: str = ""
    cards: tuple[tuple[Card, Mapping[str, Any]], ...] = ()
    spending: SpendingPlanner | None = None
    options: tuple[Option, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: another process makes the rest itself, and need not be sent a model."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def most_in_cohort(self) -> int:
        """Return the most clients that a round asks for: of the options' sizes the largest, where there are options."""
        sizes = [option.experiment.training.cohort_size for option in self.options]
        return max(sizes, default=self.training.cohort_size)

    @property
    def up_codec(self) -> Codec:
        """Return what clients' messages go through: the method's own codec, or the configuration's."""
        return self.method.codec if self.method.codec.encodes else self.communication.up

    @cached_property
    def template(self) -> nn.Module:
        """The full model with its initial values, made once; nobody changes it."""
        return self.build_model()

    def new_model(self) -> nn.Module:
        """Return a copy of the template, for whoever changes it."""
        return copied(self.template)

    @cached_property
    def forward_pass(self) -> Counted:
        """The template's forward pass of one sample, counted once for all that ask for costs."""
        return counted(self.template, tuple(int(size) for size in self.world.data.images.shape[1:]))

    @cached_property
    def shown_model(self) -> nn.Module:
        """The one that components are shown before round 1: what one of them does to it reaches no client."""
        return self.new_model()

    @cached_property
    def layout(self) -> FlatLayout:
        """Return the full model's places in its vector, riders included."""
        riders = optimizer_riders(self.training.optimizer, layout_of(self.template).num_params)
        return layout_of(self.template, riders)

    @cached_property
    def initial_vector(self) -> Tensor:
        """The initial model [num_values]; nobody changes it."""
        return model_vector(self.template, self.layout)

    @cached_property
    def server_tensors(self) -> ServerTensors:
        """The server's proxy and validation data as components see them: inputs, transformed, and labels."""
        proxy = validation = None
        if self.world.proxy is not None:
            images, labels = self.world.proxy
            inputs = self.world.data.transformed(images, self.layout.dtype)
            proxy = (inputs, None if labels is None else targets_of(labels))
        if self.world.validation is not None:
            images, labels = self.world.validation
            validation = (self.world.data.transformed(images, self.layout.dtype), targets_of(labels))
        return proxy, validation

    @cached_property
    def initial_states(self) -> Mapping[str, State]:
        """Each server component's state before round 1, by seam: checks, forecasts and the run begin with the same.

        Raises:
            ConfigError: A component can't work in this world.
        """
        return {seam: part.init(server_context(self, seam)) for seam, part in self.method.server_components}

    @cached_property
    def test_shares(self) -> tuple[np.ndarray, ...]:
        """Each client's part of the test set, as indices into it: its own samples, or see :func:`test_shares`."""
        if (owners := self.world.test_owners) is not None:
            return tuple(parts_by_owner(owners, len(self.world.profiles)))
        return test_shares(self.world.test_labels, self.label_counts_NC, stream(self.seed, "test shares"))

    @cached_property
    def label_counts_NC(self) -> np.ndarray:
        """Training samples per client and class."""
        return ClientColumns.of(self.world.profiles).label_counts_NC

    def drawn(self, value: int | tuple[int, int], purpose: str, client: int) -> int:
        """Return a configured number, or a client's own draw from a range, the same in every round."""
        if isinstance(value, int):
            return value
        low, high = value
        return int(stream(self.seed, purpose, 0, client).numpy().integers(low, high + 1))

    def classes(self, round: int) -> Mapping[int, tuple[int, ...]]:
        """Return all clients' classes of a round under drift; empty without drift."""
        world, drift = self.world, self.world.drift
        if drift is None:
            return {}
        num_clients, num_classes = len(world.profiles), world.data.num_classes
        return RoundClasses(drift=drift, seed=self.seed, num_clients=num_clients, num_classes=num_classes, round=round)

    def test_owners(self, round: int) -> np.ndarray | None:
        """Return the world's owners of test samples [T]; under drift those of the classes that they have in a round."""
        owners, classes = self.world.test_owners, self.classes(round)
        if owners is None or not classes:
            return owners
        if not self.world.data.learned.has_classes:
            return None
        has_NC = np.zeros(self.label_counts_NC.shape, bool)
        for client, own in classes.items():
            has_NC[client, list(own)] = True
        return np.where(has_NC[owners, self.world.test_labels], owners, -1)

    def equal_steps(self) -> int:
        """Return local steps of every client where all take the same number.

        Source: DynamicFL, Eq. 4: ``floor(sum_m n_m E / (M B))``.
        """
        epochs, batch = self.training.local_epochs, self.training.batch_size
        if not isinstance(epochs, int) or not isinstance(batch, int):
            raise ConfigError(
                "equal steps for all clients need one number for training.local_epochs and training.batch_size,"
                " not a range; give numbers, or set training.local_steps or training.equal_steps: false"
            )
        return max(1, self._num_samples * epochs // (len(self.world.profiles) * batch))

    @cached_property
    def _num_samples(self) -> int:
        if self.world.is_drawn:
            return len(self.world.profiles) * self.world.profiles[0].num_samples
        return int(ClientColumns.of(self.world.profiles).num_samples.sum())

    def local_steps(self, client: int, num_samples: int) -> tuple[int, int, bool]:
        """Return a client's local steps, batch size, and whether its batches are whole; it has at least 1 sample."""
        batch = self.drawn(self.training.batch_size, "batch_size", client)
        fixed = self.method.settings.local_steps
        if fixed is None and self.training.local_steps is not None:
            fixed = self.drawn(self.training.local_steps, "local_steps", client)
        if fixed is not None:
            # A method's own single step (FedSGD) is on the client's whole set where the batch would hold more.
            return fixed, batch, self.method.settings.local_steps is None
        equal_steps = self.training.equal_steps
        if self.method.settings.equal_steps if equal_steps is None else equal_steps:
            return self.equal_steps(), batch, True
        epochs = self.drawn(self.training.local_epochs, "local_epochs", client)
        return epochs * math.ceil(num_samples / batch), batch, False


def client_side(experiment: Experiment) -> ClientSide:
    """Return the parts of an experiment that a worker gets."""
    return ClientSide(
        seed=experiment.seed,
        objective=experiment.method.objective,
        terms=experiment.method.terms,
        solver=experiment.method.solver,
        optimizer=experiment.training.optimizer,
        indices=experiment.world.indices,
        device=experiment.device,
        tf32=experiment.tf32,
        # Availability alone reads it: who is there may depend on how its training went.
        track_accuracy=experiment.world.availability is not None,
        codec=experiment.up_codec,
        encodes_payloads=not experiment.method.codec.encodes,
        down_codec=experiment.communication.down,
        lanes=experiment.lanes,
        # What a job costs outside its steps does not depend on the size of a step.
        job_passes=experiment.method.passes(1, experiment.world.data.num_classes).job,
        task=experiment.world.data.learned,
    )


def server_context(experiment: Experiment, seam: str) -> ServerContext:
    """Return the context from which the component of a seam makes its state."""
    world, (proxy, validation) = experiment.world, experiment.server_tensors
    return ServerContext(
        num_clients=len(world.profiles),
        num_classes=world.data.num_classes,
        has_classes=world.data.learned.has_classes,
        num_rounds=experiment.training.rounds,
        evaluate_every=experiment.evaluate_every,
        profiles=world.profiles,
        model=experiment.shown_model,
        layout=experiment.layout,
        vector=experiment.initial_vector,
        proxy_data=proxy,
        validation_data=validation,
        budgets=world.budgets,
        topology=world.topology,
        stream=stream(experiment.seed, seam, 0),
    )
