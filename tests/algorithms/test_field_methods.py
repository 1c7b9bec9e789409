"""What all methods of the field share: checkpoints, purity, equal weights, batch norm, whole runs, Ray."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsweep
from fedsweep.catalog import build_method
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.driver.ray_session import FleetSettings, make_ray_fleet
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.ray_cluster import ClusterNeeds, ray_cluster
from fedsweep.models.mlp import Mlp
from fedsweep.runs.state_codec import from_bytes, to_bytes
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment

SHORT_SERVER = {"batch_size": 8}
METHODS: dict[str, dict[str, object]] = {
    "scaffold": {},
    "feddyn": {},
    "fednova": {},
    "fedavgm": {},
    "fedadagrad": {},
    "fedadam": {},
    "fedyogi": {},
    "fedensemble": {"members": "all"},
    "abavg": {},
    "feddf": {"steps": 10, "check_every": 5, **SHORT_SERVER},
    "fedbe": {"epochs": 3, "average_every": 2, **SHORT_SERVER},
    "fedgen": {"noise_width": 3, "hidden_width": 5, "generator_steps": 4},
    "fedmix": {},
    "moon": {},
}
ON_CLIENTS = ("scaffold", "feddyn", "fedgen", "fedmix", "moon")
# These need features, which a plain sequence does not name.
WITH_BATCH_NORM = tuple(name for name in METHODS if name not in ("moon", "fedgen"))


def network() -> nn.Module:
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)


def experiment(name: str, **options: Any) -> Experiment:
    images, labels = tiny_data(num_samples=40, seed=9)
    settings: dict[str, Any] = {"build": network, "rounds": 4, "cohort_size": 4, "local_epochs": 2}
    world = {"proxy": (images, None), "validation": (images[:20], labels[:20])}
    return tiny_experiment(build_method({"name": name, **METHODS[name]}), **(settings | world | options))


each_method = functools.partial(pytest.mark.parametrize, "name")


@each_method(METHODS)
def test_states_and_memories_survive_a_checkpoint_and_the_run_goes_on_to_the_same_bits(name: str) -> None:
    engine = local_engine(experiment(name))
    half = run_rounds(engine, rounds=2)
    restored = dataclasses.replace(
        half,
        components={seam: from_bytes(to_bytes(state)) for seam, state in half.components.items()},
        memories={client: from_bytes(to_bytes(memory)) for client, memory in half.memories.items()},
    )
    straight, resumed = run_rounds(engine, half), run_rounds(engine, restored)
    assert torch.equal(straight.vector, resumed.vector)
    assert to_bytes(dict(straight.components)) == to_bytes(dict(resumed.components))
    assert (name in ("scaffold", "feddyn", "moon")) == bool(half.memories)


@each_method(METHODS)
def test_a_round_changes_nothing_that_it_was_given(name: str) -> None:
    engine = local_engine(experiment(name))
    state = run_rounds(engine, rounds=2)

    def content() -> bytes:
        return to_bytes(
            {"components": dict(state.components), "vector": state.vector, "memories": dict(state.memories)}
        )

    before = content()
    run_rounds(engine, state, rounds=1)
    assert content() == before


@each_method(METHODS)
def test_it_is_alive(name: str) -> None:
    """Skewed clients, from the third round at the latest: another model than FedAvg's, or other answers."""
    found = run_rounds(local_engine(experiment(name, sizes=(4, 8, 12, 24, 28, 20))))
    plain = dataclasses.replace(experiment(name, sizes=(4, 8, 12, 24, 28, 20)), method=build_method({"name": "fedavg"}))
    expected = run_rounds(local_engine(plain))
    assert [r.cohort for r in found.records] == [r.cohort for r in expected.records]
    assert torch.equal(found.vector, expected.vector) == (name == "fedensemble")
    assert [r.test_loss for r in found.records] != [r.test_loss for r in expected.records]


@each_method([name for name in METHODS if name != "abavg"])
def test_clients_of_equal_size_count_alike(name: str) -> None:
    record = run_rounds(local_engine(experiment(name, rounds=1))).records[0]
    assert record.aggregation_weights == pytest.approx([0.25] * 4, abs=1e-15)


@each_method(WITH_BATCH_NORM)
def test_batch_norm_stays_sound(name: str) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    state = run_rounds(local_engine(experiment(name, build=normed)))
    assert bool(torch.isfinite(state.vector).all())
    assert bool((state.vector[-8:] > 0).all())  # running_var lies last


@each_method(METHODS)
def test_averaged_momentum_moves_with_the_model(name: str) -> None:
    """It lies behind the model in each vector, and is no part of what a network computes."""
    momentum = OptimizerSettings(momentum=0.9, keep="average")
    state = run_rounds(local_engine(experiment(name, optimizer=momentum, learning_rate=0.01)))
    size = sum(p.numel() for p in network().parameters())
    assert len(state.vector) == 2 * size and bool(state.vector[size:].any())
    assert state.records[-1].test_loss is not None and np.isfinite(state.records[-1].test_loss)


@each_method(METHODS)
def test_one_client_alone_is_enough(name: str) -> None:
    state = run_rounds(local_engine(experiment(name, cohort_size=1)))
    assert bool(torch.isfinite(state.vector).all()) and len(state.records) == 4


@each_method(METHODS)
def test_it_runs_from_a_configuration(name: str, tmp_path: Path) -> None:
    """Two rounds on digits: what a user gets."""
    config = {
        "name": name,
        "method": {"name": name, **METHODS[name]},
        "scenario": {
            "clients": 8,
            "server_data": {"validation": 0.05, "proxy": {"per_class": 5, "labelled": False}},
        },
        "training": {"rounds": 2, "cohort_size": 4},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    result = fedsweep.run(config, out=tmp_path / "run")
    assert result.summary["status"] == "finished"
    accuracies = result.rounds.column("test_accuracy").to_pylist()
    assert len(accuracies) == 2 and all(0 <= a <= 1 for a in accuracies)
    assert np.isfinite(result.rounds.column("test_loss").to_pylist()).all()


@pytest.fixture(scope="module")
def ray_module() -> Iterator[Any]:
    with ray_cluster(None, ClusterNeeds(actors=2)) as ray:
        yield ray


def pickled_network() -> Callable[[], nn.Module]:
    def net() -> nn.Module:  # local: pickled by value
        from fedsweep.models.mlp import Mlp

        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    return net


@pytest.mark.ray
@each_method(ON_CLIENTS)
def test_two_actors_give_the_bits_of_one_process(name: str, ray_module: Any) -> None:
    work = experiment(name, build=pickled_network())
    expected = run_rounds(local_engine(work))
    settings = FleetSettings(num_actors=2, name=name, options={"num_cpus": 1})
    fleet = make_ray_fleet(work, ray_module.put(work), settings, print)
    try:
        found = run_rounds(Engine(work, fleet))
    finally:
        fleet.close()
    assert found.vector.numpy().tobytes() == expected.vector.numpy().tobytes()
    assert to_bytes(dict(found.components)) == to_bytes(dict(expected.components))
    assert [(r.bytes_up, r.bytes_down) for r in found.records] == [(r.bytes_up, r.bytes_down) for r in expected.records]
