"""A method that is held to its card, and the worlds of milliseconds in which that is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.card import Card, card_of
from fedsweep.catalog import method_builder
from fedsweep.components.local import LocalStep, Objective
from fedsweep.config.signatures import bind, describe
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod, MethodSettings
from fedsweep.models.networks.chains import ChainNetwork, Mlp
from fedsweep.testing.worlds import run_rounds, tiny_data, tiny_device, tiny_experiment, with_devices
from fedsweep.world.topology import Star, Topology, ring, tree

ROUNDS = 3
UNEQUAL = (4, 8, 12, 24, 28, 20)
_DEVICES = (tiny_device(1e4), tiny_device(3e4), tiny_device(2e5))


def small_network() -> nn.Module:
    """Features, a head and units; no norms."""
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)


class NormedNetwork(ChainNetwork):
    """The same with one hidden layer and batch norm."""

    def __init__(self) -> None:
        super().__init__(input_shape=(1, 1, 6), num_classes=4)
        self.add_layer("fc1", nn.Linear(6, 8), norm=nn.BatchNorm1d(8))
        self.add_head(8, None)


class PlainNetwork(nn.Module):
    """Says nothing of features or units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(6, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layers(inputs)
        return logits


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A method that is held to its card.

    Attributes:
        name: For messages.
        builder: Builds it.
        card: Its card.
    """

    name: str
    builder: Callable[..., FederatedMethod]
    card: Card

    def parameters(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return all parameters, as a configuration with these would have them."""
        return bind("method", self.name, self.builder, settings)

    def built(self, parameters: Mapping[str, Any] | None = None) -> FederatedMethod:
        """Return the method with these parameters; by default those of the card's ``small``."""
        return self.builder(**self.parameters(self.card.small if parameters is None else parameters))

    @cached_property
    def method(self) -> FederatedMethod:
        """The method with the card's parameters for small worlds."""
        return self.built()

    def world(self, method: FederatedMethod | None = None, **options: Any) -> Experiment:
        """Six clients of unequal size and few classes, four a round; the server has data, the devices have speeds.

        Args:
            method: The subject's by default.
            options: See :func:`tiny_experiment`.
        """
        dtype = np.float64 if options.get("double") else np.float32
        images, labels = tiny_data(num_samples=40, seed=9, dtype=dtype)
        inputs, targets = tiny_data(dtype=dtype)
        order = np.argsort(targets, kind="stable")
        settings: dict[str, Any] = {
            "build": small_network,
            "rounds": ROUNDS,
            "cohort_size": 4,
            "local_epochs": 2,
            "batch_size": 8,
            "sizes": UNEQUAL,
            "images": inputs[order],
            "labels": targets[order],
            "proxy": (images, labels if "labelled proxy" in self.card.needs else None),
            "validation": (images[:20], labels[:20]),
            "topology": self._topology(options.get("num_clients", len(UNEQUAL))),
        }
        made = tiny_experiment(self.method if method is None else method, **(settings | options))
        cards = ((self.card, self.parameters(self.card.small)),) if method is None else ()
        return replace(with_devices(made, _DEVICES), cards=cards)

    def _topology(self, num_clients: int) -> Topology:
        if "graph" in self.card.needs:
            return ring(num_clients=num_clients)
        return tree(num_clients=num_clients, edges=min(2, num_clients)) if "tree" in self.card.needs else Star()

    @property
    def states(self) -> tuple[RunState, ...]:
        """The run in that world: before round 1 and after each round."""
        return self._run[0]

    @property
    def unfinished(self) -> list[RunState]:
        """The states within that run's rounds that a checkpoint would keep: refinements that were not at their end."""
        return self._run[1]

    @cached_property
    def _run(self) -> tuple[tuple[RunState, ...], list[RunState]]:
        unfinished: list[RunState] = []
        return states_of(self.world(), on_partial=unfinished.append), unfinished

    @cached_property
    def plain(self) -> tuple[RunState, ...]:
        """FedAvg's run in the same world, with what the method asks of the training section."""
        return _run_of(fedavg_with(self.method.settings), None, Star())

    def end_of(self, method: FederatedMethod, sizes: tuple[int, ...] | None) -> Tensor:
        """Return the model of another method's run in this world, where clients may have other sizes."""
        if "labelled proxy" in self.card.needs:
            return states_of(self.world(method, **({} if sizes is None else {"sizes": sizes})))[-1].vector
        topology = self._topology(len(UNEQUAL)) if method.pacing.has_hubs else Star()
        return _run_of(method, sizes, topology)[-1].vector


def fedavg_with(settings: MethodSettings) -> FederatedMethod:
    """FedAvg, with what another method asks of the training section."""
    return FederatedMethod(name="fedavg", source="", settings=settings)


# Many methods are compared with the same few runs.
@cache
def _run_of(method: FederatedMethod, sizes: tuple[int, ...] | None, topology: Topology) -> tuple[RunState, ...]:
    options = {} if sizes is None else {"sizes": sizes}
    return states_of(subject_of("fedavg").world(method, topology=topology, **options))


def states_of(
    experiment: Experiment, *, on_partial: Callable[[RunState], None] = lambda state: None
) -> tuple[RunState, ...]:
    """Return a run's states: before round 1, and after each round; those within rounds are handed to ``on_partial``."""
    engine = Engine(experiment, LocalFleet(experiment), on_partial=on_partial)
    states = [engine.start()]
    while engine.finished_by(states[-1]) is None:
        states.append(run_rounds(engine, states[-1], rounds=1))
    return tuple(states)


def subject_of(method: str | Callable[..., FederatedMethod]) -> Subject:
    """Return a method by its name or its builder; what was worked out of it before is kept.

    Raises:
        AssertionError: It has no card, or a parameter without a default.
    """
    return _subject(method_builder(method) if isinstance(method, str) else method)


@cache
def _subject(builder: Callable[..., FederatedMethod]) -> Subject:
    card = card_of(builder)
    if card is None:
        raise AssertionError(
            f"{builder.__module__}:{builder.__name__} has no card: put @with_card(Card(...)) on it, see"
            " docs/adding-a-method.md"
        )
    if missing := [row.name for row in describe(builder) if row.default is None]:
        raise AssertionError(
            f"{builder.__module__}:{builder.__name__}: parameters need defaults, but {missing} have none"
        )
    return Subject(name=builder().name, builder=builder, card=card)


# -- the golden problem ------------------------------------------------------------------------------------------


class Point(nn.Module):
    """One parameter, w, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w * torch.ones(len(inputs), 2, dtype=self.w.dtype)


@dataclass(frozen=True, kw_only=True)
class Quadratic(Objective):
    """``a / 2 (w - b)^2``; a sample's two features are a and b."""

    def loss(self, step: LocalStep) -> Tensor:
        a, b = step.inputs.flatten(1).unbind(1)
        assert isinstance(step.model, Point)
        loss: Tensor = (0.5 * a * (step.model.w - b) ** 2).mean()
        return loss


def golden_problem(
    method: FederatedMethod,
    *,
    rounds: int,
    steps: tuple[int, ...] = (5, 5),
    problem: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0, 4.0), (0.0, 10.0)),
    cohort_size: int | None = None,
    **options: Any,
) -> list[RunState]:
    """Clients with ``a_k / 2 (w - b_k)^2``, from w = 1, whole gradients, in float64: the states from the start on.

    By default a = (1, 4), b = (0, 10), five steps at a rate of 0.1: the optimum of the plain mean is 8.

    Args:
        method: What is run, with the quadratic as its objective.
        rounds: Rounds.
        steps: Of each client; as many equal samples it has, in batches of one.
        problem: The a_k and the b_k.
        cohort_size: Clients a round; all by default.
        options: See :func:`tiny_experiment`.
    """
    rows = [(a, b) for a, b, n in zip(*problem, steps, strict=True) for _ in range(n)]
    experiment = tiny_experiment(
        replace(method, objective=Quadratic()),
        num_clients=len(steps),
        cohort_size=cohort_size or len(steps),
        rounds=rounds,
        batch_size=1,
        build=Point,
        double=True,
        images=np.array(rows).reshape(len(rows), 1, 1, 2),
        labels=np.zeros(len(rows), dtype=np.int64),
        sizes=steps,
        **options,
    )
    return list(states_of(experiment))
