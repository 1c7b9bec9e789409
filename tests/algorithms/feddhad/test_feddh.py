"""FedDH, FedDHE and FedJS: weights, the gradient of the control parameters, where the loss's gradient comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_server, tiny_sync, tiny_update
from torch import Tensor, nn

from fedsweep.algorithms.feddhad.degrees import (
    JensenShannon,
    degree_gradients,
    degree_weights,
    degrees,
    divergences,
    pulls,
)
from fedsweep.algorithms.feddhad.feddh import NonIIDDegree
from fedsweep.components.aggregation import by_samples
from fedsweep.errors import ConfigError
from fedsweep.records import ClientProfile, ClientUpdate, ServerContext, SyncContext
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, Covered, FullModel, SubModel
from fedsweep.testing import component_conforms, linear_model
from fedsweep.trees import FlatLayout, layout_of, model_vector

torch.set_num_threads(1)
BOTH: dict[str, Any] = {"learning_rate_v": 0.3, "learning_rate_b": 0.2, "decay_v": 0.9, "decay_b": 0.8}


class Point(nn.Module):
    """A model that is nothing but a vector of four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held(SubModel):
    """All coordinates travel, only some are held."""

    mask: tuple[bool, ...]

    def key(self) -> str:
        return f"held {self.mask}"

    def layout(self, full: FlatLayout) -> FlatLayout:
        return full

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return vector.clone()

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        cover = torch.tensor(self.mask)
        return Covered(vector=torch.where(cover, vector, float("nan")), cover=cover)

    def build(self, model: nn.Module) -> nn.Module:
        return model


LAYOUT = layout_of(Point())
START = torch.zeros(4, dtype=torch.float64)


def update(
    client: int, vector: Tensor, *, samples: int = 1, version: int = 0, part: SubModel = FULL_MODEL
) -> ClientUpdate:
    """One step at rate 1, so that the move is the gradient."""
    return tiny_update(
        client, vector, layout=LAYOUT, submodel=part, anchor_version=version, num_samples=samples, learning_rate=1.0
    )


def sync(round: int = 1, *, anchors: dict[int, Tensor] | None = None, ends_round: bool = True) -> SyncContext:
    anchors = anchors or {0: START}
    return tiny_sync(
        Point(),
        anchors[max(anchors)],
        round=round,
        ends_round=ends_round,
        layout=LAYOUT,
        anchors=anchors,
        learning_rate=1.0,
        cohort=(),
    )


def context(counts: Sequence[Sequence[int]], **more: Any) -> ServerContext:
    profiles = tuple(
        ClientProfile(client=k, num_samples=sum(row), label_counts=np.array(row)) for k, row in enumerate(counts)
    )
    return tiny_server(
        Point(), START, num_clients=len(counts), num_classes=len(counts[0]), profiles=profiles, layout=LAYOUT, **more
    )


def vectors(number: int) -> list[Tensor]:
    generator = stream(0, "vectors").torch()
    return [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(number)]


# -- divergences and weights -------------------------------------------------------------------------------------


def test_weights_of_the_worked_example() -> None:
    """P = (1,0), (.5,.5), (.25,.75) with n = 100, 200, 100: P_m = (.5625, .4375)."""
    counts = np.array([[100, 0], [100, 100], [25, 75]])
    js = divergences(counts)
    assert js.tolist() == pytest.approx([0.1826642, 0.0019621, 0.0516399], abs=5e-8)
    found, free = degrees(torch.ones(3), torch.zeros(3), js, floor=1e-3)
    weights = degree_weights(torch.tensor([100, 200, 100]), found)
    assert weights.tolist() == pytest.approx([0.0052430, 0.9762112, 0.0185458], abs=1e-7)
    assert free.all()


