"""Codecs that a configuration names: both ways, for what travels beside models, in rounds that fold and others."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny import net
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedbuff import fedbuff
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.heterofl import heterofl
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.catalog import resolve
from fedsweep.client.coding import Encoder, sent_down
from fedsweep.components.codec import AsItIs, Codec, Communication
from fedsweep.components.compression.registry import CODECS
from fedsweep.config import load_config
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import forecast
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.checks import check_world
from fedsweep.experiment.experiment import Experiment, client_side
from fedsweep.method import FederatedMethod
from fedsweep.records import Payload
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_device, tiny_experiment, with_devices
from fedsweep.testing.fleets import SplitFleet

BOTH_WAYS = [name for name in CODECS if name not in ("none", "count_sketch")]
TO_CODE = {"dynamicsgd": dynamicsgd(), "scaffold": scaffold(), "dynamicfl": dynamicfl(group_size=2)}
TENTH = {"name": "topk", "share": 0.1, "error_feedback": True}


def coded(method: FederatedMethod, up: Codec | None = None, down: Codec | None = None, **world: Any) -> Experiment:
    experiment = tiny_experiment(method, build=net, **{"rounds": 3, "local_steps": 3, **world})
    return replace(experiment, communication=Communication(up=up or AsItIs(), down=down or AsItIs()))


@functools.cache
def uncoded(name: str) -> RunState:
    """The run of :func:`coded` without codecs."""
    return run_rounds(local_engine(coded(TO_CODE[name])))


@functools.cache
def uncoded_bytes(method: str) -> int:
    """What the run of :func:`with_codecs` sends without them."""
    return run_rounds(local_engine(with_codecs(method))).total_bytes


def with_codecs(method: str, up: object = None, down: object = None, **training: object) -> Experiment:
    plan = {"rounds": 2, "cohort_size": 6, "local_epochs": 1, "batch_size": 20, **training}
    return build_experiment(
        load_config(
            {
                "scenario": {"dataset": "digits", "clients": 10},
                "method": {"name": method},
                "training": plan,
                "communication": {"up": up, "down": down},
            }
        )
    )


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("method", TO_CODE)
def test_bits_do_not_depend_on_folding_nor_on_where_clients_are(name: str, method: str) -> None:
    """Workers encode, decode and average among themselves to what comes out by way of the server."""
    codec = CODECS[name](error_feedback=True)
    experiment = coded(TO_CODE[method], codec, codec)
    alone, split = run_rounds(local_engine(experiment)), run_rounds(Engine(experiment, SplitFleet(experiment)))
    assert torch.equal(alone.vector, split.vector) and not torch.equal(alone.vector, uncoded(method).vector)
    assert alone.left is not None and split.left is not None and torch.equal(alone.left, split.left)
    assert alone.total_bytes == split.total_bytes < uncoded(method).total_bytes
    assert [record.sync_points for record in alone.records] == [r.sync_points for r in uncoded(method).records]


def test_none_is_no_codec_bit_for_bit() -> None:
    none = {"name": "none"}
    given, plain = (load_config({"communication": c}) for c in ({"up": none, "down": none}, {}))
    assert given.tree() == plain.tree() and resolve(given).hash() == resolve(plain).hash()
    first, second = (
        run_rounds(local_engine(e)) for e in (with_codecs("scaffold", none, none), with_codecs("scaffold"))
    )
    assert torch.equal(first.vector, second.vector) and first.total_bytes == second.total_bytes
    assert first.left is None and not first.sent_contents


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "dynamicfl", "dynamicsgd", "fedprox"])
@pytest.mark.parametrize("name", ["topk", "qsgd", "powersgd", "fp16"])
def test_dry_run_plan_and_ledger_have_the_same_bytes(method: str, name: str) -> None:
    experiment = with_codecs(method, {"name": name}, {"name": name, "error_feedback": True})
    engine = local_engine(experiment)
    estimated, state = forecast(experiment), run_rounds(engine)
    assert estimated.exact and estimated.total_bytes == state.total_bytes
    # Who was not in the first round's cohort is sent two messages in the second, with 16 bits a whole model.
    assert state.total_bytes < 0.55 * uncoded_bytes(method)


@pytest.mark.parametrize(("method", "most"), [("scaffold", 0.21), ("dynamicfl", 0.25), ("fedavg", 0.21)])
def test_the_largest_tenth_both_ways(method: str, most: float) -> None:
    tenth = run_rounds(local_engine(with_codecs(method, TENTH, TENTH))).total_bytes
    assert 0.1 < tenth / uncoded_bytes(method) <= most


def test_payloads_and_published_content_go_through_the_codecs() -> None:
    """SCAFFOLD's variates have the params' form: 8 bits each and a scale for each of the four tensors."""
    experiment = coded(scaffold(), CODECS["int8"](), CODECS["int8"](), rounds=2)
    engine = local_engine(experiment)
    message = engine.layout.num_params + 4 * len(engine.layout.names)
    state = run_rounds(engine, rounds=1)
    round = play_round(engine, state)
    # Who is new has missed the first round's model, and no content: there it was zero.
    assert state.last_models is not None
    new = len(set(round.plan.context.cohort) - set(state.last_models[0].tolist()))
    assert new and round.ledger.bytes("up") == round.ledger.bytes("down") == 3 * 2 * message
    kinds = {kind for _, _, kind in round.ledger.sizes}
    assert kinds == {f"{kind}/{part}" for kind in ("update", "control", "scaffold") for part in ("levels", "scales")}
    control, given = (state.sent_contents["control"][key] for key in ("sent", "given"))
    assert not given.any() and not control.any()  # as the first round began; what it made of it is sent in the second
    sent = round.codecs.sent_contents["control"]
    assert torch.equal(sent["given"], state.components["refinement0"]["control"])
    assert 0 < float((sent["sent"] - sent["given"]).abs().max()) <= float(sent["given"].abs().max()) / 127


def test_clients_start_from_what_the_server_sent_and_that_is_tested() -> None:
    """Signs have one size a tensor, and so has the server's move, but for rounding."""
    experiment = coded(fedavg(), down=CODECS["sign"](), rounds=2)
    engine = local_engine(experiment)
    start = engine.start().vector
    after = run_rounds(engine, rounds=1)
    moved = engine.layout.params(after.vector - start)
    sizes = [tensor.abs().flatten() for tensor in moved.values()]
    assert all(bool(size[0] > 0) and torch.allclose(size, size[0].expand_as(size), atol=1e-6) for size in sizes)


