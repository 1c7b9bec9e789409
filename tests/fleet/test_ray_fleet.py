"""The Ray fleet gives the local fleet's bits, whatever dies on the way."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_terms
import pytest
import ray
import torch
from ray_pool import Pool, play
from tiny import Halves

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.client.messages import LaneSettings
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.codec import Communication
from fedsweep.components.compression.registry import CODECS
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import ClientJobError, ResourceError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.ray_cluster import ClusterNeeds, check_fits
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

pytestmark = pytest.mark.ray

_NAMES = itertools.count()


def play_in_own_processes(
    ray: Any, experiment: Experiment, *, hang_timeout_s: float = 60.0
) -> tuple[RunState, list[str]]:
    """The run on two actors as a run has them: each in a process of its own."""
    from fedsweep.fleet.fleet import Vectors
    from fedsweep.fleet.ray_fleet import FleetSettings, RayFleet

    messages: list[str] = []
    settings = FleetSettings(
        num_actors=2,
        name=f"test-{next(_NAMES)}",
        options={"num_cpus": 1},
        vectors=Vectors.of(experiment),
        hang_timeout_s=hang_timeout_s,
    )
    fleet = RayFleet(ray.put(experiment), settings, messages.append)
    try:
        return run_rounds(Engine(experiment, fleet, on_repair=messages.append)), messages
    finally:
        fleet.close()


def bits(state: RunState) -> bytes:
    return state.vector.numpy().tobytes()


MOMENTUM = {keep: OptimizerSettings(momentum=0.9, keep=keep) for keep in ("reset", "persist", "average")}
METHODS = {
    "fedavg": fedavg(),
    "fedprox": fedprox(mu=0.1),
    "dynamicsgd": dynamicsgd(),
    "dynamicfl": dynamicfl(high_interval=1, low_interval=4, high_only=False),
}


@pytest.mark.parametrize(
    ("name", "keep", "actors", "exchange"),
    [
        ("fedavg", "persist", 2, "auto"),
        ("fedprox", "average", 2, "auto"),
        ("dynamicsgd", "persist", 3, "auto"),
        ("dynamicsgd", "reset", 2, "server"),
        ("dynamicfl", "persist", 1, "auto"),
        ("dynamicfl", "average", 3, "auto"),
        ("dynamicfl", "persist", 2, "server"),
        ("dynamicsgd", "persist", 2, "network"),
        ("dynamicfl", "average", 3, "network"),
    ],
)
def test_actors_give_the_bits_of_one_process(pool: Pool, name: str, keep: str, actors: int, exchange: Any) -> None:
    work = tiny_experiment(METHODS[name], rounds=3, local_epochs=2, optimizer=MOMENTUM[keep])
    expected = run_rounds(local_engine(work))
    found, messages = play(pool, work, actors, exchange=exchange)
    assert bits(found) == bits(expected)
    assert found.records[-1].values_up == expected.records[-1].values_up
    assert found.records[-1].train_loss == expected.records[-1].train_loss
    assert messages == []
    assert found.records[-1].test_accuracy is not None and found.records[-1].test_accuracy > 0.6


@pytest.mark.parametrize(("name", "actors"), [("fedprox", 1), ("dynamicsgd", 3), ("dynamicfl", 2)])
def test_actors_give_the_bits_of_one_process_in_lanes(pool: Pool, name: str, actors: int) -> None:
    work = tiny_experiment(METHODS[name], rounds=3, local_epochs=2, cohort_size=5, optimizer=MOMENTUM["persist"])
    expected, work = run_rounds(local_engine(work)), replace(work, lanes=LaneSettings(width=3))
    here, (found, messages) = run_rounds(local_engine(work)), play(pool, work, actors)
    assert bits(found) == bits(here) and messages == []
    assert torch.allclose(found.vector, expected.vector, atol=1e-6)


def test_a_client_actor_killed_between_lanes_changes_no_bit(pool: Pool, tmp_path: Path) -> None:
    lanes = LaneSettings(width=3)
    plain = tiny_experiment(METHODS["dynamicsgd"], cohort_size=5, optimizer=MOMENTUM["persist"])
    expected = run_rounds(local_engine(replace(plain, lanes=lanes)))
    client = expected.records[1].cohort[1]
    method = fault_terms.with_fault_at_start(plain.method, client=client, round=2, marker=str(tmp_path / "died"))
    found, messages = play(pool, replace(plain, method=method, lanes=lanes), 2)
    assert (tmp_path / "died").exists() and any("round 2" in message for message in messages)
    assert bits(found) == bits(expected) and not any("one by one" in message for message in messages)


TENTH = CODECS["topk"](share=0.1, error_feedback=True)
SIGNS = CODECS["sign"](error_feedback=True)


@pytest.mark.parametrize(("name", "actors"), [("dynamicsgd", 1), ("dynamicfl", 2), ("scaffold", 3)])
def test_codecs_both_ways_give_the_bits_of_one_process(pool: Pool, name: str, actors: int) -> None:
    method = {**METHODS, "scaffold": scaffold()}[name]
    work = tiny_experiment(method, rounds=3, local_epochs=2)
    work = replace(work, communication=Communication(up=TENTH, down=SIGNS))
    expected, (found, messages) = run_rounds(local_engine(work)), play(pool, work, actors)
    assert bits(found) == bits(expected) and messages == []
    assert [r.bytes_up for r in found.records] == [r.bytes_up for r in expected.records]


def test_a_client_actor_killed_among_codecs_changes_no_bit(pool: Pool, tmp_path: Path) -> None:
    plain = tiny_experiment(METHODS["dynamicsgd"], rounds=3, local_epochs=2)
    plain = replace(plain, communication=Communication(up=TENTH, down=SIGNS))
    expected = run_rounds(local_engine(plain))
    method = fault_terms.with_fault(
        plain.method, client=expected.records[1].cohort[1], round=2, position=3, marker=str(tmp_path / "died")
    )
    found, messages = play(pool, replace(plain, method=method), 2)
    assert (tmp_path / "died").exists() and any("round 2" in message for message in messages)
    assert bits(found) == bits(expected)


def test_what_server_and_clients_say_beside_models_travels_too(pool: Pool) -> None:
    work = tiny_experiment(fault_terms.spoken(), rounds=3, local_steps=2)
    expected, (found, _) = run_rounds(local_engine(work)), play(pool, work, 2)
    assert bits(found) == bits(expected)
    assert [r.bytes_down for r in found.records] == [r.bytes_down for r in expected.records]
    assert [r.bytes_up for r in found.records] == [r.bytes_up for r in expected.records]


@pytest.mark.parametrize(
    ("name", "keep", "exchange"),
    [
        pytest.param("fedavg", "persist", "server", marks=pytest.mark.exhaustive),
        pytest.param("dynamicsgd", "reset", "auto", marks=pytest.mark.exhaustive),
        ("dynamicsgd", "reset", "network"),
        ("dynamicfl", "persist", "auto"),
    ],
)
def test_a_client_actor_killed_in_a_round_changes_no_bit(
    pool: Pool, tmp_path: Path, name: str, keep: str, exchange: Any
) -> None:
    plain = tiny_experiment(METHODS[name], rounds=3, local_epochs=2, optimizer=MOMENTUM[keep])
    expected = run_rounds(local_engine(plain))
    client = expected.records[1].cohort[1]
    method = fault_terms.with_fault(
        METHODS[name], client=client, round=2, position=3, marker=str(tmp_path / "died"), how="kill"
    )
    work = tiny_experiment(method, rounds=3, local_epochs=2, optimizer=MOMENTUM[keep])
    found, messages = play(pool, work, 2, exchange=exchange)
    assert (tmp_path / "died").exists()
    assert bits(found) == bits(expected)
    assert [r.attendees for r in found.records] == [r.attendees for r in expected.records]
    assert any("client actor" in message and "round 2" in message for message in messages)


def test_a_client_actor_in_its_own_process_that_is_killed_changes_no_bit(shared_ray: Any, tmp_path: Path) -> None:
    plain = tiny_experiment(METHODS["dynamicsgd"], local_epochs=2, optimizer=MOMENTUM["persist"])
    expected = run_rounds(local_engine(plain))
    method = fault_terms.with_fault(
        plain.method, client=expected.records[1].cohort[1], round=2, position=3, marker=str(tmp_path / "died")
    )
    found, messages = play_in_own_processes(shared_ray, replace(plain, method=method))
    assert (tmp_path / "died").exists() and bits(found) == bits(expected)
    assert any("client actor" in message and "round 2" in message for message in messages)


@pytest.mark.slow
def test_a_client_actor_that_hangs_is_replaced(shared_ray: Any, tmp_path: Path) -> None:
    plain = tiny_experiment(METHODS["fedavg"], rounds=2, local_epochs=2)
    expected = run_rounds(local_engine(plain))
    client = expected.records[0].cohort[0]
    method = fault_terms.with_fault(
        METHODS["fedavg"], client=client, round=1, position=1, marker=str(tmp_path / "hung"), how="stop"
    )
    work = tiny_experiment(method, rounds=2, local_epochs=2)
    found, messages = play_in_own_processes(shared_ray, work, hang_timeout_s=3.0)
    assert bits(found) == bits(expected)
    assert any("does not answer" in message for message in messages)


@pytest.mark.parametrize("name", ["fedavg", "dynamicsgd"])
def test_a_client_that_diverges_names_client_round_and_step(pool: Pool, tmp_path: Path, name: str) -> None:
    plain = run_rounds(local_engine(tiny_experiment(METHODS[name], rounds=2, local_epochs=2)))
    client = plain.records[1].cohort[-1]
    method: FederatedMethod = fault_terms.with_fault(
        METHODS[name], client=client, round=2, position=2, marker=str(tmp_path / "unused"), how="nan"
    )
    with pytest.raises(ClientJobError, match=f"client {client} failed in round 2, local step 3"):
        play(pool, tiny_experiment(method, rounds=2, local_epochs=2), 2)


@pytest.mark.parametrize("name", ["fedavg", "dynamicsgd"])  # by the server, and by shared memory
def test_a_model_in_bfloat16_has_the_bits_of_one_process(pool: Pool, name: str) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[Halves.__module__])
    work = tiny_experiment(METHODS[name], local_epochs=2, optimizer=MOMENTUM["persist"], build=Halves)
    expected = run_rounds(local_engine(work))
    assert expected.vector.dtype == torch.bfloat16 and expected.records[-1].test_accuracy > 0.5
    found, messages = play(pool, work)
    assert torch.equal(found.vector, expected.vector) and messages == []


def test_data_are_in_the_node_once_and_read_only_in_actors(shared_ray: Any) -> None:
    import numpy as np

    work = tiny_experiment(METHODS["fedavg"])
    reference = shared_ray.put(work)

    @shared_ray.remote(num_cpus=0)
    def owns(experiment: Experiment) -> tuple[bool, bool]:
        images: np.ndarray = experiment.world.data.images
        return bool(images.flags.owndata), bool(images.flags.writeable)

    assert shared_ray.get(owns.remote(reference)) == (False, False)


def test_a_node_by_node_check_refuses_fractions_that_fit_only_in_sum() -> None:
    nodes = [{"CPU": 8.0, "GPU": 2.0}]
    check_fits(nodes, ClusterNeeds(actors=4, gpus_per_client=0.5))
    with pytest.raises(ResourceError, match="no room for client actor 4"):
        check_fits(nodes, ClusterNeeds(actors=5, gpus_per_client=0.5))
    with pytest.raises(ResourceError, match="largest of 2 nodes has 1 CPU"):
        check_fits([{"CPU": 1.0}, {"CPU": 1.0}], ClusterNeeds(actors=1, cpus_per_client=2.0))


def test_lanes_prove_themselves_once_for_all_actors(pool: Pool) -> None:
    """Steps can't be recorded here, which the run says once; its bits are those of one process."""
    lanes = LaneSettings(width=4, proves=True, records=True)
    work = replace(tiny_experiment(fedprox(mu=0.1), optimizer=MOMENTUM["persist"], rounds=2), lanes=lanes)
    state, messages = play(pool, work)
    alone = run_rounds(local_engine(work))
    assert bits(state) == bits(alone) and state.stepping == alone.stepping
    assert state.stepping is not None and state.stepping.kind == "lanes"
    assert messages == ["lanes: a step can't be recorded (only CUDA GPUs record): its kernels are launched one by one"]
