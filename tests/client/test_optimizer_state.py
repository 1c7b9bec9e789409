"""What becomes of the clients' optimiser state between participations, and how far its steps go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import net
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.optimizer import OptimizerGroup, OptimizerSettings
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import layout_of

OPTIMIZERS = {
    "heavy ball": OptimizerSettings(momentum=0.9),
    "nesterov": OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": OptimizerSettings(name="adam"),
}


def torch_optimizer(params: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.name == "adam":
        return torch.optim.Adam(params, lr=0.1, betas=settings.betas, eps=settings.eps)
    return torch.optim.SGD(
        params, lr=0.1, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=settings.weight_decay
    )


def reference(settings: OptimizerSettings, keep: str, *, rounds: int, steps: int) -> tuple[Tensor, Tensor]:
    """Two clients of 4 and 8 samples, one torch optimiser each; the model and the mean of the first state tensor."""
    experiment = unequal_pair(settings, keep, rounds=rounds, steps=steps)
    data = experiment.world.data
    models = [experiment.build_model() for _ in range(2)]
    optimizers = [torch_optimizer(list(m.parameters()), settings) for m in models]
    shares = (1 / 3, 2 / 3)
    for _ in range(rounds):
        if keep == "reset":
            optimizers = [torch_optimizer(list(m.parameters()), settings) for m in models]
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            part = experiment.world.indices[k]
            inputs, targets = torch.from_numpy(data.images[part]), torch.from_numpy(data.labels[part])
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        with torch.no_grad():
            for pair in zip(*(m.parameters() for m in models), strict=True):
                mean = shares[0] * pair[0] + shares[1] * pair[1]
                for p in pair:
                    p.copy_(mean)
                states = [optimizer.state[p] for optimizer, p in zip(optimizers, pair, strict=True)]
                if keep == "average":
                    for name in states[0]:
                        middle = shares[0] * states[0][name] + shares[1] * states[1][name]
                        for s in states:
                            s[name].copy_(middle)
    first = [next(iter(optimizers[0].state[p].items()))[1] for p in models[0].parameters()]
    if settings.name == "adam":
        first = [optimizers[0].state[p]["exp_avg"] for p in models[0].parameters()]
    return _flat(models[0].parameters()), _flat(first)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def unequal_pair(settings: OptimizerSettings, keep: str, *, rounds: int, steps: int):  # type: ignore[no-untyped-def]
    return tiny_experiment(
        fedavg(),
        num_clients=2,
        cohort_size=2,
        rounds=rounds,
        local_steps=steps,
        batch_size=8,
        sizes=(4, 8),
        double=True,
        optimizer=replace(settings, keep=keep),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_optimizer_state_at_the_next_participation(name: str, keep: str) -> None:
    """Against torch's own optimisers, whose states are made anew, kept, or averaged by the clients' shares."""
    experiment = unequal_pair(OPTIMIZERS[name], keep, rounds=3, steps=4)
    engine = local_engine(experiment)
    state = run_rounds(engine)
    model, buffer = reference(OPTIMIZERS[name], keep, rounds=3, steps=4)
    torch.testing.assert_close(state.vector[: model.numel()], model, rtol=0, atol=1e-11)
    if keep == "average":
        torch.testing.assert_close(state.vector[28:56], buffer, rtol=0, atol=1e-11)
    else:
        assert state.vector.numel() == 28


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_ways_to_keep_the_state_differ(name: str) -> None:
    ends = [
        run_rounds(local_engine(unequal_pair(OPTIMIZERS[name], keep, rounds=3, steps=4))).vector[:28]
        for keep in ("reset", "persist", "average")
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert float((ends[a] - ends[b]).abs().max()) > 1e-5


@pytest.mark.parametrize(("name", "riders"), [("heavy ball", 28), ("nesterov", 28), ("adam", 57)])
def test_averaged_state_travels_with_the_model_and_is_metered(name: str, riders: int) -> None:
    """Momentum is as large as the model; Adam moves two moments and the count of steps."""
    engine = local_engine(unequal_pair(OPTIMIZERS[name], "average", rounds=1, steps=2))
    round = play_round(engine)
    for direction in ("up", "down"):
        assert round.ledger.values[0, direction, "optimizer"] == riders
        assert round.ledger.values[0, direction, "params"] == 28
    record = run_rounds(engine).records[0]
    assert record.values_up == record.values_down == 2 * (28 + riders)


def test_plain_sgd_has_no_state_to_average() -> None:
    engine = local_engine(unequal_pair(OptimizerSettings(), "average", rounds=1, steps=2))
    assert {kind for _, _, kind in play_round(engine).ledger.values} == {"params"}


@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_state_lasts_through_the_sync_points_of_a_round(keep: str) -> None:
    """One client averages with itself, so cutting its round must change nothing, momentum included."""
    optimizer = OptimizerSettings(momentum=0.9, nesterov=True, keep=keep)
    options = {"num_clients": 1, "cohort_size": 1, "local_steps": 9, "optimizer": optimizer}
    whole = run_rounds(local_engine(tiny_experiment(fedavg(), **options))).vector  # type: ignore[arg-type]
    cut = run_rounds(local_engine(tiny_experiment(dynamicsgd(), **options))).vector  # type: ignore[arg-type]
    assert torch.equal(whole, cut)


def unit_move(settings: OptimizerSettings, steps: int) -> float:
    """How far torch's SGD goes at rate 1 on a gradient that is always 1."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=settings.momentum, nesterov=settings.nesterov)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return -float(parameter.detach())


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("name", ["plain", "heavy ball", "nesterov"])
def test_effective_steps_are_the_move_under_unit_gradients(name: str, steps: int) -> None:
    settings = {"plain": OptimizerSettings(), **OPTIMIZERS}[name]
    engine = local_engine(tiny_experiment(fedavg(), local_steps=steps, optimizer=settings))
    update = play_round(engine).updates[0]
    assert update.steps == steps
    assert update.effective_steps == pytest.approx(unit_move(settings, steps), rel=1e-12)


