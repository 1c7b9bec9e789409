"""The networks: sizes as printed in the papers, initial values, split into features and head, errors."""

import pytest
import torch
from torch import nn

from fedsweep.errors import ConfigError
from fedsweep.models.cost import fwd_macs_per_sample
from fedsweep.models.network import InputShape, Network
from fedsweep.models.registry import MODELS
from fedsweep.models.slicing import build_submodel_module, ordered_kept
from fedsweep.streams import Stream
from fedsweep.testing import build_model

torch.set_num_threads(1)

RGB = (3, 32, 32)
GREY = (1, 28, 28)
PARTS = ("weight", "bias")
STREAM = Stream((0, "init"))


def outline(name: str, input_shape: InputShape, num_classes: int) -> Network:
    """A network without memory for its weights."""
    with torch.device("meta"):
        return MODELS[name].builder(input_shape=input_shape, num_classes=num_classes)


@pytest.mark.parametrize(
    ("name", "input_shape", "num_classes", "printed"),
    [
        ("mlp", GREY, 10, 118_282),
        ("cnn", RGB, 10, 62_050),
        ("cnn", RGB, 100, 69_700),
        ("cnn", GREY, 62, 48_890),
        ("lenet5", RGB, 10, 62_006),
        ("lenet5", RGB, 100, 69_656),
        ("feddhad_cnn", RGB, 10, 122_570),
        ("feddhad_cnn", RGB, 100, 128_420),
        ("convnet3", RGB, 10, 320_010),
        ("convnet3", RGB, 100, 504_420),
        ("convnet3", GREY, 10, 317_706),
        ("fedstg_cnn", RGB, 10, 2_474_506),
        ("fedstg_cnn", RGB, 100, 2_520_676),
        ("resnet18", RGB, 10, 11_172_170),
        ("resnet18", RGB, 100, 11_218_340),
        ("feddhad_resnet18", RGB, 200, 11_276_232),
        ("vgg11", RGB, 10, 9_750_922),
    ],
)
def test_parameter_count_is_the_printed_one(name: str, input_shape: InputShape, num_classes: int, printed: int) -> None:
    assert sum(parameter.numel() for parameter in outline(name, input_shape, num_classes).parameters()) == printed


def test_feddhad_resnet18_has_4800_biases_in_its_convolutions() -> None:
    convs = [m for m in outline("feddhad_resnet18", RGB, 200).modules() if isinstance(m, nn.Conv2d)]
    assert sum(conv.bias.numel() for conv in convs if conv.bias is not None) == 4_800


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.classifies])
def test_features_and_head_have_the_declared_shapes_and_compose_to_forward(name: str) -> None:
    model = outline(name, RGB, 7)
    inputs = torch.zeros(2, *RGB, device="meta")
    features = model.features(inputs)
    assert features.shape == (2, model.feature_width)
    assert model.head(features).shape == (2, 7)
    assert model(inputs).shape == (2, 7)
    assert (model.input_shape, model.num_classes, model.has_features) == (RGB, 7, True)


@pytest.mark.parametrize("name", ["mlp", "cnn", "convnet3"])
def test_forward_is_head_of_features(name: str) -> None:
    model = build_model(name, input_shape=RGB, num_classes=3, stream=STREAM)
    inputs = torch.rand(2, *RGB, generator=STREAM.torch())
    assert torch.equal(model(inputs), model.head(model.features(inputs)))


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("cnn", 16),
        ("lenet5", 16),
        ("feddhad_cnn", 18),
        ("convnet3", 8),
        ("fedstg_cnn", 8),
        ("vgg11", 32),
        ("feddhad_resnet18", 9),
    ],
)
def test_inputs_below_the_smallest_size_are_refused_and_the_smallest_works(name: str, smallest: int) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*at least {smallest}x{smallest} pixels.*got 1x32x{smallest - 1}"):
        outline(name, (1, 32, smallest - 1), 10)
    model = outline(name, (1, smallest, smallest), 10)
    assert model(torch.zeros(1, 1, smallest, smallest, device="meta")).shape == (1, 10)


def test_cnn_on_digits_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"got 1x8x8; set scenario.image_size=16 or more.*mlp takes any size"):
        outline("cnn", (1, 8, 8), 10)


