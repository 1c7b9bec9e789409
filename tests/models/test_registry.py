"""Building by name: same stream same values, global generator untouched, options, users' own modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError
from fedsweep.models.network import ModelShape, Network
from fedsweep.models.registry import MODELS, make_network
from fedsweep.models.slicing import build_submodel_module
from fedsweep.models.user_network import adopt
from fedsweep.streams import Stream
from fedsweep.testing import build_model
from fedsweep.trees import layout_of

torch.set_num_threads(1)

SHAPE = (1, 8, 8)
STREAM = Stream((0, "init"))

USER_MODULE = """
import warnings

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from fedsweep import unit_group


class Split(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.relu = nn.ReLU()
        self.last = nn.Linear(width, 3)

    def features(self, inputs):
        return self.relu(self.first(inputs.flatten(1)))

    def head(self, features):
        return self.last(features)

    def unit_groups(self):
        return (unit_group(self, name="hidden", layers=["first"], norms=[], consumers=["last"], modules=["relu"]),)


def split(*, input_shape, num_classes, width=5):
    return Split(width)


class Activated(Split):
    def __init__(self, width, between):
        super().__init__(width)
        self.between = between

    def forward(self, inputs):
        return self.head(self.between(self.features(inputs)))


def dropped(*, input_shape, num_classes):
    return Activated(5, nn.Dropout(0.5))


def activated(*, input_shape, num_classes):
    return Activated(5, nn.Tanh())


def joined(*, input_shape, num_classes):
    return Activated(5, nn.Identity())


class Pooled(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, num_classes)

    def forward(self, inputs):
        return self.head(self.features(inputs).mean(dim=(2, 3)))


def pooled(*, input_shape, num_classes):
    return Pooled(num_classes)


def plain(*, input_shape, num_classes, **options):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


def three_logits(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


class Pair(nn.Sequential):
    def forward(self, inputs):
        return super().forward(inputs), inputs


def with_features(*, input_shape, num_classes):
    return Pair(nn.Flatten(), nn.Linear(64, num_classes))


class Tied(nn.Sequential):
    def unit_groups(self):
        return (unit_group(self, name="hidden", layers=["1"], norms=[], consumers=["3"], modules=["2"]),)


def tied(*, input_shape, num_classes):
    layer = nn.Linear(64, 64)
    return Tied(nn.Flatten(), layer, layer, nn.Linear(64, num_classes))


class OneActivation(nn.Sequential):
    def unit_groups(self):
        return tuple(
            unit_group(self, name=name, layers=[name], norms=[], consumers=[reader], modules=[module])
            for name, module, reader in (("1", "2", "3"), ("3", "4", "5"))
        )


def one_activation(*, input_shape, num_classes):
    relu = nn.ReLU()
    return OneActivation(
        nn.Flatten(), nn.Linear(64, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, num_classes)
    )


def tied_without_groups(*, input_shape, num_classes):
    return nn.Sequential(*tied(input_shape=input_shape, num_classes=num_classes))


def frozen(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)).requires_grad_(False)


class Moving(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.last = nn.Linear(64, num_classes)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.seen += len(inputs)
        return self.last(inputs.flatten(1))


def moving(*, input_shape, num_classes):
    return Moving(num_classes)


class Averaging(Moving):
    def forward(self, inputs):
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * inputs.detach().mean())
        return self.last(inputs.flatten(1) - self.seen)


def averaging(*, input_shape, num_classes):
    return Averaging(num_classes)


class Counting(Moving):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


def counting(*, input_shape, num_classes):
    return Counting(num_classes)


def cumulative(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, momentum=None), nn.Linear(64, num_classes))


def sound_norms(*, input_shape, num_classes):
    # One that keeps no statistics, and a frozen one, which keeps still.
    none = nn.BatchNorm1d(64, momentum=None, track_running_stats=False)
    return nn.Sequential(
        nn.Flatten(), none, nn.BatchNorm1d(64, momentum=None).requires_grad_(False), nn.Linear(64, num_classes)
    )


def parametrized(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, num_classes)))


