"""FedDHAD on Ray actors gives the local fleet's bits: sub-models, probes and payloads travel unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from ray_pool import Pool, play
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.codec import Codec
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment, tiny_pictures

pytestmark = pytest.mark.ray


def same_rounds_in_both(pool: Pool, work: Experiment) -> RunState:
    """The run on two actors, after a check against this process."""
    expected, (found, _) = run_rounds(local_engine(work)), play(pool, work)
    assert found.vector.numpy().tobytes() == expected.vector.numpy().tobytes()
    assert [(r.bytes_up, r.bytes_down, r.flops) for r in found.records] == [
        (r.bytes_up, r.bytes_down, r.flops) for r in expected.records
    ]
    return found


def test_two_actors_give_the_bits_of_one_process(pool: Pool) -> None:
    def net() -> nn.Module:  # local: pickled by value
        from fedsweep.models.networks.chains import Mlp

        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    method = merge(
        feddh(gradient="explicit", learning_rate_v=0.3, learning_rate_b=0.2), fedad(base_rate=0.4, refresh=(1, 3))
    )
    momentum = OptimizerSettings(momentum=0.9, keep="persist")
    work = tiny_experiment(method, build=net, rounds=5, local_epochs=2, optimizer=momentum)
    found = same_rounds_in_both(pool, work)
    assert min(r.fwd_macs_per_sample or 0 for r in found.records) < 144


def test_codec_and_scaled_steps_give_the_bits_of_one_process(pool: Pool) -> None:
    """The largest fifth of a sub-model's move with error feedback, and what is rounded by chance to eight bits."""

    @dataclass(frozen=True, kw_only=True)
    class LargestInEightBits(Codec):
        @property
        def error_feedback(self) -> bool:
            return True

        def encode(self, move: Tensor, stream: Stream) -> Payload:
            places = move.abs().topk(-(-len(move) // 5)).indices
            scale = move.abs().max() / 127
            chance = torch.rand(len(places), generator=stream.torch())
            levels = torch.floor(move[places] / scale + chance).clamp(-127, 127).to(torch.int8)
            return {"levels": levels, "places": places.to(torch.int32), "scale": scale.reshape(1)}

        def decode(self, message: Payload, size: int) -> Tensor:
            move = torch.zeros(size)
            move[message["places"].long()] = message["levels"] * message["scale"]
            return move

    def net() -> nn.Module:
        from fedsweep.models.networks.chains import Mlp

        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    coded = FederatedMethod(name="coded", source="", codec=LargestInEightBits())
    method = merge(coded, fedad(base_rate=0.4, refresh=(1,), multiplier="incoming"))
    work = tiny_experiment(method, build=net, rounds=4, optimizer=OptimizerSettings(momentum=0.9, keep="persist"))
    found = same_rounds_in_both(pool, work)
    assert found.records[-1].bytes_up < found.records[-1].bytes_down / 2


def test_two_speed_rounds_of_a_transformer_give_the_bits_of_one_process(pool: Pool) -> None:
    def net() -> nn.Module:
        from fedsweep.models.networks.vit import VitTiny

        return VitTiny(input_shape=(1, 8, 8), num_classes=10, depth=2, width=16)

    images, labels = tiny_pictures(48, size=8, channels=1)
    method = merge(merge(feddh(), dynamicfl(high_interval=1, low_interval=2)), fedad(base_rate=0.4, refresh=(1,)))
    work = tiny_experiment(
        method,
        build=net,
        images=images,
        labels=labels,
        local_steps=3,
        learning_rate=1e-3,
        optimizer=OptimizerSettings(name="adam", keep="persist"),
    )
    found = same_rounds_in_both(pool, work)
    assert [r.sync_points for r in found.records] == [2] * 3
    assert (found.records[-1].fwd_macs_per_sample or 0) < 0.9 * (found.records[0].fwd_macs_per_sample or 0)
