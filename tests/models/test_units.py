"""Unit groups and sub-models: a dense sub-model computes what the masked full model computes (R3, R4)."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.errors import ConfigError
from fedsweep.models.network import InputShape, Network
from fedsweep.models.registry import MODELS
from fedsweep.models.slicing import (
    attach_unit_scales,
    build_submodel_module,
    kept_index,
    ordered_kept,
    ordered_width,
)
from fedsweep.models.unit_groups import KeptIndex, UnitGroup
from fedsweep.streams import Stream
from fedsweep.testing import build_model

CLASSIFIERS = {name for name, entry in MODELS.items() if entry.classifies}
torch.set_num_threads(1)

STREAM = Stream((0, "units"))
SHAPES: dict[str, InputShape] = {
    "mlp": (1, 8, 8),
    "lenet5": (3, 32, 32),
    "feddhad_cnn": (3, 32, 32),
    "convnet3": (1, 8, 8),
    "fedstg_cnn": (1, 8, 8),
    "vgg11": (3, 32, 32),
    "feddhad_resnet18": (3, 9, 9),
    "vit_tiny": (1, 8, 8),
}


def build(name: str) -> Network:
    options: dict[str, object] = {"dropout": 0.0} if name == "fedstg_cnn" else {}
    return build_model(name, input_shape=SHAPES[name], num_classes=5, stream=STREAM, **options).double()


def outline(name: str) -> Network:
    with torch.device("meta"):
        return MODELS[name].builder(input_shape=(3, 32, 32), num_classes=10)


def random_kept(groups: tuple[UnitGroup, ...]) -> dict[str, Tensor]:
    """About 60 % of each group, at random."""
    generator = STREAM.child("kept").torch()
    return {
        group.name: torch.randperm(group.size, generator=generator)[: ordered_width(group.size, 0.6)].sort().values
        for group in groups
    }


def random_scales(groups: tuple[UnitGroup, ...], kept: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = STREAM.child("scales").torch()
    return {
        group.name: torch.ones(len(kept[group.name]))
        if group.residual
        else 1 + torch.rand(len(kept[group.name]), generator=generator)
        for group in groups
    }


def masks(groups: tuple[UnitGroup, ...], kept: dict[str, Tensor], scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales at full size, with zeros for the units left out."""
    return {g.name: torch.zeros(g.size).index_copy(0, kept[g.name], scales[g.name]) for g in groups}