def test_divergence_is_zero_for_equal_and_ln_2_for_disjoint_labels() -> None:
    """Two clients of equal size without a common class: each is ln 2 x 0.3112... from their mean; equal ones are 0."""
    assert divergences(np.array([[3, 5], [6, 10]])).tolist() == [0.0, 0.0]
    far = divergences(np.array([[1, 0], [0, 10**9]]))
    assert float(far[0]) == pytest.approx(math.log(2), abs=1e-6)
    same = divergences(np.array([[4, 0], [0, 4]]))
    assert float(same[0]) == float(same[1]) > 0


def test_equal_degrees_give_the_very_bits_of_weights_by_samples() -> None:
    updates = [update(k, START, samples=n) for k, n in enumerate((3, 7, 11, 13))]
    counts = torch.tensor([u.num_samples for u in updates])
    for degree in (1e-3, 0.1, 0.7):
        assert torch.equal(degree_weights(counts, torch.full((4,), degree, dtype=torch.float64)), by_samples(updates))


def test_mean_degree_under_the_weights_is_the_harmonic_mean() -> None:
    """Theorem 5.7: sum q D = sum n / sum (n / D), at most sum n D / sum n."""
    n, found = torch.tensor([3.0, 5.0, 2.0]).double(), torch.tensor([0.1, 0.4, 0.02]).double()
    weights = degree_weights(n, found)
    assert float((weights * found).sum()) == pytest.approx(float(n.sum() / (n / found).sum()), rel=1e-12)
    assert float((weights * found).sum()) < float((n * found).sum() / n.sum())
    equal = torch.full((3,), 0.3, dtype=torch.float64)
    assert float((degree_weights(n, equal) * equal).sum()) == pytest.approx(0.3, rel=1e-12)


def test_weights_by_samples_never_have_a_smaller_mean_degree() -> None:
    """Theorem 5.7 for drawn federations, by the arithmetic and the harmonic mean's inequality."""
    draws = stream(0, "theorem 5.7").numpy()
    for clients in draws.integers(1, 40, size=200).tolist():
        n = torch.from_numpy(draws.integers(1, 1000, size=clients)).double()
        found = torch.from_numpy(np.exp(draws.normal(scale=3.0, size=clients)))
        ours, plain = (float((weights * found).sum()) for weights in (degree_weights(n, found), n / n.sum()))
        assert ours <= plain * (1 + 1e-12) and (clients == 1 or ours < plain)


@pytest.mark.parametrize(
    ("weighting", "rest"),
    [
        (NonIIDDegree(), "sizes and the offsets b"),
        (NonIIDDegree(learning_rate_b=0.0), "sizes alone"),
        (JensenShannon(), "sizes alone"),
    ],
)
def test_where_all_have_the_same_labels_the_user_is_told_what_weights_go_by(weighting: Any, rest: str) -> None:
    (note,) = weighting.notes(context([[4, 2], [2, 1], [14, 7]]))
    assert note.endswith(f": weights go by {rest}")
    assert weighting.notes(context([[4, 2], [2, 2]])) == ()


def test_forecasts_say_that_they_leave_out_the_pass_for_an_explicit_gradient() -> None:
    (note,) = NonIIDDegree(gradient="explicit").notes(context([[4, 2], [2, 2]]))
    assert note.startswith("forecasts leave out the pass")
    assert NonIIDDegree(gradient="explicit").notes(context([[4, 2], [2, 2]]), {"pending": None}) == ()


def test_floor_keeps_equal_labels_and_negative_degrees_finite() -> None:
    found, free = degrees(torch.tensor([1.0, 1.0]), torch.tensor([0.0, -5.0]), torch.tensor([0.0, 0.3]), floor=1e-3)
    assert found.tolist() == pytest.approx([1e-3, 1e-3]) and not free.any()


# -- gradients of the control parameters -------------------------------------------------------------------------

MASKS = {
    "full models": (FULL_MODEL,) * 3,
    "sub-models": tuple(
        Held(mask=mask) for mask in ((True, True, False, False), (True, False, True, False), (True, True, True, False))
    ),
}


