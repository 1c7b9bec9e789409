from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.algorithms.dynafed.trajectory import (
    Forward,
    InnerLoop,
    Params,
    SyntheticSet,
    cosine_distance,
    draw_batches,
    draw_segment,
    forward_of,
    group_within,
    match,
    soft_cross_entropy,
)
from fedsweep.models.networks.chains import ConvNet3
from fedsweep.streams import Stream
from fedsweep.trees import layout_of, model_vector

STREAM = Stream(("test", 1))


def draws(*shape: int, name: str = "values") -> Tensor:
    return torch.randn(*shape, generator=STREAM.child(name).torch(), dtype=torch.float64)


def linear(params: Params, inputs: Tensor) -> Tensor:
    return inputs.flatten(1) @ params[0].T


def loop_of(steps: int, forward: Forward = linear, *, augments: bool = False) -> InnerLoop:
    return InnerLoop(forward=forward, batches=(None,) * steps, augments=augments, stream=STREAM)


def linear_case(*, rate: float = 0.5) -> tuple[Params, Params, SyntheticSet]:
    """Four classes, six features, five images."""
    given = SyntheticSet(
        images=draws(5, 1, 2, 3, name="images"),
        labels=draws(5, 4, name="labels"),
        rate=torch.tensor(rate, dtype=torch.float64),
    )
    return (draws(4, 6, name="start"),), (draws(4, 6, name="target"),), given


def test_loss_of_equal_logits_is_the_logarithm_of_the_classes_over_the_classes() -> None:
    """Zero label logits give 1/C each, and so do zero logits: the mean over C classes of 1/C ln C, thus ln(C)/C."""
    assert float(soft_cross_entropy(torch.zeros(3, 10), torch.zeros(3, 10))) == pytest.approx(math.log(10) / 10)


def test_loss_is_the_usual_cross_entropy_over_the_number_of_classes() -> None:
    logits, labels = draws(7, 4), draws(7, 4, name="labels")
    usual = F.cross_entropy(logits, labels.softmax(dim=1))
    assert float(soft_cross_entropy(logits, labels)) == pytest.approx(float(usual) / 4, rel=1e-12)