@pytest.mark.parametrize(
    ("nesterov", "steps", "expected"),
    [(False, 1, 1.0), (False, 3, 5.61), (False, 250, 2410.0), (True, 1, 1.9), (True, 3, 8.049), (True, 250, 2419.0)],
)
def test_effective_steps_have_the_specifications_values(nesterov: bool, steps: int, expected: float) -> None:
    optimizer = OptimizerSettings(momentum=0.9, nesterov=nesterov)
    engine = local_engine(tiny_experiment(fedavg(), cohort_size=1, local_steps=steps, optimizer=optimizer))
    assert play_round(engine).updates[0].effective_steps == pytest.approx(expected, abs=0.5e-3 if steps < 250 else 0.5)


def test_adam_has_no_effective_steps() -> None:
    engine = local_engine(tiny_experiment(fedavg(), optimizer=OptimizerSettings(name="adam")))
    assert np.isnan(play_round(engine).updates[0].effective_steps)


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.1),
        OptimizerSettings(name="adam", weight_decay=0.1),
        OptimizerSettings(),
    ],
    ids=["nesterov", "adam", "plain"],
)
def test_groups_are_those_of_torch_and_a_rate_of_zero_keeps_every_bit(settings: OptimizerSettings) -> None:
    groups = (
        OptimizerGroup(match="fc1", rate=0.0),
        OptimizerGroup(match="bias", rate=0.5, weight_decay=0.0),
        OptimizerGroup(match="fc*.weight", rate=2.0),
    )
    client = tiny_experiment(
        fedavg(), num_clients=1, cohort_size=1, rounds=1, local_steps=4, batch_size=8, sizes=(8,), double=True,
        build=lambda: net().double(), optimizer=replace(settings, groups=groups),
    )  # fmt: skip
    model = client.new_model()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert [*start] == [f"{layer}.{part}" for layer in ("fc1", "fc2", "classifier") for part in ("weight", "bias")]
    rates, decay = (0.0, 0.0, 2.0, 0.5, 1.0, 0.5), settings.weight_decay
    decays = (decay, decay, decay, 0.0, decay, 0.0)
    parts = [
        {"params": [value], "lr": 0.1 * rate, "weight_decay": own}
        for value, rate, own in zip(model.parameters(), rates, decays, strict=True)
    ]
    if settings.name == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parts)
    else:
        optimizer = torch.optim.SGD(parts, momentum=settings.momentum, nesterov=settings.nesterov)
    inputs, targets = (torch.from_numpy(part) for part in (client.world.data.images[:8], client.world.data.labels[:8]))
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = client.layout.params(run_rounds(local_engine(client)).vector[: client.layout.num_params])
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), atol=1e-9, rtol=0)
    assert all(torch.equal(found[name], start[name]) for name in ("fc1.weight", "fc1.bias"))


@pytest.mark.parametrize(
    ("method", "groups", "message"),
    [
        (
            "fedavg",
            [{"match": "head", "rate": 0}],
            "no trained parameter matches 'head'; there are fc1.weight, fc1.bias",
        ),
        ("fednova", [{"match": "fc1", "rate": 0}], "method fednova divides clients' moves by their steps"),
        ("scaffold", [{"match": "fc1", "rate": 2}], "method scaffold divides clients' moves by their steps"),
        ("feddh", [{"match": "fc1", "rate": 2}], "method feddh divides clients' moves by their steps"),
        ("feddhad", [{"match": "fc1", "rate": 2}], "method feddhad divides clients' moves by their steps"),
        ("fedavg", [{"match": "fc1", "rate": -1}], "training.optimizer.groups.0.rate"),
    ],
)
def test_groups_that_mean_nothing_are_refused(method: str, groups: list[dict[str, Any]], message: str) -> None:
    config = {"method": {"name": method}, "training": {"optimizer": {"name": "sgd", "groups": groups}}}
    with pytest.raises(ConfigError, match=message):
        check_experiment(plan_run(load_config(config)).experiment)
    assert "groups" not in load_config({}).tree()["training"]["optimizer"]


def test_a_count_of_steps_that_has_no_room_in_the_models_type_is_refused() -> None:
    narrow, wide = (layout_of(net().to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    settings = OptimizerSettings(name="adam", keep="average")
    with pytest.raises(ConfigError, match=r"optimizer_state: average moves .* type \(bfloat16\) .* set it to persist"):
        settings.check(narrow)
    settings.check(wide)
    replace(settings, keep="persist").check(narrow)
    OptimizerSettings(momentum=0.9, keep="average").check(narrow)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "feddh", "gradient": "explicit"},
        {"name": "feddh", "learning_rate_v": 0, "learning_rate_b": 0},
        {"name": "fedjs"},
    ],
)
def test_who_reads_nothing_off_moves_goes_with_any_rates(method: dict[str, Any]) -> None:
    groups = [{"match": "fc1", "rate": 2}]
    config = {"method": method, "training": {"optimizer": {"name": "sgd", "lr": 0.05, "groups": groups}}}
    check_experiment(plan_run(load_config(config)).experiment)


def test_decays_by_group_go_with_methods_of_one_rate() -> None:
    groups = [{"match": "fc1", "weight_decay": 0.1}]
    config = {"method": {"name": "feddh"}, "training": {"optimizer": {"name": "sgd", "lr": 0.05, "groups": groups}}}
    check_experiment(plan_run(load_config(config)).experiment)
