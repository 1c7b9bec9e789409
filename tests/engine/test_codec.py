"""Codecs: what is sent of a model is what is charged, in plan, ledger, clock and forecast, and all that arrives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny import net
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fedstg import fedstg
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.components.codec import Codec, Communication
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import check_first_round, forecast
from fedsweep.engine.ledger import message_sizes, payload_sizes
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import Payload
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.streams import Stream
from fedsweep.submodel import ElementMask, PartOfModel
from fedsweep.testing import (
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    with_devices,
    with_parts,
)
from fedsweep.testing.fleets import SplitFleet

MODEL = 28  # params of the linear model


@dataclass(frozen=True, kw_only=True)
class Largest(Codec):
    """Every so many values one: the largest, with their places."""

    of: int = 10
    feeds_back: bool = True

    @property
    def error_feedback(self) -> bool:
        return self.feeds_back

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        places = move.abs().topk(-(-len(move) // self.of)).indices
        return {"values": move[places], "places": places.to(torch.int32)}

    def decode(self, message: Payload, size: int) -> Tensor:
        move = torch.zeros(size, dtype=message["values"].dtype)
        move[message["places"].long()] = message["values"]
        return move


@dataclass(frozen=True, kw_only=True)
class EightBits(Codec):
    """A byte for each value and one scale, rounded up or down by chance so that the mean is right."""

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        scale = move.abs().max() / 127
        chance = torch.rand(len(move), generator=stream.torch(), dtype=move.dtype)
        return {"scale": scale.reshape(1), "levels": torch.floor(move / scale + chance).clamp(-127, 127).to(torch.int8)}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["levels"].to(message["scale"].dtype) * message["scale"]


@dataclass(frozen=True, kw_only=True)
class Everything(Codec):
    """All of it."""

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        return {"move": move}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["move"]


@dataclass(frozen=True, kw_only=True)
class LongPlaces(Largest):
    """Its places in twice the bytes."""

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        message = super().encode(move, stream)
        return {**message, "places": message["places"].long()}


@dataclass(frozen=True, kw_only=True)
class Above(Largest):
    """The values above a threshold, with their places: as many as there are."""

    level: float = 0.02

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        places = (move.abs() > self.level).nonzero().flatten()
        return {"values": move[places], "places": places.to(torch.int32)}


@dataclass(frozen=True, kw_only=True)
class Drawn(Largest):
    """About half of the values, by a draw for each."""

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        places = (torch.rand(len(move), generator=stream.torch()) < 0.5).nonzero().flatten()
        return {"values": move[places], "places": places.to(torch.int32)}


def coded(codec: Codec) -> FederatedMethod:
    return replace(fedavg(), codec=codec)


# A tenth of 28 is 3 values and 3 places of four bytes, or of eight; 8 bits are 28 bytes and a scale.
MESSAGES = [
    (Largest(), 3 * 4 + 3 * 4, 6),
    (EightBits(), 28 + 4, 29),
    (Everything(), 4 * 28, 28),
    (LongPlaces(), 3 * 12, 9),
]


@pytest.mark.parametrize(("codec", "num_bytes", "values"), MESSAGES)
def test_the_message_is_charged_as_it_is_sent(codec: Codec, num_bytes: int, values: int) -> None:
    experiment = tiny_experiment(coded(codec), rounds=1)
    engine = local_engine(experiment)
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert (round.ledger.bytes("up"), round.ledger.total("up")) == (3 * num_bytes, 3 * values)
    assert round.ledger.bytes("down") == 3 * 4 * MODEL
    known = forecast(experiment)
    assert plan.num_bytes == round.ledger.total_bytes == known.total_bytes - known.registration_bytes
    assert plan.values == 3 * (values + MODEL)


@pytest.mark.parametrize(("codec", "num_bytes", "values"), MESSAGES)
def test_the_clock_waits_for_what_is_sent(codec: Codec, num_bytes: int, values: int) -> None:
    experiment = tiny_experiment(coded(codec), rounds=1)
    state = run_rounds(local_engine(with_devices(experiment, [tiny_device(1e30, bits_per_s=1.0)])))
    assert state.clock == pytest.approx(32 * MODEL + 8 * num_bytes)


def test_a_codec_that_keeps_everything_is_fedavg() -> None:
    coded_run, plain = (run_rounds(local_engine(tiny_experiment(m))) for m in (coded(Everything()), fedavg()))
    assert torch.allclose(coded_run.vector, plain.vector, atol=1e-6)


def test_wide_types_of_a_message_have_all_their_bytes_and_the_models_own_are_values() -> None:
    sent = {"move": torch.zeros(6, dtype=torch.float64), "places": torch.zeros(3, dtype=torch.int64)}
    assert message_sizes(sent, torch.float32) == {"move": (12, 48), "places": (6, 24)}
    assert message_sizes(sent, torch.float64) == {"move": (6, 24), "places": (6, 24)}
    mask = {"mask": torch.zeros(9, dtype=torch.bool), "bits": torch.zeros(3, dtype=torch.uint8)}
    assert message_sizes(mask, torch.float32) == payload_sizes(mask, torch.float32) == {"mask": (0, 2), "bits": (3, 3)}


def test_eight_bits_are_near_fedavg_and_not_it() -> None:
    coded_run, plain = (run_rounds(local_engine(tiny_experiment(m))) for m in (coded(EightBits()), fedavg()))
    assert not torch.equal(coded_run.vector, plain.vector)
    assert torch.allclose(coded_run.vector, plain.vector, atol=0.02)


def test_what_was_left_out_is_sent_later() -> None:
    """With a rate of 0 from the second round on, all that the first round left out arrives, three values a round."""
    world = {"num_clients": 1, "cohort_size": 1, "rounds": 20}
    first = run_rounds(local_engine(tiny_experiment(coded(Largest()), **world)), rounds=1)  # type: ignore[arg-type]
    whole = run_rounds(local_engine(tiny_experiment(fedavg(), **world)), rounds=1)  # type: ignore[arg-type]
    start = local_engine(tiny_experiment(fedavg())).start().vector
    assert int((first.vector != start).sum()) == 3
    assert torch.allclose(first.vector + first.memories[0]["codec"], whole.vector, atol=1e-6)
    still = local_engine(tiny_experiment(coded(Largest()), learning_rate=0.0, **world))  # type: ignore[arg-type]
    later = run_rounds(still, first, rounds=9)
    assert torch.allclose(later.vector, whole.vector, atol=1e-6) and not later.memories[0]["codec"].any()
    forgetful = coded(Largest(feeds_back=False))
    still = local_engine(tiny_experiment(forgetful, learning_rate=0.0, **world))  # type: ignore[arg-type]
    forgot = run_rounds(local_engine(tiny_experiment(forgetful, **world)), rounds=1)  # type: ignore[arg-type]
    assert torch.equal(run_rounds(still, forgot, rounds=9).vector, first.vector) and not forgot.memories


def test_what_is_left_out_survives_a_resume(tmp_path: Path) -> None:
    experiment = tiny_experiment(coded(Largest()), rounds=4, num_clients=3)
    whole, engine = run_rounds(local_engine(experiment)), local_engine(experiment)
    CheckpointStore(tmp_path, keep=1, config_hash="x").save(run_rounds(engine, rounds=2), fetch=engine.fleet.fetch)
    again = local_engine(experiment)
    found = CheckpointStore(tmp_path, keep=1, config_hash="x").newest(keep_handle=again.fleet.keep).state
    assert found is not None and torch.equal(run_rounds(again, found).vector, whole.vector)


def test_of_a_part_the_part_is_encoded() -> None:
    """Units 1 and 4 of fc1's eight: 2 x 6 + 2, 2 x 8 + 8 and 4 x 8 + 4 params are 74; a tenth of them are 8."""
    groups = net().unit_groups()  # type: ignore[operator]
    part = unit_submodel(groups, {"fc1": [1, 4]})
    engine = local_engine(tiny_experiment(replace(with_parts(part), codec=Largest()), build=net))
    state = engine.start()
    size = part.layout(engine.layout).num_params
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert round.ledger.bytes("up") == 3 * 8 * -(-size // 10)
    assert plan.num_bytes == round.ledger.total_bytes
    left = run_rounds(engine, state, rounds=1).memories[round.attendees[0]]["codec"]
    cover = part.embed(torch.zeros(size), engine.layout).cover
    assert cover is not None and left[cover].any() and not left[~cover].any()


ALIVE = torch.arange(MODEL) % 5 == 0  # six of 28 params


@pytest.mark.parametrize(
    ("part", "travels"), [(ElementMask(mask=ALIVE, fresh=False), 6), (PartOfModel(names=frozenset({"1.bias"})), 4)]
)
def test_what_does_not_travel_is_not_encoded(part: ElementMask | PartOfModel, travels: int) -> None:
    engine = local_engine(tiny_experiment(replace(with_parts(part), codec=EightBits())))
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert round.ledger.bytes("up") == 3 * (travels + 4)
    assert plan.num_bytes == round.ledger.total_bytes
    assert int((round.vector != state.vector).sum()) == travels


def test_batch_norms_statistics_go_beside_it() -> None:
    """A mean and a variance for each of six inputs go as they are."""
    engine = local_engine(tiny_experiment(coded(EightBits()), build=with_norm, rounds=1))
    round = play_round(engine)
    params, buffers = engine.layout.num_params, engine.layout.num_buffers
    assert buffers == 12 and round.ledger.bytes("up") == 3 * (params + 4 + 4 * buffers)
    plain = play_round(local_engine(tiny_experiment(fedavg(), build=with_norm, rounds=1)))
    assert torch.equal(round.vector[params:], plain.vector[params:])


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 4))


