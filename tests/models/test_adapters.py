"""Frozen bases: what is not trained keeps its bits, is there once, travels nowhere; LoRA is LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ray_pool import Pool, play
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.api import load_model, run
from fedsweep.catalog import build_method
from fedsweep.client.messages import LaneSettings
from fedsweep.client.optimizer import OptimizerGroup, OptimizerSettings
from fedsweep.client.shards import batch_order
from fedsweep.components.local import eval_copy
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.engine.cost import CostModel
from fedsweep.engine.engine import Engine
from fedsweep.errors import ConfigError, InputError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.models.adapters import Adapter, Lora, LoraLinear, Part
from fedsweep.models.cost import counted
from fedsweep.models.network import ModelShape, Network
from fedsweep.models.networks.chains import FedstgCnn, Mlp
from fedsweep.models.networks.vit import VitTiny
from fedsweep.models.registry import adapt
from fedsweep.models.user_network import adopt
from fedsweep.records import ClientWork
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import local_engine, run_rounds, tiny_experiment, tiny_pictures
from fedsweep.trees import (
    constants,
    constants_sha256,
    layout_of,
    load_vector,
    model_vector,
    moving_buffers,
    trained_params,
)

torch.set_num_threads(1)
TINY: dict[str, Any] = {
    "scenario": {"clients": 4},
    "training": {"rounds": 2, "cohort_size": 2, "local_steps": 2, "batch_size": 8},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}


def adapted(network: Network, adapter: Adapter) -> Network:
    adapt(network, adapter, stream(3, "adapter"))
    return network


def small(adapter: Adapter | None = None) -> Network:
    network = Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)
    return adapted(network, adapter or Lora(rank=2))


def test_adapter_that_no_memory_holds_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"the model with its adapter \(.*rank=9223372036854775808.*too large"):
        small(Lora(rank=2**63))


@pytest.mark.parametrize(
    ("adapter", "macs", "spared"),
    [
        # 6 -> 8 -> 8 -> 4. The first two layers go forwards alone; of 144 products 112 are theirs.
        (Part(train=("classifier",)), 144, 2 * 112),
        # Rank 2: 28 + 32 + 24 more; nothing before the first layer is trained, so its inputs have no gradient either.
        (Lora(rank=2), 228, 2 * 48 + 64 + 32),
    ],
)
def test_a_step_spares_the_gradients_of_frozen_layers_as_torch_counts_them(
    adapter: Adapter, macs: int, spared: int
) -> None:
    network = small(adapter)
    found = counted(network, (1, 1, 6))
    assert (sum(count for count, _ in found.layers.values()), found.spared) == (macs, spared)
    with FlopCounterMode(display=False) as torchs:
        network(torch.ones(1, 1, 1, 6)).sum().backward()
    # A trained layer counts three passes everywhere; torch leaves out the gradient of inputs that nobody trains.
    first = 8 * 4 if isinstance(adapter, Part) else 6 * 2
    assert torchs.get_total_flops() == 2 * (3 * macs - spared - first)
    plain = counted(Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8), (1, 1, 6))
    assert plain.spared == 0
    costs = CostModel(tiny_experiment(fedavg(), build=lambda: small(adapter)))
    assert costs.flops(FULL_MODEL, 10) == 2 * 10 * (3 * macs - spared)


def test_a_new_lora_is_its_base_and_begins_as_the_paper_says() -> None:
    plain = VitTiny(input_shape=(3, 32, 32), num_classes=5)
    inputs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    before = plain.eval()(inputs)
    names = [name for name, _ in plain.named_parameters()]
    network = adapted(plain, Lora(rank=4, targets=("query", "value")))
    assert torch.equal(network(inputs), before)
    assert set(trained_params(network)) == {
        f"{path}.{part}.weight"
        for path, layer in network.named_modules()
        if isinstance(layer, LoraLinear)
        for part in ("down", "up")
    }
    assert all(path.endswith((".query", ".value")) for path, x in network.named_modules() if isinstance(x, LoraLinear))
    assert sorted(constants(network)) == sorted(names)


def plain_lora(experiment: Experiment, steps: int, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """LoRA as one writes it down: y = W x + b + U D x, plain SGD on U and D."""
    model = experiment.build_model()
    fixed = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    own = {name: p.detach().clone().requires_grad_() for name, p in trained_params(model).items()}
    layers = [name.removesuffix(".down.weight") for name in own if name.endswith("down.weight")]
    for inputs, targets in batches[:steps]:
        x = inputs.flatten(1)
        for layer in layers:
            y = x @ fixed[f"{layer}.weight"].T + fixed[f"{layer}.bias"]
            y = y + x @ own[f"{layer}.down.weight"].T @ own[f"{layer}.up.weight"].T
            x = y.relu() if layer != layers[-1] else y
        gradients = torch.autograd.grad(F.cross_entropy(x, targets), list(own.values()))
        own = {
            name: (value - 0.1 * gradient).detach().requires_grad_()
            for (name, value), gradient in zip(own.items(), gradients, strict=True)
        }
    return own


def test_one_clients_lora_is_plain_lora() -> None:
    experiment = tiny_experiment(fedavg(), num_clients=1, cohort_size=1, rounds=1, local_steps=7, build=small)
    data, indices = experiment.world.data, experiment.world.indices[0]
    work = ClientWork(steps=7, batch_size=4, whole_batches=True, num_samples=len(indices))
    order = batch_order(work, stream(0, "batches", 1, 0))
    batches = [
        (torch.from_numpy(data.images[indices[own]]), torch.from_numpy(data.labels[indices[own]])) for own in order
    ]
    expected = plain_lora(experiment, 7, batches)
    engine = local_engine(replace(experiment, training=replace(experiment.training, equal_steps=True)))
    final = engine.layout.views(run_rounds(engine).vector)
    assert set(final) == set(expected)
    for name, value in final.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(),
        OptimizerSettings(momentum=0.9, weight_decay=0.1),
        OptimizerSettings(name="adam", weight_decay=0.1),
        OptimizerSettings(clip_norm=0.1),
        OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.1, keep="persist"),
        OptimizerSettings(name="adam", weight_decay=0.1, keep="average"),
        OptimizerSettings(weight_decay=0.1, groups=(OptimizerGroup(match="up", rate=10.0, weight_decay=0.5),)),
    ],
    ids=["sgd", "momentum and decay", "adam and decay", "clipped", "kept", "averaged", "groups"],
)
@pytest.mark.parametrize("lanes", [None, LaneSettings(width=3)], ids=["loop", "lanes"])
def test_frozen_values_keep_their_bits(settings: OptimizerSettings, lanes: LaneSettings | None) -> None:
    experiment = replace(tiny_experiment(fedavg(), build=small, optimizer=settings), lanes=lanes)
    fleet = LocalFleet(experiment)
    module = fleet._worker._full_slot.module
    before = {name: value.detach().clone() for name, value in constants(module).items()}
    engine = local_engine(experiment)
    engine = type(engine)(experiment, fleet)
    state = run_rounds(engine)
    assert not torch.equal(state.vector, experiment.initial_vector)
    assert all(torch.equal(value, before[name]) for name, value in constants(module).items())


def test_lanes_are_the_loop() -> None:
    experiment = tiny_experiment(fedavg(), build=small, double=True)
    alone = run_rounds(local_engine(experiment)).vector
    together = run_rounds(local_engine(replace(experiment, lanes=LaneSettings(width=3)))).vector
    torch.testing.assert_close(alone, together, atol=1e-12, rtol=0)


@pytest.mark.ray
def test_actors_give_the_bits_of_one_process(pool: Pool, tmp_path: Path) -> None:
    run({**TINY, "model": {"name": "mlp"}}, out=tmp_path / "base")
    adapter = {"kind": "lora", "rank": 2, "base": str(tmp_path / "base")}
    experiment = plan_run(load_config({**TINY, "model": {"name": "mlp", "adapter": adapter}})).experiment
    found, _ = play(pool, experiment, 2)
    assert torch.equal(found.vector, run_rounds(local_engine(experiment)).vector)


def test_bytes_are_the_adapters_and_the_base_is_there_once() -> None:
    experiment = tiny_experiment(fedavg(), build=small)
    values = 2 * (6 + 8) + 2 * (8 + 8) + 2 * (8 + 4)
    assert experiment.layout.num_values == len(experiment.initial_vector) == values
    record = run_rounds(local_engine(experiment)).records[-1]
    assert record.bytes_up == record.bytes_down == 3 * 4 * values
    places = {name: value.data_ptr() for name, value in constants(experiment.template).items()}
    for other in (experiment.new_model(), experiment.shown_model, eval_copy(experiment.template)):
        assert {name: value.data_ptr() for name, value in constants(other).items()} == places
        own = {value.data_ptr() for value in trained_params(other).values()}
        assert not own & {value.data_ptr() for value in trained_params(experiment.template).values()}


class LowPrecision(nn.Module):
    """A base of another type, with tied weights, a table and a frozen batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, bias=False).bfloat16().requires_grad_(False)
        self.again = self.base
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
        self.second = self.first
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        x = self.again(self.base(x.to(torch.bfloat16))).to(x.dtype)
        out: Tensor = self.last(self.second(self.first(self.norm(x) + self.table)))
        return out


