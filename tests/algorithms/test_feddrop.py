"""FedDrop: neurons alone, unbiased layers, rates from a budget of time."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fedsweep.algorithms.feddhad.dropout_rates import drawn_units
from fedsweep.algorithms.feddrop import costs_by_share, feddrop, hidden_neurons, rate_within
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.models.cost import fwd_macs_per_sample
from fedsweep.models.networks.chains import LeNet5, Mlp
from fedsweep.models.unit_submodel import UnitSubModel, unit_submodel
from fedsweep.records import ClientWork
from fedsweep.streams import stream
from fedsweep.testing import (
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    tiny_pictures,
    with_devices,
)
from fedsweep.trees import layout_of
from fedsweep.world.devices import client_time

torch.set_num_threads(1)


def lenet() -> LeNet5:
    return LeNet5(input_shape=(3, 32, 32), num_classes=10)


def test_convolutions_stay_whole_and_neurons_are_scaled() -> None:
    """34 bytes beside the values: a bit for each of 120 and 84 neurons, and a factor for each of the two layers."""
    images, labels = tiny_pictures(4)
    options: dict[str, Any] = {"num_clients": 2, "cohort_size": 2, "rounds": 1, "sizes": (2, 2)}
    engine = local_engine(tiny_experiment(feddrop(rate=0.5), build=lenet, images=images, labels=labels, **options))
    for update in play_round(engine).updates:
        part = update.submodel
        assert isinstance(part, UnitSubModel)
        assert [name for name, _ in part.kept] == ["fc1", "fc2"]
        assert part.scales == (("fc1", (2.0,)), ("fc2", (2.0,)))
        assert part.index_bytes() == 34
    record = run_rounds(engine).records[0]
    assert record.bytes_down - record.bytes_up == 2 * 34
    assert record.extra["dropout_device_rate"] == 0.5


def test_a_dropped_layers_output_is_unbiased() -> None:
    """The mean over draws of the scaled first layer, dropped neurons 0, is the whole layer's output.

    A neuron's mean over M draws at rate 0.3 has a standard error of x sqrt(0.3 / 0.7 / M).
    """
    model, draws = Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8).double().eval(), 300
    inputs = torch.ones(1, 1, 1, 6, dtype=torch.float64)
    expected = model.relu1(model.fc1(inputs.flatten(1)))[0]
    groups, total = hidden_neurons(model), torch.zeros(8, dtype=torch.float64)
    for number in range(draws):
        kept, scales = drawn_units(
            groups, {g.name: np.full(8, 0.3) for g in groups}, generator=stream(0, "d", position=number).numpy()
        )
        small = cast(Mlp, unit_submodel(groups, kept, scales=scales).build(model)).train()
        total[list(kept["fc1"])] += small.relu1(small.fc1(inputs.flatten(1)))[0].detach()
    assert bool((expected > 0.01).any())
    error = (total / draws - expected).abs()
    assert bool((error <= 4 * expected * (0.3 / 0.7 / draws) ** 0.5 + 1e-12).all())


def test_the_kept_share_is_the_rates() -> None:
    engine = local_engine(
        tiny_experiment(feddrop(rate=0.25), build=lambda: Mlp(input_shape=(1, 1, 6), num_classes=4), rounds=1)
    )
    parts = [cast(UnitSubModel, u.submodel) for u in play_round(engine).updates]
    share = np.mean([len(units) / 128 for part in parts for _, units in part.kept])
    assert share == pytest.approx(0.75, abs=4 * (0.25 * 0.75 / (6 * 128)) ** 0.5)


# -- rates from a budget -----------------------------------------------------------------------------------------

WORK = ClientWork(steps=5, batch_size=10, whole_batches=False, num_samples=50)


def test_costs_by_share_are_the_networks_at_each_share() -> None:
    """Hidden layers at one half: 29,924 values and 619,740 MACs; all of it: 62,006 and 651,720."""
    model = lenet()
    values, macs = costs_by_share(model, layout_of(model), hidden_neurons(model))
    assert (sum(values), sum(macs)) == (62_006, 651_720)
    halves = (values[0] + values[1] / 2 + values[2] / 4, macs[0] + macs[1] / 2 + macs[2] / 4)
    assert halves == (29_924, 619_740)
    small = unit_submodel(model.unit_groups(), {"fc1": range(60), "fc2": range(42)}).build(model)
    assert sum(p.numel() for p in small.parameters()) == 29_924
    assert fwd_macs_per_sample(small, (3, 32, 32)) == 619_740


@pytest.mark.parametrize(("budget_s", "cap"), [(30.0, 0.9), (35.0, 0.9), (25.0, 0.9), (5.0, 0.5)])
def test_the_rate_is_the_smallest_that_fits_the_budget(budget_s: float, cap: float) -> None:
    model = lenet()
    values, macs = costs_by_share(model, layout_of(model), hidden_neurons(model))
    device = tiny_device(1e7, overhead_s=0.1, bits_per_s=2e5)

    def seconds(rate: float) -> float:
        share = 1 - rate
        kept, work = (sum(c * share**n for n, c in enumerate(costs)) for costs in (values, macs))
        bits = 32 * kept
        return client_time(device, steps=5, flops=6 * work * 50, bits_down=bits, bits_up=bits).total_s

    rate = rate_within(budget_s, device, WORK, values=values, macs=macs, cap=cap)
    if 0 < rate < cap:
        assert seconds(rate) == pytest.approx(budget_s, rel=1e-12)
    elif rate == 0:
        assert seconds(0) <= budget_s
    else:
        assert rate == cap and seconds(cap) > budget_s
    grid = [r for r in np.linspace(0, cap, 1001) if seconds(r) <= budget_s]
    assert rate == pytest.approx(grid[0] if grid else cap, abs=cap / 1000)


def test_slow_devices_drop_more_and_fast_ones_nothing() -> None:
    """One round's plan: three speeds, a budget between the slowest's times with and without dropout."""
    made = tiny_experiment(
        feddrop(rate=0.6, budget_s=3.0),
        build=lambda: Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=64),
        cohort_size=6,
        sizes=(16,) * 6,
    )
    speeds = tuple(tiny_device(f, bits_per_s=1e9) for f in (1e5, 2e5, 1e7))
    engine = local_engine(with_devices(made, speeds))
    plan = engine.planner.plan(engine.start())
    values = [part.layout(engine.layout).num_values for part in plan.context.submodels.values()]
    assert values[0] < values[1] <= values[2] == values[5] == engine.layout.num_values
    rate = plan.components["submodels"]["mean_rate"]
    assert 0 < rate < 0.6


def test_a_budget_without_devices_is_refused() -> None:
    method = feddrop(rate=0.5, budget_s=10.0)
    with pytest.raises(
        ConfigError, match=r"feddrop with budget_s=10.0 needs the devices' speeds; set scenario.devices"
    ):
        check_experiment(tiny_experiment(method, build=lambda: Mlp(input_shape=(1, 1, 6), num_classes=4)))


def test_parts_train_on_scaled_activations_and_the_full_model_is_tested_without() -> None:
    """In evaluation mode a part's factors do nothing."""
    model = Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)
    groups = hidden_neurons(model)
    small: nn.Module = unit_submodel(groups, {"fc1": (0, 3), "fc2": (1, 2, 5)}, scales={"fc1": (2.0, 2.0)}).build(model)
    inputs = torch.randn(3, 1, 1, 6, generator=stream(0, "x").torch())
    with torch.no_grad():
        plain, scaled = small.eval()(inputs), small.train()(inputs)
    assert not torch.allclose(plain, scaled)
