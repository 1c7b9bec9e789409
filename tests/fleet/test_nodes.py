"""Several nodes: actors on different nodes give the same bits, also when a node dies with what was on it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_terms
import pytest

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.driver.session import RunSession, SessionSettings
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

pytestmark = [pytest.mark.ray, pytest.mark.slow]

_NAMES = itertools.count()


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Any, Any, Any]]:
    """A head and a second node with two CPUs each; ray, the cluster and the second node."""
    import os

    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    import ray.cloudpickle as ray_pickle
    from ray.cluster_utils import Cluster

    ray_pickle.register_pickle_by_value(fault_terms)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"node0": 2}})
    second = cluster.add_node(num_cpus=2, resources={"node1": 2})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace="fedsweep", logging_level="ERROR", log_to_driver=False)
    try:
        yield ray, cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


def in_turn(index: int) -> dict[str, Any]:
    """Actors go to one node after the other."""
    return {"num_cpus": 1, "resources": {f"node{index % 2}": 1}}


def maker(
    ray: Any, experiment: Experiment, actors: int, options: Callable[[int], Mapping[str, Any]] = in_turn
) -> Callable[[Callable[[str], None]], Any]:
    from fedsweep.fleet.fleet import Vectors
    from fedsweep.fleet.ray_fleet import FleetSettings, RayFleet

    def make(warn: Callable[[str], None]) -> RayFleet:
        settings = FleetSettings(
            num_actors=actors,
            name=f"nodes-{next(_NAMES)}",
            options={},
            placed=options,
            vectors=Vectors.of(experiment),
        )
        return RayFleet(ray.put(experiment), settings, warn)

    return make


def session(make: Any, experiment: Experiment, folder: Path) -> RunSession:
    folder.mkdir()
    return RunSession(experiment, make, SessionSettings(folder=folder, checkpoint_every=2, checkpoint_keep=2, facts={}))


def play(ray: Any, experiment: Experiment, actors: int) -> tuple[RunState, list[str], str]:
    """Plays a run; also what was said, and which exchange the last round had."""
    messages: list[str] = []
    fleet = maker(ray, experiment, actors)(messages.append)
    try:
        return run_rounds(Engine(experiment, fleet, on_repair=messages.append)), messages, fleet.exchange.name
    finally:
        fleet.close()


def bits(state: RunState) -> bytes:
    return state.vector.numpy().tobytes()


def two_speed() -> FederatedMethod:
    return dynamicfl(high_interval=1, low_interval=4)


@pytest.mark.parametrize(
    ("method", "keep", "actors", "dies"),
    [
        (dynamicsgd(), "average", 2, False),
        (dynamicfl(high_interval=1, low_interval=4, high_only=False), "persist", 4, True),
        pytest.param(fedavg(), "persist", 2, False, marks=pytest.mark.exhaustive),
    ],
)
def test_actors_on_two_nodes_give_the_bits_of_one_process(
    nodes: tuple[Any, Any, Any], tmp_path: Path, method: FederatedMethod, keep: str, actors: int, dies: bool
) -> None:
    optimizer = OptimizerSettings(momentum=0.9, keep=keep)
    work = tiny_experiment(method, rounds=2, local_epochs=2, optimizer=optimizer)
    expected = run_rounds(local_engine(work))
    if dies:
        client, marker = expected.records[1].cohort[1], tmp_path / "died"
        method = fault_terms.with_fault(method, client=client, round=2, position=3, marker=str(marker), how="kill")
    found, messages, exchange = play(nodes[0], replace(work, method=method), actors)
    assert bits(found) == bits(expected)
    assert exchange == "network"
    assert len(messages) == dies and all("client actor" in text and "round 2" in text for text in messages)


def test_nodes_that_do_not_reach_each_other_go_through_the_server_and_say_so(
    nodes: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsweep.fleet import ray_exchange

    ray = nodes[0]
    addresses = ray_exchange._addresses()
    here = ray.get_runtime_context().get_node_id()
    elsewhere = {node: own if node == here else "203.0.113.1" for node, own in addresses.items()}
    monkeypatch.setattr(ray_exchange, "_addresses", lambda: elsewhere)
    monkeypatch.setattr(ray_exchange, "_CONNECT_S", 1.0)
    work = tiny_experiment(dynamicsgd(), rounds=2, local_steps=3)
    run = session(maker(ray, work, 2), work, tmp_path / "run")
    try:
        messages = list(run.open(resume=False).messages)
        while (step := run.step()).stopped_by is None:
            messages += step.messages
        run.finish("finished")
        assert bits(run._known_state()) == bits(run_rounds(local_engine(work)))
    finally:
        run.close()
    told = json.loads((tmp_path / "run" / "result.json").read_text())["exchange"]
    assert told == {"name": "server", "notes": messages}
    (said,) = messages
    assert said.startswith("the client actors on 2 nodes can't aggregate among themselves: ")
    assert said.endswith(": every sync point goes through the server, which is slower")


def test_a_node_that_dies_between_rounds_changes_no_bit(nodes: tuple[Any, Any, Any], tmp_path: Path) -> None:
    ray, cluster, second = nodes
    work = tiny_experiment(
        two_speed(), rounds=5, local_epochs=2, optimizer=OptimizerSettings(momentum=0.9, keep="persist")
    )
    expected = run_rounds(local_engine(work))
    places = iter([{"num_cpus": 1}, {"num_cpus": 1, "resources": {"node1": 1}}])

    def options(index: int) -> dict[str, Any]:
        del index
        return next(places, {"num_cpus": 1})

    run = session(maker(ray, work, 2, options), work, tmp_path / "run")
    try:
        run.open(resume=False)
        messages: list[str] = []
        rounds: list[int] = []
        stopped = None
        while stopped is None:
            step = run.step()
            messages += step.messages
            stopped = step.stopped_by
            if step.record is not None:
                rounds.append(step.record.round)
                if step.record.round == 3:
                    cluster.remove_node(second, allow_graceful=False)
        assert stopped == "rounds"
        assert rounds == [1, 2, 3, 4, 5]
        assert any("client actor 1" in message or "remember" in message for message in messages)
        assert bits(run._known_state()) == bits(expected)
    finally:
        run.close()
