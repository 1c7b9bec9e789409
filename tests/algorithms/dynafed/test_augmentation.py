from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from fedsweep.algorithms.dynafed.augmentation import (
    FAMILIES,
    augment,
    colour,
    crop,
    cutout,
    flip,
    rotate,
    scale,
)
from fedsweep.streams import Stream

STREAM = Stream(("test", 0))


def images(count: int = 6, channels: int = 3, height: int = 8, width: int = 8) -> Tensor:
    return torch.randn(count, channels, height, width, generator=STREAM.torch(), dtype=torch.float64)


def none_of_it() -> list[tuple[str, Callable[[Tensor, Generator], Tensor]]]:
    return [
        ("colour", lambda x, g: colour(x, g, brightness=0, saturation=0, contrast=0)),
        ("crop", lambda x, g: crop(x, g, ratio=0)),
        ("cutout", lambda x, g: cutout(x, g, ratio=0)),
        ("flip", lambda x, g: flip(x, g, probability=0)),
        ("scale", lambda x, g: scale(x, g, ratio=1)),
        ("rotate", lambda x, g: rotate(x, g, degrees=0)),
    ]


@pytest.mark.parametrize(("name", "family"), none_of_it(), ids=lambda value: value if isinstance(value, str) else "")
def test_strength_zero_changes_nothing(name: str, family: Callable[[Tensor, Generator], Tensor]) -> None:
    given = images()
    assert torch.allclose(family(given, STREAM.torch()), given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 8, 8), (3, 9, 6), (1, 1, 6)])
def test_shape_and_type_stay_and_a_gradient_flows(
    family: Callable[[Tensor, Generator], Tensor], shape: tuple[int, int, int]
) -> None:
    given = images(16, *shape).float().requires_grad_()
    changed = family(given, STREAM.torch())
    assert changed.shape == given.shape
    assert changed.dtype == given.dtype
    (gradient,) = torch.autograd.grad(changed.square().sum(), given)
    assert float(gradient.abs().sum()) > 0
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_each_family_changes_images_differently_but_the_same_stream_alike(
    family: Callable[[Tensor, Generator], Tensor],
) -> None:
    given = images(1).repeat(16, 1, 1, 1)
    changed = family(given, STREAM.torch())
    assert not torch.equal(changed, given)
    assert len(torch.unique(changed.flatten(1), dim=0)) > 1
    assert torch.equal(changed, family(given, STREAM.torch()))
    assert not torch.equal(changed, family(given, STREAM.child("other").torch()))


def test_flip_twice_is_the_identity() -> None:
    given = images()
    once = flip(given, STREAM.torch(), probability=1)
    assert torch.equal(once, given.flip(3))
    assert torch.equal(flip(once, STREAM.torch(), probability=1), given)


def test_all_six_families_are_drawn() -> None:
    seen = {int(torch.randint(6, (), generator=STREAM.child(number).torch())) for number in range(100)}
    assert seen == set(range(6))
    expected = FAMILIES[int(torch.randint(6, (), generator=(generator := STREAM.torch())))](images(), generator)
    assert torch.equal(augment(images(), STREAM), expected)


def test_crop_shifts_by_at_most_an_eighth_and_fills_with_zeros() -> None:
    """On 32 pixels at most 4: the one bright pixel of each image is found again within 4 rows and columns."""
    given = torch.zeros(64, 1, 32, 32)
    given[:, 0, 16, 16] = 1
    places = crop(given, STREAM.torch())[:, 0].flatten(1).argmax(dim=1)
    rows, columns = places // 32 - 16, places % 32 - 16
    assert (int(rows.min()), int(rows.max())) == (-4, 4)
    assert (int(columns.min()), int(columns.max())) == (-4, 4)
    assert torch.equal(
        crop(torch.ones(64, 1, 32, 32), STREAM.torch()).amin(dim=(1, 2, 3)) == 0, (rows != 0) | (columns != 0)
    )


def test_cutout_hides_a_square_of_half_the_side_cut_off_at_the_borders() -> None:
    hidden = (cutout(torch.ones(256, 1, 8, 8), STREAM.torch()) == 0)[:, 0]
    heights, widths = hidden.any(dim=2).sum(dim=1), hidden.any(dim=1).sum(dim=1)
    assert torch.equal(hidden.sum(dim=(1, 2)), heights * widths)
    assert set(heights.tolist()) == set(widths.tolist()) == {2, 3, 4}


def test_colour_of_one_value_moves_by_brightness_alone() -> None:
    """An image of one value has no deviation from its means, so only the summand in [-0.5, 0.5) is left."""
    changed = colour(torch.zeros(200, 3, 4, 4), STREAM.torch())
    assert torch.allclose(changed, changed[:, :1, :1, :1].expand_as(changed))
    moves = changed[:, 0, 0, 0]
    assert -0.5 <= float(moves.min()) < -0.45
    assert 0.45 < float(moves.max()) <= 0.5


def test_saturation_and_contrast_keep_their_means_and_their_ranges() -> None:
    given = images(200)
    grey = given.mean(dim=1, keepdim=True)
    saturated = colour(given, STREAM.torch(), brightness=0, contrast=0)
    assert torch.allclose(saturated.mean(dim=1, keepdim=True), grey)
    factors = ((saturated - grey) / (given - grey))[:, 0, 0, 0]
    assert 0 <= float(factors.min()) < 0.1 < 1.9 < float(factors.max()) <= 2
    level = given.mean(dim=(1, 2, 3), keepdim=True)
    contrasted = colour(given, STREAM.torch(), brightness=0, saturation=0)
    factors = ((contrasted - level) / (given - level))[:, 0, 0, 0]
    assert 0.5 <= float(factors.min()) < 0.55 < 1.45 < float(factors.max()) <= 1.5


def test_rotation_and_scale_of_a_ramp_are_the_linear_maps_they_claim() -> None:
    """A ramp x in [-1, 1], turned by up to 15 degrees, has the slopes cos and sin; scaled, it has the factor."""
    axis = torch.linspace(-1, 1, 33, dtype=torch.float64)
    ramp = axis.expand(33, 33).expand(300, 1, 33, 33)
    middle, step = slice(14, 19), 1 / 16
    turned = rotate(ramp, STREAM.torch())[:, 0, middle, middle]
    cosines = (turned[:, 2, 4] - turned[:, 2, 0]) / (4 * step)
    sines = (turned[:, 4, 2] - turned[:, 0, 2]) / (4 * step)
    assert torch.allclose(cosines**2 + sines**2, torch.ones(300, dtype=torch.float64))
    degrees = torch.rad2deg(torch.atan2(sines, cosines))
    assert -15 <= float(degrees.min()) < -14 < 14 < float(degrees.max()) <= 15
    wide = rotate(torch.arange(65.0, dtype=torch.float64).expand(9, 65).expand(50, 1, 9, 65), STREAM.torch())[:, 0]
    gradients = torch.stack((wide[:, 4, 33] - wide[:, 4, 31], wide[:, 5, 32] - wide[:, 3, 32])) / 2
    assert torch.allclose((gradients**2).sum(dim=0), torch.ones(50, dtype=torch.float64))
    stretched = scale(ramp, STREAM.torch())[:, 0, middle, middle]
    factors = (stretched[:, 2, 4] - stretched[:, 2, 0]) / (4 * step)
    assert 1 / 1.2 <= float(factors.min()) < 0.85 < 1.18 < float(factors.max()) <= 1.2
