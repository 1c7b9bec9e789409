"""Networks asked under other values than their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedsweep.models.adapters import Part
from fedsweep.models.functional import features_with, head_names, head_with, logits_with
from fedsweep.models.network import ModelShape
from fedsweep.models.networks.chains import Mlp
from fedsweep.models.registry import MODELS
from fedsweep.models.user_network import adopt
from fedsweep.streams import Stream
from fedsweep.testing import build_model

SHAPE = (3, 32, 32)


class TwoLayers(nn.Module):
    """A user's own network: the head has a batch norm, the body dropout and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.top = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))

    def features(self, inputs: Tensor) -> Tensor:
        answer: Tensor = self.body(inputs)
        return answer

    def head(self, features: Tensor) -> Tensor:
        answer: Tensor = self.top(features)
        return answer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(
    "name", [n for n, entry in MODELS.items() if entry.classifies and n not in ("resnet18", "vgg11")]
)
def test_the_head_of_each_network_is_its_classifier(name: str) -> None:
    model = build_model(name, input_shape=SHAPE, num_classes=3, stream=Stream((0, "init")))
    assert head_names(model) == {"classifier.weight", "classifier.bias"}


def test_a_heads_batch_norm_goes_with_it_and_nothing_is_moved() -> None:
    model = adopt(TwoLayers(), name="own", shape=ModelShape(input_shape=(1, 2, 2), num_classes=2)).train()
    before, state = values_of(model), torch.get_rng_state()
    norm = {f"module.top.0.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    assert head_names(model) == norm | {"module.top.1.weight", "module.top.1.bias"}
    assert all(torch.equal(value, before[name]) for name, value in values_of(model).items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_of_features_that_nothing_trained_makes_all_that_is_trained_is_the_head() -> None:
    probe = build_model("mlp", input_shape=SHAPE, num_classes=3, stream=Stream((0, "init")))
    Part(train=("classifier",)).attach(probe)
    assert head_names(probe) == {"classifier.weight", "classifier.bias"}


def test_a_network_that_does_not_say_where_its_features_are_has_no_head() -> None:
    model = adopt(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), name="own", shape=ModelShape(input_shape=(1, 2, 2), num_classes=2)
    )
    assert head_names(model) == frozenset()


def test_other_values_answer_as_a_network_that_has_them() -> None:
    model, other = (Mlp(input_shape=(1, 2, 2), num_classes=3, hidden_width=5) for _ in range(2))
    values, inputs = values_of(other), torch.randn(4, 1, 2, 2)
    features = features_with(model, values | {"rider": torch.ones(1)}, inputs)
    assert torch.equal(features, other.features(inputs))
    assert torch.equal(logits_with(model, values, inputs), other(inputs))
    head = {name: values[name] for name in head_names(model)}
    assert torch.equal(head_with(model, head, features), other(inputs))
    assert not torch.equal(model(inputs), other(inputs))
