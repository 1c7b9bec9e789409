"""Transforms of images on their way into a model: scaling, normalisation, and the papers' augmentations.

A transform works on a whole batch at once and draws only from the generator that it is given. The draws are made on
the CPU, so they are the same wherever the images lie. Legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsweep.errors import ConfigError, InvariantError
from fedsweep.trees import Inputs, all_of, any_of, as_tensors, each
from fedsweep.world.data.record import Dataset

_CROP_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """Turns raw inputs into a model's.

    Class attributes:
        pictures: It takes pictures alone, ``[B, C, H, W]``.
        moves_pixels: Pixels come to lie elsewhere, so that a target for each of them would stay behind.

    Attributes:
        random: Whether training inputs are drawn at random; False means that inputs may be computed once and kept.
        dtype: The inputs' floating type; float64 is for exact tests.
    """

    pictures: ClassVar[bool] = False
    moves_pixels: ClassVar[bool] = False

    random: bool
    dtype: torch.dtype = torch.float32

    @abstractmethod
    def __call__(self, images: Any, *, generator: torch.Generator | None, train: bool) -> Any:
        """Return inputs for a batch.

        Args:
            images: ``[B, ...]``, as the data set holds them, or several by name; not changed.
            generator: A CPU generator; needed where ``train`` and :attr:`random` hold, otherwise unused.
            train: Whether the inputs are for training, so that augmentation applies.

        Returns:
            The same, floats of type :attr:`dtype`, on the same device.

        Raises:
            InvariantError: a generator is needed and missing.
        """


@dataclass(frozen=True, kw_only=True)
class Unchanged(Transform):
    """Inputs of any kind as they are; integers as int64, floats as :attr:`dtype`."""

    random: bool = field(default=False, init=False)

    def __call__(self, images: Inputs, *, generator: torch.Generator | None, train: bool) -> Inputs:
        return each(self._placed, images)

    def _placed(self, values: Tensor) -> Tensor:
        if values.is_floating_point():
            return values.to(self.dtype)
        return values if values.dtype == torch.bool else values.long()


@dataclass(frozen=True, kw_only=True)
class Normalize(Transform):
    """``(x / scale - mean) / std`` per channel, the same for training and testing.

    Attributes:
        scale: The pixel value that maps to 1.0, > 0.
        mean: Per channel, after scaling.
        std: Per channel, after scaling, > 0.
    """

    pictures: ClassVar[bool] = True

    random: bool = field(default=False, init=False)
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor, *, generator: torch.Generator | None, train: bool) -> Tensor:
        factor, offset = _affine_constants(self.scale, self.mean, self.std, self.dtype, images.device)
        return torch.addcmul(offset, images.to(self.dtype), factor)


@dataclass(frozen=True, kw_only=True)
class Augmentation(Transform):
    """Draws for training images, and then moves their pixels: of several batches at once."""

    pictures: ClassVar[bool] = True
    moves_pixels: ClassVar[bool] = True

    random: bool = field(default=True, init=False)
    normalize: Normalize

    def __call__(self, images: Tensor, *, generator: torch.Generator | None, train: bool) -> Tensor:
        if not train:
            return self.normalize(images, generator=None, train=False)
        if generator is None:
            raise InvariantError(f"{type(self).__name__} draws at random for training and needs a generator")
        return self.augmented(images, self.draw(images.shape, generator))

    @abstractmethod
    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw for a batch of images ``[B, C, H, W]``; returns tensors ``[B, ...]`` on the CPU."""

    @abstractmethod
    def augmented(self, images: Tensor, draws: tuple[Tensor, ...]) -> Tensor:
        """Return training inputs ``[B, C, H, W]`` for images and what was drawn for them; image by image."""


