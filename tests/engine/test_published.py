"""What the server publishes: sent and charged once per client and version, cut to the client's part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny import net
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.aggregation import Refinement
from fedsweep.components.base import Published
from fedsweep.components.local import LocalStep, LocalTerm
from fedsweep.components.planning import FixedInterval
from fedsweep.errors import InvariantError
from fedsweep.method import FederatedMethod
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import ClientUpdate, Payload, RoundRecord, ServerContext, State, SyncContext
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import GivenParts, local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree

MODEL = 28  # scalars of the linear model


@dataclass(frozen=True, kw_only=True)
class Bank(Refinement):
    """Publishes seven numbers and a mask of nine, which change after the rounds that are named."""

    changes: tuple[int, ...] = ()

    def init(self, context: ServerContext) -> State:
        return {"bank": torch.zeros(7)}

    def publish(self, state: State) -> Mapping[str, Published]:
        return {"bank": Published(value=state["bank"]), "mask": Published(value=torch.ones(9, dtype=torch.bool))}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state

    def observe(self, state: State, record: RoundRecord) -> State:
        return {"bank": state["bank"] + 1.0} if record.round in self.changes else state


@dataclass(frozen=True, kw_only=True)
class Reader(LocalTerm):
    """Adds what was published to the gradient of the bias."""

    needs_anchor: ClassVar[bool] = False
    name: str = "reader"

    def gradient(self, step: LocalStep) -> ParamTree:
        assert step.broadcast["mask"].dtype == torch.bool
        return {"1.bias": step.broadcast["bank"][:4]}


def method(**fields: Any) -> FederatedMethod:
    return replace(fedavg(), terms=(Reader(),), **fields)


def traffic(given: FederatedMethod, **options: Any) -> list[tuple[tuple[int, ...], int, int]]:
    """Each round's cohort, and the values and bytes down beyond the models."""
    state = run_rounds(local_engine(tiny_experiment(given, **options)))
    return [
        (r.cohort, r.values_down - MODEL * len(r.cohort), r.bytes_down - 4 * MODEL * len(r.cohort))
        for r in state.records
    ]


def test_a_client_gets_what_is_published_once() -> None:
    """Seven values, and nine bits in two bytes, for each client that was not in a cohort before."""
    known: set[int] = set()
    for cohort, values, size in traffic(method(refinements=(Bank(),)), rounds=4):
        new = set(cohort) - known
        assert (values, size) == (7 * len(new), 7 * 4 * len(new) + 2 * len(new))
        known |= new
    assert len(known) > 3


class Narrow(Bank):
    """Publishes the numbers in a type that numpy does not have."""

    def publish(self, state: State) -> Mapping[str, Published]:
        return {"bank": Published(value=state["bank"].bfloat16())}


def test_numbers_of_sixteen_bits_are_published_at_two_bytes() -> None:
    [(cohort, values, num_bytes)] = traffic(replace(fedavg(), refinements=(Narrow(),)), rounds=1)
    assert (values, num_bytes) == (7 * len(cohort), 14 * len(cohort))


def test_and_again_once_it_is_another() -> None:
    """With everybody in each round: at first, and after round 2. The mask stays the same."""
    rounds = traffic(method(refinements=(Bank(changes=(2,)),)), rounds=4, cohort_size=6)
    assert [values for _, values, _ in rounds] == [6 * 7, 0, 6 * 7, 0]
    assert [size - 4 * values for _, values, size in rounds] == [6 * 2, 0, 0, 0]


def test_clients_read_what_is_published_now() -> None:
    """At a rate of 1 without data's say the bias moves by the bank alone: it is 0 at first, then 1."""
    still = replace(method(refinements=(Bank(changes=(1,)),)), terms=())
    read = method(refinements=(Bank(changes=(1,)),))
    first, second = (
        [run_rounds(local_engine(tiny_experiment(given, rounds=rounds, local_steps=1))).vector for rounds in (1, 2)]
        for given in (still, read)
    )
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1] - second[1], torch.tensor([0.0] * 24 + [0.1] * 4))


def test_a_folded_round_publishes_once_too() -> None:
    cut = method(refinements=(Bank(),), pacing=FixedInterval(interval=1, sync_rule="paper"))
    assert cut.folds and cut.exchanges == ("its Bank exchanges",)
    engine = local_engine(tiny_experiment(cut, local_steps=3))
    round = play_round(engine)
    assert round.sync_points == 3
    assert [round.ledger.values[k, "down", "bank"] for k in round.plan.context.cohort] == [7, 7, 7]


def test_a_resumed_run_charges_what_the_whole_one_does(tmp_path: Path) -> None:
    experiment = tiny_experiment(method(refinements=(Bank(),)), rounds=4)
    whole, engine = run_rounds(local_engine(experiment)), local_engine(experiment)
    store = CheckpointStore(tmp_path, keep=1, config_hash="")
    store.save(run_rounds(engine, rounds=2), fetch=engine.fleet.fetch)
    found = store.newest(keep_handle=engine.fleet.keep).state
    assert found is not None and set(found.published) == {k for r in found.records for k in r.cohort}
    again = run_rounds(local_engine(experiment), found)
    assert [r.bytes_down for r in again.records] == [r.bytes_down for r in whole.records]


@dataclass(frozen=True, kw_only=True)
class Control(Refinement):
    """Publishes the params' numbers in their order."""

    def publish(self, state: State) -> Mapping[str, Published]:
        return {"control": Published(value=torch.arange(float(NUM_PARAMS)), like="params")}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state


@dataclass(frozen=True, kw_only=True)
class Echo(LocalTerm):
    """Sends back what it was given for each param, and fails where that has another shape."""

    needs_anchor: ClassVar[bool] = False
    sends: ClassVar[bool] = True
    name: str = "echo"

    def gradient(self, step: LocalStep) -> ParamTree:
        return {name: 0.0 * step.broadcast[f"control/{name}"] for name in step.params}

    def finish(self, memory: dict[str, object], work: Any) -> tuple[dict[str, object], Payload]:
        return memory, dict(work.broadcast)


def build() -> nn.Module:
    return net()


NUM_PARAMS = sum(p.numel() for p in net().parameters())
PART = unit_submodel(net().unit_groups(), {"fc1": (1, 4)})


@pytest.mark.parametrize("part", [FULL_MODEL, PART])
def test_what_lies_like_the_params_is_cut_to_the_clients_part(part: SubModel) -> None:
    """The rows 1 and 4 of fc1's weight [8, 6] are the numbers 6 to 11 and 24 to 29."""
    mine = FederatedMethod(
        name="x", source="", terms=(Echo(),), refinements=(Control(),), submodels=GivenParts(rounds=((part,),))
    )
    engine = local_engine(tiny_experiment(mine, build=build, cohort_size=2))
    state = engine.start()
    round = play_round(engine, state)
    for update in round.updates:
        got = {name.removeprefix("echo/control/"): value for name, value in update.extras.items()}
        assert {name: value.shape for name, value in got.items()} == {
            name: value.shape for name, value in update.params.items()
        }
        expected = [*range(6, 12), *range(24, 30)] if part is PART else list(range(48))
        assert got["fc1.weight"].flatten().tolist() == expected
        assert round.ledger.values[update.client, "down", "control"] == update.layout.num_params


def test_two_contents_of_one_name_are_refused() -> None:
    twice = replace(fedavg(), refinements=(Bank(), Bank(changes=(1,))))
    with pytest.raises(InvariantError, match="two components publish something called 'bank'"):
        play_round(local_engine(tiny_experiment(twice)))
