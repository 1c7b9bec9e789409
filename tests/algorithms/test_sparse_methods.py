"""What holds for every method with element masks: limits, traffic, zeros, the clock, resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import resumed
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.algorithms.feddst import feddst
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fedopt import fedadam
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fedstg import fedstg
from fedsweep.algorithms.moon import moon
from fedsweep.algorithms.parts.element_masks import decided, weight_layers
from fedsweep.algorithms.prunefl.method import prunefl
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.submodel import ElementMask
from fedsweep.testing import (
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    with_devices,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("short_first_stage")

WEIGHTS = 6 * 10 + 10 * 10 + 10 * 4
PARAMS = WEIGHTS + 10 + 10 + 4
ALIVE = 40  # a fifth of the weights

SPARSE: dict[str, Callable[..., FederatedMethod]] = {
    "prunefl": partial(prunefl, first_stage="none", fixed_time=1e9, every=2),
    "prunefl, client": partial(prunefl, fixed_time=1e9, every=2),
    "feddst": partial(feddst, moved=0.5, every=2, until=20),
}


def build() -> nn.Module:
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=10)


def experiment(method: FederatedMethod, **more: Any) -> Experiment:
    return tiny_experiment(method, **({"build": build, "rounds": 6} | more))


def zeros(engine: Engine, vector: Tensor) -> float:
    values = decided(vector, weight_layers(build()))
    return float((values == 0).double().mean())


@pytest.mark.parametrize("name", SPARSE)
def test_without_zeros_it_is_fedavg_bit_for_bit(name: str) -> None:
    plain = run_rounds(local_engine(experiment(fedavg())))
    whole = run_rounds(local_engine(experiment(SPARSE[name](sparsity=0.0))))
    assert torch.equal(whole.vector, plain.vector) and whole.total_bytes == plain.total_bytes


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("optimizer", [OptimizerSettings(), OptimizerSettings(momentum=0.9, weight_decay=0.1)])
def test_dead_weights_are_zero_on_clients_and_server(name: str, optimizer: OptimizerSettings) -> None:
    """Also where momentum or weight decay would move them."""
    engine = local_engine(experiment(SPARSE[name](sparsity=0.8), optimizer=optimizer))
    state = engine.start()
    for _ in range(5):
        round = play_round(engine, state)
        for update in round.updates:
            assert isinstance(update.submodel, ElementMask) and update.vector is not None
            if not update.extras:
                assert not update.vector[:PARAMS][~update.submodel.mask].any()
        state, _ = engine.advance(state)
        assert zeros(engine, state.vector) >= 0.8
        assert state.records[-1].extra["sparsity"] == pytest.approx(zeros(engine, state.vector))


@pytest.mark.parametrize("name", SPARSE)
def test_what_travels_is_what_is_alive_and_a_packed_mask_once(name: str) -> None:
    """40 weights and 24 biases each way; 200 bits of mask are 25 bytes, down to whoever does not have it."""
    engine = local_engine(experiment(SPARSE[name](sparsity=0.8), num_clients=3, rounds=1))
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert round.ledger.bytes("up") == 3 * 4 * (ALIVE + 24)
    assert round.ledger.bytes("down") == 3 * (4 * (ALIVE + 24) + 25)
    known = forecast(engine.experiment)
    assert plan.num_bytes == round.ledger.total_bytes == known.total_bytes - known.registration_bytes


def test_a_mask_that_stays_is_not_sent_again() -> None:
    engine = local_engine(experiment(feddst(sparsity=0.8, moved=0.0), num_clients=4, cohort_size=2))
    state, seen = engine.start(), set[int]()
    for _ in range(6):
        round = play_round(engine, state)
        new = set(round.plan.context.cohort) - seen
        assert round.ledger.bytes("down") == 2 * 4 * (ALIVE + 24) + 25 * len(new)
        seen |= new
        state, _ = engine.advance(state)
    assert len(seen) == 4


@pytest.mark.parametrize("method", [feddst(sparsity=0.8, moved=0.0), prunefl(first_stage="none", every=100)])
def test_a_client_that_was_idle_does_not_know_the_mask(method: FederatedMethod) -> None:
    idle = dynamicfl(group="random", group_size=1, high_only=True, idle_clients="authors")
    engine = local_engine(experiment(merge(idle, method), num_clients=4, cohort_size=4, rounds=8))
    state, seen = engine.start(), set[int]()
    while state.round < 8:
        round = play_round(engine, state)
        down = {(client, kind): n for (client, way, kind), n in round.ledger.values.items() if way == "down"}
        sent = {client for client, _ in down}
        assert round.ledger.bytes("down") - 4 * sum(down.values()) == 25 * len(sent - seen)
        seen |= sent
        state, _ = engine.advance(state)
    assert len(seen) > 1


@pytest.mark.parametrize("name", SPARSE)
def test_a_new_mask_is_sent_to_everybody(name: str) -> None:
    """Clients of the second round send what the mask is chosen by; in the third all get the new one."""
    engine = local_engine(experiment(SPARSE[name](sparsity=0.8), num_clients=3))
    second = play_round(engine, run_rounds(engine, rounds=1))
    beside = 25 if name == "feddst" else 4 * PARAMS
    assert second.ledger.bytes("down") == 3 * 4 * (ALIVE + 24)
    assert second.ledger.bytes("up") == 3 * (4 * (ALIVE + 24) + beside)
    state = run_rounds(engine, rounds=2)
    third = play_round(engine, state)
    alive = int(state.components["submodels"]["mask"].sum())
    assert third.ledger.bytes("down") == 3 * (4 * alive + 25) and third.ledger.bytes("up") == 3 * 4 * alive
    assert not torch.equal(state.components["submodels"]["mask"], second.components["submodels"]["mask"]) or (
        second.components["submodels"]["version"] == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_the_clock_waits_for_what_is_alive_and_works_densely(name: str) -> None:
    method = SPARSE[name](sparsity=0.8)
    engine = local_engine(with_devices(experiment(method, rounds=1), [tiny_device(1e30, bits_per_s=1.0)]))
    first_stage = engine.start().setup_flops
    state = run_rounds(engine)
    assert state.clock == pytest.approx(8 * (2 * 4 * (ALIVE + 24) + 25))
    dense = run_rounds(local_engine(experiment(fedavg(), rounds=1)))
    assert state.records[0].flops - first_stage == dense.records[0].flops
    assert (first_stage > 0) == ("client" in name)
    saving = run_rounds(local_engine(experiment(SPARSE[name](sparsity=0.8, saves_work=True), rounds=1)))
    assert saving.records[0].flops - first_stage == pytest.approx(0.2 * dense.records[0].flops, rel=0.02)
    assert saving.records[0].fwd_macs_per_sample == ALIVE


@pytest.mark.parametrize("name", SPARSE)
def test_a_resumed_run_is_the_unbroken_one(name: str, tmp_path: Path) -> None:
    made = experiment(SPARSE[name](sparsity=0.8), optimizer=OptimizerSettings(momentum=0.9, keep="persist"))
    whole, end = run_rounds(local_engine(made)), resumed(made, tmp_path, rounds=3)
    assert torch.equal(end.vector, whole.vector) and end.total_bytes == whole.total_bytes
    assert torch.equal(end.components["submodels"]["mask"], whole.components["submodels"]["mask"])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pytest.param(name, other, marks=pytest.mark.exhaustive if "client" in name and other.name != "feddh" else ())
        for name in SPARSE  # a first stage on a client comes before the rounds
        for other in (fedprox(mu=0.1), scaffold(), feddh(), moon())
        if name != "feddst" or other.name not in ("scaffold", "feddh")  # a weight that is dropped has made no step
    ],
)
def test_it_merges_with_what_touches_other_seams(name: str, other: FederatedMethod) -> None:
    engine = local_engine(experiment(merge(SPARSE[name](sparsity=0.8), other)))
    assert zeros(engine, run_rounds(engine).vector) >= 0.8


def test_what_does_not_go_together_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="prunefl and federated_dropout can't be merged: both have their own submodels"
    ):
        merge(prunefl(), federated_dropout())
    with pytest.raises(ConfigError, match="feddst and prunefl can't be merged"):
        merge(feddst(), prunefl())
    with pytest.raises(ConfigError, match="feddst and fedadam can't be merged: both have their own server update"):
        merge(feddst(), fedadam())
    with pytest.raises(ConfigError, match=r"method prunefl\+fedstg: its clients keep what they trained"):
        merge(prunefl(), fedstg())
    run_rounds(local_engine(experiment(merge(prunefl(fixed_time=1e9), fedadam()), rounds=2)))


@pytest.mark.parametrize("method", [prunefl, feddst])
def test_a_sparsity_out_of_range_is_refused(method: Callable[..., FederatedMethod]) -> None:
    for value in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"method\.sparsity must be a number >= 0 and < 1, but got"):
            method(sparsity=value)
    with pytest.raises(ConfigError, match=r"method\.sparsity=0\.99 leaves fewer weights of Mlp than it has layers"):
        check_experiment(experiment(method(sparsity=0.99)))