@dataclass(frozen=True, kw_only=True)
class FlipCrop(Augmentation):
    """For training: a random horizontal flip, a random crop of the widened image, maybe a turn; then normalisation.

    Sources: DynamicFL, section 8 (CIFAR-10 and CIFAR-100: reflected by 4); NIID-Bench (Li et al., ICDE 2022), whose
    program reflects CIFAR-10 by 4 and widens CIFAR-100 by 4 black pixels before turning it by up to 15 degrees.

    Attributes:
        normalize: What follows, and all that is done for testing.
        padding: Pixels by which the image is widened on each side, >= 0 and smaller than the image. The crop has the
            image's size.
        black: Whether what lies outside of the image is black; else the image is mirrored at its border.
        max_degrees: Largest turn either way, >= 0, after the crop; the nearest pixel is taken, outside is black.
    """

    padding: int = 4
    black: bool = False
    max_degrees: float = 0.0

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw how far each image is shifted down and right, whether it is flipped, and maybe its turn in -1..1."""
        batch = shape[0]
        shifts = torch.randint(0, 2 * self.padding + 1, (2, batch, 1), generator=generator) - self.padding
        flipped = torch.rand(batch, 1, generator=generator) < 0.5
        turns = [2 * torch.rand(batch, generator=generator) - 1] if self.max_degrees else []
        return (*shifts, flipped, *turns)

    def augmented(self, images: Tensor, draws: tuple[Tensor, ...]) -> Tensor:
        """Flip and crop as one gather: each output pixel's source row and column are computed, nothing is padded."""
        (batch, channels, height, width), device = images.shape, images.device
        down, right, flipped, *turns = (drawn.to(device) for drawn in draws)
        rows = torch.arange(height, device=device) + down
        columns = torch.arange(width, device=device) + right
        columns = torch.where(flipped, width - 1 - columns, columns)
        places = _reflected(rows, height)[:, :, None] * width + _reflected(columns, width)[:, None, :]
        flat = places.reshape(batch, 1, -1).expand(-1, channels, -1)
        cropped = images.reshape(batch, channels, -1).gather(2, flat).reshape(images.shape)
        if self.black:
            cropped = cropped * (_within(rows, height)[:, None, :, None] & _within(columns, width)[:, None, None, :])
        for turn in turns:
            cropped = _rotated(cropped.to(self.dtype), (turn * math.radians(self.max_degrees)).to(self.dtype))
        return self.normalize(cropped, generator=None, train=True)


@dataclass(frozen=True, kw_only=True)
class FlipRotateJitterCrop(Augmentation):
    """FedStg's augmentation: flip, rotation, brightness and contrast jitter, random resized crop; then normalisation.

    Each step is torchvision's of the same name: the rotation takes the nearest pixel and fills with black; brightness
    and contrast come in random order, each clipped to 0..1; the crop keeps an aspect ratio between 3/4 and 4/3 and is
    scaled back to the image's size bilinearly.

    Source: FedStg, section 6.

    Attributes:
        normalize: What follows, and all that is done for testing.
        max_degrees: Largest rotation either way.
        jitter: Brightness and contrast factors come from ``1 - jitter .. 1 + jitter``.
        min_area: Smallest share of the image's area that a crop keeps, in (0, 1].
    """

    max_degrees: float = 15.0
    jitter: float = 0.2
    min_area: float = 0.8

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw five numbers in 0..1 for each image, and the box of its crop."""
        fives = torch.rand(5, shape[0], 1, 1, 1, generator=generator)
        return (*fives, _crop_boxes(shape, self.min_area, generator).T)

    def augmented(self, images: Tensor, draws: tuple[Tensor, ...]) -> Tensor:
        """Return the images after all steps, in their order."""
        pixels = images.to(self.dtype) / self.normalize.scale
        *fives, boxes = draws
        flipped, turn, brightness, contrast, order = (drawn.to(pixels.device, pixels.dtype) for drawn in fives)
        pixels = torch.where(flipped < 0.5, pixels.flip(-1), pixels)
        pixels = _rotated(pixels, (2 * turn - 1) * math.radians(self.max_degrees))
        brightness = 1 + (2 * brightness - 1) * self.jitter
        contrast = 1 + (2 * contrast - 1) * self.jitter
        brightness_first = order < 0.5
        pixels = torch.where(brightness_first, _brightened(pixels, brightness), _contrasted(pixels, contrast))
        pixels = torch.where(brightness_first, _contrasted(pixels, contrast), _brightened(pixels, brightness))
        pixels = _resized_crop(pixels, boxes.T)
        return self.normalize(pixels * self.normalize.scale, generator=None, train=True)


@lru_cache(maxsize=64)
def _affine_constants(
    scale: float, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return factor and offset ``[C, 1, 1]`` of the normalisation as one multiply-add."""
    means = torch.tensor(mean, dtype=torch.float64)
    deviations = torch.tensor(std, dtype=torch.float64)
    factor, offset = 1 / (scale * deviations), -means / deviations
    return factor.to(device, dtype)[:, None, None], offset.to(device, dtype)[:, None, None]


