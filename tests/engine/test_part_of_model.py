"""A model of which only some tensors travel: what is charged, what is averaged, and what the client keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalTerm, LocalWork, Memory
from fedsweep.engine.forecast import forecast
from fedsweep.errors import InvariantError
from fedsweep.records import Payload
from fedsweep.submodel import PartOfModel
from fedsweep.testing import (
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    with_devices,
    with_parts,
)
from fedsweep.trees import ParamTree, layout_of

BODY = PartOfModel(names=frozenset({"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean"}))


def build() -> nn.Module:
    """A body of 6 x 3 + 3 + 6 = 27 params with 6 float buffers, a head of 16 params."""
    return nn.Sequential(Flat(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))


class Flat(nn.Linear):
    """A layer that takes pictures."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.flatten(1))


@dataclass(frozen=True, kw_only=True)
class OwnHead(LocalTerm):
    """The client goes on with the head that it had."""

    needs_anchor: ClassVar[bool] = False
    stateful: ClassVar[bool] = True
    name: str = "own"

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        model = memory.get("model")
        return memory, {n: v for n, v in model.items() if n.startswith("2.")} if isinstance(model, dict) else None

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return {"model": {name: value.clone() for name, value in work.params.items()}}, {}


def test_what_stays_is_not_charged_in_ledger_plan_and_forecast() -> None:
    """27 params and 3 of 6 buffers travel, each way, for three clients."""
    experiment = tiny_experiment(with_parts(BODY), build=build, rounds=1)
    engine = local_engine(experiment)
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    for direction in ("up", "down"):
        assert round.ledger.bytes(direction) == 3 * 4 * (27 + 3)
        kinds = {kind: n for (k, way, kind), n in round.ledger.values.items() if (k, way) == (0, direction)}
        assert kinds in ({}, {"params": 27, "buffers": 3})
    known = forecast(experiment)
    assert plan.num_bytes == round.ledger.total_bytes == known.total_bytes - known.registration_bytes


def test_the_clock_waits_for_what_travels_alone() -> None:
    experiment = tiny_experiment(with_parts(BODY), build=build, rounds=1)
    state = run_rounds(local_engine(with_devices(experiment, [tiny_device(1e30, bits_per_s=1.0)])))
    assert state.clock == pytest.approx(2 * 32 * 30)


def test_the_server_keeps_what_does_not_travel_and_the_client_its_own() -> None:
    method = replace(with_parts(BODY), terms=(OwnHead(),))
    experiment = tiny_experiment(method, build=build, num_clients=3, rounds=3)
    engine = local_engine(experiment)
    state, layout = engine.start(), layout_of(build())
    start = layout.model(state.vector)
    first = run_rounds(engine, state, rounds=1)
    after = layout.model(first.vector)
    for name, value in after.items():
        assert torch.equal(value, start[name]) == (name not in BODY.names), name
    heads = [first.memories[k]["terms"]["own"]["model"]["2.weight"] for k in range(3)]
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], start["2.weight"])
    # With a rate of 0 the second round ends where it began: with the client's own head.
    frozen = local_engine(tiny_experiment(method, build=build, num_clients=3, rounds=3, learning_rate=0.0))
    second = run_rounds(frozen, first, rounds=1)
    for k in range(3):
        assert torch.equal(second.memories[k]["terms"]["own"]["model"]["2.weight"], heads[k])


def test_momentum_that_persists_is_kept_for_the_head_too() -> None:
    experiment = tiny_experiment(
        with_parts(BODY), build=build, num_clients=3, optimizer=OptimizerSettings(momentum=0.9, keep="persist")
    )
    kept = run_rounds(local_engine(experiment), rounds=1).memories[0]["optimizer"]["momentum_buffer"]
    assert kept.shape == (43,) and bool((kept[27:] != 0).any())


def test_momentum_that_is_averaged_travels_where_its_param_does() -> None:
    experiment = tiny_experiment(
        with_parts(BODY), build=build, optimizer=OptimizerSettings(momentum=0.9, keep="average"), rounds=1
    )
    engine = local_engine(experiment)
    state = engine.start()
    round = play_round(engine, state)
    assert {kind for _, _, kind in round.ledger.values} == {"params", "buffers", "optimizer"}
    assert round.ledger.bytes("up") == 3 * 4 * (27 + 3 + 27)
    assert bool((round.vector[49:][:27] != 0).any()) and not bool(round.vector[49:][27:].any())


def test_adams_count_travels_with_its_moments() -> None:
    adam = OptimizerSettings(name="adam", keep="average")
    engine = local_engine(tiny_experiment(with_parts(BODY), build=build, optimizer=adam, local_steps=4, rounds=2))
    state = run_rounds(engine)
    assert float(engine.layout.views(state.vector)["optimizer.step"]) == 8.0


def test_a_name_that_the_model_lacks_is_refused() -> None:
    experiment = tiny_experiment(with_parts(PartOfModel(names=frozenset({"head.weight"}))), build=build)
    with pytest.raises(InvariantError, match=r"no params or float buffers called head\.weight"):
        run_rounds(local_engine(experiment))


def test_parts_of_equal_names_are_one() -> None:
    assert PartOfModel(names=frozenset({"a", "b"})).key() == PartOfModel(names=frozenset({"b", "a"})).key()
    assert PartOfModel(names=frozenset({"a"})).key() != PartOfModel(names=frozenset({"b"})).key()
