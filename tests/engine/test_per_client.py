"""Accuracies by class, by client, and of clients' own models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.messages import Question
from fedsweep.components import (
    ClientTest,
    ClientUpdate,
    GlobalModel,
    LocalClient,
    LocalTerm,
    LocalWork,
    Memory,
    Payload,
)
from fedsweep.engine.engine import Engine
from fedsweep.engine.per_client import client_accuracies, spread
from fedsweep.errors import WorkerLost
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod
from fedsweep.records import State
from fedsweep.runs.tables.per_client import accuracy_table
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.trees import ParamTree

torch.set_num_threads(1)


def uneven(method: FederatedMethod, **options: Any) -> Experiment:
    """Sorted clients and a test set of 50, 20, 13, 0 samples of the four classes."""
    experiment = tiny_experiment(method, **options)
    images, labels = tiny_data(num_samples=200, seed=1)
    kept = np.concatenate([np.flatnonzero(labels == c)[:n] for c, n in enumerate((50, 20, 13, 0))])
    world = replace(experiment.world, test_images=images[kept], test_labels=labels[kept])
    return replace(experiment, world=world, evaluate_per_client=True)


def test_classes_weighted_by_their_samples_are_the_pooled_accuracy_exactly() -> None:
    for record in run_rounds(local_engine(uneven(fedavg(), rounds=4))).records:
        assert record.class_accuracies is not None
        hits = [round(n * a) for n, a in zip((50, 20, 13), record.class_accuracies[:3], strict=True)]
        assert all(
            h == pytest.approx(n * a) for h, n, a in zip(hits, (50, 20, 13), record.class_accuracies, strict=False)
        )
        assert sum(hits) / 83 == record.test_accuracy
        assert math.isnan(record.class_accuracies[3])


def test_a_clients_accuracy_is_its_classes_by_their_shares_in_its_data() -> None:
    counts_NC = np.array([[3, 1, 0, 0], [0, 0, 0, 5], [0, 2, 2, 4]])
    found = client_accuracies((0.5, 0.9, 0.1, math.nan), counts_NC)
    assert found[0] == pytest.approx((3 * 0.5 + 0.9) / 4)
    assert math.isnan(found[1])  # its one class has no test samples
    assert found[2] == pytest.approx(0.5)  # class 3 counts for nobody


def test_the_worst_and_the_best_tenth_are_rounded_up() -> None:
    values = np.array([0.1, 0.2, *[0.5] * 8, 0.9, math.nan])  # 11 known: 2 make a tenth
    assert spread("x", values) == {
        "x": pytest.approx(5.2 / 11),
        "x_sd": pytest.approx(np.std(values[:11])),
        "x_worst10": pytest.approx(0.15),
        "x_best10": pytest.approx(0.7),
    }
    assert spread("x", np.array([math.nan])) == {}


def test_accuracies_by_client_change_nothing_else() -> None:
    asked = uneven(fedavg())
    one, other = (run_rounds(local_engine(replace(asked, evaluate_per_client=on))) for on in (True, False))
    assert torch.equal(one.vector, other.vector)
    assert [r.test_accuracy for r in one.records] == [r.test_accuracy for r in other.records]
    assert other.records[-1].class_accuracies is None
    assert not other.records[-1].extra
    assert {"class_accuracy_sd", "client_accuracy", "client_accuracy_worst10"} <= one.records[-1].extra.keys()


@dataclass(frozen=True, kw_only=True)
class Counted(GlobalModel):
    """Counts the batches that are predicted."""

    passes: ClassVar[list[int]] = []

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        self.passes.append(len(inputs))
        return super().predict(state, model, updates, inputs)


def test_one_pass_serves_a_thousand_clients() -> None:
    images, labels = tiny_data(num_samples=4000)
    method = FederatedMethod(name="counted", source="", evaluation=Counted())
    experiment = tiny_experiment(method, num_clients=1000, rounds=1, images=images, labels=labels)
    engine = local_engine(replace(experiment, evaluate_per_client=True))
    Counted.passes.clear()
    record = run_rounds(engine).records[-1]
    assert sum(Counted.passes) == 4000
    table = accuracy_table(engine.experiment, [record])
    assert table is not None and table.num_rows == 1000
    tested = engine.tester._test.test(GlobalModel(), None, engine.experiment.new_model(), ())
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        engine.tester.with_shares(replace(record, extra={}), tested)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.01  # what a thousand clients add to the pass


# -- models of clients' own


@dataclass(frozen=True, kw_only=True)
class Keep(LocalTerm):
    """The client's own model is the one that it trained last."""

    name: str = "own"
    stateful = True

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return {"values": {name: value.clone() for name, value in work.values.items()}}, {}