def _reflected(positions: Tensor, size: int) -> Tensor:
    """Mirror positions outside ``0 .. size - 1`` at the border pixel, which is not repeated."""
    positions = positions.abs()
    return size - 1 - (size - 1 - positions).abs()


def _within(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)


def _rotated(pixels: Tensor, angles: Tensor) -> Tensor:
    """Rotate about the centre by ``angles [B, 1, 1, 1]`` in radians; nearest pixel, black outside."""
    batch, _, height, width = pixels.shape
    angles = angles.reshape(batch, 1, 1)
    y = (torch.arange(height, dtype=pixels.dtype, device=pixels.device) - (height - 1) / 2)[:, None]
    x = torch.arange(width, dtype=pixels.dtype, device=pixels.device) - (width - 1) / 2
    source_x = x * angles.cos() - y * angles.sin()
    source_y = x * angles.sin() + y * angles.cos()
    grid = torch.stack((source_x * 2 / width, source_y * 2 / height), dim=-1)
    return torch.nn.functional.grid_sample(pixels, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _brightened(pixels: Tensor, factors: Tensor) -> Tensor:
    return (pixels * factors).clamp(0, 1)


def _contrasted(pixels: Tensor, factors: Tensor) -> Tensor:
    """Blend with the mean grey of each image."""
    if pixels.shape[1] == 3:
        weights = torch.tensor((0.299, 0.587, 0.114), dtype=pixels.dtype, device=pixels.device)
        grey = (pixels * weights[:, None, None]).sum(dim=1, keepdim=True)
    else:
        grey = pixels.mean(dim=1, keepdim=True)
    return (pixels * factors + grey.mean(dim=(2, 3), keepdim=True) * (1 - factors)).clamp(0, 1)


def _crop_boxes(shape: torch.Size, min_area: float, generator: torch.Generator) -> Tensor:
    """Draw top, left, height and width of each image's crop: ``[4, B]``; ten tries each, else the whole image."""
    batch, _, height, width = shape
    draws = torch.rand(4, batch, _CROP_TRIES, dtype=torch.float64, generator=generator)
    area = height * width * (min_area + (1 - min_area) * draws[0])
    ratio = torch.exp((2 * draws[1] - 1) * math.log(4 / 3))
    crop_width = torch.sqrt(area * ratio).round()
    crop_height = torch.sqrt(area / ratio).round()
    fits = (crop_width >= 1) & (crop_width <= width) & (crop_height >= 1) & (crop_height <= height)
    top = (draws[2] * (height - crop_height + 1)).floor()
    left = (draws[3] * (width - crop_width + 1)).floor()
    boxes = torch.stack((top, left, crop_height, crop_width))
    first = fits.to(torch.int64).argmax(dim=1)
    chosen = boxes.gather(2, first.expand(4, batch)[:, :, None])[:, :, 0]
    whole = torch.tensor((0.0, 0.0, height, width), dtype=torch.float64)[:, None]
    return torch.where(fits.any(dim=1), chosen, whole)


def _resized_crop(pixels: Tensor, boxes: Tensor) -> Tensor:
    """Scale crops ``boxes [4, B]`` (top, left, height, width) to the image's size, bilinearly."""
    _, _, height, width = pixels.shape
    top, left, crop_height, crop_width = boxes.to(pixels.device, pixels.dtype)
    y = _source_positions(height, top, crop_height) * 2 / max(height - 1, 1) - 1
    x = _source_positions(width, left, crop_width) * 2 / max(width - 1, 1) - 1
    grid = torch.stack((x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)), dim=-1)
    return torch.nn.functional.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=True)


def _source_positions(size: int, start: Tensor, length: Tensor) -> Tensor:
    """Return each of ``size`` output pixels' place in the input: ``[B, size]``, within the crop."""
    steps = (torch.arange(size, dtype=start.dtype, device=start.device) + 0.5) / size
    places = steps * length[:, None] - 0.5
    return start[:, None] + torch.minimum(places.clamp(min=0), length[:, None] - 1)


def _own_normalize(dataset: Dataset) -> Transform:
    if dataset.pixels is None:
        return Unchanged()
    return Normalize(scale=dataset.scale, mean=dataset.mean, std=dataset.std)


def _constants(dataset: Dataset, table: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]) -> Normalize:
    """Return the table's mean and standard deviation for this data set, else its own."""
    mean, std = table.get(dataset.name, (dataset.mean, dataset.std))
    return Normalize(scale=dataset.scale, mean=mean, std=std)


