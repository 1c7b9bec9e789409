"""Tiny experiments for sweeps: digits, six clients, a few steps; and a cluster that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

TinySweep = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny() -> TinySweep:
    """Makes a configuration with a sweep over a space."""

    def make(space: dict[str, Any], *, rounds: int = 3, more: dict[str, Any] | None = None, **sweep: Any) -> Any:
        base = {
            "name": "tiny",
            "scenario": {"clients": 6, "partition": {"kind": "iid"}},
            "training": {"rounds": rounds, "cohort_size": 2, "local_steps": 2},
            "checkpoint": {"every": 1},
            "tracking": {"uri": "none"},
            "sweep": {"space": space, **sweep},
        }
        return {**base, **(more or {})}

    return make


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two CPUs."""
    from fedsweep.fleet.ray_cluster import ClusterNeeds, ray_cluster

    with ray_cluster(None, ClusterNeeds(actors=2, store_bytes=2**28)) as ray:
        yield ray
