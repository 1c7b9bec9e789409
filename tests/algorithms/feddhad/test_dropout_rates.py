"""FedAD's arithmetic: device rates, unit rates, draws, the curvature rule, unit scores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import lenet_run, run_net
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.curvature import (
    CurvatureGap,
    curvature_along,
    exact_spectrum,
    gap_share,
    lanczos_spectrum,
    raw_base_rate,
)
from fedsweep.algorithms.feddhad.dropout_rates import device_dropout, drawn_units, target_time, unit_rates
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.feddhad.unit_scores import (
    UnitScores,
    feature_ranks,
    incoming_weights,
    maskable_groups,
    outgoing_weights,
)
from fedsweep.components.probes import LocalClient
from fedsweep.models.unit_groups import UnitGroup, unit_group
from fedsweep.streams import Stream, stream
from fedsweep.testing import build_model, linear_model

torch.set_num_threads(1)


def group(name: str, size: int) -> UnitGroup:
    return UnitGroup(
        name=name, size=size, kind="linear", produced=((f"{name}.weight", 0),), consumed=(), modules=("r",)
    )


# -- device rates ------------------------------------------------------------------------------------------------


def test_balanced_rates_level_the_times_of_slow_devices() -> None:
    """Times 1, 2, 4, 8, reference 4, d_avg .25: T = 3, rates 0, 0, .25, .625, times 1, 2, 3, 3."""
    target = target_time(0.25, 4.0, device_rate="balanced")
    rates = [device_dropout(t, target, cap=0.9, device_rate="balanced") for t in (1, 2, 4, 8)]
    assert rates == [0.0, 0.0, 0.25, 0.625]
    assert [t * (1 - r) for t, r in zip((1, 2, 4, 8), rates, strict=True)] == [1, 2, 3, 3]
    assert device_dropout(8, target, cap=0.5, device_rate="balanced") == 0.5


def test_printed_rates_are_the_papers_but_below_one() -> None:
    target = target_time(0.25, 4.0, device_rate="printed")
    rates = [device_dropout(t, target, cap=0.5, device_rate="printed") for t in (1, 2, 4, 8)]
    assert rates == [0.99, 0.5, 0.25, 0.125]


# -- unit rates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_unit_rates_have_the_given_mean_fall_with_the_score_and_stay_below_the_cap(
    rate: float, temperature: float
) -> None:
    scores = Stream((0, "scores")).numpy().random(40)
    rates = unit_rates(scores, rate, temperature=temperature)
    assert rates.mean() == pytest.approx(rate, abs=1e-12)
    assert rates.min() >= 0 and rates.max() <= 0.9
    assert (np.diff(rates[np.argsort(scores)]) <= 1e-12).all()
    if 0 < rate < 0.3 and temperature == 1.0:
        assert rates.max() / rates.min() <= np.e


def test_raw_ranks_are_capped_and_the_excess_is_handed_on() -> None:
    """Ranks 1..10 at rate .3: the softmax gives the weakest 1.9; capped at .9, the others share 3 - .9 by weight."""
    scores = np.arange(1.0, 11.0)
    rates = unit_rates(scores, 0.3)
    shares = np.exp(-scores)
    # .9 for the first, then 2.1 to the rest would give the second 1.33: .9 too; 1.2 to the rest: .76 for the third.
    expected = np.concatenate([[0.9, 0.9], 1.2 * shares[2:] / shares[2:].sum()])
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    assert rates.mean() == pytest.approx(0.3)


@pytest.mark.parametrize(("scores", "temperature"), [([2.0, 27.0, 28.0], 0.03), ([0.1, 0.9, 1.0], 0.001)])
def test_small_temperatures_drive_rates_apart_up_to_the_cap(scores: list[float], temperature: float) -> None:
    """Beside the lowest score the others' weights are 0 in float64: what it leaves goes to the next one."""
    found = unit_rates(np.array(scores), 0.4, cap=0.5, temperature=temperature)
    np.testing.assert_allclose(found, [0.5, 0.5, 0.2], rtol=1e-12)


def test_equal_scores_give_equal_rates() -> None:
    np.testing.assert_allclose(unit_rates(np.full(7, 0.4), 0.35), 0.35, rtol=1e-12)