@pytest.mark.parametrize("parts", MASKS.values(), ids=MASKS.keys())
def test_slopes_are_those_of_automatic_differentiation(parts: tuple[SubModel, ...]) -> None:
    """F(w) = (w - c) A (w - c) / 2 with w_e the mean over the holders, weights n / (v JS + b)."""
    *models, centre = vectors(4)
    root = torch.stack(vectors(4))
    matrix = root @ root.T
    n = torch.tensor([2.0, 3.0, 5.0]).double()
    js = torch.tensor([0.1, 0.3, 0.2]).double()
    v = torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.0, 0.1, -0.02], dtype=torch.float64, requires_grad=True)
    covers = torch.stack([torch.tensor(getattr(p, "mask", (True,) * 4)) for p in parts]).double()
    raw = (n / (v * js + b))[:, None] * covers
    mass = raw.sum(dim=0)
    mean = torch.where(mass > 0, (raw * torch.stack(models)).sum(dim=0) / mass.clamp_min(1e-300), START)
    loss = (mean - centre) @ matrix @ (mean - centre) / 2
    expected_v, expected_b = torch.autograd.grad(loss, (v, b))

    found = (v * js + b).detach()
    updates = [update(k, m, samples=int(n[k]), part=p) for k, (m, p) in enumerate(zip(models, parts, strict=True))]
    g = matrix @ (mean.detach() - centre)
    slopes = degree_gradients(g, pulls(updates, degree_weights(n, found), sync()), found)
    torch.testing.assert_close(slopes * js, expected_v, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(slopes, expected_b, rtol=1e-12, atol=1e-14)
    # The weights do not depend on the degrees' scale.
    assert abs(float((found * slopes).sum())) < 1e-13
    assert abs(float((v.detach() * slopes * js + b.detach() * slopes).sum())) < 1e-13


def test_factor_falls_where_moving_towards_the_client_lowers_the_loss() -> None:
    """w = 1.5: client 0 at 1 lies towards the minimum at 0, so it is to count more: its slope is positive."""
    models = [torch.full((4,), value, dtype=torch.float64) for value in (1.0, 2.0)]
    updates = [update(k, m) for k, m in enumerate(models)]
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    slopes = degree_gradients(torch.full((4,), 1.5, dtype=torch.float64), pulls(updates, even, sync()), even)
    assert float(slopes[0]) > 0 > float(slopes[1])


@pytest.mark.parametrize(("gradient", "rests"), [("deferred", True), ("explicit", True), ("same_round", False)])
def test_right_weights_stay_where_the_gradient_is_taken_at_the_aggregate(gradient: Any, rests: bool) -> None:
    """F_k = |w - c_k|^2 / 2, clients return c_k with n equal and JS equal: q = n / sum n is optimal.

    The moves that led to the aggregate say otherwise; those that start from it do not.
    """
    centres = vectors(2)
    weighting = NonIIDDegree(gradient=gradient, **BOTH)
    state = weighting.init(context([[8, 0], [0, 8]]))
    weights, state = weighting.weigh(state, [update(k, c, samples=8) for k, c in enumerate(centres)], sync())
    mean = (centres[0] + centres[1]) / 2
    second = [
        dataclasses.replace(update(k, c, samples=8, version=1), extras={"gradient_at_anchor/gradient": mean - c})
        for k, c in enumerate(centres)
    ]
    _, state = weighting.weigh(state, second, sync(2, anchors={1: mean}))
    assert weights.tolist() == [0.5, 0.5]
    moved = float((state["v"] - 1).abs().max() + state["b"].abs().max())
    assert (moved < 1e-15) is rests


def test_gradient_step_uses_the_rates_of_the_round_that_formed_the_aggregate() -> None:
    """Round 3's weights, corrected in round 4: rates 0.3 x 0.9^2 and 0.2 x 0.8^2; client 2 was not there."""
    weighting = NonIIDDegree(**BOTH)
    counts = [[9, 1], [2, 8], [5, 5]]
    state = weighting.init(context(counts))
    first, second, target = vectors(3)
    updates = [update(0, first, samples=10), update(1, second, samples=10)]
    weights, state = weighting.weigh(state, updates, sync(3))
    mean = weights[0] * first + weights[1] * second
    _, after = weighting.weigh(state, [update(2, mean - target, samples=10, version=1)], sync(4, anchors={1: mean}))
    js = divergences(np.array(counts))
    slopes = torch.stack(
        [-q / d * (target @ (w - mean)) for q, d, w in zip(weights, js, (first, second), strict=False)]
    )
    torch.testing.assert_close(after["v"][:2], 1 - 0.3 * 0.9**2 * slopes * js[:2], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after["b"][:2], -0.2 * 0.8**2 * slopes, rtol=1e-12, atol=1e-14)
    assert (float(after["v"][2]), float(after["b"][2])) == (1.0, 0.0)
    assert torch.equal(state["v"], torch.ones(3).double())  # what was handed in is as it was


def test_moves_from_another_model_than_the_aggregate_say_nothing() -> None:
    weighting = NonIIDDegree(**BOTH)
    first, second, other = vectors(3)
    state = weighting.init(context([[9, 1], [2, 8]]))
    _, state = weighting.weigh(state, [update(0, first), update(1, second)], sync())
    _, after = weighting.weigh(state, [update(0, other, version=0)], sync(2, anchors={0: START, 1: other}))
    assert torch.equal(after["v"], torch.ones(2).double()) and not after["b"].any()


def test_floor_stops_learning() -> None:
    weighting = NonIIDDegree(floor=0.5, gradient="same_round", **BOTH)
    state = weighting.init(context([[9, 1], [2, 8]]))
    first, second = vectors(2)
    _, after = weighting.weigh(state, [update(0, first), update(1, second)], sync())
    assert torch.equal(after["v"], torch.ones(2).double()) and not after["b"].any()


def test_single_client_has_weight_one_and_learns_nothing() -> None:
    weighting = NonIIDDegree(gradient="same_round", **BOTH)
    state = weighting.init(context([[9, 1], [2, 8]]))
    weights, after = weighting.weigh(state, [update(1, vectors(1)[0])], sync())
    assert weights.tolist() == [1.0]
    assert torch.equal(after["v"], torch.ones(2).double()) and after["pending"] is None


# -- errors and conformance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"gradient": "proxy"}, {"estimate": "gradients"}])
def test_missing_or_unlabelled_proxy_data_is_an_error(more: dict[str, Any]) -> None:
    weighting = NonIIDDegree(**more)
    for data in (None, (torch.zeros(2, 4), None)):
        with pytest.raises(ConfigError, match="needs labelled data on the server"):
            weighting.init(context([[9, 1], [2, 8]], proxy_data=data))


def test_unbalanced_proxy_data_is_an_error_for_the_estimate() -> None:
    data = (torch.zeros(3, 4), torch.tensor([0, 0, 1]))
    with pytest.raises(ConfigError, match=r"same number of proxy samples.*\[2, 1\]"):
        NonIIDDegree(estimate="gradients").init(context([[9, 1], [2, 8]], proxy_data=data))
    NonIIDDegree(gradient="proxy").init(context([[9, 1], [2, 8]], proxy_data=data))


@pytest.mark.parametrize("weighting", [NonIIDDegree(), JensenShannon()])
def test_components_conform(weighting: Any) -> None:
    component_conforms(weighting)
    assert weighting.registration() == ("label_counts",)


def test_linear_model_of_the_tests_has_28_parameters() -> None:
    layout = layout_of(linear_model())
    assert layout.num_params == len(model_vector(linear_model(), layout)) == 28
    assert isinstance(FULL_MODEL, FullModel)