def normed_weight(*, input_shape, num_classes):
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, num_classes)))


class Spectral(nn.Sequential):
    def forward(self, inputs):
        return self[1](self[0].weight[:1] + inputs.flatten(1))


def spectral(*, input_shape, num_classes):
    return Spectral(nn.utils.spectral_norm(nn.Embedding(2, 64)), nn.Linear(64, num_classes))


class Factors(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(64, num_classes)
        del self.weight
        self.left, self.right = nn.Parameter(torch.ones(num_classes, 2)), nn.Parameter(torch.ones(2, 64))

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.left @ self.right, self.bias)


def factors(*, input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Factors(num_classes))


def scripted(*, input_shape, num_classes):
    with warnings.catch_warnings(action="ignore"):  # newer versions of Python have it deprecated
        return torch.jit.script(plain(input_shape=input_shape, num_classes=num_classes))


def with_script(**shape):
    return nn.Sequential(scripted(**shape))


def rectified(*, input_shape, num_classes):
    return nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, num_classes))


class Centred(nn.Sequential):
    def forward(self, inputs):
        inputs.sub_(0.5)
        return super().forward(inputs)


def centred(*, input_shape, num_classes):
    return Centred(nn.Flatten(), nn.Linear(64, num_classes))


def no_module(*, input_shape, num_classes):
    return 5


def wrong_call(shape):
    return None


not_callable = 5
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fedsweep_test_user_models.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "fedsweep_test_user_models"


def build(name: str, *, stream: Stream = STREAM, num_classes: int = 3, **options: Any) -> Network:
    checked = bind_spec("model", {"name": name, **options}).parameters
    return build_model(name, input_shape=SHAPE, num_classes=num_classes, stream=stream, **checked)


def same_values(one: Network, other: Network) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_names_are_those_of_the_interface() -> None:
    assert set(MODELS) == {
        "mlp", "cnn", "lenet5", "feddhad_cnn", "convnet3", "fedstg_cnn", "resnet18", "feddhad_resnet18", "vgg11",
        "vit_tiny", "transformer", "fcn", "vae", "masked_autoencoder",
    }  # fmt: skip
    assert all(entry.summary and entry.source for entry in MODELS.values())


@pytest.mark.parametrize("name", ["mlp", "convnet3", "fedstg_cnn"])
def test_same_stream_gives_the_same_values_and_another_stream_others(name: str) -> None:
    assert same_values(build(name), build(name))
    assert not same_values(build(name), build(name, stream=Stream((1, "init"))))


@pytest.mark.parametrize("name", ["mlp", "{user_module}:plain"])
def test_global_generator_is_as_before_and_does_not_matter(name: str, user_module: str) -> None:
    name = name.format(user_module=user_module)
    before = torch.get_rng_state()
    first = build(name)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert same_values(first, build(name))


def test_global_generator_is_put_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError):
        build("lenet5")
    assert torch.equal(before, torch.get_rng_state())


def test_options_come_from_the_signature_and_act() -> None:
    assert bind_spec("model", {"name": "mlp"}).parameters == {"hidden_width": 128, "projection": None}
    assert bind_spec("model", {"name": "fedstg_cnn"}).parameters == {"dropout": 0.5, "projection": None}
    assert bind_spec("model", {"name": "lenet5"}).parameters == {"projection": None}
    assert build("mlp", hidden_width=4).feature_width == 4
    assert build("convnet3", width=4).feature_width == 4
    assert build("fedstg_cnn", dropout=0).get_submodule("dropout").p == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet", {}, "unknown model 'lenet'; did you mean 'lenet5'"),
        ("mlp", {"hiden_width": 4}, "model mlp: unknown parameter 'hiden_width'; did you mean 'hidden_width'"),
        ("resnet18", {"width": 4}, "model resnet18: unknown parameter 'width' .known: adapter, projection"),
        ("mlp", {"hidden_width": 4.5}, "model.hidden_width must be an integer >= 1, but got 4.5"),
        ("mlp", {"hidden_width": True}, "hidden_width must be an integer >= 1, but got true"),
        ("mlp", {"hidden_width": 0}, "model.hidden_width must be an integer >= 1, but got 0"),
        ("convnet3", {"width": 0}, "model.width must be an integer >= 1, but got 0"),
        ("fedstg_cnn", {"dropout": 1.0}, "model.dropout must be a number >= 0 and < 1, but got 1.0"),
        ("vit_tiny", {"heads": 0}, "model.heads must be an integer >= 1, but got 0"),
        ("masked_autoencoder", {"hidden_share": 1}, "model.hidden_share must be a number > 0 and < 1, but got 1"),
    ],
)
def test_wrong_names_and_options_are_explained(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **options)