def test_a_base_may_be_of_any_type_and_weights_may_be_tied() -> None:
    model = LowPrecision()
    assert layout_of(model).names == ("first.weight", "last.weight", "last.bias")
    assert sorted(constants(model)) == [
        "base.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.weight",
        "table",
    ]
    experiment = tiny_experiment(fedavg(), build=LowPrecision)
    state = run_rounds(local_engine(experiment))
    assert len(state.vector) == 36 + 24 + 4 and not torch.equal(state.vector, experiment.initial_vector)
    moved = experiment.new_model()
    load_vector(moved, experiment.layout, state.vector)
    assert moved.get_parameter("second.weight") is moved.get_parameter("first.weight")


TYPES = """
import torch
from torch import nn


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8).double(), nn.Linear(8, 10)

    def forward(self, inputs):
        return self.last(self.first(inputs.flatten(1).double()).float())


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 10, dtype=torch.cfloat))

    def forward(self, inputs):
        return (inputs.flatten(1) @ self.weight.real)


def double(*, input_shape, num_classes):
    return Double()


def complex_one(*, input_shape, num_classes):
    return Complex()
"""


def test_what_is_trained_is_of_one_floating_type_whatever_its_base_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_types.py").write_text(TYPES)
    monkeypatch.syspath_prepend(tmp_path)
    for name, shown in (("double", "last.bias' of float32"), ("complex_one", "'module.weight' of complex64")):
        with pytest.raises(ConfigError, match=f"own_types:{name}' must train parameters of one floating .*{shown}"):
            run({**TINY, "model": {"name": f"own_types:{name}"}}, out=tmp_path / "run")
    part = {"kind": "part", "train": ["last"]}
    run({**TINY, "model": {"name": "own_types:double", "adapter": part}}, out=tmp_path / "run")


