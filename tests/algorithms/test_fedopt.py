"""FedAvgM, FedAdagrad, FedAdam, FedYogi: optimisers on the server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import normed, tiny_server, tiny_sync, tiny_update, vector
from torch import nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedopt import AdaptiveServer, fedadagrad, fedadam, fedavgm, fedyogi
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.method import FederatedMethod, merge
from fedsweep.trees import layout_of

Builder = Callable[..., FederatedMethod]


def path(method: FederatedMethod, moves: list[float], *, start: float = 0.0) -> list[float]:
    """The server's model where the clients' mean lies ``moves`` away from it, round after round, in float64."""
    model = nn.Linear(1, 1, bias=False).double()
    layout = layout_of(model)
    component, now = method.server_update, torch.tensor([start], dtype=torch.float64)
    state = component.init(tiny_server(model, now, num_classes=2, num_rounds=9, layout=layout))
    found = []
    for round, move in enumerate(moves, start=1):
        sync = tiny_sync(model, now, round=round, layout=layout, anchors={0: now})
        update = tiny_update(0, now + move, layout=layout)
        now, state = component.apply(state, [update], torch.ones(1, dtype=torch.float64), sync)
        found.append(float(now))
    return found


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

    options = {"build": normed, "rounds": 1, "local_epochs": 2}
    plain, stepped = vector(fedavg(), **options), vector(method, **options)
    assert torch.equal(plain[-12:], stepped[-12:])
    later = vector(method, **(options | {"rounds": 4}))
    assert bool((later[-6:] > 0).all())


def test_they_take_any_clients() -> None:
    options = {"optimizer": OptimizerSettings(name="adam"), "learning_rate": 0.01}
    merged = merge(fedprox(mu=0.1), fedyogi(server_learning_rate=0.01))
    assert not torch.equal(vector(merged, **options), vector(fedyogi(server_learning_rate=0.01), **options))