@pytest.mark.parametrize("name", [name for name in CODECS if name not in ("none", "count_sketch")])
def test_what_was_decoded_and_what_is_left_add_up_to_what_was_meant(name: str) -> None:
    """Error feedback's telescoping sum, to 1e-6, up and down."""
    codec = CODECS[name](error_feedback=True)
    experiment = coded(fedavg(), codec, codec, double=True)
    full, side = experiment.layout, client_side(experiment)
    generator = torch.Generator().manual_seed(0)
    size = full.num_params
    encoder = Encoder(side, FULL_MODEL, full, {})
    meant, arrived, announced = (torch.zeros(size, dtype=full.dtype) for _ in range(3))
    left: Tensor | None = None
    for number in range(60):
        anchor, move = (torch.randn(size, generator=generator, dtype=full.dtype) for _ in range(2))
        source = Stream((number,))
        meant += move
        arrived += encoder.decoded(0, anchor + move, anchor, source) - anchor
        if number % 20 == 10:  # kept, and taken up again
            encoder = Encoder(side, FULL_MODEL, full, encoder.memory())
        now, left = sent_down(codec, full, target=anchor + move, before=anchor, residual=left, stream=source)
        announced += now - anchor
    assert left is not None
    for received, owed in ((arrived, encoder.memory()["codec"]), (announced, left)):
        assert float((received + owed - meant).abs().max()) <= 1e-6 * float(meant.abs().max())
        assert float(owed.abs().max()) > (1e-5 if name.endswith("16") else 0.01)


