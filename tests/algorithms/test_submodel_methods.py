"""What holds for every method that gives clients a part of the network: limits with any optimiser, networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import comparable, net
from torch import nn

from fedsweep.algorithms.afd import afd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.feddrop import feddrop
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fjord import fjord
from fedsweep.algorithms.heterofl import heterofl
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.streams import stream
from fedsweep.testing import (
    build_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    tiny_pictures,
    with_devices,
)

torch.set_num_threads(1)

DEVICES = (tiny_device(1e4), tiny_device(3e4), tiny_device(2e5))
SIZES = (6, 10, 14, 18, 22, 26)

# Each method where nothing is left out, and where half the units are.
WHOLE: dict[str, Callable[[], FederatedMethod]] = {
    "federated_dropout": partial(federated_dropout, keep=1.0),
    "federated_dropout, complete": partial(federated_dropout, keep=1.0, aggregate="complete", shared=True),
    "feddrop": partial(feddrop, rate=0.0),
    "feddrop, complete": partial(feddrop, rate=0.0, aggregate="complete"),
    "feddrop, time enough": partial(feddrop, rate=0.5, budget_s=1e9),
    "afd": partial(afd, keep=1.0),
    "heterofl": partial(heterofl, widths=(1.0,), masked_loss=False, weighting="size"),
    "fjord": partial(fjord, widths=(1.0,)),
    "fjord, distilled": partial(fjord, widths=(1.0,), distillation=True),
}
HALF: dict[str, Callable[[], FederatedMethod]] = {
    "federated_dropout": partial(federated_dropout, keep=0.5),
    "federated_dropout, complete": partial(federated_dropout, keep=0.5, aggregate="complete"),
    "feddrop": partial(feddrop, rate=0.5),
    "afd": partial(afd, keep=0.5),
    "afd, shared": partial(afd, keep=0.5, scores="shared", aggregate="complete"),
    "heterofl": partial(heterofl, widths=(0.75, 0.25), scaler=False, masked_loss=False, weighting="size"),
    "fjord": partial(fjord, widths=(0.75, 0.5, 0.25)),
}


def experiment(method: FederatedMethod, **more: Any) -> Experiment:
    made = tiny_experiment(method, **({"build": net, "local_epochs": 2, "sizes": SIZES} | more))
    return with_devices(made, DEVICES)


def run(method: FederatedMethod, **more: Any) -> RunState:
    return run_rounds(local_engine(experiment(method, **more)))


# Each way with the state of the optimiser is shown for three methods, and each method with one of the ways.
@pytest.mark.parametrize(
    ("name", "keep"),
    [
        pytest.param(name, keep, marks=() if (place - at) % 3 == 0 else pytest.mark.exhaustive)
        for place, name in enumerate(WHOLE)
        for at, keep in enumerate(("reset", "persist", "average"))
    ],
)
def test_where_nothing_is_left_out_it_is_fedavg_bit_for_bit(name: str, keep: Any) -> None:
    """Models, traffic, FLOPs and the clock, with momentum and weight decay and clients of unequal size."""
    optimizer = OptimizerSettings(momentum=0.9, weight_decay=0.01, keep=keep)
    found, expected = (run(m, optimizer=optimizer) for m in (WHOLE[name](), fedavg()))
    assert torch.equal(found.vector, expected.vector)
    assert comparable(found) == comparable(expected)
    assert found.clock == expected.clock is not None


@pytest.mark.parametrize("name", HALF)
def test_half_the_units_change_the_model_but_not_who_trains_on_what(name: str) -> None:
    dropped, plain = run(HALF[name]()), run(fedavg())
    assert [r.cohort for r in dropped.records] == [r.cohort for r in plain.records]
    assert [r.local_steps for r in dropped.records] == [r.local_steps for r in plain.records]
    assert not torch.equal(dropped.vector, plain.vector)
    for cut, whole in zip(dropped.records, plain.records, strict=True):
        assert cut.bytes_up < whole.bytes_up and cut.flops < whole.flops
    assert dropped.clock is not None and plain.clock is not None and dropped.clock < plain.clock


# -- networks ----------------------------------------------------------------------------------------------------

# Name, size of its pictures, and whether it has hidden neurons.
NETWORKS = {
    "lenet5": (32, True),
    "feddhad_cnn": (32, True),
    "resnet18": (8, False),
    "feddhad_resnet18": (9, False),
    "vit_tiny": (8, True),
}
# Of the residual networks, a second each, every method has one. Two refuse batch norm, see their own tests.
RESIDUAL = {
    "resnet18": ("feddrop", "heterofl", "fjord"),
    "feddhad_resnet18": ("federated_dropout", "afd"),
}


@pytest.mark.parametrize(
    ("name", "network"),
    [
        *((m, n) for n in NETWORKS if n not in RESIDUAL for m in HALF if "," not in m),
        *(pytest.param(m, n, marks=pytest.mark.slow) for n, methods in RESIDUAL.items() for m in methods),
    ],
)
def test_every_network_trains_in_parts(name: str, network: str) -> None:
    """FedDrop finds no neurons in residual networks, which it trains whole."""
    size, has_neurons = NETWORKS[network]
    images, labels = tiny_pictures(4, size=size)

    def build() -> nn.Module:
        return build_model(network, input_shape=(3, size, size), num_classes=10, stream=stream(0, "m"))

    made = tiny_experiment(
        HALF[name](),
        build=build,
        images=images,
        labels=labels,
        num_clients=2,
        cohort_size=2,
        sizes=(2, 2),
        rounds=1,
        learning_rate=1e-3,
    )
    engine = local_engine(made)
    start = engine.start()
    played = play_round(engine, start)
    sent = [len(u.vector) for u in played.updates if u.vector is not None]
    assert torch.isfinite(played.vector).all() and not torch.equal(played.vector, start.vector)
    if name == "feddrop" and not has_neurons:
        assert sent == [engine.layout.num_values] * 2
    else:
        assert max(sent) < engine.layout.num_values


@pytest.mark.parametrize("layer", ["fc1", "classifier"])
@pytest.mark.parametrize("method", [fedad(base_rate=0.3, refresh=(1,)), heterofl(widths=(1.0, 0.5))])
def test_a_frozen_layer_is_cut_and_scored_like_any(method: FederatedMethod, layer: str) -> None:
    def frozen() -> nn.Module:
        module = net()
        module.get_submodule(layer).requires_grad_(False)
        return module

    assert run(method, build=frozen).vector.isfinite().all()


def test_a_network_without_units_is_refused_before_the_first_round() -> None:
    for name, method in HALF.items():
        with pytest.raises(ConfigError, match=f"{name.split(',')[0]} leaves out .* but model Sequential lists no unit"):
            check_experiment(tiny_experiment(method()))
    for name in ("federated_dropout", "feddrop", "afd", "heterofl", "fjord"):
        check_experiment(tiny_experiment(WHOLE[name]()))
