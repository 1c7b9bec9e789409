"""Several nodes: actors on different nodes give the same bits, also when a node dies with what was on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.driver.session import RunSession, SessionSettings
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def nodes() -> Iterator[tuple[Any, Any, Any]]:
    """A head with two CPUs and a second node with one; ray, the cluster and the second node."""
    import os

    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    second = cluster.add_node(num_cpus=2, resources={"second": 2})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace="fedsweep", logging_level="ERROR", log_to_driver=False)
    try:
        yield ray, cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


def session(ray: Any, experiment: Experiment, folder: Path, options: Any) -> RunSession:
    from fedsweep.fleet.ray_fleet import RayFleet

    layout = experiment.layout

    def make(warn: Any) -> RayFleet:
        return RayFleet(
            ray.put(experiment),
            num_actors=2,
            name=folder.name,
            options=options,
            num_values=layout.num_values,
            dtype=layout.dtype,
            capacity=experiment.training.cohort_size,
            warn=warn,
        )

    folder.mkdir()
    return RunSession(experiment, make, SessionSettings(folder=folder, checkpoint_every=2, checkpoint_keep=2, facts={}))


def two_speed() -> FederatedMethod:
    return dynamicfl(high_interval=1, low_interval=4)


@pytest.mark.parametrize("keep", ["reset", "persist"])
def test_a_node_that_dies_between_rounds_changes_no_bit(nodes: tuple[Any, Any, Any], tmp_path: Path, keep: str) -> None:
    ray, cluster, second = nodes
    work = tiny_experiment(two_speed(), rounds=5, local_epochs=2, optimizer=OptimizerSettings(momentum=0.9, keep=keep))
    expected = run_rounds(local_engine(work))
    places = iter([{"num_cpus": 1}, {"num_cpus": 1, "resources": {"second": 1}}])

    def options(index: int) -> dict[str, Any]:
        del index
        return next(places, {"num_cpus": 1})

    run = session(ray, work, tmp_path / keep, options)
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
        assert run._known_state().vector.numpy().tobytes() == expected.vector.numpy().tobytes()
    finally:
        run.close()
