"""Unit-wise sub-models: what travels, how it is put back, and that they are the same wherever they are built."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from fedsweep.errors import InvariantError
from fedsweep.models import unit_submodel as module
from fedsweep.models.cost import fwd_macs_per_sample
from fedsweep.models.network import Network
from fedsweep.models.slicing import _sliced, attach_unit_scales, kept_index, ordered_kept
from fedsweep.models.unit_submodel import UnitSubModel, unit_submodel
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import build_model
from fedsweep.trees import FlatLayout, coverage_mean, layout_of, model_vector

torch.set_num_threads(1)

SHAPES = {
    "mlp": (1, 8, 8),
    "cnn": (3, 16, 16),
    "lenet5": (3, 32, 32),
    "feddhad_cnn": (3, 32, 32),
    "convnet3": (1, 8, 8),
    "fedstg_cnn": (1, 8, 8),
    "vgg11": (3, 32, 32),
    "resnet18": (3, 9, 9),
    "feddhad_resnet18": (3, 9, 9),
    "vit_tiny": (1, 8, 8),
}
LAYER_NORMALISED = ("cnn", "resnet18")  # their norms take statistics over all channels that are there


def network(name: str, num_classes: int = 10) -> Network:
    return build_model(name, input_shape=SHAPES[name], num_classes=num_classes, stream=Stream((0, "unit sub-models")))


def drawn(model: Network, share: float = 0.6, *, seed: int = 0, residual: bool = False) -> dict[str, list[int]]:
    generator = Stream((seed, "kept")).numpy()
    return {
        group.name: sorted(generator.choice(group.size, max(1, int(share * group.size)), replace=False).tolist())
        for group in model.unit_groups()
        if residual or not group.residual
    }


def half_width(model: Network) -> SubModel:
    groups = model.unit_groups()
    return unit_submodel(groups, ordered_kept(groups, 0.5))


LARGE = ("vgg11", "resnet18", "feddhad_resnet18")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in SHAPES])
def test_part_is_the_slice_of_every_tensor_and_goes_back_to_its_place(name: str, residual: bool) -> None:
    """R3: embedding what was extracted gives the kept values back, and covers nothing else."""
    model = network(name)
    layout = layout_of(model)
    vector = torch.arange(1, layout.num_values + 1, dtype=torch.float64)
    kept = drawn(model, residual=residual)
    part = unit_submodel(model.unit_groups(), kept)
    own = part.extract(vector, layout)
    index = kept_index(model.unit_groups(), kept)
    expected = {key: _sliced(value, index.get(key, ())) for key, value in layout.views(vector).items()}
    found = part.layout(layout).views(own)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    covered = part.embed(own, layout)
    assert covered.cover is not None
    assert int(covered.cover.sum()) == part.layout(layout).num_values == len(own) < layout.num_values
    assert torch.equal(covered.vector[covered.cover], vector[covered.cover])
    assert torch.equal(part.extract(covered.vector, layout), own)


@pytest.mark.parametrize("name", list(SHAPES))
def test_layout_is_that_of_the_smaller_module(name: str) -> None:
    model = network(name)
    part = unit_submodel(model.unit_groups(), drawn(model))
    built = part.build(model)
    assert part.layout(layout_of(model)) == layout_of(built)
    layout = layout_of(model)
    assert torch.equal(part.extract(model_vector(model, layout), layout), model_vector(built, layout_of(built)))


def test_optimiser_state_that_moves_with_the_model_is_cut_like_it() -> None:
    model = network("lenet5")
    size = layout_of(model).num_params
    layout = layout_of(model, [("optimizer.exp_avg", (size,)), ("optimizer.step", (1,))])
    part = unit_submodel(model.unit_groups(), drawn(model))
    vector = torch.cat([torch.arange(1.0, size + 1), torch.arange(1.0, size + 1), torch.tensor([7.0])])
    own, cut = part.extract(vector, layout), part.layout(layout)
    assert cut.num_riders == cut.num_params + 1
    assert torch.equal(own[: cut.num_params], own[cut.num_params : -1]) and own[-1] == 7.0
    covered = part.embed(own, layout)
    assert covered.cover is not None and torch.equal(covered.vector[covered.cover], vector[covered.cover])


def test_large_models_keep_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("lenet5")
    layout = layout_of(model)
    vector = model_vector(model, layout)
    part = unit_submodel(model.unit_groups(), drawn(model))
    expected = part.extract(vector, layout)
    monkeypatch.setattr(module, "_CACHE_VALUES", 0)
    again = unit_submodel(model.unit_groups(), drawn(model))
    assert torch.equal(again.extract(vector, layout), expected)
    assert "_index" in vars(part) and "_index" not in vars(again)


def test_pickled_part_is_equal_small_and_works_alike() -> None:
    model = network("feddhad_cnn")
    layout = layout_of(model)
    kept = drawn(model)
    part = unit_submodel(model.unit_groups(), kept, scales={name: [1.5] * len(kept[name]) for name in kept})
    vector = model_vector(model, layout)
    own = part.extract(vector, layout)
    data = pickle.dumps(part)
    copy = pickle.loads(data)
    assert len(data) < 8_000
    assert copy == part and copy.key() == part.key() and hash(copy) == hash(part)
    assert torch.equal(copy.extract(vector, layout), own)


def test_another_layout_is_not_mistaken_for_the_one_before() -> None:
    model = network("mlp")
    part = unit_submodel(model.unit_groups(), drawn(model))
    plain = layout_of(model)
    ridden = layout_of(model, [("optimizer.momentum_buffer", (plain.num_params,))])
    for layout in (plain, ridden, plain):
        own = part.extract(torch.zeros(layout.num_values), layout)
        assert len(own) == part.layout(layout).num_values


def test_keys_tell_units_and_factors_apart() -> None:
    groups = network("mlp").unit_groups()
    parts = [
        unit_submodel(groups, {"fc1": [0, 1]}),
        unit_submodel(groups, {"fc1": [0, 2]}),
        unit_submodel(groups, {"fc2": [0, 1]}),
        unit_submodel(groups, {"fc1": [0, 1]}, scales={"fc1": [2.0, 2.0]}),
        unit_submodel(groups, {"fc1": [0, 1]}, scales={"fc1": [2.0, 3.0]}),
    ]
    assert len({part.key() for part in parts}) == len(set(parts)) == 5


def test_nothing_left_out_is_the_full_model() -> None:
    groups = network("mlp").unit_groups()
    everything = {group.name: list(range(group.size)) for group in groups}
    assert unit_submodel(groups, everything, scales={"fc1": [1.0] * 128}) is FULL_MODEL
    scaled = unit_submodel(groups, everything, scales={"fc1": [2.0] * 128})
    assert isinstance(scaled, UnitSubModel) and scaled.kept == () and scaled.scales == (("fc1", (2.0,)),)


@pytest.mark.parametrize(
    ("kept", "scales"),
    [
        ({"fc9": [0]}, {}),
        ({"fc1": []}, {}),
        ({"fc1": [1, 0]}, {}),
        ({"fc1": [1, 1]}, {}),
        ({"fc1": [-1, 2]}, {}),
        ({"fc1": [0, 128]}, {}),
        ({"fc1": [0, 1]}, {"fc1": [1.0]}),
        ({}, {"fc9": [1.0]}),
    ],
)
def test_wrong_units_and_factors_are_errors(
    kept: Mapping[str, Sequence[int]], scales: Mapping[str, Sequence[float]]
) -> None:
    with pytest.raises(InvariantError, match="unit"):
        unit_submodel(network("mlp").unit_groups(), kept, scales=scales)


def test_masks_cost_a_bit_per_unit_ordered_widths_nothing_and_factors_four_bytes() -> None:
    """R8: 120 units are 15 bytes; equal factors travel once, uneven ones one by one."""
    groups = network("lenet5").unit_groups()
    assert half_width(network("lenet5")).index_bytes() == 0
    assert unit_submodel(groups, {"fc1": [1, 2]}).index_bytes() == 15
    assert unit_submodel(groups, {"fc1": [1, 2]}, scales={"fc1": [2.0, 2.0]}).index_bytes() == 15 + 4
    assert unit_submodel(groups, {"fc1": [1, 2]}, scales={"fc1": [2.0, 3.0]}).index_bytes() == 15 + 8


@pytest.mark.parametrize("name", ["lenet5", "feddhad_cnn", "vgg11"])
def test_half_widths_have_the_printed_sizes(name: str) -> None:
    printed = {"lenet5": (251_340, 15_888), "feddhad_cnn": (1_331_712, 31_082), "vgg11": (38_767_104, 2_440_394)}
    model = network(name)
    part = half_width(model)
    macs = fwd_macs_per_sample(part.build(model), SHAPES[name])
    assert (macs, part.layout(layout_of(model)).num_params) == printed[name]


def test_lenet_parts_have_the_closed_forms_of_parameters_and_macs() -> None:
    """R8: 76 k1 + (25 k1 + 1) k2 + (25 k2 + 1) k3 + (k3 + 1) k4 + 10 k4 + 10 and its MACs."""
    model = network("lenet5")
    for k1, k2, k3, k4 in [(6, 16, 120, 84), (1, 1, 1, 1), (4, 9, 71, 13)]:
        sizes = {"conv1": k1, "conv2": k2, "fc1": k3, "fc2": k4}
        part = unit_submodel(model.unit_groups(), {name: range(size) for name, size in sizes.items()})
        params = 76 * k1 + (25 * k1 + 1) * k2 + (25 * k2 + 1) * k3 + (k3 + 1) * k4 + 10 * k4 + 10
        macs = 58_800 * k1 + 2_500 * k1 * k2 + 25 * k2 * k3 + k3 * k4 + 10 * k4
        assert part.layout(layout_of(model)).num_params == params
        assert fwd_macs_per_sample(part.build(model), (3, 32, 32)) == macs


def over_kept_channels(kept: list[int]) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    """A forward hook: what a norm over all channels gives where its statistics are over some, zeros elsewhere."""

    def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        assert isinstance(module, nn.GroupNorm) and module.num_groups == 1
        part = nn.functional.group_norm(inputs[0][:, kept], 1, module.weight[kept], module.bias[kept], module.eps)
        return torch.zeros_like(output).index_copy(1, torch.tensor(kept), part)

    return hook


@pytest.mark.parametrize("name", list(SHAPES))
def test_part_computes_what_the_masked_full_model_computes(name: str) -> None:
    """R4: removed units' outputs 0, kept ones scaled, in float64; batch norm in evaluation mode.

    Norms over all channels: the masked model's, too, take their statistics over the kept ones.
    """
    options: dict[str, object] = {"dropout": 0.0} if name == "fedstg_cnn" else {}
    model = build_model(name, input_shape=SHAPES[name], num_classes=5, stream=Stream((0, "m")), **options).double()
    kept = drawn(model)
    factors = {key: [1.0 + 0.01 * unit for unit in units] for key, units in kept.items()}
    small = unit_submodel(model.unit_groups(), kept, scales=factors).build(model)
    masks = {}
    for group in model.unit_groups():
        if group.name in kept:
            masks[group.name] = torch.zeros(group.size, dtype=torch.float64)
            masks[group.name][kept[group.name]] = torch.tensor(factors[group.name], dtype=torch.float64)
            for path in {key.rpartition(".")[0] for key, _ in group.produced} if name in LAYER_NORMALISED else ():
                if isinstance(norm := model.get_submodule(path), nn.GroupNorm):
                    norm.register_forward_hook(over_kept_channels(kept[group.name]))
    attach_unit_scales(model, masks)
    for net in (model, small):
        net.train()
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
    inputs = torch.randn(3, *SHAPES[name], generator=Stream((0, "x")).torch(), dtype=torch.float64)
    torch.testing.assert_close(small(inputs), model(inputs), rtol=1e-12, atol=1e-12)


def layout_and_parts() -> tuple[FlatLayout, Tensor, list[SubModel]]:
    model = network("mlp")
    layout = layout_of(model)
    groups = model.unit_groups()
    halves = [unit_submodel(groups, {g.name: range(k * 64, k * 64 + 64) for g in groups}) for k in range(2)]
    return layout, model_vector(model, layout), halves


def test_parts_that_share_no_unit_are_joined_whatever_their_weights() -> None:
    """R5: each value is its only holder's; weights from one set's units to the other's are held by nobody."""
    layout, server, halves = layout_and_parts()
    rows = [h.embed(torch.full((h.layout(layout).num_values,), float(k)), layout) for k, h in enumerate(halves, 1)]
    mean = coverage_mean(server, [r.vector for r in rows], [r.cover for r in rows], [0.9, 0.1])
    found, before = layout.views(mean), layout.views(server)
    assert bool((found["fc2.weight"][:64, :64] == 1).all()) and bool((found["fc2.weight"][64:, 64:] == 2).all())
    assert torch.equal(found["fc2.weight"][:64, 64:], before["fc2.weight"][:64, 64:])
    assert torch.equal(found["fc2.weight"][64:, :64], before["fc2.weight"][64:, :64])
    torch.testing.assert_close(found["classifier.bias"], torch.full((10,), 1.1), rtol=0, atol=1e-6)


def test_parts_without_a_step_leave_the_model_as_it_is() -> None:
    """R2, R7: extracting, embedding and averaging gives the server's model, in any order of clients."""
    model = network("lenet5")
    layout = layout_of(model)
    server = model_vector(model, layout)
    parts = [unit_submodel(model.unit_groups(), drawn(model, seed=k)) for k in range(4)]
    rows = [part.embed(part.extract(server, layout), layout) for part in parts]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        mean = coverage_mean(
            server, [rows[k].vector for k in order], [rows[k].cover for k in order], [0.1 * (k + 1) for k in order]
        )
        torch.testing.assert_close(mean, server, rtol=1e-6, atol=0)
        held = torch.stack([row.cover for row in rows if row.cover is not None]).any(dim=0)
        assert torch.equal(mean[~held], server[~held]) and bool((~held).any())
