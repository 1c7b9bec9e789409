"""FedMix and NaiveMix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import run, tiny_step
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedmix import GroupMeans, MixedLoss, fedmix
from fedsweep.components.local import LocalStep
from fedsweep.components.probes import LocalClient
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.models.networks.chains import Mlp
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.world.availability import AlwaysAvailable

UNEQUAL = (4, 8, 12, 24, 28, 20)


class Smooth(nn.Module):
    """Two layers without kinks, so that differences show the order of an error."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.tanh(self.first(inputs.flatten(1))))
        return logits


def local_step(*, bank: int = 5, seed: int = 0) -> LocalStep:
    torch.manual_seed(seed)
    model = Smooth().double()
    return tiny_step(
        model,
        inputs=torch.randn(7, 1, 1, 6, dtype=torch.float64),
        targets=torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        broadcast={
            "bank/inputs": torch.randn(bank, 1, 1, 6, dtype=torch.float64),
            "bank/labels": torch.rand(bank, 4, dtype=torch.float64).softmax(dim=1),
        },
        stream=stream(0, "method", 1, 0, 0),
    )


def value(loss: Tensor) -> float:
    return float(loss.detach())


def test_a_clients_averages_by_hand() -> None:
    """Seven samples in groups of three: 3, 3 and 1; each sample is in one of them."""
    inputs = torch.arange(7.0).reshape(7, 1)
    client = LocalClient(
        client=0,
        round=0,
        inputs=inputs,
        targets=torch.tensor([0, 0, 0, 0, 1, 1, 2]),
        num_classes=4,
        anchor={},
        params={},
        model=nn.Identity(),
        forward_with=lambda params, x: x,
        stream=stream(0, "probe"),
    )
    sent = GroupMeans(group_size=3).measure(client)
    sizes = torch.tensor([3.0, 3.0, 1.0])
    assert sent["inputs"].shape == (3, 1) and sent["labels"].shape == (3, 4)
    assert float((sizes * sent["inputs"][:, 0]).sum()) == 21
    torch.testing.assert_close(sizes @ sent["labels"], torch.tensor([4.0, 2.0, 1.0, 0.0]))
    assert float(sent["inputs"][2, 0]) in range(7)
    whole = GroupMeans(group_size=None).measure(client)
    assert whole["inputs"].tolist() == [[3.0]]
    torch.testing.assert_close(whole["labels"], torch.tensor([[4.0, 2.0, 1.0, 0.0]]) / 7)


def test_the_third_part_is_the_slope_along_the_average() -> None:
    """By a central difference: s (1 - s) d/dt mean CE(f(x' + t X), y) at t = 0."""
    step, share, width = local_step(bank=1), 0.2, 1e-5
    other, labels = step.broadcast["bank/inputs"][0], step.broadcast["bank/labels"]
    mixed = (1 - share) * step.inputs

    def own(shift: float) -> float:
        return value(F.cross_entropy(step.forward(mixed + shift * other), step.targets))

    both = value(F.cross_entropy(step.forward(mixed), labels.expand(7, -1)))
    slope = (own(width) - own(-width)) / (2 * width)
    expected = (1 - share) * own(0.0) + share * both + share * (1 - share) * slope
    assert value(MixedLoss(strength=share).loss(step)) == pytest.approx(expected, abs=1e-9)


