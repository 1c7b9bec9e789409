"""Laying clients on workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.messages import Handle, Progress, Reply, RoundTotals, Segment, SegmentReply
from fedsweep.components.codec import Codec
from fedsweep.engine.engine import Engine
from fedsweep.errors import ComponentError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet, level, merged_answers
from fedsweep.fleet.ray_client_actor import ClientActor
from fedsweep.fleet.ray_wire import received_answer, sent_segment
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import to_arrays

loads = st.dictionaries(
    st.integers(0, 40), st.tuples(st.integers(1, 3), st.floats(0.5, 100.0)), min_size=1, max_size=14
)


@settings(max_examples=80, deadline=None)
@given(loads=loads, num_workers=st.integers(1, 6))
def test_every_client_has_one_worker_and_no_worker_is_idle_beside_a_loaded_one(
    loads: dict[int, tuple[int, float]], num_workers: int
) -> None:
    placed = level(loads, num_workers)
    assert set(placed) == set(loads)
    assert set(placed.values()) <= set(range(num_workers))
    assert len(set(placed.values())) == min(num_workers, len(loads)) or len({s for s, _ in loads.values()}) > 1


@settings(max_examples=80, deadline=None)
@given(loads=loads, num_workers=st.integers(1, 6))
def test_each_frequency_is_level_to_within_its_greatest_load(
    loads: dict[int, tuple[int, float]], num_workers: int
) -> None:
    """Longest first is never off by more than one client of the class."""
    placed = level(loads, num_workers)
    for frequency in {syncs for syncs, _ in loads.values()}:
        members = {k: work for k, (syncs, work) in loads.items() if syncs == frequency}
        totals = [sum(work for k, work in members.items() if placed[k] == w) for w in range(num_workers)]
        assert max(totals) - min(totals) <= max(members.values()) + 1e-9


@settings(max_examples=40, deadline=None)
@given(loads=loads, num_workers=st.integers(1, 6), data=st.data())
def test_placement_does_not_depend_on_the_order_of_the_loads(
    loads: dict[int, tuple[int, float]], num_workers: int, data: st.DataObject
) -> None:
    shuffled = dict(data.draw(st.permutations(list(loads.items()))))
    assert level(shuffled, num_workers) == level(loads, num_workers)


def test_ten_equal_clients_on_ten_workers_have_one_each() -> None:
    """Whatever their ids: k mod W would leave workers idle."""
    assert Counter(level(dict.fromkeys(range(3, 200, 20), (1, 5.0)), 10).values()) == Counter(range(10))


def test_high_frequency_clients_are_spread_before_low_ones_fill_up() -> None:
    """Two workers, two high clients of work 1 and two low ones of 10 and 9: one high client on each."""
    placed = level({0: (9, 1.0), 1: (9, 1.0), 2: (1, 10.0), 3: (1, 9.0)}, 2)
    assert placed[0] != placed[1] and placed[2] != placed[3]


def test_longest_first_by_hand() -> None:
    """7, 6, 5, 4, 3 on two workers: 7 | 6, then 5 to the second, 4 to the first, 3 to either with 11: the first."""
    works = {0: 7.0, 1: 6.0, 2: 5.0, 3: 4.0, 4: 3.0}
    assert level({k: (1, w) for k, w in works.items()}, 2) == {0: 0, 1: 1, 2: 1, 3: 0, 4: 0}


def answer(*clients: int, aggregate: bool = False) -> SegmentReply:
    return SegmentReply(
        replies=tuple(Reply(client=k, vector=torch.full((2,), float(k)), progress=Progress(steps=k)) for k in clients),
        totals={k: RoundTotals(steps=k, samples=0, loss_sum=0.0) for k in clients},
        memories={k: f"of {k}" for k in clients},
        aggregate=torch.ones(2) if aggregate else None,
    )


def test_answers_are_combined_in_the_order_of_clients() -> None:
    first, second = answer(5, 1, aggregate=True), answer(3, 0)
    for order in ((first, second), (second, first)):
        result = merged_answers(order)
        assert (
            [reply.client for reply in result.replies] == list(result.totals) == list(result.memories) == [0, 1, 3, 5]
        )
        assert [float(reply.vector[0]) for reply in result.replies] == [0.0, 1.0, 3.0, 5.0]
        assert result.memories[3] == "of 3" and result.totals[5].steps == 5
        assert result.aggregate is not None
    assert merged_answers([second]).aggregate is None


def test_the_local_fleet_has_one_worker_that_folds() -> None:
    fleet = local_engine(tiny_experiment(fedavg())).fleet
    assert (fleet.num_workers, fleet.folds) == (1, True)
    assert set(fleet.place({4: (1, 2.0), 7: (2, 1.0)}).values()) == {0}
    assert fleet.fetch(fleet.keep({"a": 1})) == {"a": 1}


@dataclass(frozen=True, kw_only=True)
class Faulty(Codec):
    """Fails where clients encode, not where a plan does."""

    on_client: ClassVar[bool] = False

    def encode(self, move: Tensor, stream: Any) -> Any:
        if self.on_client:
            raise ValueError("no code")
        return {"move": move}

    def decode(self, message: Any, size: int) -> Tensor:
        return message["move"]  # type: ignore[no-any-return]


class OnActor(LocalFleet):
    """A client actor's work in this process; of an error the traceback does not travel, as with Ray."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._actor = ClientActor(experiment, 0, 0.0)

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        Faulty.on_client = True
        try:
            return received_answer(self._actor.run(sent_segment(segment), to_arrays(anchor), [], []), {})
        except Exception as error:
            raise error.with_traceback(None) from None
        finally:
            Faulty.on_client = False


def test_what_a_codec_raises_on_an_actor_is_told_with_its_place() -> None:
    experiment = tiny_experiment(replace(fedavg(), codec=Faulty()))
    place = r"^Faulty.encode \(test_fleet.py, line \d+\) failed in round 1: ValueError: no code$"
    with pytest.raises(ComponentError, match=place):
        run_rounds(Engine(experiment, OnActor(experiment)))
