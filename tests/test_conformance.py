"""Every registered method is held to its card; and the checks see what they are there for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from each_method import each_method
from torch import Tensor

from fedsweep.algorithms.registry import METHODS
from fedsweep.card import Card, Limit, with_card
from fedsweep.components.aggregation import Refinement, Weighting
from fedsweep.components.base import ComponentReport
from fedsweep.components.codec import Codec
from fedsweep.components.local import LocalStep, LocalTerm, LocalWork, Memory, Passes
from fedsweep.components.planning import SubModelPolicy
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, Payload, RoundContext, ServerContext, State, SyncContext
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import CHECKS, method_conforms
from fedsweep.trees import ParamTree

torch.set_num_threads(1)

Builder = Callable[..., FederatedMethod]


# Three of the checks take two thirds of the time of all.
DEAR = ("rough worlds", "cost", "merges")


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in DEAR])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_conforms(name: str, check: str) -> None:
    method_conforms(name, checks=[check])


@pytest.mark.slow
@pytest.mark.parametrize("check", DEAR)
@pytest.mark.parametrize("name", each_method())
def test_every_method_conforms_in_what_takes_long(name: str, check: str) -> None:
    method_conforms(name, checks=[check])


# -- the checks see what they are there for ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pull(LocalTerm):
    """A pull towards the anchor, well-behaved unless a field says otherwise."""

    strength: float = 0.5
    name: str = "pull"
    stated_passes: float = 0

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        return Passes(step=self.stated_passes)

    def gradient(self, step: LocalStep) -> ParamTree:
        return {name: self.strength * (value.detach() - step.anchor[name]) for name, value in step.params.items()}


@dataclass(frozen=True, kw_only=True)
class Talks(Pull):
    """Sends one value."""

    sends: ClassVar[bool] = True

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return memory, {"one": torch.ones(1)}


@dataclass(frozen=True, kw_only=True)
class Loose(Pull):
    """Can't be hashed."""

    weights: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Shuffles(Pull):
    """Pulls as often as it was asked before: what another run did is not forgotten."""

    count: ClassVar[Any] = itertools.count(1)

    def gradient(self, step: LocalStep) -> ParamTree:
        factor = 1e-3 * next(self.count)
        return {name: factor * value for name, value in super().gradient(step).items()}


@dataclass(frozen=True, kw_only=True)
class Counts(Refinement):
    """Adds up rounds in its state; in place, or in a list that a checkpoint can't see, where it is told to."""

    in_place: bool = False
    needs_proxy: bool = False

    def init(self, context: ServerContext) -> State:
        if self.needs_proxy and context.proxy_data is None:
            raise ConfigError("counts needs proxy data; set scenario.server_data.proxy")
        return {"rounds": torch.zeros(1)}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        if self.in_place:
            state["rounds"] += 1
            return vector * 0.99, state
        return vector * 0.99, {"rounds": state["rounds"] + 1}

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={"counted": 0.0})


@dataclass(frozen=True, kw_only=True)
class Unkeepable(Refinement):
    """Has a state that no checkpoint can keep."""

    def init(self, context: ServerContext) -> State:
        return {"seen": {1, 2}}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector * 0.99, state


@dataclass(frozen=True, kw_only=True)
class OnlyWhole(Refinement):
    """Falls over parts of the model, without having said so."""

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        if any(u.submodel != FULL_MODEL for u in updates):
            raise RuntimeError("parts of the model")
        return vector * 0.99, state


@dataclass(frozen=True, kw_only=True)
class Scribbles(Pull):
    """Changes the batch that others see, too."""

    def gradient(self, step: LocalStep) -> ParamTree:
        step.inputs.mul_(1.5)
        return {}


@dataclass(frozen=True, kw_only=True)
class CutsNothing(SubModelPolicy):
    """Says that it cuts, and does not."""

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        return dict.fromkeys(context.cohort, FULL_MODEL), state


@dataclass(frozen=True, kw_only=True)
class FirstWins(Weighting):
    """All weight to whoever comes first: the client of the lowest number."""

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        weights = torch.zeros(len(updates), dtype=torch.float64)
        weights[0] = 1.0
        return weights, state


@dataclass(frozen=True, kw_only=True)
class Wide(Codec):
    """Sends the four largest values, and where they lie in eight bytes each."""

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        places = move.abs().topk(4).indices
        return {"values": move[places], "places": places}

    def decode(self, message: Payload, size: int) -> Tensor:
        return torch.zeros(size, dtype=message["values"].dtype).index_copy(0, message["places"], message["values"])


def its_params(*, params: int) -> int:
    """A model."""
    return params