def test_rate_above_the_cap_is_the_cap() -> None:
    np.testing.assert_allclose(unit_rates(np.arange(4.0), 0.99), 0.9)


# -- draws -------------------------------------------------------------------------------------------------------


def test_draws_keep_their_share_and_scale_to_an_expectation_of_one() -> None:
    groups = (group("a", 20_000), group("b", 20_000))
    rates = {"a": np.full(20_000, 0.25), "b": np.full(20_000, 0.6)}
    drawn = kept, scales = drawn_units(groups, rates, generator=stream(0, "draw").numpy())
    for name, rate in (("a", 0.25), ("b", 0.6)):
        assert len(kept[name]) / 20_000 == pytest.approx(1 - rate, abs=0.015)
        assert sum(scales[name]) / 20_000 == pytest.approx(1.0, abs=0.04)
        assert set(scales[name]) == {1 / (1 - rate)}
    again = drawn_units(groups, rates, generator=stream(0, "draw").numpy())
    assert drawn == again != drawn_units(groups, rates, generator=stream(1, "draw").numpy())


def test_layer_that_would_lose_all_keeps_the_unit_with_the_smallest_rate() -> None:
    rates = {"a": np.array([0.9, 0.8, 0.9])}
    for seed in range(40):
        kept, scales = drawn_units((group("a", 3),), rates, generator=stream(seed, "draw").numpy())
        draws = stream(seed, "draw").numpy().random(3)
        if not (draws >= rates["a"]).any():
            assert kept["a"] == (1,) and scales["a"] == pytest.approx((5.0,))
            return
    raise AssertionError("no draw of 40 lost the whole layer")


def test_rate_zero_keeps_all_without_a_factor() -> None:
    kept, scales = drawn_units((group("a", 5),), {"a": np.zeros(5)}, generator=stream(0, "draw").numpy())
    assert kept["a"] == (0, 1, 2, 3, 4) and scales["a"] == (1.0,) * 5


# -- curvature ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eigenvalues", "share"), [([0, 0, 0, 1, 2], 0.6), ([1, 1, 1, 1], 0.0), ([-3, 0, 0, 0], 0.25), ([0, 1, 2], 1 / 3)]
)
@pytest.mark.parametrize("exact_up_to", [100, 0])
def test_base_rate_of_a_quadratic_is_the_share_below_the_first_gap(
    eigenvalues: list[float], share: float, exact_up_to: int
) -> None:
    """Its gradient is linear, so L = 0 and any gap counts; a start of equal entries gives Lanczos the true shares."""
    values = torch.tensor(eigenvalues).double()
    before, after = torch.linspace(1, 2, len(values)).double(), torch.linspace(-1, 1, len(values)).double()
    found = raw_base_rate(
        lambda w: (values * w * w).sum() / 2,
        before,
        after,
        exact_up_to=exact_up_to,
        lanczos_steps=10,
        start=torch.ones(len(values)).double(),
    )
    assert found == pytest.approx(share, abs=1e-9)


def test_rough_gradient_hides_gaps() -> None:
    """Gaps 1 and 3: L = 0.2 needs more than 0.8, L = 0.5 more than 2, L = 1 more than 4."""
    values, shares = torch.tensor([0.0, 1.0, 4.0]), torch.full((3,), 1 / 3)
    found = [gap_share(values, shares, lipschitz=lipschitz) for lipschitz in (0.2, 0.5, 1.0)]
    assert found == pytest.approx([1 / 3, 2 / 3, 0.0])


def test_lipschitz_constant_is_that_of_the_curvature_change_along_the_move() -> None:
    """F = sum w^3, H = 6 w. From 3 to 1: H move - (gradient there - here) = -36 - (3 - 27) = -12, the move -2: L = 6.

    The gap from -18 to 18 (at -3 and 3) exceeds 4 L = 24. Back from -3 to 3 it is 108 over 6: L = 18, 4 L = 72.
    """
    after, before = torch.tensor([3.0, -3.0]).double(), torch.tensor([1.0, -1.0]).double()
    options: dict[str, Any] = {"exact_up_to": 10, "lanczos_steps": 1, "start": torch.ones(2).double()}
    assert raw_base_rate(lambda w: (w**3).sum(), before, after, **options) == pytest.approx(0.5)
    far = torch.tensor([-3.0, 3.0]).double()
    assert raw_base_rate(lambda w: (w**3).sum(), far, after, **options) == 0.0


