"""The engine's server side: which component is asked when, what it may see, what it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from tiny import seams_engine
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.components.aggregation import Refinement, ServerUpdate, Weighting, When, by_samples, mean_of_updates
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import InvariantError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, RoundRecord, ServerContext, State, SyncContext
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment


@dataclass(frozen=True, kw_only=True)
class Log(Weighting):
    """By samples; its state is what it was asked."""

    needs_updates: ClassVar[bool] = True

    def init(self, context: ServerContext) -> State:
        return {"log": ["init"]}

    def _with(self, state: State, entry: str) -> State:
        return {"log": [*state["log"], entry]}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return by_samples(updates), self._with(state, f"weigh {sync.round}.{sync.index}")

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        end = " end" if sync.ends_round else ""
        return self._with(state, f"learn {sync.round}.{sync.index}{end}")

    def observe(self, state: State, record: RoundRecord) -> State:
        tested = record.test_accuracy is not None
        return self._with(state, f"observe {record.round} tested={tested}")


def test_components_are_asked_in_the_documented_order() -> None:
    state = run_rounds(seams_engine(weighting=Log(), cut=True, rounds=2))
    one_round = ["weigh {0}.0", "learn {0}.0", "weigh {0}.1", "learn {0}.1 end", "observe {0} tested=True"]
    assert state.components["weighting"]["log"] == ["init", *[e.format(r) for r in (1, 2) for e in one_round]]


@dataclass(frozen=True, kw_only=True)
class AddOne(Refinement):
    """Adds 1 to every value and remembers where."""

    when: ClassVar[When] = "round_end"

    def init(self, context: ServerContext) -> State:
        return []

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector + 1.0, [*state, (sync.round, sync.index)]


@dataclass(frozen=True, kw_only=True)
class AddOneAlways(Refinement):
    """The same at every sync point."""

    when: ClassVar[When] = "always"

    def init(self, context: ServerContext) -> State:
        return []

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return AddOne().refine(state, vector, updates, sync)


def test_refinements_act_at_the_rounds_end_or_at_every_sync_point() -> None:
    state = run_rounds(seams_engine(refinements=(AddOne(), AddOneAlways()), cut=True, rounds=2))
    assert state.components["refinement0"] == [(1, 1), (2, 1)]
    assert state.components["refinement1"] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_refinements_work_on_the_aggregate_one_after_the_other() -> None:
    plain = run_rounds(seams_engine(rounds=1)).vector
    once = run_rounds(seams_engine(refinements=(AddOne(),), rounds=1)).vector
    twice = run_rounds(seams_engine(refinements=(AddOne(), AddOneAlways()), rounds=1)).vector
    assert torch.equal(once, plain + 1.0)
    assert torch.equal(twice, plain + 1.0 + 1.0)


def test_the_refined_model_is_what_clients_receive_next() -> None:
    always = seams_engine(refinements=(AddOneAlways(),), cut=True)
    state = always.start()
    round = play_round(always, state)
    assert {u.anchor_version for u in round.updates} == {1}
    first = run_rounds(seams_engine(refinements=(AddOneAlways(),), rounds=1))
    assert float((round.anchors[1] - state.vector).mean()) > 0.5
    assert round.anchors[1].shape == first.vector.shape


@dataclass(frozen=True, kw_only=True)
class Patient(Refinement):
    """Keeps its progress before it finishes, and says what it found kept."""

    when: ClassVar[When] = "always"

    def init(self, context: ServerContext) -> State:
        return []

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        sync.checkpoint({"at": f"{sync.round}.{sync.index}"})
        return vector, [*state, sync.resumed]


def test_a_refinement_finds_what_the_interrupted_try_of_this_very_call_kept() -> None:
    kept: list[RunState] = []
    first = seams_engine(refinements=(Patient(),), cut=True, rounds=1)
    engine = Engine(first.experiment, first.fleet, on_partial=kept.append)
    done = run_rounds(engine)
    assert done.components["refinement0"] == [None, None] and done.partial == {}
    assert [state.round for state in kept] == [0, 0]
    again = run_rounds(engine, kept[0])
    assert again.components["refinement0"] == [{"at": "1.0"}, None]
    again = run_rounds(engine, kept[1])
    assert again.components["refinement0"] == [None, {"at": "1.1"}]


@dataclass(frozen=True, kw_only=True)
class Blind(Weighting):
    """Tries to look at the models without having asked for them."""

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        assert all(u.vector is None for u in updates)
        with pytest.raises(ValueError, match="needs_updates = False"):
            _ = updates[0].params
        return by_samples(updates), state

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        assert all(u.vector is None for u in updates)
        return {"learned": state.get("learned", 0) + 1}


def test_components_that_need_no_updates_see_no_models() -> None:
    state = run_rounds(seams_engine(weighting=Blind(), cut=True, rounds=2))
    assert state.components["weighting"] == {"learned": 4}


@dataclass(frozen=True, kw_only=True)
class Deltas(ServerUpdate):
    """The mean, made of deltas from each update's anchor."""

    needs_updates: ClassVar[bool] = True

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        total = torch.zeros_like(sync.vector, dtype=torch.float64)
        for update, weight in zip(updates, weights.tolist(), strict=True):
            assert update.vector is not None
            anchor = sync.anchors[update.anchor_version]
            total += weight * (anchor.double() + (update.vector.double() - anchor.double()))
        return total.float(), state


