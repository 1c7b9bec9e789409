"""SCAFFOLD: control variates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import net, run
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddyn import feddyn
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fedopt import fedadam
from fedsweep.algorithms.fedstg import fedstg
from fedsweep.algorithms.prunefl.method import prunefl
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.aggregation import Uniform
from fedsweep.components.codec import Codec, Communication
from fedsweep.components.compression.sparsifiers import TopK
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment, with_parts

PIXELS: dict[str, Any] = {"input_shape": (1, 1, 6), "num_classes": 4}
Golden = Callable[..., list[RunState]]


def server_control(state: RunState) -> Tensor:
    control: Tensor = state.components["refinement0"]["control"]
    return control.double()


def client_controls(state: RunState) -> dict[int, Tensor]:
    memories = {k: m["terms"]["scaffold"] for k, m in state.memories.items()}
    return {k: torch.cat([torch.as_tensor(v).reshape(-1) for v in m.values()]).double() for k, m in memories.items()}


def uniform_fedavg() -> FederatedMethod:
    return replace(fedavg(), weighting=Uniform())


def test_the_golden_rounds(golden: Golden) -> None:
    """c_1 after round 1 is (1 - 0.59049) / 0.5, c_2 is (1 - 9.30016) / 0.5, c their mean."""
    states = golden(scaffold(), rounds=60)
    values = [float(state.vector) for state in states]
    assert values[1] == pytest.approx(4.945325, abs=1e-12)
    assert values[2:4] == pytest.approx([7.042854439, 7.843186324], abs=5e-10)
    assert values[-1] == pytest.approx(8.0, abs=1e-10)
    assert float(server_control(states[1])) == pytest.approx(-7.89065, abs=1e-12)
    assert [float(c) for c in client_controls(states[1]).values()] == pytest.approx([0.81902, -16.60032], abs=1e-12)
    assert [float(c) for c in client_controls(states[-1]).values()] == pytest.approx([8.0, -8.0], abs=1e-9)


@pytest.mark.slow
def test_the_optimum_is_reached_with_unequal_steps_and_in_part(golden: Golden) -> None:
    assert float(golden(scaffold(), rounds=30, steps=(2, 10))[-1].vector) == pytest.approx(8.0, abs=1e-10)
    five = ((1.0, 4.0, 2.0, 0.5, 3.0), (0.0, 10.0, -3.0, 4.0, 1.0))
    optimum = float(np.dot(*five) / np.sum(five[0]))
    found = golden(scaffold(), rounds=90, steps=(3, 5, 4, 2, 6), problem=five, cohort_size=2, learning_rate=0.05)
    assert float(found[-1].vector) == pytest.approx(optimum, abs=1e-9)


def test_by_size_the_optimum_is_that_of_the_weighted_losses(golden: Golden) -> None:
    """n = (2, 10): (2 x 1 x 0 + 10 x 4 x 10) / (2 x 1 + 10 x 4)."""
    states = golden(scaffold(weighting="size"), rounds=14, steps=(2, 10))
    assert float(states[-1].vector) == pytest.approx(400 / 42, abs=1e-9)


def test_one_whole_gradient_is_the_variate(golden: Golden) -> None:
    """K = 1: c_k = a_k (1 - b_k) = 1 and -36."""
    states = golden(scaffold(), rounds=1, steps=(1, 1))
    assert [float(c) for c in client_controls(states[1]).values()] == pytest.approx([1.0, -36.0], abs=1e-12)


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_the_servers_variate_is_the_mean_of_the_clients(weighting: str) -> None:
    sizes = (4, 8, 12, 24, 28, 20)
    method = scaffold(weighting=weighting)  # type: ignore[arg-type]
    state = run(method, rounds=5, cohort_size=2, sizes=sizes, double=True)
    shares = [n / 96 if weighting == "size" else 1 / 6 for n in sizes]
    total = sum(shares[k] * c for k, c in client_controls(state).items())
    torch.testing.assert_close(server_control(state), total, rtol=0, atol=1e-14)
    assert float(server_control(state).norm()) > 0.01


def test_the_first_round_is_uniform_fedavgs() -> None:
    options = {"rounds": 1, "sizes": (4, 8, 12, 24, 28, 20)}
    plain = uniform_fedavg()
    assert torch.equal(run(scaffold(), **options).vector, run(plain, **options).vector)
    options["rounds"] = 2
    assert not torch.equal(run(scaffold(), **options).vector, run(plain, **options).vector)


def test_the_server_rate_scales_the_first_move() -> None:
    start = local_engine(tiny_experiment(fedavg(), double=True)).start().vector
    plain, scaled = (
        run(scaffold(server_learning_rate=rate), rounds=1, double=True).vector - start for rate in (1.0, 0.5)
    )
    torch.testing.assert_close(scaled, 0.5 * plain, rtol=0, atol=1e-15)


@pytest.mark.parametrize("pacing", [dynamicsgd(), dynamicfl(high_interval=1, low_interval=2)], ids=lambda m: m.name)
def test_with_several_sync_points_a_round_the_variates_still_agree(pacing: FederatedMethod) -> None:
    state = run(merge(scaffold(), pacing), local_steps=6, cohort_size=4, double=True)
    assert state.records[-1].sync_points == 5
    mean = torch.stack(list(client_controls(state).values())).sum(dim=0) / 6
    torch.testing.assert_close(server_control(state), mean, rtol=0, atol=1e-14)


def test_what_a_client_sends_is_the_change_of_its_variate() -> None:
    engine = local_engine(tiny_experiment(scaffold(), num_clients=2, cohort_size=2, double=True))
    before = run_rounds(engine, rounds=2)
    after, _ = engine.advance(before)
    for update in play_round(engine, before).updates:
        sent = torch.cat([value.reshape(-1) for value in update.extras.values()])
        change = client_controls(after)[update.client] - client_controls(before)[update.client]
        torch.testing.assert_close(sent, change, rtol=0, atol=1e-14)


def test_it_takes_a_server_optimiser_unless_it_has_a_rate_of_its_own() -> None:
    assert not torch.equal(run(merge(scaffold(), fedadam())).vector, run(scaffold()).vector)
    with pytest.raises(ConfigError, match="scaffold and fedadam can't be merged: both have their own server update"):
        merge(scaffold(server_learning_rate=0.5), fedadam())


@pytest.mark.parametrize(("nesterov", "effective"), [(False, 2.9), (True, 4.61)])
def test_momentum_divides_by_the_weights_of_the_gradients(golden: Golden, nesterov: bool, effective: float) -> None:
    """Two steps at 0.01 and momentum 0.9 weigh 1 + 1.9, with Nesterov 1.9 + 2.71; c_1 = (1 - y_1) / (0.01 t)."""
    optimizer = OptimizerSettings(momentum=0.9, nesterov=nesterov)
    states = golden(scaffold(), rounds=1, steps=(2, 2), learning_rate=0.01, optimizer=optimizer)
    plain = golden(uniform_fedavg(), rounds=1, steps=(2, 2), learning_rate=0.01, optimizer=optimizer)
    assert torch.equal(states[1].vector, plain[1].vector)
    controls = client_controls(states[1])
    first = 0.99 if not nesterov else 1 - 0.019
    second = first - 0.01 * (0.9 + first) if not nesterov else first - 0.01 * (first + 0.9 * (0.9 + first))
    assert float(controls[0]) == pytest.approx((1 - second) / (0.01 * effective), abs=1e-12)
    assert float(server_control(states[1])) == pytest.approx(sum(float(c) for c in controls.values()) / 2, abs=1e-12)


def test_the_optimum_is_reached_with_momentum(golden: Golden) -> None:
    optimizer = OptimizerSettings(momentum=0.5)
    states = golden(scaffold(), rounds=30, steps=(2, 10), learning_rate=0.05, optimizer=optimizer)
    assert float(states[-1].vector) == pytest.approx(8.0, abs=1e-9)


def test_variates_are_cut_to_sub_models() -> None:
    """What travels is twice the sub-model each way, and c stays the mean of all c_k, zero where nobody was."""

    def build() -> nn.Module:
        return Mlp(**PIXELS, hidden_width=8)

    options: dict[str, object] = {"build": build, "rounds": 3, "double": True}
    state = run(merge(scaffold(), federated_dropout(keep=0.5)), **options)
    plain = run(federated_dropout(keep=0.5), **options)
    assert [r.values_up for r in state.records] == [2 * r.values_up for r in plain.records]
    assert [r.values_down for r in state.records] == [2 * r.values_down for r in plain.records]
    total = torch.stack(list(client_controls(state).values())).sum(dim=0) / 6
    torch.testing.assert_close(server_control(state), total, rtol=0, atol=1e-14)
    assert not torch.equal(state.vector, plain.vector)


HALVED = unit_submodel(net().unit_groups(), {"fc1": range(4)}, scales={"fc1": [2.0] * 4}, scales_in="incoming")
WORLDS: dict[str, tuple[tuple[FederatedMethod, ...], dict[str, object]]] = {
    "unequal sizes": ((), {"sizes": (4, 8, 12, 24, 28, 20), "rounds": 4, "cohort_size": 2}),
    "momentum": ((), {"rounds": 3, "optimizer": OptimizerSettings(momentum=0.9, nesterov=True)}),
    "sync points": ((dynamicfl(high_interval=1, low_interval=2),), {"local_steps": 6, "cohort_size": 4}),
    "sub-models": ((federated_dropout(keep=0.5),), {"build": lambda: Mlp(**PIXELS, hidden_width=8), "rounds": 3}),
    "scaled steps": ((with_parts(HALVED),), {"build": net, "rounds": 3}),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_rebuilt_variates_are_those_that_clients_send_bit_for_bit(world: str, weighting: str) -> None:
    others, options = WORLDS[world]
    told, rebuilt = (
        run(merge(scaffold(weighting=weighting, rebuild=rebuild), *others), **options)  # type: ignore[arg-type]
        for rebuild in (False, True)
    )
    assert torch.equal(told.vector, rebuilt.vector)
    assert torch.equal(server_control(told), server_control(rebuilt)) and float(server_control(told).norm()) > 0
    mine, theirs = client_controls(told), client_controls(rebuilt)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert [2 * r.values_up for r in rebuilt.records] == [r.values_up for r in told.records]
    assert [r.values_down for r in rebuilt.records] == [r.values_down for r in told.records]
    assert rebuilt.components["refinement0"]["sent"] == {}


@pytest.mark.parametrize("rebuild", [True, False])
def test_a_round_at_rate_zero_moves_nothing(rebuild: bool) -> None:
    plain = tiny_experiment(scaffold(rebuild=rebuild), rounds=3)
    warm = replace(plain, training=replace(plain.training, schedule=lambda round: 0.1 * (round - 1)))
    engine = local_engine(warm)
    first = run_rounds(engine, rounds=1)
    assert torch.equal(first.vector, engine.start().vector) and not server_control(first).any()
    assert server_control(run_rounds(engine, first)).isfinite().all()


def test_what_others_send_beside_models_is_no_variate() -> None:
    """In a round at rate 0 SCAFFOLD's clients send none."""
    plain = tiny_experiment(merge(scaffold(), prunefl(every=1, first_stage="none")), rounds=2)
    warm = replace(plain, training=replace(plain.training, schedule=lambda round: 0.1 * (round - 1)))
    assert server_control(run_rounds(local_engine(warm))).any()