def test_what_terms_send_has_a_memory_of_its_own() -> None:
    codec = CODECS["topk"](error_feedback=True)
    state = run_rounds(local_engine(coded(scaffold(), codec, rounds=1)))
    assert all(set(memory) == {"codec", "codec scaffold", "terms"} for memory in state.memories.values())
    forgetful = run_rounds(local_engine(coded(scaffold(), CODECS["topk"](), rounds=1)))
    assert all(set(memory) == {"terms"} for memory in forgetful.memories.values())


def test_a_client_pays_for_each_message_since_its_last_model_and_at_most_for_a_whole_one() -> None:
    """By hand from the cohorts: one message for each round since the client's last one, in ledger, plan and clock."""
    codec = CODECS["int8"]()
    experiment = coded(fedavg(), down=codec, rounds=12, num_clients=6, cohort_size=2)
    devices = with_devices(experiment, [tiny_device(1e18, bits_per_s=8e3)])
    engine = local_engine(devices)
    params, buffers = engine.layout.num_params, engine.layout.num_buffers
    message, state = params + 4 * len(engine.layout.names), engine.start()
    up = 4 * (params + buffers)
    last: dict[int, int] = {}
    charged = set()
    for number in range(12):
        plan = engine.planner.plan(state)
        missed = {k: max(1, number - last.get(k, 0)) for k in plan.context.cohort}
        down = [min(count * message, 4 * params) + 4 * buffers for count in missed.values()]
        charged |= set(missed.values())
        before, state = state, run_rounds(engine, state, rounds=1)
        assert state.records[-1].bytes_down == sum(down)
        assert plan.num_bytes == sum(down) + 2 * up
        # At 1,000 bytes a second; the cohort's slowest is who was sent the most.
        assert before.clock is not None and plan.clock == pytest.approx(before.clock + (max(down) + up) / 1000)
        last |= dict.fromkeys(plan.context.cohort, number)
        assert state.last_models is not None and dict(state.last_models.T.tolist()) == last
    assert charged >= {1, 2, 3, 4}