def test_smallest_feddhad_resnet18_trains_on_a_batch_of_one() -> None:
    model = build_model("feddhad_resnet18", input_shape=(1, 9, 9), num_classes=2, stream=STREAM)
    assert model.train()(torch.zeros(1, 1, 9, 9)).isfinite().all()


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_dynamicfl_models_start_kaiming_normal_with_zero_linear_bias(name: str) -> None:
    """Std of a Kaiming normal weight, fan out and ReLU: sqrt(2 / (Cout * k * k))."""
    model = build_model(name, input_shape=RGB, num_classes=10, stream=STREAM)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.bias.count_nonzero() == 0
            assert module.weight.count_nonzero() > 0
        if isinstance(module, nn.Conv2d) and module.weight.numel() >= 2_000:
            weight = module.weight
            expected = (2 / (weight.shape[0] * weight.shape[2] * weight.shape[3])) ** 0.5
            assert weight.std().item() == pytest.approx(expected, rel=0.06)
    conv = model.get_submodule("conv1" if name == "cnn" else "stem")
    assert isinstance(conv, nn.Conv2d)
    assert (conv.bias is not None and bool((conv.bias != 0).all())) if name == "cnn" else conv.bias is None


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.classifies])
def test_no_parameter_is_tied_and_float_buffers_come_from_batch_norm_alone(name: str) -> None:
    model = outline(name, RGB, 10)
    assert len(list(model.parameters())) == len(list(model.named_parameters(remove_duplicate=False)))
    norms = {path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    for path, buffer in model.named_buffers():
        assert not buffer.is_floating_point() or path.rpartition(".")[0] in norms


@pytest.mark.parametrize(
    ("input_shape", "num_classes", "rule"),
    [((1, 0, 8), 10, "sizes of at least 1"), ((1, 8, 8), 0, "num_classes must be at least 1")],
)
def test_impossible_shapes_are_refused(input_shape: InputShape, num_classes: int, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        outline("mlp", input_shape, num_classes)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "feddhad_cnn", "vit_tiny"])
def test_a_projection_adds_two_layers_and_leaves_what_is_before_as_it_starts(name: str) -> None:
    plain, projected = (
        build_model(name, input_shape=RGB, num_classes=10, stream=STREAM, **options)
        for options in ({}, {"projection": 7})
    )
    width, own = plain.feature_width, dict(projected.named_parameters())
    assert [tuple(own[f"projection.{layer}.weight"].shape) for layer in (0, 2)] == [(width, width), (7, width)]
    assert tuple(own["classifier.weight"].shape) == (10, 7) and projected.feature_width == 7
    body = [key for key, _ in plain.named_parameters() if not key.startswith("classifier")]
    assert own.keys() - body == {f"{k}.{p}" for k in ("projection.0", "projection.2", "classifier") for p in PARTS}
    if name != "vit_tiny":  # which draws its last values when all layers are there
        assert all(torch.equal(own[key], dict(plain.named_parameters())[key]) for key in body)
    more = fwd_macs_per_sample(projected, RGB) - fwd_macs_per_sample(plain, RGB)
    assert more == width * width + width * 7 + 7 * 10 - width * 10
    inputs = torch.rand(2, *RGB)
    expected = projected.projection[2](projected.projection[0](projected.encode(inputs)).relu())  # type: ignore
    torch.testing.assert_close(projected.eval().features(inputs), expected)


def test_a_projections_hidden_neurons_can_be_left_out_and_its_outputs_not() -> None:
    model = build_model("resnet18", input_shape=GREY, num_classes=4, stream=STREAM, projection=6)
    kept = ordered_kept(model.unit_groups(), 0.25)
    assert len(kept["projection"]) == 128
    smaller = build_submodel_module(model, kept)
    assert [tuple(smaller.get_parameter(f"projection.{layer}.weight").shape) for layer in (0, 2)] == [
        (128, 128),
        (6, 128),
    ]
    assert smaller.eval()(torch.rand(2, *GREY)).shape == (2, 4)


def test_a_projection_without_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.projection must be at least 1, or null for none, but got 0"):
        build_model("mlp", input_shape=GREY, num_classes=10, stream=STREAM, projection=0)