def test_moves_are_divided_by_steps_whose_momentum_begins_with_the_round() -> None:
    kept = {"optimizer": OptimizerSettings(momentum=0.9, keep="persist")}
    match = "the term scaffold divides moves by steps whose momentum begins at zero in each round, but .* is persist"
    with pytest.raises(ConfigError, match=match):
        check_experiment(tiny_experiment(scaffold(rebuild=True), **kept))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        check_experiment(tiny_experiment(scaffold(), **kept))  # type: ignore[arg-type]
    check_experiment(tiny_experiment(scaffold(rebuild=True), optimizer=OptimizerSettings(keep="persist")))
    with pytest.raises(ConfigError, match="the term scaffold, which begins anew in each round"):
        check_experiment(tiny_experiment(merge(scaffold(rebuild=True, weighting="size"), fedstg())))


@dataclass(frozen=True)
class Plain(Codec):
    """Sends the move whole, as a codec that may change it."""

    def encode(self, move: Tensor, stream: Stream) -> Payload:
        return {"move": move}

    def decode(self, message: Payload, size: int) -> Tensor:
        return message["move"]


def test_nothing_is_rebuilt_from_moves_that_went_through_a_codec() -> None:
    match = "the server repeats what the term scaffold makes of a client's move, but the codec Plain changes"
    with pytest.raises(ConfigError, match=match):
        check_experiment(tiny_experiment(replace(scaffold(rebuild=True), codec=Plain())))
    check_experiment(tiny_experiment(replace(scaffold(), codec=Plain())))


def test_its_changes_come_as_they_are_beside_a_codec_of_the_methods_own() -> None:
    state = run(replace(scaffold(), codec=TopK(share=0.3)), rounds=4, double=True)
    mean = torch.stack(list(client_controls(state).values())).sum(dim=0) / 6
    torch.testing.assert_close(server_control(state), mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", [scaffold(), feddyn()], ids=lambda m: m.name)
def test_what_the_server_adds_up_comes_in_the_end(method: FederatedMethod) -> None:
    """Of what a codec leaves out for good the server's sum would know nothing, and go another way than the clients'."""
    made, match = tiny_experiment(method), r"adds up what the term .* the codec TopK leaves out of them never comes"
    with pytest.raises(ConfigError, match=match):
        check_experiment(replace(made, communication=Communication(up=TopK(share=0.1))))
    check_experiment(replace(made, communication=Communication(up=TopK(share=0.1, error_feedback=True))))
    if method.name == "feddyn":  # whose server has the models alone
        with pytest.raises(ConfigError, match=match):
            check_experiment(tiny_experiment(replace(method, codec=TopK(share=0.1))))