def test_every_update_has_its_anchor_at_hand() -> None:
    """Two speeds: at a round's end the attendees started from different versions of the server's model."""
    fields = {"num_clients": 4, "cohort_size": 4, "local_steps": 6, "rounds": 2}
    method = dynamicfl(high_interval=2, low_interval=3, group="random", sync_rule="paper")
    plain = run_rounds(local_engine(tiny_experiment(method, **fields)))  # type: ignore[arg-type]
    deltas = replace(method, server_update=Deltas())
    found = run_rounds(local_engine(tiny_experiment(deltas, **fields)))  # type: ignore[arg-type]
    torch.testing.assert_close(found.vector, plain.vector, rtol=0, atol=1e-6)
    assert found.anchors == {}


@dataclass(frozen=True, kw_only=True)
class Given(Weighting):
    """The weights that the test names."""

    weights: tuple[float, ...]

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return torch.tensor(self.weights, dtype=torch.float64), state


@pytest.mark.parametrize(
    "weights",
    [(0.5, 0.6, 0.1), (0.5, 0.7, -0.2), (0.5, 0.5, float("nan")), (0.5, 0.5), (0.25, 0.25, 0.25, 0.25), ()],
    ids=["sum", "negative", "nan", "too few", "too many", "none"],
)
@pytest.mark.parametrize("cut", [False, True])
def test_weights_that_break_the_promise_are_refused(weights: tuple[float, ...], cut: bool) -> None:
    with pytest.raises(
        InvariantError, match=r"Given must give 3 non-negative weights that sum to 1, but gave .* round 1"
    ):
        run_rounds(seams_engine(weighting=Given(weights=weights), cut=cut, rounds=1))


def test_weights_need_not_be_positive() -> None:
    engine = seams_engine(weighting=Given(weights=(0.0, 1.0, 0.0)), rounds=1)
    round = play_round(engine)
    assert round.updates[1].vector is not None
    assert torch.equal(round.vector, round.updates[1].vector)


@dataclass(frozen=True, kw_only=True)
class Blown(ServerUpdate):
    """The mean over zero."""

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        return mean_of_updates(updates, weights, sync) / 0.0, state


def test_a_server_model_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(
        InvariantError, match=r"Blown.apply \(test_engine.py, line \d+\) returned a model .* not finite .* in round 1"
    ):
        run_rounds(seams_engine(server_update=Blown()))


@dataclass(frozen=True, kw_only=True)
class Meddler(Refinement):
    """Does to the model that it is shown before round 1 what nobody should."""

    def init(self, context: ServerContext) -> State:
        context.model.register_forward_hook(lambda module, inputs, logits: -logits)
        return {}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state


def test_what_a_component_does_to_the_model_that_it_is_shown_reaches_no_client() -> None:
    method = FederatedMethod(name="test", source="", refinements=(Meddler(),))
    work = tiny_experiment(method, local_steps=4)
    check_experiment(work)  # as before a run, which then makes its fleet
    assert torch.equal(run_rounds(local_engine(work)).vector, run_rounds(seams_engine()).vector)