def test_statistics_of_a_frozen_layer_stay() -> None:
    network = adapted(FedstgCnn(input_shape=(3, 8, 8), num_classes=4), Part(train=("classifier",)))
    assert not moving_buffers(network)
    before = constants_sha256(network)
    network.train()(torch.randn(4, 3, 8, 8))
    assert network.training and constants_sha256(network) == before
    whole = FedstgCnn(input_shape=(3, 8, 8), num_classes=4)
    assert len(moving_buffers(whole)) == 6 and constants_sha256(whole) is None


def linear_probe() -> Network:
    return adapted(FedstgCnn(input_shape=(3, 8, 8), num_classes=10, dropout=0.0), Part(train=("classifier",)))


def with_frozen_norm() -> Network:
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    module = nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(108, 10))
    return adopt(module, name="own", shape=ModelShape(input_shape=(3, 8, 8), num_classes=10))


@pytest.mark.parametrize("build", [linear_probe, with_frozen_norm])
@pytest.mark.parametrize("lanes", [None, LaneSettings(width=2)], ids=["loop", "lanes"])
def test_a_client_steps_through_a_frozen_batch_norm_as_torch_does_in_evaluation_mode(
    build: Callable[[], Network], lanes: LaneSettings | None
) -> None:
    images, labels = tiny_pictures(8, size=8)
    settings: dict[str, Any] = {"images": images.astype(np.float64), "labels": labels, "sizes": (8,), "local_steps": 3}
    one = tiny_experiment(fedavg(), build=build, double=True, num_clients=1, cohort_size=1, rounds=1, **settings)
    model = one.build_model()
    before = constants_sha256(model)
    order = batch_order(
        ClientWork(steps=3, batch_size=4, num_samples=8, whole_batches=True), stream(0, "batches", 1, 0)
    )
    for batch in order:
        model.train()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        loss = F.cross_entropy(model(torch.from_numpy(images[batch]).double()), torch.from_numpy(labels[batch]))
        own = list(trained_params(model).values())
        with torch.no_grad():
            for value, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                value -= 0.1 * gradient
    experiment = replace(one, lanes=lanes)
    fleet = LocalFleet(experiment)
    engine = Engine(experiment, fleet)
    vector = run_rounds(engine).vector
    torch.testing.assert_close(vector, model_vector(model, engine.layout), atol=1e-12, rtol=0)
    assert constants_sha256(fleet._worker._full_slot.module) == before and engine.notes == []