@dataclass(frozen=True, kw_only=True)
class OwnTest(ClientTest):
    """Asks the kept model; before the first round, the server's."""

    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        kept = client.memories.get("own", {}).get("values", client.params)
        values: ParamTree = kept  # type: ignore[assignment]
        return lambda inputs: client.forward_with(values, inputs)


@dataclass(frozen=True, kw_only=True)
class WithOwn(GlobalModel):
    def client_test(self) -> ClientTest:
        return OwnTest()


OWN = FederatedMethod(name="own", source="", terms=(Keep(),), evaluation=WithOwn())


def test_own_models_are_tested_on_own_shares_alone() -> None:
    engine = local_engine(uneven(OWN, rounds=2))
    state = run_rounds(engine)
    world = engine.experiment.world
    images, labels = torch.from_numpy(world.test_images), torch.from_numpy(world.test_labels)
    model = engine.experiment.new_model()
    for client, own in enumerate(engine.experiment.test_shares):
        kept = state.memories[client]["terms"]["own"]["values"] if client in state.memories else None
        values = engine.layout.params(state.vector) if kept is None else kept
        right = torch.func.functional_call(model, values, (images[own],)).argmax(1) == labels[own]
        found = (state.records[-1].personal_accuracies or ())[client]
        assert found == (int(right.sum()) / len(own)) if len(own) else math.isnan(found)
    table = accuracy_table(engine.experiment, state.records)
    assert table is not None
    assert table.column("personal_samples").to_pylist() == [len(own) for own in engine.experiment.test_shares] * 2
    assert table.column("personal_accuracy").null_count == sum(not len(o) for o in engine.experiment.test_shares) * 2


def test_own_models_do_not_enter_the_servers_figures() -> None:
    own, plain = (run_rounds(local_engine(uneven(method))) for method in (OWN, fedavg()))
    assert torch.equal(own.vector, plain.vector)
    assert [r.test_accuracy for r in own.records] == [r.test_accuracy for r in plain.records]
    assert [r.class_accuracies for r in own.records[:1]] != [own.records[0].personal_accuracies]
    assert plain.records[-1].personal_accuracies is None
    assert own.records[-1].bytes_up == plain.records[-1].bytes_up


class Losing(LocalFleet):
    """Loses a worker in the first test of own models."""

    asked = 0

    def measure(self, question: Question, vector: Tensor, memories: Any) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise WorkerLost("a worker of the test is gone")
        return super().measure(question, vector, memories)


def test_a_worker_that_is_lost_before_round_1_changes_nothing() -> None:
    experiment = tiny_experiment(dynamicfl(group="similarity", high_interval=1, low_interval=2))
    fleet = Losing(experiment)
    repaired: list[str] = []
    one = run_rounds(Engine(experiment, fleet, on_repair=repaired.append))
    assert fleet.asked == 2 and repaired == ["before round 1: a worker of the test is gone; replacing it and going on"]
    assert torch.equal(one.vector, run_rounds(local_engine(experiment)).vector)


def test_a_worker_that_is_lost_in_a_test_changes_nothing() -> None:
    experiment = uneven(OWN)
    fleet = Losing(experiment)
    one, other = run_rounds(Engine(experiment, fleet)), run_rounds(local_engine(experiment))
    assert fleet.asked == 4
    assert [str(r.personal_accuracies) for r in one.records] == [str(r.personal_accuracies) for r in other.records]
