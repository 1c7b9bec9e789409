"""FedDHAD on Ray actors gives the local fleet's bits: sub-models, probes and payloads travel unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from fedsweep.algorithms.fedad import fedad
from fedsweep.algorithms.feddh import feddh
from fedsweep.method import merge
from fedsweep.runtime.engine import Engine
from fedsweep.runtime.messages import OptimizerSettings
from fedsweep.runtime.ray_cluster import ClusterNeeds, ray_cluster
from fedsweep.runtime.server_actor import FleetSettings, make_ray_fleet
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray_module() -> Iterator[Any]:
    with ray_cluster(None, ClusterNeeds(actors=2)) as ray:
        yield ray


def test_two_actors_give_the_bits_of_one_process(ray_module: Any) -> None:
    def net() -> nn.Module:  # local: pickled by value
        from fedsweep.models.mlp import Mlp

        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    method = merge(
        feddh(gradient="explicit", learning_rate_v=0.3, learning_rate_b=0.2), fedad(base_rate=0.4, refresh=(1, 3))
    )
    work = tiny_experiment(
        method, build=net, rounds=5, local_epochs=2, optimizer=OptimizerSettings(momentum=0.9, keep="persist")
    )
    expected = run_rounds(local_engine(work))
    settings = FleetSettings(num_actors=2, name="feddhad", options={"num_cpus": 1})
    fleet = make_ray_fleet(work, ray_module.put(work), settings, print)
    try:
        found = run_rounds(Engine(work, fleet))
    finally:
        fleet.close()
    assert found.vector.numpy().tobytes() == expected.vector.numpy().tobytes()
    assert [(r.bytes_up, r.bytes_down, r.flops) for r in found.records] == [
        (r.bytes_up, r.bytes_down, r.flops) for r in expected.records
    ]
    assert min(r.fwd_macs_per_sample or 0 for r in found.records) < 144
