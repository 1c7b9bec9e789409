"""FedAvgM, FedAdagrad, FedAdam, FedYogi: optimisers on the server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedopt import AdaptiveServer, fedadagrad, fedadam, fedavgm, fedyogi
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.parts.server_updates import ServerMomentum
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import ClientUpdate, ServerContext, SyncContext
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import component_conforms, local_engine, run_rounds, tiny_experiment
from fedsweep.trees import layout_of

Builder = Callable[..., FederatedMethod]


def vector(method: FederatedMethod, **options: object) -> Tensor:
    return run_rounds(local_engine(tiny_experiment(method, **options))).vector  # type: ignore[arg-type]


def path(method: FederatedMethod, moves: list[float], *, start: float = 0.0) -> list[float]:
    """The server's model where the clients' mean lies ``moves`` away from it, round after round, in float64."""
    model = nn.Linear(1, 1, bias=False).double()
    layout = layout_of(model)
    component, now = method.server_update, torch.tensor([start], dtype=torch.float64)
    state = component.init(
        ServerContext(
            num_clients=1,
            num_classes=2,
            num_rounds=9,
            profiles=(),
            model=model,
            layout=layout,
            vector=now,
            stream=stream(0, "test"),
        )
    )
    found = []
    for round, move in enumerate(moves, start=1):
        sync = SyncContext(
            round=round,
            index=0,
            ends_round=True,
            vector=now,
            layout=layout,
            anchors={0: now},
            learning_rate=0.1,
            cohort=(0,),
            model=model,
            stream=stream(0, "test"),
            checkpoint=lambda tree: None,
        )
        update = ClientUpdate(
            client=0,
            vector=now + move,
            layout=layout,
            submodel=FULL_MODEL,
            anchor_version=0,
            num_samples=1,
            steps=1,
            effective_steps=1.0,
            learning_rate=0.1,
            samples_since_anchor=1,
        )
        now, state = component.apply(state, [update], torch.ones(1, dtype=torch.float64), sync)
        found.append(float(now))
    return found


def test_components_conform() -> None:
    component_conforms(ServerMomentum(momentum=0.9))
    for build in (fedadagrad, fedadam, fedyogi):
        component_conforms(build().server_update)


@pytest.mark.parametrize("build", [fedavgm, fedadagrad, fedadam, fedyogi])
def test_nothing_but_the_model_travels(build: Builder) -> None:
    """W = 28 values for each of 3 clients each way, as told beforehand."""
    experiment = tiny_experiment(build(), rounds=2)
    state = run_rounds(local_engine(experiment))
    for record in state.records:
        assert (record.values_up, record.values_down) == (3 * 28, 3 * 28)
        assert (record.bytes_up, record.bytes_down) == (4 * 3 * 28, 4 * 3 * 28)
    assert forecast(experiment).total_bytes == state.total_bytes == 2 * 2 * 4 * 3 * 28


def test_two_steps_of_fedavgm_by_hand() -> None:
    """Moves 1 and 3 at momentum 0.5, rate 2: v = 1, w = 2; then v = 0.5 + 3, w = 2 + 7."""
    assert path(fedavgm(momentum=0.5, server_learning_rate=2.0), [1.0, 3.0]) == [2.0, 9.0]


def test_a_constant_move_is_amplified_by_one_over_one_minus_momentum() -> None:
    found = path(fedavgm(momentum=0.9), [1.0] * 400)
    assert found[-1] - found[-2] == pytest.approx(10.0, abs=1e-9)


@pytest.mark.parametrize(("second_momentum", "expected"), [(0.99, 0.99005), (0.999, 3.06386)])
def test_fedadams_first_step_is_the_specifications(second_momentum: float, expected: float) -> None:
    """D = 1, tau = 1e-3, v0 = tau^2: 0.1 / (sqrt(s 1e-6 + 1 - s) + 1e-3)."""
    method = fedadam(server_learning_rate=1.0, second_momentum=second_momentum, adaptivity=1e-3)
    assert path(method, [1.0]) == pytest.approx([expected], abs=5e-6)


def test_two_steps_of_each_rule_by_hand() -> None:
    """tau = 1, v0 = 1, momentum 0.5, s = 0.75, rate 1, moves 2 and 2: m = 1, then 1.5.

    adagrad: v = 5, 9. adam: v = .75 + 1 = 1.75, then 1.3125 + 1. yogi: v = 1 + 1 = 2 (v0 < D^2), then 2 + 1.
    """
    values = {"adagrad": (5.0, 9.0), "adam": (1.75, 2.3125), "yogi": (2.0, 3.0)}
    options = {"server_learning_rate": 1.0, "momentum": 0.5, "adaptivity": 1.0}
    builders: dict[str, tuple[Builder, dict[str, float]]] = {
        "adagrad": (fedadagrad, {}),
        "adam": (fedadam, {"second_momentum": 0.75}),
        "yogi": (fedyogi, {"second_momentum": 0.75}),
    }
    for rule, (build, more) in builders.items():
        first, second = values[rule]
        one = 1 / (first**0.5 + 1)
        expected = [one, one + 1.5 / (second**0.5 + 1)]
        assert path(build(**options, **more), [2.0, 2.0]) == pytest.approx(expected, abs=1e-12), rule


def test_yogis_second_moment_rests_where_it_equals_the_square() -> None:
    component = AdaptiveServer(rule="yogi", server_learning_rate=1.0, momentum=0.0, adaptivity=2.0, second_momentum=0.9)
    assert component._second(torch.tensor([4.0, 9.0]), torch.tensor([4.0, 4.0])).tolist() == pytest.approx([4.0, 8.6])


@pytest.mark.parametrize("method", [fedavgm(), fedadagrad(), fedadam(), fedyogi()], ids=lambda m: m.name)
def test_buffers_take_the_plain_mean(method: FederatedMethod) -> None:
    """The first round's batch statistics of the inputs depend on no server update."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))

    options = {"build": build, "rounds": 1, "local_epochs": 2}
    plain, stepped = vector(fedavg(), **options), vector(method, **options)
    assert torch.equal(plain[-12:], stepped[-12:])
    later = vector(method, **(options | {"rounds": 4}))
    assert bool((later[-6:] > 0).all())


def test_they_take_any_clients() -> None:
    options = {"optimizer": OptimizerSettings(name="adam"), "learning_rate": 0.01}
    merged = merge(fedprox(mu=0.1), fedyogi(server_learning_rate=0.01))
    assert not torch.equal(vector(merged, **options), vector(fedyogi(server_learning_rate=0.01), **options))


@pytest.mark.parametrize("build", [fedavgm, fedadagrad, fedadam, fedyogi])
def test_wrong_values_are_refused(build: Builder) -> None:
    with pytest.raises(ConfigError, match=r"method\.momentum must be a number >= 0 and < 1, but got 1"):
        build(momentum=1.0)
    with pytest.raises(ConfigError, match=r"method\.server_learning_rate must be a number > 0, but got -0\.1"):
        build(server_learning_rate=-0.1)


def test_wrong_moments_and_adaptivity_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.second_momentum must be a number >= 0 and < 1, but got 1\.5"):
        fedadam(second_momentum=1.5)
    with pytest.raises(ConfigError, match=r"method\.adaptivity must be a number > 0, but got 0"):
        fedyogi(adaptivity=0.0)