def test_one_step_of_one_image_is_the_closed_form() -> None:
    """Loss -(1/C) sum_c p_c log softmax(Wx)_c has the gradient (1/C) (softmax(Wx) - p) x^T in W."""
    start, _, given = linear_case()
    one = SyntheticSet(images=given.images[:1], labels=given.labels[:1], rate=given.rate)
    (moved,) = loop_of(1).run(start, one)
    x, p = one.images.flatten(), one.labels[0].softmax(dim=0)
    expected = start[0] - 0.5 / 4 * torch.outer((start[0] @ x).softmax(dim=0) - p, x)
    assert torch.allclose(moved, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_gradients_equal_central_differences(steps: int, group: int) -> None:
    start, target, given = linear_case()

    def objective(images: Tensor, labels: Tensor, rate: Tensor) -> float:
        (end,) = loop_of(steps).run(start, SyntheticSet(images=images, labels=labels, rate=rate))
        return float((end - target[0]).square().sum() / (start[0] - target[0]).square().sum())

    matched = match(loop_of(steps), start, target, given, group=group)
    parts = {"images": given.images, "labels": given.labels, "rate": given.rate}
    assert float(matched.objective) == pytest.approx(objective(**parts), rel=1e-12)
    width = 1e-5
    for name, value in parts.items():
        found = getattr(matched.gradients, name)
        expected = torch.zeros_like(value)
        for place in np.ndindex(tuple(value.shape)):
            bump = torch.zeros_like(value)
            bump[place] = width
            up, down = objective(**{**parts, name: value + bump}), objective(**{**parts, name: value - bump})
            expected[place] = (up - down) / (2 * width)
        assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_rate_zero_stays_at_the_start_and_only_the_rate_can_learn() -> None:
    start, target, given = linear_case(rate=0.0)
    matched = match(loop_of(3), start, target, given, group=3)
    assert torch.equal(matched.end[0], start[0])
    assert float(matched.objective) == 1.0
    assert float(matched.gradients.images.abs().sum()) == 0.0
    assert float(matched.gradients.labels.abs().sum()) == 0.0
    assert float(matched.gradients.rate) != 0.0


def test_no_inner_steps_stay_at_the_start() -> None:
    start, target, given = linear_case()
    matched = match(loop_of(0), start, target, given, group=1)
    assert matched.end is start
    assert float(matched.objective) == 1.0
    assert float(matched.gradients.images.abs().sum()) == 0.0
    assert float(matched.gradients.labels.abs().sum()) == 0.0


def test_reaching_the_target_is_objective_zero() -> None:
    start, _, given = linear_case()
    target = loop_of(4).run(start, given)
    assert float(match(loop_of(4), start, target, given, group=2).objective) == 0.0


def test_a_scaled_loss_is_a_scaled_rate() -> None:
    """With c times the loss and the rate over c the steps are the same, thus also the objective."""
    start, target, given = linear_case(rate=0.3)

    class Sharper(InnerLoop):
        def step(self, number: int, params: Params, given: SyntheticSet) -> Params:
            loss = 8 * soft_cross_entropy(self.forward(params, given.images), given.labels)
            (slope,) = torch.autograd.grad(loss, params, create_graph=True)
            return (params[0] - given.rate * slope,)

    plain = match(loop_of(3), start, target, given, group=3)
    eighth = SyntheticSet(images=given.images, labels=given.labels, rate=given.rate / 8)
    sharper = Sharper(forward=linear, batches=(None,) * 3, augments=False, stream=STREAM)
    assert torch.allclose(match(sharper, start, target, eighth, group=3).objective, plain.objective, rtol=1e-13)


# -- quadratics ------------------------------------------------------------------------------------------------------

CENTRE, CURVATURE = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 0.8


def quadratic(params: Params, inputs: Tensor) -> Tensor:
    """Logits whose log-softmax in class 0 is -(1 + h / 2 ||x - z||^2), so hard labels 0 make the loss quadratic."""
    log_share = -(1 + CURVATURE / 2 * (params[0] - CENTRE).square().sum())
    return torch.stack((log_share, torch.log1p(-log_share.exp()))).expand(len(inputs), 2)


@pytest.mark.parametrize(("rate", "steps", "bound"), [(0.2, 30, 1e-25), (0.1, 60, 1e-4), (0.6, 10, 1e-3)])
def test_quadratic_clients_are_imitated_where_rate_times_steps_agree(rate: float, steps: int, bound: float) -> None:
    """Clients take 10 steps of rate 0.1 a round, the target is 3 rounds ahead: x - z shrinks by (1 - 0.1 h)^30.

    The inner loss is half the clients' (two classes), so it shrinks by (1 - rate h / 2)^steps: equal for rate 0.2
    and 30 steps, nearly so for other pairs of the same product, and the objective follows from the two factors.
    """
    start = torch.tensor([4.0, 1.0, -3.0], dtype=torch.float64)
    wanted = (1 - 0.1 * CURVATURE) ** 30
    target = CENTRE + wanted * (start - CENTRE)
    given = SyntheticSet(
        images=torch.zeros(2, 1, 1, 1, dtype=torch.float64),
        labels=torch.tensor([[800.0, 0.0]] * 2, dtype=torch.float64),
        rate=torch.tensor(rate, dtype=torch.float64),
    )
    matched = match(loop_of(steps, quadratic), (start,), (target,), given, group=steps)
    shrunk = (1 - rate * CURVATURE / 2) ** steps
    assert float(matched.objective) == pytest.approx(((shrunk - wanted) / (1 - wanted)) ** 2, rel=1e-9, abs=1e-25)
    assert float(matched.objective) < bound
    assert cosine_distance((matched.end[0] - start,), (target - start,)) == pytest.approx(0.0, abs=1e-12)
    half = match(loop_of(steps // 2, quadratic), (start,), (target,), given, group=steps)
    assert float(half.objective) > 10 * bound


# -- draws -----------------------------------------------------------------------------------------------------------


def test_segments_of_eight_snapshots_with_horizon_three() -> None:
    """Starts 0..4, targets of 2 or 3 snapshots out of the three after the start, repetitions among them."""
    segments = [
        draw_segment(8, horizon=3, last_start=50, target="drawn", stream=STREAM.child(number)) for number in range(600)
    ]
    assert {start for start, _ in segments} == {0, 1, 2, 3, 4}
    assert {len(picks) for _, picks in segments} == {2, 3}
    offsets = [pick - start for start, picks in segments for pick in picks]
    assert set(offsets) == {1, 2, 3}
    assert any(len(set(picks)) < len(picks) for _, picks in segments)
    assert any(start + 3 not in picks for start, picks in segments)
    counts = np.bincount([start for start, _ in segments])
    assert counts.min() > 80


def test_latest_start_and_plain_targets() -> None:
    segments = [
        draw_segment(30, horizon=4, last_start=2, target="farthest", stream=STREAM.child(number))
        for number in range(60)
    ]
    assert {start for start, _ in segments} == {0, 1, 2}
    assert all(picks == (start + 4,) for start, picks in segments)


def test_the_papers_target_is_the_farthest_with_two_between() -> None:
    segments = [
        draw_segment(21, horizon=5, last_start=50, target="between", stream=STREAM.child(number))
        for number in range(200)
    ]
    assert all(picks[-1] == start + 5 and len(set(picks)) == 3 for start, picks in segments)
    assert {pick - start for start, picks in segments for pick in picks[:-1]} == {1, 2, 3, 4}
    for horizon in (1, 2):
        start, picks = draw_segment(21, horizon=horizon, last_start=50, target="between", stream=STREAM)
        assert picks == tuple(range(start + 1, start + horizon + 1))


def test_batches_go_through_all_images_before_one_comes_again() -> None:
    batches = draw_batches(7, batch=3, steps=6, stream=STREAM)
    sizes = [len(batch) for batch in batches if batch is not None]
    assert sizes == [3, 3, 1, 3, 3, 1]
    passes = [torch.cat([b for b in batches[k : k + 3] if b is not None]).tolist() for k in (0, 3)]
    assert [sorted(order) for order in passes] == [list(range(7))] * 2
    assert passes[0] != passes[1]
    assert draw_batches(7, batch=None, steps=2, stream=STREAM) == (None, None)
    assert draw_batches(7, batch=7, steps=2, stream=STREAM) == (None, None)


# -- memory ----------------------------------------------------------------------------------------------------------


def conv_case() -> tuple[InnerLoop, Params, Params, SyntheticSet]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: nn.Module = ConvNet3(input_shape=(3, 8, 8), num_classes=3, width=4)
    layout = layout_of(model)
    start = tuple(value.clone() for value in layout.params(model_vector(model, layout)).values())
    target = tuple(value + 0.01 * draws(*value.shape, name=str(k)).float() for k, value in enumerate(start))
    given = SyntheticSet(
        images=draws(6, 3, 8, 8, name="images").float(),
        labels=draws(6, 3, name="labels").float(),
        rate=torch.tensor(0.04),
    )
    return loop_of(5, forward_of(model, layout), augments=True), start, target, given


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_memory_limit_changes_no_bit(group: int) -> None:
    loop, start, target, given = conv_case()
    whole = match(loop, start, target, given, group=5)
    parts = match(loop, start, target, given, group=group)
    assert torch.equal(parts.objective, whole.objective)
    assert all(torch.equal(a, b) for a, b in zip(parts.end, whole.end, strict=True))
    for name in ("images", "labels", "rate"):
        assert torch.equal(getattr(parts.gradients, name), getattr(whole.gradients, name))
        assert float(getattr(whole.gradients, name).abs().sum()) > 0


def test_group_is_as_large_as_the_limit_allows() -> None:
    loop, start, _, given = conv_case()
    assert group_within(loop, start, given, limit_bytes=1e12) == 5
    assert group_within(loop, start, given, limit_bytes=1) == 1
    groups = [group_within(loop, start, given, limit_bytes=limit) for limit in np.geomspace(1e3, 1e8, 60)]
    assert groups == sorted(groups)
    assert set(groups) >= {1, 3, 5}


def test_forward_of_leaves_the_template_as_it_is() -> None:
    _, start, _, given = conv_case()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = ConvNet3(input_shape=(3, 8, 8), num_classes=3, width=4)
    layout = layout_of(model)
    before = model_vector(model, layout)
    shifted = tuple(value + 1 for value in start)
    logits = forward_of(model, layout)(shifted, given.images)
    assert not torch.equal(logits, model(given.images))
    assert torch.equal(model_vector(model, layout), before)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), shifted, strict=True):
            parameter.copy_(value)
    assert torch.equal(logits, model(given.images))
