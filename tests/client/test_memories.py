"""A client's memory of parameters follows it through changing sub-models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from tiny import net
from torch import Tensor, nn

from fedsweep.client.memories import cut_memory, filled_memory, grown_memory
from fedsweep.components.local import LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.components.planning import SubModelPolicy
from fedsweep.method import FederatedMethod
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import Payload, RoundContext, State
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree, layout_of

torch.set_num_threads(1)


LAYOUT = layout_of(net())


def part(*units: int) -> SubModel:
    return unit_submodel(net().unit_groups(), {"fc1": units})


def tree(value: float) -> ParamTree:
    return LAYOUT.params(torch.full((LAYOUT.num_values,), value))


def test_trees_of_parameters_are_cut_wherever_they_are_and_nothing_else_is() -> None:
    memory = {
        "old": [tree(1.0), tree(2.0)],
        "count": 3,
        "mean": torch.ones(5),
        "weights": {"fc1.weight": torch.ones(8)},
    }
    cut = cut_memory(memory, part(1, 2), LAYOUT)
    assert cut["old"][1]["fc1.weight"].shape == (2, 6) and cut["old"][1]["fc2.weight"].shape == (8, 2)
    assert cut["count"] == 3 and cut["mean"] is memory["mean"] and cut["weights"]["fc1.weight"].shape == (8,)


def test_what_the_part_does_not_hold_stays_as_it_was_or_zero() -> None:
    half = part(0, 1, 2, 3)
    cut = cut_memory({"control": tree(5.0)}, half, LAYOUT)
    grown = grown_memory(cut, {"control": tree(7.0)}, submodel=half, full=LAYOUT)["control"]
    assert bool((grown["fc1.weight"][:4] == 5).all()) and bool((grown["fc1.weight"][4:] == 7).all())
    first = grown_memory(cut, None, submodel=half, full=LAYOUT)["control"]
    assert bool((first["fc1.weight"][:4] == 5).all()) and not first["fc1.weight"][4:].any()


def test_of_a_model_what_was_never_held_is_what_was_received() -> None:
    """Units 0-3 held 5 first, then units 2-5 hold 6; the whole model that is received has 9 everywhere."""
    memory: dict[str, object] = {}
    for units, value in (((0, 1, 2, 3), 5.0), ((2, 3, 4, 5), 6.0)):
        now = cut_memory({"own": tree(value)}, part(*units), LAYOUT)
        memory = grown_memory(now, memory, submodel=part(*units), full=LAYOUT, never_held=math.nan)
    filled, looked_at = (filled_memory(memory, values, LAYOUT)["own"]["fc1.bias"] for values in (tree(9.0), {}))
    assert filled.tolist() == [5, 5, 6, 6, 6, 6, 9, 9]
    assert looked_at.tolist() == [5, 5, 6, 6, 6, 6, 0, 0]


def test_full_models_keep_their_memory_itself() -> None:
    memory = {"control": tree(1.0)}
    assert cut_memory(memory, FULL_MODEL, LAYOUT) is memory
    assert grown_memory(memory, None, submodel=FULL_MODEL, full=LAYOUT) is memory


@dataclass(frozen=True, kw_only=True)
class Steps(LocalTerm):
    """Counts each coordinate's jobs, and adds nothing to the gradient."""

    stateful: ClassVar[bool] = True
    name: str = "steps"

    def init(self, params: ParamTree) -> Memory:
        return {"jobs": {name: torch.zeros_like(value) for name, value in params.items()}}

    def gradient(self, step: LocalStep) -> ParamTree:
        jobs: dict[str, Tensor] = step.memory["jobs"]  # type: ignore[assignment]
        return {name: 0 * value for name, value in jobs.items()}

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        jobs: dict[str, Tensor] = memory["jobs"]  # type: ignore[assignment]
        return {"jobs": {name: value + 1 for name, value in jobs.items()}}, {}


@dataclass(frozen=True, kw_only=True)
class Rounds(SubModelPolicy):
    """Everybody's part, round by round."""

    parts: tuple[SubModel, ...]

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        return dict.fromkeys(context.cohort, self.parts[context.round - 1]), state


def build() -> nn.Module:
    return net()


def test_terms_memory_counts_the_rounds_in_which_each_unit_was_held() -> None:
    """Units 0-3, then 2-5, then all: 2, 2, 3, 3, 2, 2, 1, 1 jobs."""
    method = FederatedMethod(
        name="x", source="", terms=(Steps(),), submodels=Rounds(parts=(part(0, 1, 2, 3), part(2, 3, 4, 5), FULL_MODEL))
    )
    state = run_rounds(local_engine(tiny_experiment(method, build=build, cohort_size=6)))
    jobs = state.memories[0]["terms"]["steps"]["jobs"]
    assert jobs["fc1.bias"].tolist() == [2, 2, 3, 3, 2, 2, 1, 1]
    assert jobs["fc2.bias"].tolist() == [3] * 8