@pytest.mark.parametrize("width", [10**12, 2**62, 2**63])
def test_network_that_no_memory_holds_is_refused_in_one_line(width: int) -> None:
    with pytest.raises(ConfigError, match=rf"the model mlp \(hidden_width={width}\) is too large to be made: "):
        build("mlp", hidden_width=width)


def test_user_module_with_features_and_groups_is_used_like_a_built_in_one(user_module: str) -> None:
    model = build(f"{user_module}:split", width=6)
    assert (model.has_features, model.feature_width) == (True, 6)
    inputs = torch.rand(2, *SHAPE, generator=STREAM.torch())
    assert torch.equal(model(inputs), model.head(model.features(inputs)))
    smaller = build_submodel_module(model, {"hidden": [1, 4]})
    assert {name: tuple(p.shape) for name, p in smaller.named_parameters()} == {
        "module.first.weight": (2, 64),
        "module.first.bias": (2,),
        "module.last.weight": (3, 2),
        "module.last.bias": (3,),
    }
    assert smaller(inputs).shape == (2, 3)


def test_norms_without_statistics_and_frozen_ones_are_sound(user_module: str) -> None:
    model = build(f"{user_module}:sound_norms")
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train()(torch.rand(2, *SHAPE, generator=STREAM.torch()))
    assert before and all(torch.equal(value, before[name]) for name, value in model.named_buffers())