def batch(name: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(3, *SHAPES[name], generator=STREAM.child("inputs").torch(), dtype=torch.float64)
    return inputs, torch.tensor([0, 3, 1])


def state(model: Network) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def gradients(model: Network) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def slice_tree(tree: Mapping[str, Tensor], index: KeptIndex) -> dict[str, Tensor]:
    """The kept part of each tensor."""
    found = dict(tree)
    for name, parts in index.items():
        for dim, units in parts if name in found else ():
            found[name] = found[name].index_select(dim, units)
    return found


def scatter_tree(
    tree: Mapping[str, Tensor], kept_values: Mapping[str, Tensor], *, index: KeptIndex
) -> dict[str, Tensor]:
    """A copy of ``tree`` with the kept part replaced: the inverse of :func:`slice_tree`."""
    found = {name: tensor.clone() for name, tensor in tree.items()}
    for name, tensor in found.items():
        axes = dict(index.get(name, ()))
        grid = torch.meshgrid(
            *(axes.get(dim, torch.arange(size)) for dim, size in enumerate(tensor.shape)), indexing="ij"
        )
        tensor[grid] = kept_values[name]
    return found


def covered(tree: Mapping[str, Tensor], index: KeptIndex) -> dict[str, Tensor]:
    """1 where the slices hold a value of the tree, 0 elsewhere."""
    ones = {name: torch.ones_like(value) for name, value in slice_tree(tree, index).items()}
    return scatter_tree({name: torch.zeros_like(value) for name, value in tree.items()}, ones, index=index)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_submodel_has_the_outputs_and_gradients_of_the_masked_full_model(name: str) -> None:
    """Also its batch-norm statistics; gradients of what is left out are exactly zero."""
    model = build(name).train()
    groups = model.unit_groups()
    kept = random_kept(groups)
    scales = random_scales(groups, kept)
    index = kept_index(groups, kept)
    submodel = build_submodel_module(model, kept, scales=scales)
    attach_unit_scales(model, masks(groups, kept, scales))
    inputs, targets = batch(name)
    full_logits, sub_logits = model(inputs), submodel(inputs)
    torch.testing.assert_close(sub_logits, full_logits, rtol=0, atol=1e-10)
    torch.autograd.backward(F.cross_entropy(full_logits, targets))
    torch.autograd.backward(F.cross_entropy(sub_logits, targets))
    full, sub = gradients(model), gradients(submodel)
    assert sub.keys() == full.keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(slice_tree(full, index), sub, rtol=0, atol=1e-10)
    coverage = covered(full, index)
    assert all(full[key][coverage[key] == 0].count_nonzero() == 0 for key in full)
    assert sum(int((coverage[key] == 0).sum()) for key in full) > 0.3 * sum(p.numel() for p in full.values())
    torch.testing.assert_close(slice_tree(state(model), index), state(submodel), rtol=0, atol=1e-10)


def test_three_sgd_steps_of_a_submodel_are_those_of_the_masked_full_model() -> None:
    model = build("lenet5").train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = model.unit_groups()
    kept = random_kept(groups)
    scales = random_scales(groups, kept)
    submodel = build_submodel_module(model, kept, scales=scales)
    attach_unit_scales(model, masks(groups, kept, scales))
    inputs, targets = batch("lenet5")
    for network in (model, submodel):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(network(inputs), targets))
            optimizer.step()
    trained = {name: p.detach() for name, p in submodel.named_parameters()}
    embedded = scatter_tree(start, trained, index=kept_index(groups, kept))
    torch.testing.assert_close(embedded, {n: p.detach() for n, p in model.named_parameters()}, rtol=0, atol=1e-10)
    assert not torch.equal(embedded["conv1.weight"], start["conv1.weight"])


@pytest.mark.parametrize("name", sorted(CLASSIFIERS))
def test_submodel_shapes_are_those_of_the_slices_and_its_groups_those_kept(name: str) -> None:
    model = outline(name)
    kept = {group.name: units.to("cpu") for group, units in zip(
        model.unit_groups(), random_kept(model.unit_groups()).values(), strict=True
    )}  # fmt: skip
    submodel = build_submodel_module(model, kept)
    assert {g.name: g.size for g in submodel.unit_groups()} == {name: len(units) for name, units in kept.items()}
    assert submodel.feature_width == submodel.features(torch.zeros(2, 3, 32, 32, device="meta")).shape[1]
    sliced = slice_tree(state(model), kept_index(model.unit_groups(), kept))
    assert {key: tensor.shape for key, tensor in state(submodel).items()} == {k: t.shape for k, t in sliced.items()}


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_layer_normalised_submodel_trains_though_its_statistics_are_its_own(name: str) -> None:
    model = build_model(name, input_shape=(1, 16, 16), num_classes=2, stream=STREAM)
    submodel = build_submodel_module(model, ordered_kept(model.unit_groups(), 0.1))
    submodel(torch.rand(2, 1, 16, 16, generator=STREAM.torch())).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in submodel.parameters())


def test_submodel_of_a_submodel_is_the_submodel_of_the_composed_indices() -> None:
    model = build("lenet5")
    outer = build_submodel_module(model, {"conv2": [1, 3, 4, 9], "fc1": range(50)})
    inner = build_submodel_module(outer, {"conv2": [0, 2]})
    direct = build_submodel_module(model, {"conv2": [1, 4], "fc1": range(50)})
    torch.testing.assert_close(state(inner), state(direct), rtol=0, atol=0)


def test_submodel_that_keeps_everything_equals_the_model_and_shares_no_memory() -> None:
    model = build("feddhad_resnet18")
    submodel = build_submodel_module(model, ordered_kept(model.unit_groups(), 1.0))
    torch.testing.assert_close(state(submodel), state(model), rtol=0, atol=0)
    own = {tensor.data_ptr() for tensor in state(model).values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in state(submodel).values())


def test_submodel_of_parameters_in_one_flat_tensor_has_memory_of_its_own() -> None:
    model = build("mlp")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    before = flat.clone()
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    submodel = build_submodel_module(model, {"fc1": [0, 5]})
    with torch.no_grad():
        for parameter in submodel.parameters():
            parameter.add_(1)
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    assert torch.equal(flat, before)


