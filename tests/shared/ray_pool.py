"""Client actors of many runs in three processes: a process of its own for each would cost seconds of every test."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import fault_terms
import ray
import ray.cloudpickle
import torch

from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Vectors
from fedsweep.fleet.ray_client_actor import ClientActor
from fedsweep.fleet.ray_exchange import ExchangeKind
from fedsweep.fleet.ray_fleet import FleetSettings, RayFleet
from fedsweep.testing import run_rounds

_KEYS = itertools.count()
# Workers don't have the folders of tests.
for _pickler in (cloudpickle, ray.cloudpickle):
    _pickler.register_pickle_by_value(fault_terms)
    _pickler.register_pickle_by_value(sys.modules[__name__])


class Host:
    """A process with client actors of many runs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._actors: dict[int, ClientActor] = {}

    def answers(self) -> bool:
        return True

    def hold(self, key: int, experiment: Experiment, index: int) -> None:
        self._actors[key] = ClientActor(experiment, index, 0.0)

    def drop(self, key: int) -> None:
        if key in self._actors:
            self._actors.pop(key)._close_exchange()

    def call(self, key: int, name: str, *args: Any) -> Any:
        return getattr(self._actors[key], name)(*args)


class Slot:
    """One of a host's client actors, called as Ray's handles are."""

    def __init__(self, host: Any, key: int) -> None:
        self.host, self.key = host, key

    def __getattr__(self, name: str) -> Any:
        host, key = self.host, self.key

        class Call:
            def __init__(self, options: Mapping[str, Any]) -> None:
                self._options = options

            def options(self, **options: Any) -> Call:
                return Call(options)

            def remote(self, *args: Any) -> Any:
                return host.call.options(**self._options).remote(key, name, *args)

        return Call({})


class Pool:
    """The hosts; a dead one is replaced when it is asked for."""

    def __init__(self) -> None:
        self._make = ray.remote(concurrency_groups={"control": 1})(Host).options(num_cpus=0)
        self.hosts = [self._make.remote() for _ in range(3)]

    def host(self, index: int) -> Any:
        try:
            ray.get(self.hosts[index].answers.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            self.hosts[index] = self._make.remote()
        return self.hosts[index]


class PooledFleet(RayFleet):
    """The fleet with client actors in the pool's processes."""

    def __init__(
        self, pool: Pool, experiment: Experiment, num_actors: int, messages: list[str], exchange: ExchangeKind = "auto"
    ) -> None:
        self._pool = pool
        super().__init__(
            ray.put(experiment),
            FleetSettings(
                num_actors=num_actors,
                name="pooled",
                options={},
                vectors=Vectors.of(experiment),
                exchange=exchange,
            ),
            messages.append,
        )

    def _grow(self, indices: Sequence[int], begun: Sequence[Any] = ()) -> None:
        for index in indices:
            host, key = self._pool.host(index), next(_KEYS)
            host.hold.remote(key, self._experiment, index)
            self._actors[index] = Slot(host, key)
            self._starting[index] = self._actors[index].where.remote(self._settings.check)
        self._births += 1

    def _find_dead(self) -> list[int]:
        dead = []
        for index, actor in self._actors.items():
            try:
                ray.get(actor.ping.options(concurrency_group="control").remote(), timeout=60)
            except ray.exceptions.RayActorError:
                dead.append(index)
        return dead

    def close(self) -> None:
        self._closed = True
        for actor in self._actors.values():
            actor.host.drop.remote(actor.key)
        self._group.drop()


def play(
    pool: Pool, experiment: Experiment, actors: int = 2, *, exchange: ExchangeKind = "auto"
) -> tuple[RunState, list[str]]:
    """A whole run on actors of the pool, and what the fleet had to say."""
    messages: list[str] = []
    fleet = PooledFleet(pool, experiment, actors, messages, exchange)
    try:
        return run_rounds(Engine(experiment, fleet, on_repair=messages.append)), messages
    finally:
        fleet.close()
