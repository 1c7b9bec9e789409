"""Every registered method gives the same bits on one, two and three actors, and after an actor died.

One cluster and three processes, each of which holds client actors of many runs: to start processes for each method
would take minutes.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.algorithms.registry import METHODS
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.ray_client_actor import ClientActor
from fedsweep.fleet.ray_cluster import ClusterNeeds, ray_cluster
from fedsweep.fleet.ray_exchange import Vectors
from fedsweep.fleet.ray_fleet import RayFleet
from fedsweep.runs.state_codec import to_bytes
from fedsweep.testing import Subject, run_rounds, subject_of

pytestmark = pytest.mark.ray

_SPEC = importlib.util.spec_from_file_location("fault_terms", Path(__file__).parent / "fleet" / "fault_terms.py")
assert _SPEC is not None and _SPEC.loader is not None
faults = importlib.util.module_from_spec(_SPEC)
sys.modules["fault_terms"] = faults
_SPEC.loader.exec_module(faults)

_KEYS = itertools.count()


class Host:
    """A process with client actors of many runs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._actors: dict[int, ClientActor] = {}

    def answers(self) -> bool:
        return True

    def hold(self, key: int, experiment: Experiment, index: int) -> None:
        self._actors[key] = ClientActor(experiment, index, 0.0)

    def call(self, key: int, name: str, *args: Any) -> Any:
        return getattr(self._actors[key], name)(*args)


class Slot:
    """One of a host's client actors, called as Ray's handles are."""

    def __init__(self, host: Any, key: int) -> None:
        self._host, self._key = host, key

    def __getattr__(self, name: str) -> Any:
        host, key = self._host, self._key

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

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._make = ray.remote(concurrency_groups={"control": 1})(Host).options(num_cpus=0)
        self.hosts = [self._make.remote() for _ in range(3)]

    def host(self, index: int) -> Any:
        try:
            self._ray.get(self.hosts[index].answers.remote(), timeout=60)
        except self._ray.exceptions.RayActorError:
            self.hosts[index] = self._make.remote()
        return self.hosts[index]


class PooledFleet(RayFleet):
    """The fleet with client actors in the pool's processes."""

    def __init__(self, pool: Pool, ray: Any, experiment: Experiment, num_actors: int, messages: list[str]) -> None:
        self._pool, self._ray = pool, ray
        super().__init__(
            ray.put(experiment),
            num_actors=num_actors,
            name="pooled",
            options=lambda index: {},
            vectors=Vectors.of(experiment),
            warn=messages.append,
        )

    def _grow(self, indices: Sequence[int], begun: Sequence[Any] = ()) -> None:
        for index in indices:
            host, key = self._pool.host(index), next(_KEYS)
            host.hold.remote(key, self._experiment, index)
            self._actors[index] = Slot(host, key)
            self._starting[index] = self._actors[index].where.remote()
        self._births += 1

    def _find_dead(self) -> list[int]:
        dead = []
        for index, actor in self._actors.items():
            try:
                self._ray.get(actor.ping.options(concurrency_group="control").remote(), timeout=60)
            except self._ray.exceptions.RayActorError:
                dead.append(index)
        return dead

    def close(self) -> None:
        self._closed = True
        self._group.drop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Pool, Any]]:
    import cloudpickle

    with ray_cluster(None, ClusterNeeds(actors=3)) as ray:
        import ray.cloudpickle as ray_pickle

        for pickler in (cloudpickle, ray_pickle):
            pickler.register_pickle_by_value(faults)
            pickler.register_pickle_by_value(sys.modules[__name__])
        yield Pool(ray), ray


class Played:
    """A run on actors that can be stopped after a round and gone on with."""

    def __init__(self, cluster: tuple[Pool, Any], work: Experiment, actors: int) -> None:
        self.messages: list[str] = []
        self._fleet = PooledFleet(*cluster, work, actors, self.messages)
        self._engine = Engine(work, self._fleet, on_repair=self.messages.append)
        self._state: RunState | None = None

    def on(self, rounds: int | None = None) -> Played:
        self._state = run_rounds(self._engine, self._state, rounds)
        return self

    def differs(self, subject: Subject) -> list[str]:
        """In what the end differs from that of the same run in one process."""
        assert self._state is not None
        fetched = {k: self._fleet.fetch(memory) for k, memory in self._state.memories.items()}
        # Of a client that has nothing to remember, actors hand back that it is nothing.
        memories = {k: memory for k, memory in fetched.items() if memory is not None}
        found, expected = content(self._state, memories), content(subject.states[-1], subject.states[-1].memories)
        self._fleet.close()
        return [key for key in expected if found[key] != expected[key]]


def content(state: RunState, memories: Mapping[int, object]) -> Mapping[str, object]:
    return {
        "model": state.vector.numpy().tobytes(),
        "states": to_bytes(dict(state.components)),
        "memories": to_bytes(dict(sorted(memories.items()))),
        "rows": [(r.bytes_up, r.bytes_down, r.flops, r.attendees, r.train_loss) for r in state.records],
    }


@pytest.mark.parametrize("name", METHODS)
def test_actors_give_the_bits_of_one_process(name: str, cluster: tuple[Pool, Any]) -> None:
    subject = subject_of(name)
    for actors in (1, 2, 3):
        played = Played(cluster, subject.world(), actors).on()
        assert [text for text in played.messages if "actor" in text] == []
        assert played.differs(subject) == [], actors


def test_an_actor_that_dies_after_the_first_round_changes_no_bit_of_any_method(cluster: tuple[Pool, Any]) -> None:
    pool, ray = cluster
    runs = {name: Played(cluster, subject_of(name).world(), 2).on(rounds=1) for name in METHODS}
    ray.kill(pool.hosts[0])  # where clients are laid first
    wrong = {}
    for name, played in runs.items():
        differs = played.on().differs(subject_of(name))
        if differs or not any("client actor 0" in text for text in played.messages):
            wrong[name] = (differs, played.messages)
    assert wrong == {}


@pytest.mark.parametrize("name", ["scaffold", "moon", "fedstg", "feddhad", "feddst"])
def test_an_actor_killed_in_a_round_changes_no_bit(name: str, cluster: tuple[Pool, Any], tmp_path: Path) -> None:
    """Methods that send, remember, hold work, measure, have masks."""
    subject, marker = subject_of(name), tmp_path / "died"
    where = {"client": subject.states[-1].records[1].cohort[1], "round": 2, "position": 0, "marker": str(marker)}
    played = Played(cluster, subject.world(faults.with_fault(subject.method, **where)), 2).on()
    assert marker.exists() and any("client actor" in text and "round 2" in text for text in played.messages)
    # Work that is held over a round's end has a place for the term that killed: memories may differ in that.
    assert set(played.differs(subject)) <= {"memories"}