def test_every_hidden_width_belongs_to_one_group_and_neither_inputs_nor_logits_do() -> None:
    # The vision transformer's tokens have a width that no group cuts.
    for name in CLASSIFIERS - {"vit_tiny"}:
        model = outline(name)
        index = kept_index(model.unit_groups(), {g.name: [0] for g in model.unit_groups()})
        for key, parameter in model.named_parameters():
            cut = {dim for dim, _ in index.get(key, ())}
            is_first = key.startswith("stem") or parameter is next(model.parameters())
            is_classifier = key.startswith("classifier")
            expected = set() if is_classifier else {0}
            if parameter.dim() > 1 and not is_first:
                expected.add(1)
            assert cut == expected, (name, key)


def test_groups_of_lenet5_are_those_written_out() -> None:
    conv1, conv2, fc1, fc2 = build("lenet5").unit_groups()
    assert conv1 == UnitGroup(
        name="conv1",
        size=6,
        kind="conv",
        produced=(("conv1.weight", 0), ("conv1.bias", 0)),
        consumed=(("conv2.weight", 1, 1),),
        modules=("relu1",),
    )
    assert (conv2.consumed, conv2.kind, conv2.module) == ((("fc1.weight", 1, 25),), "conv", "relu2")
    assert (fc1.consumed, fc1.kind, fc1.size) == ((("fc2.weight", 1, 1),), "linear", 120)
    assert fc2.consumed == (("classifier.weight", 1, 1),)


@pytest.mark.parametrize("name", ["resnet18", "feddhad_resnet18"])
def test_resnets_have_one_group_per_stage_and_one_per_block(name: str) -> None:
    groups = outline(name).unit_groups()
    assert [g.size for g in groups if g.residual] == [64, 128, 256, 512]
    assert [g.size for g in groups if not g.residual] == [64, 64, 128, 128, 256, 256, 512, 512]
    assert len({g.name for g in groups}) == len(groups)


def test_flattened_channels_keep_their_block_of_columns() -> None:
    index = kept_index(build("lenet5").unit_groups(), {"conv2": [1, 3]})
    (dim, columns), *rest = index["fc1.weight"]
    assert (dim, rest) == (1, [])
    assert columns.tolist() == [*range(25, 50), *range(75, 100)]
    assert set(index) == {"conv2.weight", "conv2.bias", "fc1.weight"}


@pytest.mark.parametrize(
    ("size", "width", "kept"),
    [(100, 0.55, 55), (6, 0.5, 3), (6, 0.25, 2), (84, 0.25, 21), (10, 0.01, 1), (1, 0.3, 1), (7, 1.0, 7)],
)
def test_ordered_width_rounds_up_but_not_by_rounding_error(size: int, width: float, kept: int) -> None:
    assert ordered_width(size, width) == kept


@pytest.mark.parametrize("width", [0.0, -0.5, 1.01, float("nan")])
def test_ordered_width_out_of_range_is_refused(width: float) -> None:
    with pytest.raises(ConfigError, match="0 < width <= 1 must hold"):
        ordered_width(10, width)


def test_scales_act_in_training_alone() -> None:
    model = build("mlp")
    inputs, _ = batch("mlp")
    plain = model.eval()(inputs)
    attach_unit_scales(model, {"fc2": torch.full((128,), 2.0)})
    assert torch.equal(model.eval()(inputs), plain)
    bias = model.get_parameter("classifier.bias")
    torch.testing.assert_close(model.train()(inputs) - bias, 2 * (plain - bias))


def test_a_residual_group_is_masked_but_not_scaled() -> None:
    resnet = outline("feddhad_resnet18")
    with pytest.raises(ConfigError, match="'stage1' is tied by residual additions"):
        attach_unit_scales(resnet, {"stage1": torch.full((64,), 2.0)})


def test_group_norm_with_groups_of_several_channels_cannot_be_cut() -> None:
    model = outline("cnn")
    model.norm1 = torch.nn.GroupNorm(2, 6, device="meta")
    with pytest.raises(ConfigError, match="2 groups for 6 channels"):
        build_submodel_module(model, {"conv1": [0, 1, 2]})