_DYNAMICFL_CONSTANTS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "femnist": ((0.9614,), (0.1634,)),
}
_DYNAFED_CONSTANTS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "fashion_mnist": ((0.1307,), (0.3081,)),
    "cinic10": ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
}
_NIID_BENCH_CONSTANTS = {
    "cifar100": _DYNAMICFL_CONSTANTS["cifar100"],
    "tiny_imagenet": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def _dynamicfl(dataset: Dataset) -> Transform:
    """DynamicFL: flip and crop for colour images; grey ones are normalised only (section 8)."""
    normalize = _constants(dataset, _DYNAMICFL_CONSTANTS)
    return _flip_crop(dataset, normalize) if dataset.num_channels == 3 else normalize


def _dynafed(dataset: Dataset) -> Transform:
    """DynaFed: normalisation alone, with its authors' constants (section 7)."""
    return _constants(dataset, _DYNAFED_CONSTANTS)


def _fedstg(dataset: Dataset) -> Transform:
    """FedStg: its augmentation, with mean and standard deviation 0.5 in each channel (section 6)."""
    halves = (0.5,) * dataset.num_channels
    return FlipRotateJitterCrop(normalize=Normalize(scale=dataset.scale, mean=halves, std=halves))


def _niid_bench(dataset: Dataset) -> Transform:
    """NIID-Bench's program: CIFAR flipped and cropped, CIFAR-100 turned too; pixels 0..1 unless it has more."""
    none = ((0.0,) * dataset.num_channels, (1.0,) * dataset.num_channels)
    mean, std = _NIID_BENCH_CONSTANTS.get(dataset.name, none)
    normalize = Normalize(scale=dataset.scale, mean=mean, std=std)
    if dataset.name == "cifar10":
        return _flip_crop(dataset, normalize)
    return _flip_crop(dataset, normalize, black=True, max_degrees=15.0) if dataset.name == "cifar100" else normalize


def _flip_crop(dataset: Dataset, normalize: Normalize, *, black: bool = False, max_degrees: float = 0.0) -> FlipCrop:
    transform = FlipCrop(normalize=normalize, black=black, max_degrees=max_degrees)
    if dataset.pixels is not None and min(dataset.image_shape[1:]) <= transform.padding:
        height, width = dataset.image_shape[1:]
        raise ConfigError(
            f"scenario.transform widens pictures by {transform.padding} pixels, which must be fewer than they have,"
            f" but data set {dataset.name!r} has {height} x {width}; set scenario.transform to normalize"
        )
    return transform


TRANSFORMS: dict[str, Callable[[Dataset], Transform]] = {
    "normalize": _own_normalize,
    "dynamicfl": _dynamicfl,
    "dynafed": _dynafed,
    "fedstg": _fedstg,
    "niid_bench": _niid_bench,
}


def check_transform(transform: Transform, dataset: Dataset, name: str) -> None:
    """Try a user's transform on two samples, for a test and for training.

    Args:
        transform: The user's.
        dataset: Whose first samples it is given.
        name: Its name in the configuration, for messages.

    Raises:
        ConfigError: It gives something else than inputs for two samples, or changes what it is given.
    """
    for train in (False, True):
        samples = as_tensors(dataset.train.inputs[:2].copy())
        before = each(torch.clone, samples)
        answer = transform(samples, generator=torch.Generator().manual_seed(0) if train else None, train=train)
        parts = [*answer.values()] if isinstance(answer, dict) else [answer]
        where = f"scenario.transform {name}, called with train={train}, must"
        if wrong := [
            part for part in parts if not (isinstance(part, Tensor) and part.shape[:1] == any_of(samples).shape[:1])
        ]:
            shown = list(wrong[0].shape) if isinstance(wrong[0], Tensor) else f"a {type(wrong[0]).__name__}"
            raise ConfigError(f"{where} return one tensor for a batch, but returned {shown} for two samples")
        if dataset.pixels is not None and not parts[0].is_floating_point():
            raise ConfigError(f"{where} return floats for pictures, but returned {parts[0].dtype}")
        if not all(map(torch.equal, all_of(samples), all_of(before))):
            raise ConfigError(f"{where} leave its batch as it is, which may be the data set's own memory")
        if not train:
            again = all_of(transform(samples, generator=None, train=False))
            if any(not torch.equal(one.nan_to_num(), two.nan_to_num()) for one, two in zip(parts, again, strict=True)):
                raise ConfigError(f"{where} return the same for the same batch; draw only where train holds")
