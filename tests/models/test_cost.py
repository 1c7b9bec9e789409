"""Costs: the figures printed by FedDHAD and the closed forms, through real sub-models."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.models.cost import counted, fwd_macs_per_sample, training_flops
from fedsweep.models.network import Network
from fedsweep.models.registry import MODELS
from fedsweep.models.slicing import build_submodel_module, ordered_kept
from fedsweep.streams import Stream
from fedsweep.testing import build_model

torch.set_num_threads(1)

RGB = (3, 32, 32)
STREAM = Stream((0, "cost"))


def outline(name: str, num_classes: int) -> Network:
    with torch.device("meta"):
        return MODELS[name].builder(input_shape=RGB, num_classes=num_classes)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "num_classes", "printed"),
    [
        ("lenet5", 10, 651_720),
        ("lenet5", 100, 659_280),
        ("feddhad_cnn", 10, 4_548_608),
        ("feddhad_cnn", 100, 4_554_368),
        ("vgg11", 10, 153_293_824),
        ("feddhad_resnet18", 200, 557_977_600),
    ],
)
def test_forward_cost_is_the_printed_one(name: str, num_classes: int, printed: int) -> None:
    assert fwd_macs_per_sample(outline(name, num_classes), RGB) == printed


def test_batch_norm_counts_four_per_output_only_when_asked() -> None:
    model = outline("feddhad_resnet18", 200)
    assert fwd_macs_per_sample(model, RGB, count_batch_norm=False) == 555_520_000
    assert fwd_macs_per_sample(model, RGB) == 555_520_000 + 4 * 614_400


@pytest.mark.parametrize(
    ("name", "num_classes", "width", "macs", "parameters"),
    [
        ("lenet5", 10, 0.25, 141_440, 4_257),
        ("lenet5", 10, 0.50, 251_340, 15_888),
        ("lenet5", 10, 0.75, 477_300, 35_355),
        ("feddhad_cnn", 10, 0.25, 430_208, 7_994),
        ("feddhad_cnn", 10, 0.50, 1_331_712, 31_082),
        ("feddhad_cnn", 10, 0.75, 2_704_512, 69_274),
        ("vgg11", 10, 0.25, 9_913_600, 611_434),
        ("vgg11", 10, 0.50, 38_767_104, 2_440_394),
        ("vgg11", 10, 0.75, 86_560_512, 5_486_890),
        ("feddhad_resnet18", 200, 0.25, 35_685_376, 727_176),
        ("feddhad_resnet18", 200, 0.50, 140_576_768, 2_848_840),
        ("feddhad_resnet18", 200, 0.75, 314_674_176, 6_365_192),
    ],
)
def test_ordered_width_has_the_tabulated_cost_and_size(
    name: str, num_classes: int, width: float, macs: int, parameters: int
) -> None:
    model = outline(name, num_classes)
    submodel = build_submodel_module(model, ordered_kept(model.unit_groups(), width))
    assert (fwd_macs_per_sample(submodel, RGB), num_parameters(submodel)) == (macs, parameters)


@pytest.mark.parametrize(
    ("name", "num_classes", "macs", "parameters"),
    [
        ("lenet5", 10, 619_740, 29_924),
        ("feddhad_cnn", 10, 4_515_520, 89_450),
        ("vgg11", 10, 152_963_584, 9_420_170),
        ("feddhad_resnet18", 200, 557_977_600, 11_276_232),
    ],
)
def test_half_of_the_hidden_neurons_alone_has_the_tabulated_cost_and_size(
    name: str, num_classes: int, macs: int, parameters: int
) -> None:
    model = outline(name, num_classes)
    neurons = [group for group in model.unit_groups() if group.kind == "linear"]
    submodel = build_submodel_module(model, ordered_kept(neurons, 0.5))
    assert (fwd_macs_per_sample(submodel, RGB), num_parameters(submodel)) == (macs, parameters)


@pytest.mark.parametrize("kept", [(6, 16, 120, 84), (1, 1, 1, 1), (3, 11, 50, 7)])
def test_lenet5_submodels_have_the_closed_forms(kept: tuple[int, int, int, int]) -> None:
    """Parameters 76 k1 + (25 k1 + 1) k2 + (25 k2 + 1) k3 + (k3 + 1) k4 + 10 k4 + 10 and the MACs alike."""
    k1, k2, k3, k4 = kept
    model = outline("lenet5", 10)
    units = {group.name: range(count) for group, count in zip(model.unit_groups(), kept, strict=True)}
    submodel = build_submodel_module(model, units)
    assert num_parameters(submodel) == (
        76 * k1 + (25 * k1 + 1) * k2 + (25 * k2 + 1) * k3 + (k3 + 1) * k4 + 10 * k4 + 10
    )
    assert fwd_macs_per_sample(submodel, RGB) == 58_800 * k1 + 2_500 * k1 * k2 + 25 * k2 * k3 + k3 * k4 + 10 * k4


def test_training_a_sample_costs_six_operations_per_mac_without_batch_norm() -> None:
    for model, macs in ((outline("lenet5", 10), 651_720), (outline("feddhad_resnet18", 200), 555_520_000)):
        assert training_flops(fwd_macs_per_sample(model, RGB, count_batch_norm=False), 7) == 7 * 6 * macs


def test_counting_changes_neither_model_nor_generators() -> None:
    model = build_model("fedstg_cnn", input_shape=(1, 8, 8), num_classes=2, stream=STREAM).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    fwd_macs_per_sample(model, (1, 8, 8))
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_network_that_looks_at_values_is_counted_on_the_cpu() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, inputs: Tensor) -> Tensor:
            flat: Tensor = self.layer(inputs.flatten(1))
            return flat if bool(flat.sum() > 1e9) else self.norm(flat)

    assert fwd_macs_per_sample(Branching(), (1, 2, 2)) == 4 * 3 + 4 * 3
    assert fwd_macs_per_sample(Branching(), (1, 2, 2), count_batch_norm=False) == 4 * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_network_that_casts_its_inputs_to_its_own_type_is_counted(dtype: torch.dtype) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 3).to(dtype), nn.BatchNorm1d(3).to(dtype)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.norm(self.layer(inputs.flatten(1).to(dtype)))
            return logits

    assert fwd_macs_per_sample(Casting(), (1, 2, 2)) == 4 * 3 + 4 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_of_a_network_is_its_own(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fwd_macs_per_sample(nn.Linear(5, 3).to(dtype), (1, 2, 2))


class Recurrent(nn.Module):
    """Rows of an image as a sequence, through two recurrent layers both ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rows = getattr(nn, kind)(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(12, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.rows(inputs.flatten(1, 2))
        logits: Tensor = self.last(outputs[:, -1])
        return logits


class Written(nn.Module):
    """An embedding, and products that the network writes out itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 6)
        self.mix = nn.Parameter(torch.zeros(6, 7))
        self.last = nn.Parameter(torch.zeros(7, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        words = self.words(inputs.flatten(1).long())
        return torch.einsum("btw,wo->bto", words, self.mix).mean(1) @ self.last


class Attending(nn.Module):
    """Torch's own layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layer(inputs.flatten(1, 2)).mean(1))
        return logits


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layer_counts_its_weights_at_each_position(kind: str, gates: int) -> None:
    both_ways = 2 * gates * 6 * ((8 + 6) + (12 + 6))
    assert fwd_macs_per_sample(Recurrent(kind), (1, 4, 8)) == 4 * both_ways + 12 * 5


@pytest.mark.parametrize(
    ("model", "shape"), [(Recurrent("GRU"), (1, 4, 8)), (Recurrent("RNN"), (1, 4, 8)), (Written(), (1, 2, 3))]
)
def test_cost_is_what_torch_counts(model: nn.Module, shape: tuple[int, int, int]) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *shape))
    assert 2 * fwd_macs_per_sample(model, shape) == counter.get_total_flops() > 0
    assert counted(model, shape).unknown == ()


def test_torchs_layer_of_attention_is_counted_inside_and_stays_fast() -> None:
    tokens, width, hidden = 6, 8, 16
    projections, products = 4 * width * width, 2 * tokens * width
    macs = tokens * (projections + products + 2 * width * hidden) + width * 5
    assert fwd_macs_per_sample(Attending(), (1, tokens, width)) == macs
    assert torch.backends.mha.get_fastpath_enabled()


def test_vector_products_are_counted() -> None:
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.vector = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(5))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.matrix @ inputs.flatten()
            return (outputs + outputs @ self.vector)[None]

    assert fwd_macs_per_sample(Vectors(), (1, 2, 2)) == 5 * 4 + 5


def test_products_without_a_formula_are_named() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.last(torch.fft.fft2(inputs).real.flatten(1))
            return logits

    count = counted(Spectral(), (1, 4, 4))
    assert count.unknown == ("_fft_c2c",) or count.unknown == ("_fft_r2c",)
    assert count.layers == {"last.weight": (16 * 5, 0)}