def test_each_sync_point_of_a_round_is_encoded() -> None:
    """An average after each step but the first: a message for each, so the round does not fold."""
    method = merge(dynamicsgd(), coded(EightBits()))
    engine = local_engine(tiny_experiment(method, local_steps=4, rounds=2))
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert round.sync_points == 3 and round.ledger.bytes("up") == 3 * 3 * 32
    assert plan.num_bytes == round.ledger.total_bytes
    assert torch.isfinite(run_rounds(engine, state).vector).all()


@pytest.mark.parametrize("method", [fedavg(), dynamicsgd()])
def test_messages_of_any_length_are_charged_as_they_were_sent(
    method: FederatedMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each fleet, and the forecast says that it is an estimate."""
    experiment = tiny_experiment(merge(method, coded(Above())), local_steps=4, rounds=2)
    assert not forecast(experiment).exact
    sent, encode = list[int](), Above.encode

    def noted(self: Above, move: Tensor, stream: Stream) -> Payload:
        message = encode(self, move, stream)
        sent.append(8 * len(message["places"]))
        return message

    states = []
    for fleet in (LocalFleet, SplitFleet):
        engine = Engine(experiment, fleet(experiment))
        state = engine.start()
        engine.advance(state)  # what the plan tries is tried
        monkeypatch.setattr(Above, "encode", noted)
        sent.clear()
        states.append(played := engine.advance(state)[0])
        monkeypatch.undo()
        assert len(set(sent)) > 1 and played.records[0].bytes_up == sum(sent)
    assert states[0].total_bytes == states[1].total_bytes and torch.equal(states[0].vector, states[1].vector)


def test_the_servers_messages_are_of_one_length_or_refused() -> None:
    experiment = replace(tiny_experiment(fedavg()), communication=Communication(down=Above()))
    with pytest.raises(ConfigError, match=r"communication.down: messages of Above are of other lengths .* set comm"):
        check_first_round(experiment)
    with pytest.raises(ConfigError, match="messages of Drawn are of other lengths"):
        check_first_round(replace(experiment, communication=Communication(down=Drawn())))
    for codec in (Largest(), EightBits(), Everything()):
        check_first_round(replace(experiment, communication=Communication(down=codec)))


def test_codecs_merge_with_terms_and_payloads() -> None:
    """SCAFFOLD's variates are charged beside the message."""
    run_rounds(local_engine(tiny_experiment(merge(fedprox(mu=0.1), coded(Largest())))))
    round = play_round(local_engine(tiny_experiment(merge(scaffold(), coded(EightBits())))))
    assert round.ledger.bytes("up") == 3 * (32 + 4 * MODEL)


def test_two_codecs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"both have their own codec \(Largest and EightBits\)"):
        merge(coded(Largest()), coded(EightBits()))


def test_work_that_is_carried_over_rounds_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"method fedstg\+fedavg: .* the codec Largest, which encodes"):
        merge(fedstg(), coded(Largest()))


@dataclass(frozen=True, kw_only=True)
class Short(Everything):
    """Decodes less than it was given."""

    least: ClassVar[int] = 3

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["move"][: self.least]


def test_a_codec_that_decodes_something_else_is_named() -> None:
    with pytest.raises(InvariantError, match=r"Short must decode 28 finite values, but gave a tensor of shape \(3,\)"):
        play_round(local_engine(tiny_experiment(coded(Short()))))