@pytest.mark.parametrize("method", [fedavg(), dynamicfl(group_size=1)], ids=lambda m: m.name)
def test_who_missed_messages_has_the_servers_model_bit_for_bit_once_it_has_them(
    method: FederatedMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients add what they decode, one message after the other; what was left out stays on the server."""
    codec, moves = CODECS["topk"](share=0.2, error_feedback=True), list[Tensor]()
    decode = type(codec).decode
    monkeypatch.setattr(type(codec), "decode", lambda *message: moves.append(decode(*message)) or moves[-1])
    engine = local_engine(coded(method, down=codec, rounds=8, num_clients=6, cohort_size=2))
    params, state = engine.layout.num_params, engine.start()
    models, late = dict.fromkeys(range(6), (0, state.vector[:params])), set[int]()
    for _ in range(8):
        for client in engine.planner.plan(state).context.cohort:
            had, model = models[client]
            for move in moves[had:]:
                model = model + move
            assert torch.equal(model, state.vector[:params])
            models[client] = (len(moves), model)
            late.add(len(moves) - had)
        state = run_rounds(engine, state, rounds=1)
        assert len(moves) == state.version
    assert state.left is not None and bool(state.left.any()) and max(late) > 2


def test_with_everybody_in_each_round_a_download_is_one_message() -> None:
    codec = CODECS["topk"](share=0.1)
    engine = local_engine(coded(fedavg(), codec, codec, cohort_size=4, num_clients=4))
    records = run_rounds(engine).records
    assert len({record.bytes_down for record in records}) == 1
    assert all(record.bytes_down == record.bytes_up for record in records)


def test_who_synchronises_seldom_misses_what_the_others_were_sent() -> None:
    """DynamicFL's slow group has no model of the round's inner sync points, of which each was announced."""
    codec = CODECS["topk"](share=0.01)
    engine = local_engine(coded(dynamicfl(group_size=2), down=codec, cohort_size=4, num_clients=4, rounds=2))
    start = engine.start()
    first, state = engine.planner.plan(start), run_rounds(engine, start, rounds=1)
    second, inner = engine.planner.plan(state), state.records[0].sync_points - 1
    messages = [plan.timing_inputs.server_messages for plan in (first, second)]
    assert None not in messages and inner
    before, sent = (own.downloads(plan.points) for own, plan in zip(messages, (first, second), strict=True))
    assert sorted(len(messages) for messages in before.values()) == [1, 1, 1 + inner, 1 + inner]
    for client, messages in sent.items():
        assert sum(messages[0]) == (1 + inner if len(before[client]) == 1 else 1) and set(messages[1:]) <= {(1,)}


def test_the_mean_of_sketches_is_decoded_once() -> None:
    codec = CODECS["count_sketch"](share=0.5, rows=3, keep=0.05)
    engine = local_engine(coded(fedprox(mu=0.1), codec, local_steps=5))
    state = engine.start()
    round = play_round(engine, state)
    moved = (round.vector - state.vector).abs() > 1e-7
    # Each client's own would be other values; of the mean the largest twentieth are read.
    assert int(moved.sum()) == -(-engine.layout.num_params // 20)
    assert round.ledger.bytes("up") < 0.55 * round.ledger.bytes("down")


@dataclass(frozen=True, kw_only=True)
class WholeHundredths(Codec):
    """Messages of whole numbers, which add up."""

    decodes_sums: ClassVar[bool]

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        return {"hundredths": (100 * move).round().to(torch.int32)}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["hundredths"] / 100


class Summed(WholeHundredths):
    decodes_sums = True


class OneByOne(WholeHundredths):
    decodes_sums = False


def test_a_mean_of_whole_numbers_is_not_cut_to_one() -> None:
    summed, each = (run_rounds(local_engine(coded(fedavg(), codec()))).vector for codec in (Summed, OneByOne))
    torch.testing.assert_close(summed, each, atol=1e-6, rtol=0)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    codec = CODECS["topk"](error_feedback=True)
    experiment = coded(scaffold(), codec, codec, rounds=4)
    whole, engine = run_rounds(local_engine(experiment)), local_engine(experiment)
    CheckpointStore(tmp_path, keep=1, config_hash="x").save(run_rounds(engine, rounds=2), fetch=engine.fleet.fetch)
    again = local_engine(experiment)
    found = CheckpointStore(tmp_path, keep=1, config_hash="x").newest(keep_handle=again.fleet.keep).state
    assert found is not None and torch.equal(run_rounds(again, found).vector, whole.vector)


def test_a_sub_models_own_shapes_are_encoded() -> None:
    engine = local_engine(with_codecs("heterofl", {"name": "powersgd", "rank": 1}))
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert plan.num_bytes == round.ledger.total_bytes
    assert round.ledger.bytes("up") < 0.2 * round.ledger.bytes("down")


REFUSED = [
    (coded(replace(fedavg(), codec=CODECS["fp16"]()), CODECS["topk"]()), "communication.up: method fedavg has a codec"),
    (coded(fedbuff(), CODECS["topk"]()), "communication.up: clients of method fedbuff keep what they trained over"),
    (coded(heterofl(), down=CODECS["topk"]()), "communication.down: the server's message is one for all clients, but"),
    (coded(fedavg(), down=CODECS["count_sketch"]()), "communication.down: CountSketch decodes the sum of clients'"),
    (
        coded(heterofl(), CODECS["count_sketch"]()),
        "communication.up: CountSketch decodes the mean of clients'",
    ),
    (coded(scaffold(rebuild=True), down=CODECS["fp16"]()), "the server repeats what the term scaffold makes of a"),
]


@pytest.mark.parametrize(("experiment", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_does_not_go_together_is_refused(experiment: Experiment, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_world(experiment)


def test_fedbuff_goes_with_a_codec_downwards() -> None:
    codec = CODECS["topk"](error_feedback=True)
    experiment = with_devices(coded(fedbuff(), down=codec), [tiny_device(1e6), tiny_device(2e6)])
    check_world(experiment)
    plain = with_devices(coded(fedbuff()), [tiny_device(1e6), tiny_device(2e6)])
    sent, whole = (run_rounds(local_engine(e)) for e in (experiment, plain))
    assert sent.total_bytes < whole.total_bytes and sent.left is not None