def one_value() -> int:
    """A number."""
    return 1


def built(card: Card | None, **parts: Any) -> Builder:
    """A builder with one documented parameter."""

    def mine(*, pull: float = 0.5) -> FederatedMethod:
        """A method of the test.

        Args:
            pull: Of no use.
        """
        return FederatedMethod(name="mine", source="", **parts)

    return mine if card is None else with_card(card)(mine)


def silent(*, pull: float = 0.5) -> FederatedMethod:
    """A method whose parameter is not explained."""
    return FederatedMethod(name="silent", source="")


@with_card(Card())
def needing(*, pull: float) -> FederatedMethod:
    """A method whose parameter has no default.

    Args:
        pull: Of no use.
    """
    return FederatedMethod(name="needing", source="")


WRONG: Mapping[str, tuple[str, Builder, str]] = {
    "no card": ("values", built(None), r"has no card: put @with_card\(Card\(\.\.\.\)\) on it"),
    "a list in a component": ("values", built(Card(), terms=(Loose(),)), "unhashable type"),
    "a silent parameter": ("values", with_card(Card())(silent), r"says nothing of \['pull'\]"),
    "a parameter without a default": (
        "values",
        needing,
        r":needing: parameters need defaults, but \['pull'\] have none",
    ),
    "memory of other runs": ("bits", built(Card(), terms=(Shuffles(),)), "a second run gives another model"),
    "a state that can't be kept": (
        "resume",
        built(Card(), refinements=(Unkeepable(),)),
        "a builtins.set, which can't be kept",
    ),
    "a state changed in place": ("purity", built(Card(), refinements=(Counts(in_place=True),)), "round 1 changed what"),
    "more up than the card says": (
        "ledger",
        built(Card(), terms=(Talks(),)),
        r"round 1, up: 2640 bytes crossed, the ledger has 2640, the card's formula gives 2624; correct",
    ),
    "less down than the card says": ("ledger", built(Card(down=(its_params,)), terms=(Pull(),)), "round 1, down: "),
    "a limit that is none": (
        "limits",
        built(Card(limits=(Limit(given={"pull": 0.0}),)), terms=(Pull(),)),
        r"with {'pull': 0\.0} the models should be those of fedavg \(bit for bit\), but are .* apart",
    ),
    "a dead figure": (
        "life",
        built(Card(live=("counted",)), refinements=(Counts(),)),
        r"figures of the card's `live` are 0 or missing in 3 rounds: \['counted'\]",
    ),
    "a term without effect": ("life", built(Card(), terms=(Pull(strength=0.0),)), "its model is FedAvg's"),
    "a need that is none": (
        "rough worlds",
        built(Card(needs=("proxy",)), terms=(Pull(),)),
        r"lack, but they are not refused: \['no data on the server'\]",
    ),
    "a need that the card does not have": (
        "rough worlds",
        built(Card(), refinements=(Counts(needs_proxy=True),)),
        "refused, though the card does not say that it is needed: {'no data on the server'",
    ),
    "a merge that falls over": (
        "merges",
        built(Card(), refinements=(OnlyWhole(),)),
        "mine and federated_dropout can be merged, but the run fails: OnlyWhole.refine .* parts of the model",
    ),
    "batches written on": ("streams", built(Card(), terms=(Scribbles(),)), "batches are not FedAvg's"),
    "nothing is cut": ("sub-models", built(Card(), submodels=CutsNothing()), "no client got less than the whole"),
    "weights by number": ("order", built(Card(), weighting=FirstWins()), "numbered the other way round"),
    "passes that are not made": (
        "cost",
        built(Card(), terms=(Pull(stated_passes=1),)),
        r"compute 1\.000 times what FedAvg's do, but the column flops says 1\.333; correct the `passes`",
    ),
    "another golden round": (
        "golden",
        built(Card(golden=(4.9,))),
        r"gives \[4\.94532.*\], but the card says \(4\.9,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_seen_and_named(name: str) -> None:
    check, builder, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        method_conforms(builder, checks=[check])


@pytest.mark.parametrize("checks", ["ledgers", ["ledgers"]])
def test_a_check_that_is_none_is_said_to_be(checks: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="unknown check 'ledgers'; did you mean 'ledger'"):
        method_conforms(built(Card()), checks=checks)


def test_a_codec_of_ones_own_may_send_wide_integers() -> None:
    """They are charged as they are; counted again they were four bytes each."""
    method_conforms(built(Card(), codec=Wide()), checks=["ledger"])


def test_a_method_of_ones_own_conforms() -> None:
    method_conforms(built(Card(up=(one_value,)), terms=(Talks(),)))