def test_lanczos_finds_the_ends_of_a_spectrum_and_shares_that_sum_to_one() -> None:
    root = torch.randn(60, 60, generator=Stream((0, "root")).torch()).double()
    matrix = root @ root.T
    product = curvature_along(lambda w: w @ matrix @ w / 2, torch.zeros(60).double())
    exact, even = exact_spectrum(product, torch.zeros(60).double())
    torch.testing.assert_close(exact, torch.linalg.eigvalsh(matrix), rtol=1e-9, atol=1e-9)
    assert float(even.sum()) == pytest.approx(1.0)
    values, shares = lanczos_spectrum(product, torch.ones(60).double(), steps=25)
    assert len(values) == 25 and float(shares.sum()) == pytest.approx(1.0)
    assert float(values[-1]) == pytest.approx(float(exact[-1]), rel=1e-6)
    whole, _ = lanczos_spectrum(product, torch.ones(60).double(), steps=60)
    torch.testing.assert_close(whole, exact, rtol=1e-6, atol=1e-6)


# -- probes ------------------------------------------------------------------------------------------------------


def client(model: nn.Module, inputs: Tensor, *, moved: float = 0.1) -> LocalClient:
    params = {name: value.detach() for name, value in model.named_parameters()}
    return LocalClient(
        client=0,
        round=1,
        inputs=inputs,
        targets=torch.arange(len(inputs)) % 4,
        num_classes=4,
        anchor={name: value + moved for name, value in params.items()},
        params=params,
        model=model.eval(),
        forward_with=lambda p, x: torch.func.functional_call(model, p, (x,), strict=False),
        stream=stream(0, "probe"),
    )


def test_curvature_probe_sends_one_share_and_leaves_the_model_alone() -> None:
    model = linear_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.randn(12, 1, 1, 6, generator=Stream((0, "x")).torch())
    sent = CurvatureGap(exact_up_to=100, num_params=28).measure(client(model, inputs))
    assert sent.keys() == {"rate"} and sent["rate"].shape == (1,) and 0 <= float(sent["rate"]) <= 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_curvature_probe_works_on_batch_norm_and_by_lanczos() -> None:
    model = build_model("fedstg_cnn", input_shape=(1, 8, 8), num_classes=4, stream=stream(0, "m"))
    inputs = torch.randn(6, 1, 8, 8, generator=Stream((0, "x")).torch())
    sent = CurvatureGap(exact_up_to=10, lanczos_steps=3, num_params=11).measure(client(model, inputs))
    assert 0 <= float(sent["rate"]) <= 1