class Averaged(nn.Module):
    """Keeps a running average of its embeddings, whose rows of padding are zeros."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(rows, 4, padding_idx=0), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        embedded = self.table(inputs).mean(1)
        if self.training:
            self.get_buffer("mean").lerp_(embedded.detach().mean(0), 0.1)
        logits: torch.Tensor = self.last(embedded)
        return logits


class Etf(nn.Module):
    """Takes inputs below 1 alone, and has a classifier that is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        del self.last.weight
        self.last.register_buffer("weight", torch.eye(3, 4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert inputs.max() < 1, "out of range"
        logits: torch.Tensor = self.last(self.table(inputs))
        return logits


def test_constant_weights_and_inputs_in_a_range_are_sound() -> None:
    adopt(Etf(), name="own", shape=ModelShape(input_shape=(5,), num_classes=3))
    place = r"\[2, 5\] \(Etf.forward \(test_registry.py, line \d+\): AssertionError: out of range"
    with pytest.raises(ConfigError, match=rf"model 'own' can't take inputs {place}"):
        adopt(Etf(), name="own", shape=ModelShape(input_shape=(5,), num_classes=3, sample=torch.ones(1, 5)))


def test_averages_of_ids_are_tried_on_ids_that_there_are() -> None:
    shape = ModelShape(input_shape=(5,), num_classes=3, sample=torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"the buffer 'module\.mean' changes in training"):
        adopt(Averaged(rows=2), name="own", shape=shape)
    adopt(Averaged(rows=1), name="own", shape=shape)  # of zeros alone it stays zero


def test_parameters_may_be_tied_where_no_unit_group_cuts(user_module: str) -> None:
    model = build(f"{user_module}:tied_without_groups")
    assert layout_of(model).names == (
        "module.1.weight",
        "module.1.bias",
        "module.3.weight",
        "module.3.bias",
    )
    assert model.get_parameter("module.2.weight") is model.get_parameter("module.1.weight")


def test_user_module_without_features_has_its_logits_as_features(user_module: str) -> None:
    model = build(f"{user_module}:plain", anything=1)
    inputs = torch.rand(2, *SHAPE, generator=STREAM.torch())
    assert (model.has_features, model.feature_width, model.unit_groups()) == (False, 3, ())
    assert torch.equal(model(inputs), model.features(inputs))


@pytest.mark.parametrize("name", ["activated", "dropped", "pooled"])
def test_a_forward_that_does_more_than_features_and_head_is_what_is_trained(name: str, user_module: str) -> None:
    """What is between them, if only a dropout, was left out without a word; torchvision's Swin was refused."""
    model = build(f"{user_module}:{name}").train()
    assert not model.has_features
    inputs, answers = torch.rand(2, *SHAPE, generator=STREAM.torch()), []
    for ask in (model, model.module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            answers.append(ask(inputs))
    assert torch.equal(*answers)


def test_a_forward_of_features_and_head_has_both(user_module: str) -> None:
    assert build(f"{user_module}:joined").has_features


def test_outputs_are_the_tasks_also_where_the_data_have_classes() -> None:
    shape = ModelShape(input_shape=SHAPE, num_classes=10, outputs=(16,))
    network = make_network(MODELS["mlp"].builder, "mlp", {}, shape=shape, stream=STREAM)
    assert network(torch.zeros(2, *SHAPE)).shape == (2, 16)


@pytest.mark.parametrize(
    ("attribute", "options", "message"),
    [
        ("three_logits", {}, r"must give logits \[2, 4\] for two samples, but gave \[2, 3\]"),
        ("with_features", {}, "must give one tensor of outputs, but gave a tuple"),
        ("tied", {}, "must not tie parameters of a unit group, but 'module.1.weight' and 'module.2.weight' are the"),
        ("one_activation", {}, "groups '1' and '3' have one module for their activations, 'module.4'; give each a"),
        ("frozen", {}, "must train at least one parameter"),
        ("moving", {}, "the buffer 'module.seen' changes in training, but state_dict leaves it out"),
        ("averaging", {}, "the buffer 'module.seen' changes in training, but state_dict leaves it out"),
        ("counting", {}, "the buffer 'module.seen' changes in training, but only floats travel; make it one of floats"),
        ("cumulative", {}, "the batch norm 'module.1' averages over all batches .*; give it a momentum"),
        ("parametrized", {}, "must not use torch's parametrizations"),
        (
            "normed_weight",
            {},
            "must not make weights of other parameters, as 'module.1' does; remove torch's weight_norm,",
        ),
        ("spectral", {}, "must not make weights of other parameters, as 'module.0' does"),
        ("factors", {}, "as 'module.1' does; .* or give the layer a weight of its own"),
        ("scripted", {}, "scripted' must not use TorchScript; leave out torch.jit.script and torch.jit.trace"),
        ("with_script", {}, "must not use TorchScript"),
        ("centred", {}, r"centred' changes its inputs in place, .*; write x = x - 0.5, not x.sub_\(0.5\)"),
        ("rectified", {}, "rectified' changes its inputs in place, .* give a first layer no inplace=True"),
        ("no_module", {}, "must return a torch.nn.Module, but returned a int"),
        ("wrong_call", {}, r"shape is missing; .* \(beside input_shape, num_classes, outputs, which are given to it\)"),
        ("not_callable", {}, "must be callable, but is a int"),
        ("splitt", {}, "'splitt'; did you mean 'split'"),
        ("split", {"widht": 4}, "unknown parameter 'widht'; did you mean 'width'"),
    ],
)
def test_unfit_user_modules_are_explained(
    user_module: str, attribute: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(f"{user_module}:{attribute}", num_classes=4, **options)


def test_user_module_that_cannot_take_the_inputs_is_explained(user_module: str) -> None:
    with pytest.raises(ConfigError, match=r"can't take inputs \[2, 1, 9, 9\]"):
        build_model(f"{user_module}:plain", input_shape=(1, 9, 9), num_classes=3, stream=STREAM)


def test_missing_user_module_is_explained() -> None:
    with pytest.raises(ConfigError, match="the module 'no_such_package_here' cannot be imported"):
        build("no_such_package_here:model")