def test_it_approximates_mixup_with_the_average_to_second_order() -> None:
    """NaiveMix is exact Mixup with this one average; halving the share divides the error by about four."""
    errors = [
        abs(
            value(MixedLoss(strength=s).loss(local_step(bank=1)))
            - value(MixedLoss(strength=s, mixup="naive").loss(local_step(bank=1)))
        )
        for s in (0.02, 0.01, 0.005)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_an_average_of_zeros_has_no_slope() -> None:
    step = local_step(bank=1)
    step.broadcast["bank/inputs"].zero_()
    labels = step.broadcast["bank/labels"].expand(7, -1)
    logits = step.forward(0.9 * step.inputs)
    expected = 0.9 * F.cross_entropy(logits, step.targets) + 0.1 * F.cross_entropy(logits, labels)
    assert value(MixedLoss(strength=0.1).loss(step)) == pytest.approx(value(expected), abs=1e-15)


def test_the_loss_does_not_depend_on_how_often_a_batch_repeats() -> None:
    """The mean over the batch; dividing the inner products by B once more would show here."""
    step = local_step(bank=1)
    double = local_step(bank=1)
    double.inputs, double.targets = step.inputs.repeat(2, 1, 1, 1), step.targets.repeat(2)
    assert value(MixedLoss(strength=0.3).loss(double)) == pytest.approx(value(MixedLoss(strength=0.3).loss(step)))


def test_the_gradient_goes_through_the_slope() -> None:
    """Against central differences in every parameter of the first layer."""
    step = local_step(bank=1)
    loss = MixedLoss(strength=0.3).loss(step)
    weight = step.params["first.weight"]
    (found,) = torch.autograd.grad(loss, weight)
    for place in ((0, 0), (3, 2), (8, 5)):
        ends = []
        for shift in (1e-6, -1e-6):
            with torch.no_grad():
                weight[place] += shift
            ends.append(value(MixedLoss(strength=0.3).loss(step)))
            with torch.no_grad():
                weight[place] -= shift
        assert float(found[place]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


def test_each_step_draws_its_own_average() -> None:
    step, seen = local_step(bank=5), set()
    for position in range(20):
        step.stream = stream(0, "method", 1, 0, position)
        seen.add(round(value(MixedLoss(strength=0.1).loss(step)), 12))
    assert len(seen) == 5


@pytest.mark.parametrize("mixup", ["taylor", "naive"])
def test_strength_zero_is_fedavg_bit_for_bit(mixup: str) -> None:
    assert torch.equal(run(fedmix(strength=0, mixup=mixup)).vector, run(fedavg()).vector)  # type: ignore[arg-type]
    assert not torch.equal(run(fedmix(mixup=mixup)).vector, run(fedavg()).vector)  # type: ignore[arg-type]


@pytest.mark.parametrize("group_size", [None, 5])
def test_the_averages_travel_up_once_and_the_bank_down(group_size: int | None) -> None:
    """An average has 6 + 4 values; a client is charged with the whole bank at its first start, and keeps it."""
    engine = local_engine(tiny_experiment(fedmix(group_size=group_size), sizes=UNEQUAL))
    state = run_rounds(engine)
    averages = 6 if group_size is None else sum(math.ceil(n / group_size) for n in UNEQUAL)
    assert state.setup_bytes == 4 * averages * (6 + 4)
    known: set[int] = set()
    for record in state.records:
        fresh = set(record.cohort) - known
        known |= fresh
        assert record.values_up == 3 * 28
        assert record.values_down == 3 * 28 + len(fresh) * averages * (6 + 4)
    assert len(known) < 3 * len(state.records)


def test_the_bank_has_all_clients_averages_in_order() -> None:
    engine = local_engine(tiny_experiment(fedmix()))
    bank = engine.start().components["refinement0"]
    world = engine.experiment.world
    expected = np.stack([world.test_images[indices].mean(axis=0) for indices in world.indices])
    np.testing.assert_allclose(bank["inputs"], expected, atol=1e-6)
    np.testing.assert_allclose(bank["labels"].sum(dim=1), np.ones(6), atol=1e-6)


@pytest.mark.parametrize(("mixup", "passes"), [("taylor", 6), ("naive", 3)])
def test_a_step_costs_its_passes(mixup: str, passes: int) -> None:
    plain, mixed = run(fedavg()), run(fedmix(mixup=mixup))  # type: ignore[arg-type]
    assert [3 * r.flops for r in mixed.records] == [passes * r.flops for r in plain.records]


def test_networks_with_batch_norm_stay_sound() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))

    state = run(fedmix(strength=0.2), build=build)
    assert bool(torch.isfinite(state.vector).all()) and bool((state.vector[-6:] > 0).all())


def test_accuracies_that_are_kept_move_no_statistics() -> None:
    """The objective's passes are of mixed inputs; who is there for certain goes by the clients' accuracies."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))

    plain, counted = (
        run(fedmix(strength=0.2), build=build, **world) for world in ({}, {"availability": AlwaysAvailable()})
    )
    assert torch.equal(plain.vector, counted.vector) and plain.accuracies == {} and counted.accuracies


def test_it_learns() -> None:
    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=16)

    state = run(fedmix(), build=build, rounds=15, cohort_size=6)
    assert (state.records[-1].test_accuracy or 0) > 0.8


def test_what_would_show_a_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.group_size must be an integer >= 2 or null, but got 1"):
        fedmix(group_size=1)
    with pytest.raises(ConfigError, match=r"fedmix sends averages of at least two samples, but clients \[1\] have one"):
        check_experiment(tiny_experiment(fedmix(), sizes=(4, 1, 12, 24, 28, 20)))