@pytest.mark.parametrize("exact_up_to", [100, 10])
def test_curvature_probe_takes_words_and_frozen_weights(exact_up_to: int) -> None:
    """Beside a frozen embedding 20 parameters are trained, in float64 where the spectrum is exact."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    subject = client(model, torch.arange(12).view(6, 2) % 3)
    trained = {name: value for name, value in subject.params.items() if name != "0.weight"}
    subject = replace(subject, params=trained, anchor={name: subject.anchor[name] for name in trained})
    sent = CurvatureGap(exact_up_to=exact_up_to, lanczos_steps=3, num_params=20).measure(subject)
    assert 0 <= float(sent["rate"]) <= 1


def test_filter_scores_are_the_ranks_of_the_maps_over_the_largest_rank() -> None:
    """Weights of the first filter are 0 with bias 1: constant maps of rank 1; the second copies an input of rank 3."""
    model = build_model("lenet5", input_shape=(1, 16, 16), num_classes=4, stream=stream(0, "m"))
    with torch.no_grad():
        weight, bias = model.get_parameter("conv1.weight"), model.get_parameter("conv1.bias")
        weight.zero_()
        bias.zero_()
        bias[0] = 1.0
        weight[1, 0, 0, 0] = 1.0
    inputs = torch.zeros(2, 1, 16, 16)
    inputs[:, 0, range(3), range(3)] = 1.0
    conv = [g for g in maskable_groups(model) if g.name == "conv1"]
    relative = feature_ranks(model, conv, inputs, scale="relative")[0]
    assert relative.tolist() == pytest.approx([1 / 12, 3 / 12, 0, 0, 0, 0])
    assert feature_ranks(model, conv, inputs, scale="raw")[0].tolist() == [1, 3, 0, 0, 0, 0]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("kind", "sides"), [(nn.Conv1d, (7,)), (nn.Conv3d, (4, 3, 3))])
def test_filters_of_maps_of_one_or_three_dimensions_have_ranks_of_their_own(
    kind: type[nn.Conv1d | nn.Conv3d], sides: tuple[int, ...]
) -> None:
    """The first filter is dead, the second copies an input that is the same everywhere, of rank 1."""
    model = nn.Sequential(kind(1, 3, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(3 * math.prod(sides), 2))
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
        model.get_parameter("0.weight")[1:] = 1.0
    group = unit_group(model, name="c", layers=["0"], norms=[], consumers=["3"], modules=["1"])
    inputs = torch.ones(5, 1, *sides)
    assert feature_ranks(model, [group], inputs, scale="raw")[0].tolist() == [0, 1, 1]
    largest = 1 if len(sides) == 1 else 4
    assert feature_ranks(model, [group], inputs, scale="relative")[0].tolist() == [0, 1 / largest, 1 / largest]


def test_neuron_scores_are_mean_absolute_incoming_weights_over_the_largest() -> None:
    params = {"a.weight": torch.tensor([[1.0, -1.0], [2.0, 2.0], [0.0, 1.0]])}
    neurons = group("a", 3)
    assert incoming_weights(params, neurons, weight_sum="absolute").tolist() == [0.5, 1.0, 0.25]
    assert incoming_weights(params, neurons, weight_sum="signed").tolist() == [0.0, 1.0, 0.25]


def test_head_scores_are_mean_absolute_outgoing_weights_over_the_largest() -> None:
    """Two heads of two columns each: 8/8 and 4/8 of the mean absolute weight 2."""
    heads = UnitGroup(
        name="a", size=2, kind="head", produced=(("v", 0),), consumed=(("out", 1, 2),), modules=("a",), rows=2
    )
    params = {"out": torch.tensor([[3.0, -1.0, 1.0, 1.0], [-2.0, 2.0, -1.0, 1.0]])}
    assert outgoing_weights(params, heads).tolist() == [1.0, 0.5]
    assert outgoing_weights({"out": torch.zeros(2, 4)}, heads).tolist() == [0.0, 0.0]


def test_score_probe_sends_one_number_per_maskable_unit() -> None:
    units_of = {
        "lenet5": 6 + 16 + 120 + 84,
        "feddhad_resnet18": 2 * (64 + 128 + 256 + 512),
        "vit_tiny": 4 * (4 + 128),
    }
    for name, units in units_of.items():
        model = build_model(name, input_shape=(3, 16, 16), num_classes=4, stream=stream(0, "m"))
        inputs = torch.randn(4, 3, 16, 16, generator=Stream((0, "x")).torch())
        scores = UnitScores(score_samples=2).measure(client(model, inputs))["scores"]
        assert scores.shape == (units,)
        assert 0 <= float(scores.min()) and float(scores.max()) <= 1


def test_networks_without_unit_groups_have_no_maskable_units() -> None:
    assert maskable_groups(linear_model()) == ()


def test_scores_of_filters_cost_a_pass_of_their_samples() -> None:
    """2 clients of 2 samples, through LeNet-5 of 651,720 MACs; neurons alone are scored by their weights."""
    method = fedad(base_rate=0.1, refresh=(1,))
    assert lenet_run(method).flops - lenet_run(fedavg()).flops == 2 * 2 * 2 * 651_720
    ends = [run_net(each, rounds=1).records[0].flops for each in (method, fedavg())]
    assert ends[0] == ends[1]
    assert UnitScores(score_samples=128).passes_over(500) == 128


def test_a_device_is_said_to_drop_what_its_units_can() -> None:
    """By the printed rule fast devices drop nearly all, but no unit more than a fifth."""
    method = fedad(base_rate=0.4, refresh=(1,), device_rate="printed", unit_rate_cap=0.2)
    last = run_net(method, rounds=2).records[-1]
    assert last.extra["dropout_device_rate"] == pytest.approx(0.2)