def test_torchs_own_encoder_takes_its_adapters_into_account_when_it_is_tested() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

        def forward(self, inputs: Tensor) -> Tensor:
            answer: Tensor = self.layer(inputs)
            return answer

    model = Encoder().eval()
    inputs = torch.randn(2, 3, 8)
    model.requires_grad_(False)
    Lora(rank=2, targets=("linear1",)).add_to(model)  # type: ignore[arg-type]
    for value in trained_params(model).values():
        nn.init.constant_(value, 0.5)
    with torch.inference_mode():
        quick = model(inputs)
    torch.testing.assert_close(quick, model(inputs).detach())


@pytest.mark.parametrize(
    "adapter, message",
    [
        ({"kind": "lora", "targets": ["clasifier"]}, "did you mean 'classifier'"),
        ({"kind": "lora", "rank": 0}, "model.adapter.rank must be an integer >= 1"),
        ({"kind": "lora", "targets": ["classifier"], "train": ["classifier"]}, "is in targets and in train"),
        ({"kind": "part"}, "nothing would be trained"),
        ({"kind": "lore"}, "did you mean 'lora'"),
        ({"kind": "lora", "base": "/nowhere"}, "model.adapter.base: /nowhere is neither a folder nor a file"),
    ],
)
def test_a_wrong_adapter_is_refused(adapter: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run({**TINY, "model": {"name": "mlp", "adapter": adapter}}, out=tmp_path / "run")


def test_what_lies_in_a_layer_that_is_trained_whole_gets_no_lora() -> None:
    """Its linear layers got one beside their own weights."""
    blocks = VitTiny(input_shape=(1, 8, 8), num_classes=4, depth=2, width=8, heads=2)
    trained = trained_params(adapted(blocks, Lora(rank=2, train=("blocks.0",))))
    assert "blocks.0.fc1.weight" in trained and "blocks.1.fc1.up.weight" in trained
    assert not [
        name for name in trained if name.startswith("blocks.0.") and name.endswith((".down.weight", ".up.weight"))
    ]
    with pytest.raises(ConfigError, match=r"'blocks\.0\.fc1' is in targets and in train"):
        adapted(VitTiny(input_shape=(1, 8, 8), num_classes=4), Lora(train=("blocks.0",), targets=("fc1",)))


def test_methods_that_leave_out_units_are_refused() -> None:
    method = build_method({"name": "heterofl"})
    with pytest.raises(InputError, match="lists no unit groups"):
        local_engine(tiny_experiment(method, build=small)).start()


def test_a_run_on_another_runs_model(tmp_path: Path) -> None:
    run({**TINY, "model": {"name": "mlp"}}, out=tmp_path / "base")
    adapter = {"kind": "lora", "rank": 2, "base": str(tmp_path / "base")}
    result = run({**TINY, "model": {"name": "mlp", "adapter": adapter}}, out=tmp_path / "lora")
    kept = result.config.tree()["model"]["adapter"]
    assert kept["base"] == str(tmp_path / "base" / "model.safetensors") and len(kept["base_sha256"]) == 64
    model, base = load_model(tmp_path / "lora"), load_model(tmp_path / "base")
    for name, value in base.named_parameters():
        assert torch.equal(model.get_parameter(name), value)
    rows, values = result.to_pandas(), sum(value.numel() for value in trained_params(model).values())
    assert (rows["bytes_up"] == 2 * 4 * values).all() and (rows["bytes_down"] == 2 * 4 * values).all()
    again = run({**TINY, "model": {"name": "mlp", "init_from": str(tmp_path / "lora"), "adapter": adapter}})
    assert np.isfinite(again.to_pandas()["test_loss"]).all()


def test_values_of_another_base_are_refused(tmp_path: Path) -> None:
    adapter = {"kind": "lora", "rank": 2}
    run({**TINY, "model": {"name": "mlp", "adapter": adapter}}, out=tmp_path / "lora")
    with pytest.raises(InputError, match="trained on a frozen base with the SHA-256"):
        run({**TINY, "seed": 1, "model": {"name": "mlp", "adapter": adapter, "init_from": str(tmp_path / "lora")}})
    config = tmp_path / "lora" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1", 1))
    with pytest.raises(InputError, match="trained on a frozen base with the SHA-256"):
        load_model(tmp_path / "lora")
