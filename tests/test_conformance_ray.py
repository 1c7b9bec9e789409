"""Every registered method gives the same bits on one, two and three actors, and after an actor died.

On the shared pool's processes, each of which holds client actors of many runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import fault_terms
import pytest
import ray
from each_method import each_method
from ray_pool import Pool, PooledFleet

from fedsweep.algorithms.registry import METHODS
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.runs.checkpoints.state_codec import to_bytes
from fedsweep.testing import Subject, run_rounds, subject_of

pytestmark = pytest.mark.ray
NOT_THE_SAME = {"timestamp_ms": 0, "wall_time_s": 0.0, "eval_time_s": 0.0, "server_time_s": 0.0, "traffic": None}


class Played:
    """A run on actors that can be stopped after a round and gone on with."""

    def __init__(self, pool: Pool, work: Experiment, actors: int) -> None:
        self.messages: list[str] = []
        self._fleet = PooledFleet(pool, work, actors, self.messages)
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
        "held": repr(state.held),
        "elsewhere": [(hub, model.vector.tolist(), model.num_samples) for hub, model in sorted(state.models.items())],
        "rows": [repr(replace(r, **NOT_THE_SAME)) for r in state.records],
    }


@pytest.mark.parametrize("name", each_method())
def test_actors_give_the_bits_of_one_process(name: str, pool: Pool) -> None:
    subject = subject_of(name)
    for actors in (1, 3):  # on two in the next test
        played = Played(pool, subject.world(), actors).on()
        assert [text for text in played.messages if "actor" in text] == []
        assert played.differs(subject) == [], actors


@pytest.mark.exhaustive
def test_an_actor_that_dies_after_the_first_round_changes_no_bit_of_any_method(pool: Pool) -> None:
    runs = {name: Played(pool, subject_of(name).world(), 2).on(rounds=1) for name in METHODS}
    ray.kill(pool.hosts[0])  # where clients are laid first
    wrong = {}
    for name, played in runs.items():
        differs = played.on().differs(subject_of(name))
        if differs or not any("client actor 0" in text for text in played.messages):
            wrong[name] = (differs, played.messages)
    assert wrong == {}


IN_A_ROUND = ("scaffold", "fedstg", "feddhad", "feddst")
ELSEWHERE = ("dpsgd", "dfedavgm", "hierfavg", "ifca", "aedfl", "aedfl_feddhad")  # models meet there, or are several
ROBUST = ("fedmedian", "trimmed_mean", "krum", "norm_bound")


@pytest.mark.parametrize(
    "name", [*IN_A_ROUND, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("moon", *ELSEWHERE, *ROBUST))]
)
def test_an_actor_killed_in_a_round_changes_no_bit(name: str, pool: Pool, tmp_path: Path) -> None:
    """Methods that send and remember, hold work, measure, have masks."""
    subject, marker = subject_of(name), tmp_path / "died"
    where = {"client": subject.states[-1].records[1].cohort[:2][-1], "round": 2, "position": 0, "marker": str(marker)}
    played = Played(pool, subject.world(fault_terms.with_fault(subject.method, **where)), 2).on()
    assert marker.exists() and any("client actor" in text and "round 2" in text for text in played.messages)
    # Work that is held over a round's end has a place for the term that killed: memories may differ in that.
    assert set(played.differs(subject)) <= {"memories"}
