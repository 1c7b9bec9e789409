"""The engine's server side: which component is asked when, what it may see, and what is metered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsweep.algorithms.dynamicfl import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.local import LocalStep, LocalTerm
from fedsweep.components.pacing import FixedInterval
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.components.refinement import Refinement
from fedsweep.components.server_update import ServerUpdate, mean_of_updates
from fedsweep.components.weighting import Weighting, When, by_samples
from fedsweep.errors import InvariantError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, Payload, RoundRecord, ServerContext, State, SyncContext
from fedsweep.runtime.engine import Engine
from fedsweep.runtime.ledger import Ledger
from fedsweep.runtime.playing import Played
from fedsweep.runtime.state import RunState
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree


def engine_of(**fields: object) -> Engine:
    """Six clients, three of them in each of three rounds; a round of four steps is cut in two where asked."""
    cut = FixedInterval(interval=2, sync_rule="paper") if fields.pop("cut", False) else fedavg().pacing
    experiment_fields = {key: fields.pop(key) for key in ("rounds", "seed") if key in fields}
    method = FederatedMethod(name="test", source="", pacing=cut, **fields)  # type: ignore[arg-type]
    return local_engine(tiny_experiment(method, local_steps=4, **experiment_fields))  # type: ignore[arg-type]


def played(engine: Engine, state: RunState | None = None) -> Played:
    state = engine.start() if state is None else state
    return engine._player.play(engine.planner.plan(state), state, attempt=0, keep=lambda seam, tree: None)


# -- who is asked when -----------------------------------------------------------------------------------------------


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
    state = run_rounds(engine_of(weighting=Log(), cut=True, rounds=2))
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
    state = run_rounds(engine_of(refinements=(AddOne(), AddOneAlways()), cut=True, rounds=2))
    assert state.components["refinement0"] == [(1, 1), (2, 1)]
    assert state.components["refinement1"] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_refinements_work_on_the_aggregate_one_after_the_other() -> None:
    plain = run_rounds(engine_of(rounds=1)).vector
    once = run_rounds(engine_of(refinements=(AddOne(),), rounds=1)).vector
    twice = run_rounds(engine_of(refinements=(AddOne(), AddOneAlways()), rounds=1)).vector
    assert torch.equal(once, plain + 1.0)
    assert torch.equal(twice, plain + 1.0 + 1.0)


def test_the_refined_model_is_what_clients_receive_next() -> None:
    always = engine_of(refinements=(AddOneAlways(),), cut=True)
    state = always.start()
    round = played(always, state)
    assert {u.anchor_version for u in round.updates} == {1}
    first = run_rounds(engine_of(refinements=(AddOneAlways(),), rounds=1))
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
    first = engine_of(refinements=(Patient(),), cut=True, rounds=1)
    engine = Engine(first.experiment, first.fleet, on_partial=kept.append)
    done = run_rounds(engine)
    assert done.components["refinement0"] == [None, None] and done.partial == {}
    assert [state.round for state in kept] == [0, 0]
    again = run_rounds(engine, kept[0])
    assert again.components["refinement0"] == [{"at": "1.0"}, None]
    again = run_rounds(engine, kept[1])
    assert again.components["refinement0"] == [None, {"at": "1.1"}]


# -- what they may see -----------------------------------------------------------------------------------------------


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
    state = run_rounds(engine_of(weighting=Blind(), cut=True, rounds=2))
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


# -- promises that a component may break -----------------------------------------------------------------------------


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
        run_rounds(engine_of(weighting=Given(weights=weights), cut=cut, rounds=1))


def test_weights_need_not_be_positive() -> None:
    engine = engine_of(weighting=Given(weights=(0.0, 1.0, 0.0)), rounds=1)
    round = played(engine)
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
    with pytest.raises(InvariantError, match="not finite after round 1"):
        run_rounds(engine_of(server_update=Blown()))


# -- what travels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Extremes(Probe):
    """Smallest and greatest input, and which samples are of class 0."""

    when: ClassVar = "start"
    name: str = "extremes"

    def measure(self, client: LocalClient) -> Payload:
        flat = client.inputs.flatten()
        return {"range": torch.stack([flat.min(), flat.max()]), "zeros": client.targets == 0}


@dataclass(frozen=True, kw_only=True)
class Moved(Probe):
    """How far the client went."""

    name: str = "moved"

    def measure(self, client: LocalClient) -> Payload:
        total = sum(float((client.params[n] - client.anchor[n]).square().sum()) for n in client.params)
        return {"norm": torch.tensor([total]).sqrt()}


@dataclass(frozen=True, kw_only=True)
class Curious(Weighting):
    """Asks for probes in odd rounds, and tells each client a number of its own."""

    needs_updates: ClassVar[bool] = True

    def init(self, context: ServerContext) -> State:
        return {"seen": {}}

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        return (Moved(), Extremes()) if round % 2 else ()

    def broadcast(self, state: State, client: int) -> Payload:
        return {"hint": torch.full((5,), float(client))}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return by_samples(updates), state

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        norms = {}
        for update in updates:
            assert update.vector is not None
            moved = (update.vector - sync.anchors[update.anchor_version]).norm()
            norms[update.client] = (float(update.extras["moved/norm"]), float(moved)) if update.extras else None
        return {"seen": {**state["seen"], sync.round: norms}}


@dataclass(frozen=True, kw_only=True)
class Listener(LocalTerm):
    """Pushes the gradient by what the server said."""

    name: str = "listener"

    def gradient(self, step: LocalStep) -> ParamTree:
        hint = step.broadcast["hint"]
        assert hint.shape == (5,)
        return {name: torch.full_like(value, float(hint[0])) for name, value in step.params.items()}


def test_probes_and_broadcasts_arrive_and_are_metered_by_client_and_kind() -> None:
    engine = engine_of(weighting=Curious())
    round = played(engine)
    client = round.attendees[0]
    assert {key: n for key, n in round.ledger.values.items() if key[0] == client} == {
        (client, "down", "params"): 28,
        (client, "down", "hint"): 5,
        (client, "up", "params"): 28,
        (client, "up", "extremes/range"): 2,
        (client, "up", "moved/norm"): 1,
    }
    assert round.ledger.packed_bytes["up"] == 3 * 2  # sixteen booleans of each of the three clients
    record = run_rounds(engine, rounds=1).records[0]
    assert (record.values_down, record.values_up) == (3 * 33, 3 * 31)
    assert (record.bytes_down, record.bytes_up) == (4 * 3 * 33, 4 * 3 * 31 + 6)
    assert record.comm_cost == 3 * (33 + 31)
    assert record.comm_ratio == pytest.approx(3 * (33 + 31) / (3 * 2 * 28 * 4))


def test_probes_measure_the_anchor_at_the_start_and_the_result_at_the_end() -> None:
    state = run_rounds(engine_of(weighting=Curious(), rounds=2))
    seen = state.components["weighting"]["seen"]
    assert all(told == pytest.approx(true, rel=1e-5) for told, true in seen[1].values())
    assert set(seen[2].values()) == {None}


def test_what_is_broadcast_reaches_the_terms_of_that_client() -> None:
    told = played(engine_of(weighting=Curious(), terms=(Listener(),)))
    plain = played(engine_of())
    for a, b in zip(told.updates, plain.updates, strict=True):
        assert a.vector is not None and b.vector is not None
        assert torch.equal(a.vector, b.vector) == (a.client == 0)


def test_broadcasts_travel_with_every_version_of_the_model() -> None:
    round = played(engine_of(weighting=Curious(), cut=True))
    client = round.attendees[0]
    assert round.ledger.values[client, "down", "hint"] == 2 * 5
    assert round.ledger.values[client, "down", "params"] == round.ledger.values[client, "up", "params"] == 2 * 28


def test_measuring_changes_no_bit_of_the_training() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Gradient(Probe):
        when: ClassVar = "start"
        name: str = "gradient"

        def measure(self, client: LocalClient) -> Payload:
            loss = torch.nn.functional.cross_entropy(client.model(client.inputs), client.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return {"loss": loss.detach().reshape(1)}

    @dataclass(frozen=True, kw_only=True)
    class Asks(Weighting):
        def probes(self, state: State, round: int) -> tuple[Probe, ...]:
            return (Gradient(), Moved())

        def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
            return by_samples(updates), state

    for cut in (False, True):
        assert torch.equal(
            run_rounds(engine_of(weighting=Asks(), cut=cut)).vector, run_rounds(engine_of(cut=cut)).vector
        )


@dataclass(frozen=True, kw_only=True)
class Says(Refinement):
    """Broadcasts a number, asks for a probe, under names that the test gives."""

    number: float = 0.0
    hint: str = "hint"

    def broadcast(self, state: State, client: int) -> Payload:
        return {self.hint: torch.tensor([self.number])}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state


def test_two_components_must_not_broadcast_under_one_name() -> None:
    run_rounds(engine_of(refinements=(Says(), Says(hint="other")), rounds=1))
    with pytest.raises(InvariantError, match="hint"):
        run_rounds(engine_of(refinements=(Says(), Says(number=1.0)), rounds=1))


# -- before round 1 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Introduced(Weighting):
    """Weighs by what clients said of themselves before round 1."""

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",)

    def setup(self, state: State, context: ServerContext) -> tuple[tuple[Probe, ...], Payload]:
        return (Extremes(),), {"welcome": torch.zeros(7)}

    def setup_done(self, state: State, answers: Mapping[int, Payload], context: ServerContext) -> State:
        return {client: float(answer["extremes/range"][1]) for client, answer in answers.items()}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        raw = torch.tensor([state[u.client] for u in updates], dtype=torch.float64)
        return raw / raw.sum(), state


def test_the_setup_exchange_asks_every_client_once_and_is_metered_apart() -> None:
    engine = engine_of(weighting=Introduced(), rounds=2)
    state = engine.start()
    data = engine.experiment.world
    greatest = {k: float(data.data.images[part].max()) for k, part in enumerate(data.indices)}
    assert state.components["weighting"] == pytest.approx(greatest)
    assert engine.setup_bytes == 6 * (4 * 2 + 2) + 6 * 4 * 7
    done = run_rounds(engine, state)
    members = done.records[0].cohort
    shares = np.array([greatest[k] for k in members]) / sum(greatest[k] for k in members)
    assert done.records[0].aggregation_weights == pytest.approx(shares.tolist())
    assert done.total_bytes == 2 * 4 * 2 * 3 * 28


def test_registration_is_sample_counts_and_label_counts_where_they_are_read() -> None:
    assert engine_of().registration_bytes == 6 * 4
    assert engine_of(weighting=Introduced()).registration_bytes == 6 * 4 * (1 + 4)
    assert engine_of().start().total_bytes == 0


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_the_ledger_adds_by_client_direction_and_kind() -> None:
    ledger = Ledger()
    ledger.model(0, "down", {"params": 10, "buffers": 0})
    ledger.model(0, "down", {"params": 10, "buffers": 2})
    ledger.payload(0, "up", {"mask": np.zeros(9, dtype=np.bool_), "scores": np.zeros((2, 3), dtype=np.float16)})
    ledger.model(1, "up", {"params": 5})
    ledger.packed("down", 3)
    assert ledger.values == {
        (0, "down", "params"): 20,
        (0, "down", "buffers"): 2,
        (0, "up", "scores"): 6,
        (1, "up", "params"): 5,
    }
    assert (ledger.total("up"), ledger.total("down")) == (11, 22)
    assert (ledger.bytes("up"), ledger.bytes("down")) == (4 * 11 + 2, 4 * 22 + 3)
    assert (ledger.client_values(0), ledger.client_values(1)) == (28, 5)
