import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.world.data.record import Dataset
from fedsweep.world.transforms import (
    TRANSFORMS,
    FlipCrop,
    FlipRotateJitterCrop,
    Normalize,
    Transform,
    _contrasted,
    _crop_boxes,
    _resized_crop,
    _rotated,
)


def build_transform(name: str, data: Dataset) -> Transform:
    transform: Transform = bind_spec("scenario.transform", {"kind": name}).build(data)
    return transform


def dataset(name: str = "own", channels: int = 3, side: int = 8) -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (6, channels, side, side), dtype=np.uint8)
    labels = np.arange(6) % 2
    return Dataset.images(
        name=name,
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
        num_classes=2,
        scale=255.0,
        mean=(0.4,) * channels,
        std=(0.2,) * channels,
    )


def images(channels: int = 3, side: int = 8, count: int = 6) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (count, channels, side, side), dtype=np.uint8))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PLAIN = Normalize(scale=1.0, mean=(0.0,), std=(1.0,))


def test_normalize_follows_the_formula_per_channel() -> None:
    normalize = Normalize(scale=16.0, mean=(0.5, 0.25), std=(0.5, 2.0), dtype=torch.float64)
    raw = torch.tensor([[[[16]], [[8]]]], dtype=torch.uint8)
    # Channel 0: (16/16 - 0.5) / 0.5 = 1; channel 1: (8/16 - 0.25) / 2 = 0.125.
    assert normalize(raw, generator=None, train=True).tolist() == [[[[1.0]], [[0.125]]]]
    assert raw.tolist() == [[[[16]], [[8]]]]


def test_normalize_in_float32_is_accurate() -> None:
    raw, transform = images(), build_transform("normalize", dataset())
    exact = (raw.double() / 255 - 0.4) / 0.2
    result = transform(raw, generator=None, train=False)
    assert result.dtype == torch.float32 and not transform.random
    assert (result.double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_is_a_picklable_pure_function_of_images_and_generator(name: str) -> None:
    transform, raw = build_transform(name, dataset()), images()
    assert pickle.loads(pickle.dumps(transform)) == transform
    before = raw.clone()
    first = transform(raw, generator=generator(3), train=True)
    assert torch.equal(first, transform(raw, generator=generator(3), train=True))
    assert torch.equal(raw, before)
    assert first.shape == raw.shape and first.dtype == torch.float32 and first.is_contiguous()
    assert transform.random != torch.equal(first, transform(raw, generator=generator(4), train=True))


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_only_normalises_for_testing(name: str) -> None:
    transform, raw = build_transform(name, dataset()), images()
    normalize = getattr(transform, "normalize", transform)
    assert torch.equal(transform(raw, generator=None, train=False), normalize(raw, generator=None, train=False))


@pytest.mark.parametrize("name", ["dynamicfl", "fedstg"])
def test_a_random_transform_refuses_to_train_without_a_generator(name: str) -> None:
    with pytest.raises(InvariantError, match="needs a generator"):
        build_transform(name, dataset())(images(), generator=None, train=True)


def test_float64_goes_through_augmentation() -> None:
    for name in ("dynamicfl", "fedstg"):
        transform = build_transform(name, dataset())
        assert isinstance(transform, FlipCrop | FlipRotateJitterCrop)
        exact = replace(transform, dtype=torch.float64, normalize=replace(transform.normalize, dtype=torch.float64))
        result = exact(images(), generator=generator(), train=True)
        assert result.dtype == torch.float64
        rounded = transform(images(), generator=generator(), train=True)
        assert (result - rounded).abs().max() < 1e-4


@pytest.mark.parametrize(("black", "mode"), [(False, "reflect"), (True, "constant")])
def test_crops_are_windows_of_the_widened_image_or_its_mirror(black: bool, mode: str) -> None:
    """Every output is one of 2 x 9 x 9 windows of the padded image; over many draws all shifts and flips occur."""
    raw = images(side=12, count=1)
    transform = FlipCrop(normalize=Normalize(scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3), black=black)
    padded = torch.nn.functional.pad(raw.float(), (4, 4, 4, 4), mode=mode)
    flipped = torch.nn.functional.pad(raw.float().flip(-1), (4, 4, 4, 4), mode=mode)
    windows = {}
    for flip, source in enumerate((padded, flipped)):
        for top in range(9):
            for left in range(9):
                windows[source[0, :, top : top + 12, left : left + 12].numpy().tobytes()] = (flip, top, left)
    outputs = transform(raw.expand(4000, -1, -1, -1), generator=generator(), train=True)
    found = [windows[output.contiguous().numpy().tobytes()] for output in outputs]
    assert len(set(found)) == 162
    assert np.mean([flip for flip, _, _ in found]) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("name", "channels", "mean", "std", "random"),
    [
        ("cifar10", 3, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), True),
        ("cifar100", 3, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), True),
        ("femnist", 1, (0.9614,), (0.1634,), False),
        ("own", 3, (0.4,) * 3, (0.2,) * 3, True),
        ("own", 1, (0.4,), (0.2,), False),
    ],
)
def test_dynamicfl_constants(
    name: str, channels: int, mean: tuple[float, ...], std: tuple[float, ...], random: bool
) -> None:
    transform = build_transform("dynamicfl", dataset(name, channels))
    normalize: Any = getattr(transform, "normalize", transform)
    assert (normalize.mean, normalize.std, transform.random) == (mean, std, random)


