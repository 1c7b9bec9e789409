"""The vision transformer: patches, sizes, heads that are really cut, and what they cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.errors import ConfigError
from fedsweep.models.attention import SelfAttention
from fedsweep.models.cost import fwd_macs_per_sample
from fedsweep.models.network import InputShape, Network
from fedsweep.models.networks.vit import patch_side
from fedsweep.models.slicing import kept_index
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.streams import Stream
from fedsweep.testing import build_model

torch.set_num_threads(1)

DIGITS = (1, 8, 8)
STREAM = Stream((0, "vit"))


def vit(input_shape: InputShape = DIGITS, **options: object) -> Network:
    return build_model("vit_tiny", input_shape=input_shape, num_classes=10, stream=STREAM, **options)


def part(model: Network, *, heads: tuple[int, ...], neurons: tuple[int, ...]) -> Network:
    groups = model.unit_groups()
    kept = {group.name: heads if group.kind == "head" else neurons for group in groups}
    built = unit_submodel(groups, kept).build(model)
    assert isinstance(built, Network)
    return built


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("shape", "side"),
    [((1, 8, 8), 2), ((1, 28, 28), 4), ((3, 32, 32), 4), ((3, 64, 64), 8), ((1, 9, 9), 3), ((1, 16, 8), 2)],
)
def test_patch_is_the_smallest_that_leaves_eight_a_side(shape: InputShape, side: int) -> None:
    assert patch_side(shape) == side
    rows, columns = shape[1] // side, shape[2] // side
    assert vit(shape).get_parameter("positions").shape == (rows * columns, 64)


@pytest.mark.parametrize("shape", [(1, 7, 7), (1, 31, 31), (1, 3, 8), (1, 2, 2), (1, 121, 121)])
def test_no_patch_for_a_size_names_the_way_out(shape: InputShape) -> None:
    with pytest.raises(ConfigError, match=f"inputs 1x{shape[1]}x{shape[2]}.*set model.patch_size, or scenario.image_"):
        vit(shape)


@pytest.mark.parametrize("shape", [(1, 7, 7), (1, 31, 31)])
def test_patch_size_of_ones_own_is_taken(shape: InputShape) -> None:
    model = vit(shape, patch_size=shape[1])
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 3}, "must be 0 or divide the inputs' height and width, but got patch_size=3 for 1x8x8"),
        ({"patch_size": -2}, "must be 0 or divide"),
        ({"width": 10, "heads": 4}, "must be a multiple of model.heads, but got width=10, heads=4"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vit(**options)


def test_rows_of_numbers_are_no_pictures() -> None:
    with pytest.raises(ConfigError, match=r"'vit_tiny' needs pictures .* but a sample is \[10\]"):
        vit((10,))


def test_attention_of_the_full_model_is_torchs_multi_head_attention() -> None:
    model = vit().double()
    block = model.get_submodule("blocks.0")
    own, project = block.get_submodule("attention"), block.get_submodule("project")
    reference = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for part_name in ("weight", "bias"):
            stacked = [own.get_parameter(f"{layer}.{part_name}") for layer in ("query", "key", "value")]
            reference.get_parameter(f"in_proj_{part_name}").copy_(torch.cat(stacked))
            reference.out_proj.get_parameter(part_name).copy_(project.get_parameter(part_name))
    tokens = torch.randn(2, 5, 64, generator=STREAM.torch(), dtype=torch.float64)
    expected, _ = reference(tokens, tokens, tokens)
    torch.testing.assert_close(project(own(tokens).transpose(1, 2).flatten(2)), expected, rtol=0, atol=1e-12)


def test_parts_have_the_closed_form_of_parameters() -> None:
    """Per block h (4 x 64 + 3) 16 of attention, n (2 x 64 + 1) of the MLP; the rest belongs to everybody."""
    model = vit()
    shared = 64 * 4 + 64 + 16 * 64 + 4 * (4 * 64 + 2 * 64) + 2 * 64 + 64 * 10 + 10
    for heads, neurons in [(4, 128), (1, 1), (3, 50)]:
        small = part(model, heads=tuple(range(heads)), neurons=tuple(range(neurons)))
        assert num_parameters(small) == shared + 4 * (heads * (4 * 64 + 3) * 16 + neurons * (2 * 64 + 1))
    assert num_parameters(model) == shared + 4 * (4 * (4 * 64 + 3) * 16 + 128 * (2 * 64 + 1))


@pytest.mark.parametrize("shape", [DIGITS, (3, 32, 32)])
@pytest.mark.parametrize(("heads", "neurons"), [((0, 1, 2, 3), tuple(range(128))), ((1, 3), (5, 6, 100)), ((2,), (0,))])
def test_cost_is_what_torch_counts(shape: InputShape, heads: tuple[int, ...], neurons: tuple[int, ...]) -> None:
    model = part(vit(shape), heads=heads, neurons=neurons).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, *shape))
    assert 2 * fwd_macs_per_sample(model, shape) == counter.get_total_flops()


def test_half_of_heads_and_neurons_is_half_the_cost_of_the_blocks() -> None:
    model = vit()
    shared = 16 * 4 * 64 + 64 * 10  # patches and classifier
    half = part(model, heads=(0, 2), neurons=tuple(range(0, 128, 2)))
    full_cost = fwd_macs_per_sample(model, DIGITS)
    assert fwd_macs_per_sample(half, DIGITS) - shared == (full_cost - shared) / 2


def test_units_are_heads_and_neurons_and_the_tokens_keep_their_width() -> None:
    groups = vit().unit_groups()
    assert [(g.name, g.kind, g.size, g.rows) for g in groups[:2]] == [
        ("blocks.0.heads", "head", 4, 16),
        ("blocks.0.fc1", "linear", 128, 1),
    ]
    assert len(groups) == 8
    index = kept_index(groups, {"blocks.1.heads": [1, 3], "blocks.1.fc1": [7]})
    rows = [*range(16, 32), *range(48, 64)]
    inner = {f"blocks.1.attention.{layer}.{of}" for layer in ("query", "key", "value") for of in ("weight", "bias")}
    assert {name: [(d, u.tolist()) for d, u in cuts] for name, cuts in index.items()} == {
        **{key: [(0, rows)] for key in inner},
        "blocks.1.project.weight": [(1, rows)],
        "blocks.1.fc1.weight": [(0, [7])],
        "blocks.1.fc1.bias": [(0, [7])],
        "blocks.1.fc2.weight": [(1, [7])],
    }


def test_part_has_fewer_heads_of_the_same_width() -> None:
    small = part(vit(), heads=(1, 3), neurons=(0,))
    attention = small.get_submodule("blocks.2.attention")
    assert isinstance(attention, SelfAttention)
    seen: list[Tensor] = []
    attention.register_forward_hook(lambda module, inputs, output: seen.append(output))
    small(torch.zeros(3, *DIGITS))
    assert seen[0].shape == (3, 2, 16, 16)
    assert [group.size for group in small.unit_groups()[:2]] == [2, 1]


def test_positions_tell_patches_apart() -> None:
    """Without them the mean over patches would be the same for two patches that change places."""
    model = vit().eval()
    images = torch.rand(1, *DIGITS, generator=STREAM.torch())
    swapped = images.clone()
    swapped[..., :2, :2], swapped[..., 6:, 6:] = images[..., 6:, 6:], images[..., :2, :2]
    assert not torch.allclose(model(images), model(swapped), atol=1e-3)
    with torch.no_grad():
        model.get_parameter("positions").zero_()
    torch.testing.assert_close(model(images), model(swapped), rtol=0, atol=1e-5)
