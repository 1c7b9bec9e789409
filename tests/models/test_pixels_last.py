"""Images turned round for a CPU's convolutions: for which networks, and that nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.models.network import Network, pixels_last
from fedsweep.models.registry import MODELS
from fedsweep.models.slicing import build_submodel_module, ordered_kept
from fedsweep.streams import Stream
from fedsweep.testing import build_model

torch.set_num_threads(1)
SHAPE = (3, 32, 32)
STREAM = Stream((0, "init"))
GAIN = {"cnn", "lenet5", "feddhad_cnn", "fedstg_cnn", "vit_tiny"}

USER_MODULES = """
from torch import nn


class Viewing(nn.Module):
    def __init__(self, flat):
        super().__init__()
        self.conv, self.last, self.flat = nn.Conv2d(3, 4, 3), nn.Linear(4 * 30 * 30, 5), flat

    def forward(self, inputs):
        maps = self.conv(inputs)
        return self.last(maps.view(len(maps), -1) if self.flat == "view" else maps.flatten(1))


def viewing(*, input_shape, num_classes, flat):
    return Viewing(flat)


def grouped(*, input_shape, num_classes):
    return nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(6 * 30 * 30, 5))
"""


def built(name: str, **options: object) -> Network:
    return build_model(name, input_shape=SHAPE, num_classes=5, stream=STREAM, **options)


def images() -> Tensor:
    return torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(1))


def step(network: Network, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient as one vector."""
    logits = network(inputs)
    loss = F.cross_entropy(logits, torch.arange(6) % 5)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return logits.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])


def test_networks_with_few_channels_and_without_instance_norm_turn_images_round() -> None:
    assert {name for name, entry in MODELS.items() if entry.classifies and built(name).pixels_last} == GAIN


@pytest.mark.parametrize("name", sorted(GAIN - {"fedstg_cnn"}))
def test_logits_and_gradient_are_the_same(name: str) -> None:
    network = built(name).eval()
    other = copy.deepcopy(network)
    assert other.pixels_last
    other.pixels_last = False
    for found, expected in zip(step(network, images()), step(other, images()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_maps_are_turned_round_in_float32_and_not_in_float64() -> None:
    seen: list[Tensor] = []
    network = built("lenet5")
    conv: nn.Module = network.conv1
    conv.register_forward_hook(lambda module, args, output: seen.append(output))
    network(images())
    network.double()(images().double())
    assert [maps.is_contiguous() for maps in seen] == [False, True]


def test_transforms_have_images_as_they_are() -> None:
    network = built("lenet5").eval()
    one_by_one = torch.stack([network(image[None])[0] for image in images()])
    together = torch.func.vmap(lambda image: network(image[None])[0])(images())
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-6)


def test_other_inputs_stay_as_they_are() -> None:
    for inputs in (torch.zeros(2, 5), torch.zeros(2, *SHAPE, dtype=torch.float64)):
        assert pixels_last(inputs) is inputs


def test_a_sub_model_has_the_full_models_layout() -> None:
    for name in ("lenet5", "vgg11"):
        network = built(name)
        smaller = build_submodel_module(network, ordered_kept(network.unit_groups(), 0.1))
        assert smaller.pixels_last is network.pixels_last


@pytest.mark.parametrize(("name", "flat"), [("viewing", "view"), ("viewing", "flatten"), ("grouped", None)])
def test_a_users_module_that_cannot_or_would_not_gain_keeps_torchs_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flat: str | None
) -> None:
    (tmp_path / "pixels_last_user.py").write_text(USER_MODULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    network = built(f"pixels_last_user:{name}", **({} if flat is None else {"flat": flat}))
    assert network.pixels_last is (flat == "flatten")
    assert network.training
    assert network(images()).shape == (6, 5)