@pytest.mark.parametrize(
    ("name", "channels", "transform"),
    [
        ("cifar10", 3, FlipCrop(normalize=Normalize(scale=255.0, mean=(0.0,) * 3, std=(1.0,) * 3))),
        (
            "cifar100",
            3,
            FlipCrop(
                normalize=Normalize(scale=255.0, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
                black=True,
                max_degrees=15.0,
            ),
        ),
        ("tiny_imagenet", 3, Normalize(scale=255.0, mean=(0.5,) * 3, std=(0.5,) * 3)),
        ("svhn", 3, Normalize(scale=255.0, mean=(0.0,) * 3, std=(1.0,) * 3)),
        ("own", 1, Normalize(scale=255.0, mean=(0.0,), std=(1.0,))),
    ],
)
def test_niid_bench_prepares_each_data_set_as_its_program_does(name: str, channels: int, transform: Transform) -> None:
    assert build_transform("niid_bench", dataset(name, channels)) == transform


def test_a_turn_after_the_crop_keeps_the_centre_and_blackens_corners() -> None:
    """Corners go black where a white image is turned far enough, its centre never; small turns move little."""
    white = torch.full((200, 1, 15, 15), 255, dtype=torch.uint8)
    turned = FlipCrop(normalize=PLAIN, padding=0, max_degrees=45.0)(white, generator=generator(), train=True)
    assert (turned[:, 0, 7, 7] == 255).all()
    assert 0.2 < (turned[:, 0, 0, 0] == 0).float().mean() < 1
    assert set(turned.unique().tolist()) == {0.0, 255.0}
    column = torch.zeros(300, 1, 15, 15)
    column[:, :, :, 7] = 1.0
    leaning = FlipCrop(normalize=PLAIN, padding=0, max_degrees=15.0)(column, generator=generator(), train=True)
    offsets = (leaning[:, 0, 0].argmax(dim=-1) - 7).tolist()
    # tan(15 degrees) times seven rows is 1.9 columns, either way.
    assert min(offsets) == -2 and max(offsets) == 2


def test_dynafed_normalises_with_its_authors_constants() -> None:
    grey = build_transform("dynafed", dataset("fashion_mnist", channels=1))
    assert grey == Normalize(scale=255.0, mean=(0.1307,), std=(0.3081,))


def test_fedstg_outputs_stay_between_minus_one_and_one_and_work_in_grey() -> None:
    for channels in (1, 2, 3):
        transform = build_transform("fedstg", dataset(channels=channels))
        outputs = transform(images(channels, count=50), generator=generator(), train=True)
        assert -1 - 1e-5 <= outputs.min() < -0.5 and 0.5 < outputs.max() <= 1 + 1e-5


def test_fedstg_without_strength_only_flips() -> None:
    transform = FlipRotateJitterCrop(normalize=PLAIN, max_degrees=0.0, jitter=0.0, min_area=1.0)
    raw = torch.rand(200, 1, 7, 7, generator=generator(9), dtype=torch.float32)
    outputs = transform(raw, generator=generator(), train=True)
    # A crop of the whole area still draws an aspect ratio; only a square one fits.
    same = (outputs - raw).abs().amax(dim=(1, 2, 3)) < 1e-5
    mirrored = (outputs - raw.flip(-1)).abs().amax(dim=(1, 2, 3)) < 1e-5
    assert (same ^ mirrored).all()
    assert same.float().mean() == pytest.approx(0.5, abs=0.1)


def test_rotation_by_a_quarter_turn_is_exact_and_corners_fall_black() -> None:
    raw = torch.rand(1, 2, 5, 5, generator=generator())
    quarter = _rotated(raw, torch.full((1, 1, 1, 1), math.pi / 2))
    assert torch.equal(quarter, torch.rot90(raw, 1, (2, 3))) or torch.equal(quarter, torch.rot90(raw, -1, (2, 3)))
    eighth = _rotated(torch.ones(1, 1, 9, 9), torch.full((1, 1, 1, 1), math.pi / 4))
    assert eighth[0, 0, 0, 0] == 0 and eighth[0, 0, 4, 4] == 1


def test_contrast_blends_with_the_mean_grey() -> None:
    """Grey values 0.299 and 0.587 for pure red and green; mean 0.443; factor 0.5 halves the way to it."""
    pixels = torch.zeros(1, 3, 1, 2)
    pixels[0, 0, 0, 0] = pixels[0, 1, 0, 1] = 1.0
    result = _contrasted(pixels, torch.full((1, 1, 1, 1), 0.5))
    assert result[0, :, 0, 0].tolist() == pytest.approx([0.7215, 0.2215, 0.2215], abs=1e-6)


def test_crop_boxes_keep_area_ratio_and_borders() -> None:
    top, left, height, width = _crop_boxes(torch.Size((2000, 3, 32, 32)), 0.8, generator())
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + height <= 32).all() and (left + width <= 32).all()
    area, ratio = height * width / 1024, width / height
    assert area.min() > 0.75 and area.max() <= 1.0
    assert ratio.min() >= 0.72 and ratio.max() <= 1.38
    assert len(torch.unique(top)) > 3 and len(torch.unique(left)) > 3


