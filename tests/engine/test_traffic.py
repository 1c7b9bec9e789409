"""What travels and is metered: probes, what is published, the set-up exchange, the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from tiny import Halves, seams_engine
from torch import Tensor

from fedsweep.algorithms.scaffold import scaffold
from fedsweep.components.aggregation import Refinement, Weighting, by_samples
from fedsweep.components.base import Published
from fedsweep.components.local import LocalStep, LocalTerm
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.engine.ledger import Ledger, Size, payload_sizes, whole_values
from fedsweep.errors import ClientJobError, ConfigError, InvariantError
from fedsweep.records import ClientUpdate, Payload, ServerContext, State, SyncContext
from fedsweep.testing import linear_model, local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree


@dataclass(frozen=True, kw_only=True)
class Extremes(Probe):
    """Smallest and greatest input, and which samples are of class 0."""

    when: ClassVar = "start"
    reads_model: ClassVar = False
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
    """Asks for probes in odd rounds, and tells all clients a number."""

    needs_updates: ClassVar[bool] = True
    number: float = 1.0

    def init(self, context: ServerContext) -> State:
        return {"seen": {}}

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        return (Moved(), Extremes()) if round % 2 else ()

    def publish(self, state: State) -> Mapping[str, Published]:
        return {"hint": Published(value=torch.full((5,), self.number))}

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


def test_probes_and_published_content_arrive_and_are_metered_by_client_and_kind() -> None:
    engine = seams_engine(weighting=Curious())
    round = play_round(engine)
    client = round.attendees[0]
    assert {key: n for key, n in round.ledger.values.items() if key[0] == client} == {
        (client, "down", "params"): 28,
        (client, "down", "hint"): 5,
        (client, "up", "params"): 28,
        (client, "up", "extremes/range"): 2,
        (client, "up", "moved/norm"): 1,
    }
    assert round.ledger.sizes[client, "up", "extremes/zeros"] == 2  # sixteen booleans
    record = run_rounds(engine, rounds=1).records[0]
    assert (record.values_down, record.values_up) == (3 * 33, 3 * 31)
    assert (record.bytes_down, record.bytes_up) == (4 * 3 * 33, 4 * 3 * 31 + 6)
    assert record.comm_cost == 3 * (33 + 31)
    assert record.comm_ratio == pytest.approx(3 * (33 + 31) / (3 * 2 * 28 * 4))


def test_probes_measure_the_anchor_at_the_start_and_the_result_at_the_end() -> None:
    state = run_rounds(seams_engine(weighting=Curious(), rounds=2))
    seen = state.components["weighting"]["seen"]
    assert all(told == pytest.approx(true, rel=1e-5) for told, true in seen[1].values())
    assert set(seen[2].values()) == {None}


@pytest.mark.parametrize("number", [0.0, 1.0])
def test_what_is_published_reaches_the_terms(number: float) -> None:
    told = play_round(seams_engine(weighting=Curious(number=number), terms=(Listener(),)))
    plain = play_round(seams_engine())
    for a, b in zip(told.updates, plain.updates, strict=True):
        assert a.vector is not None and b.vector is not None
        assert torch.equal(a.vector, b.vector) == (number == 0)


def test_published_content_travels_once_with_however_many_versions_of_the_model() -> None:
    round = play_round(seams_engine(weighting=Curious(), cut=True))
    client = round.attendees[0]
    assert round.ledger.values[client, "down", "hint"] == 5
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
            run_rounds(seams_engine(weighting=Asks(), cut=cut)).vector, run_rounds(seams_engine(cut=cut)).vector
        )


@dataclass(frozen=True, kw_only=True)
class Says(Refinement):
    """Publishes a number under a name that the test gives."""

    number: float = 0.0
    hint: str = "hint"

    def publish(self, state: State) -> Mapping[str, Published]:
        return {self.hint: Published(value=torch.tensor([self.number]))}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state


def test_two_components_must_not_publish_under_one_name() -> None:
    run_rounds(seams_engine(refinements=(Says(), Says(hint="other")), rounds=1))
    with pytest.raises(InvariantError, match="hint"):
        run_rounds(seams_engine(refinements=(Says(), Says(number=1.0)), rounds=1))


@dataclass(frozen=True, kw_only=True)
class Introduced(Weighting):
    """Weighs by what clients said of themselves before round 1."""

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",)

    def setup(self, state: State, context: ServerContext) -> tuple[Probe, ...]:
        return (Extremes(),)

    def setup_done(self, state: State, answers: Mapping[int, Payload], context: ServerContext) -> State:
        return {client: float(answer["extremes/range"][1]) for client, answer in answers.items()}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        raw = torch.tensor([state[u.client] for u in updates], dtype=torch.float64)
        return raw / raw.sum(), state


def test_the_setup_exchange_asks_every_client_once_and_counts_in_the_total() -> None:
    engine = seams_engine(weighting=Introduced(), rounds=2)
    state = engine.start()
    data = engine.experiment.world
    greatest = {k: float(data.data.images[part].max()) for k, part in enumerate(data.indices)}
    assert state.components["weighting"] == pytest.approx(greatest)
    assert state.setup_bytes == 6 * (4 * 2 + 2)
    done = run_rounds(engine, state)
    members = done.records[0].cohort
    shares = np.array([greatest[k] for k in members]) / sum(greatest[k] for k in members)
    assert done.records[0].aggregation_weights == pytest.approx(shares.tolist())
    assert done.records[0].total_bytes == 6 * 4 * (1 + 4) + state.setup_bytes + 4 * 2 * 3 * 28
    assert done.total_bytes == done.records[0].total_bytes + 4 * 2 * 3 * 28


@dataclass(frozen=True, kw_only=True)
class OfOne(Moved):
    """Asks client 0 alone, which is sent the model for it."""

    def asks(self, client: int) -> bool:
        return client == 0


class IntroducedByOne(Introduced):
    """One of its two probes looks at the model."""

    def setup(self, state: State, context: ServerContext) -> tuple[Probe, ...]:
        return (Extremes(), OfOne())


def test_before_round_1_the_model_goes_to_those_whose_probes_look_at_it() -> None:
    state = seams_engine(weighting=IntroducedByOne(), rounds=2).start()
    assert state.setup_bytes == 6 * (4 * 2 + 2) + 4 * 28 + 4


@dataclass(frozen=True, kw_only=True)
class Refuses(Extremes):
    """Fails on client 0."""

    error: Exception

    def measure(self, client: LocalClient) -> Payload:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("these inputs are no pictures"), ConfigError, "^these inputs are no pictures"),
        (KeyError("edges"), ClientJobError, "client 0.*Refuses.*KeyError: 'edges'"),
    ],
)
def test_a_probe_may_refuse_the_world_and_other_errors_name_its_client(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    monkeypatch.setattr(Introduced, "setup", lambda self, state, context: (Refuses(error=error),))
    with pytest.raises(kind, match=message):
        seams_engine(weighting=Introduced(), rounds=2).start()


def test_registration_is_sample_counts_and_label_counts_where_they_are_read() -> None:
    assert seams_engine().registration_bytes == 6 * 4
    assert seams_engine(weighting=Introduced()).registration_bytes == 6 * 4 * (1 + 4)
    assert seams_engine().start().total_bytes == 6 * 4


def test_a_complex_number_of_a_payload_is_two_values() -> None:
    assert payload_sizes({"a": torch.zeros(3, dtype=torch.complex64)}, torch.float32) == {"a": Size(6, 24)}
    assert payload_sizes({"a": torch.zeros(3, dtype=torch.complex128)}, torch.float32) == {"a": Size(6, 24)}


def test_a_models_variates_cost_what_its_values_do_whatever_it_is_trained_in() -> None:
    """SCAFFOLD's are as many as the model's, both ways: 2 x 28 values of four bytes for each of three clients."""
    for build in (linear_model, Halves):
        experiment = tiny_experiment(scaffold(), build=build, rounds=1)
        [record] = run_rounds(local_engine(experiment)).records
        assert record.bytes_up == record.bytes_down == 3 * 2 * 28 * 4
        assert (record.values_up, record.values_down) == (3 * 2 * 28, 3 * 2 * 28)


def test_the_ledger_adds_by_client_direction_and_kind() -> None:
    ledger = Ledger(dtype=torch.float32)
    ledger.message(0, "down", whole_values({"params": 10, "buffers": 0}))
    ledger.message(0, "down", whole_values({"params": 10, "buffers": 2}))
    ledger.payload(
        0, "up", {"mask": torch.zeros(9, dtype=torch.bool), "scores": torch.zeros((2, 3), dtype=torch.float16)}
    )
    ledger.message(1, "up", whole_values({"params": 5}))
    ledger.message(0, "down", {"mask": Size(0, 3)})
    assert ledger.values == {
        (0, "down", "params"): 20,
        (0, "down", "buffers"): 2,
        (0, "up", "scores"): 6,
        (1, "up", "params"): 5,
    }
    assert (ledger.total("up"), ledger.total("down")) == (11, 22)
    assert (ledger.bytes("up"), ledger.bytes("down")) == (2 + 2 * 6 + 4 * 5, 4 * 22 + 3)
    assert ledger.sizes[0, "up", "mask"] == 2 and ledger.sizes[0, "down", "mask"] == 3
    assert ledger.worth_by_client() == {0: 20 + 2 + 6 / 2, 1: 5}, "masks are worth nothing"