def test_a_crop_that_never_fits_is_the_whole_image() -> None:
    boxes = _crop_boxes(torch.Size((50, 1, 2, 40)), 1.0, generator())
    assert boxes.T.tolist() == [[0.0, 0.0, 2.0, 40.0]] * 50


def test_a_resized_crop_equals_cropping_then_interpolating() -> None:
    raw = torch.rand(2, 3, 10, 12, generator=generator(), dtype=torch.float64)
    boxes = torch.tensor([[1.0, 2.0], [3.0, 0.0], [7.0, 8.0], [8.0, 12.0]], dtype=torch.float64)
    result = _resized_crop(raw, boxes)
    for index in range(2):
        top, left, height, width = (int(value) for value in boxes[:, index])
        crop = raw[index : index + 1, :, top : top + height, left : left + width]
        expected = torch.nn.functional.interpolate(crop, size=(10, 12), mode="bilinear", align_corners=False)
        assert torch.allclose(result[index : index + 1], expected, atol=1e-12)


@pytest.mark.parametrize("side", [4, 5])
def test_pictures_that_are_no_larger_than_their_border_are_refused(side: int) -> None:
    with pytest.raises(ConfigError, match="but data set 'own' has 4 x 4") if side == 4 else nullcontext():
        build_transform("dynamicfl", dataset(side=side))


def test_every_transform_but_unchanged_is_for_pictures() -> None:
    kinds = [kind for kind in Transform.__subclasses__() if kind.__module__ == Transform.__module__]
    assert [kind.__name__ for kind in kinds if not kind.pictures] == ["Unchanged"]


def test_an_unknown_transform_gives_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'normalize'"):
        build_transform("normalise", dataset())


def test_a_transform_of_one_s_own_is_built_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_transform_module.py").write_text(
        "from fedsweep.world.transforms import Normalize\n"
        "def halves(dataset):\n"
        "    return Normalize(scale=dataset.scale, mean=(0.5,) * dataset.num_channels, std=(0.5,) * 3)\n"
        "def wrong(dataset):\n"
        "    return dataset.name\n"
        "def broken(dataset):\n"
        "    return dataset.nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(build_transform("own_transform_module:halves", dataset()), Transform)
    with pytest.raises(ConfigError, match="gives a str"):
        build_transform("own_transform_module:wrong", dataset())
    with pytest.raises(ConfigError, match="AttributeError"):
        build_transform("own_transform_module:broken", dataset())
