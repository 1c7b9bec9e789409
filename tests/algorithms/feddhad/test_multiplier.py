"""FedAD's multiplier: on activations, or in the weights that travel and divided out when they come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import net
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.dropout_rates import rates_of_round
from fedsweep.algorithms.feddhad.fedad import AdaptiveDropout, fedad
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.client.lanes.grouping import why_alone
from fedsweep.client.messages import ClientSide
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import OptimizerSteps, TaskLoss
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import server_context
from fedsweep.method import merge
from fedsweep.models.networks.chains import LeNet5
from fedsweep.models.unit_submodel import MultiplierIn, UnitSubModel, unit_submodel
from fedsweep.streams import stream
from fedsweep.submodel import SubModel
from fedsweep.testing import (
    build_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_experiment,
    tiny_pictures,
    with_parts,
)
from fedsweep.trees import layout_of, load_vector, model_vector

torch.set_num_threads(1)

VIT = "units 'blocks.0.heads' of VitTiny go through SelfAttention"
FORMS = ("activation", "incoming", "split", "none")
KEPT = {"fc1": (0, 2, 3, 7), "fc2": (1, 4, 5)}
FACTORS = {"fc1": (1.0, 1.5, 2.0, 1.25), "fc2": (3.0, 1.0, 1.1)}


def part_of(form: MultiplierIn) -> SubModel:
    return unit_submodel(net().unit_groups(), KEPT, scales=FACTORS, scales_in=form)


def multiplied(form: MultiplierIn) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network with the kept units alone and without hooks, and by what its params are to be multiplied."""
    root = 1.0 if form == "incoming" else 0.5
    first, second = (torch.tensor(FACTORS[name], dtype=torch.float64) ** root for name in ("fc1", "fc2"))
    read_first, read_second = (first, second) if form == "split" else (torch.ones(4), torch.ones(3))
    factors = {
        "fc1.weight": first[:, None].expand(4, 6),
        "fc1.bias": first,
        "fc2.weight": second[:, None] * read_first[None, :],
        "fc2.bias": second,
        "classifier.weight": read_second[None, :].expand(4, 3),
        "classifier.bias": torch.ones(4),
    }
    return unit_submodel(net().unit_groups(), KEPT).build(net().double()), factors


def device_that_multiplies(engine: Any, start: Tensor, *, client: int, form: MultiplierIn, optimizer: Any) -> Tensor:
    """What a device sends back that is given the multiplied weights, takes three steps and divides what it has."""
    module, factors = multiplied(form)
    part = unit_submodel(net().unit_groups(), KEPT)
    load_vector(module, part.layout(engine.layout), part.extract(start, engine.layout))
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.mul_(factors[name])
    torch_optimizer = torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
    )
    order, indices = stream(0, "batches", 1, client).numpy().permutation(12), engine.experiment.world.indices[client]
    for step in range(3):
        rows = indices[order[step * 4 : step * 4 + 4]]
        inputs, targets = (
            torch.from_numpy(x[rows])
            for x in (engine.experiment.world.data.images, engine.experiment.world.data.labels)
        )
        torch_optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), optimizer.clip_norm)
        torch_optimizer.step()
    return torch.cat([(value.detach() / factors[name]).reshape(-1) for name, value in module.named_parameters()])


@pytest.mark.parametrize("form", ["incoming", "split"])
@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSettings(),
        OptimizerSettings(momentum=0.9, weight_decay=0.1),
        OptimizerSettings(momentum=0.9, clip_norm=0.05),
    ],
    ids=["plain", "momentum and decay", "clipped"],
)
def test_device_sends_what_one_would_that_multiplies_trains_and_divides(
    form: MultiplierIn, optimizer: OptimizerSettings
) -> None:
    made = tiny_experiment(
        with_parts(part_of(form)), build=net, double=True, sizes=[12] * 6, rounds=1, optimizer=optimizer
    )
    engine = local_engine(made)
    start = engine.start()
    found = play_round(engine, start).updates[0]
    expected = device_that_multiplies(engine, start.vector, client=found.client, form=form, optimizer=optimizer)
    assert found.vector is not None
    torch.testing.assert_close(found.vector, expected, rtol=1e-10, atol=1e-12)
    plain = tiny_experiment(
        with_parts(part_of("activation")), build=net, double=True, sizes=[12] * 6, rounds=1, optimizer=optimizer
    )
    other = play_round(local_engine(plain)).updates[0].vector
    assert other is not None and float((other - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("rebuild", [False, True])
def test_scaffolds_variates_are_gradients_in_each_form(rebuild: bool) -> None:
    """One step on all samples: c_k is the gradient there, wherever the multiplier acts; the moves differ."""
    controls, models = [], []
    for form in ("activation", "incoming", "split"):
        method = merge(scaffold(rebuild=rebuild), with_parts(part_of(form)))
        made = tiny_experiment(method, build=net, double=True, sizes=[12] * 6, rounds=1, batch_size=12)
        state = run_rounds(local_engine(made))
        controls.append(state.components["refinement0"]["control"])
        models.append(state.vector)
    assert float(controls[0].norm()) > 0.01
    for control, model in zip(controls[1:], models[1:], strict=True):
        torch.testing.assert_close(control, controls[0], rtol=1e-9, atol=1e-12)
        assert float((model - models[0]).abs().max()) > 1e-4


def test_forms_give_the_same_logits_before_the_first_step() -> None:
    model = LeNet5(input_shape=(3, 32, 32), num_classes=10)
    layout, images = layout_of(model), torch.from_numpy(tiny_pictures(4)[0])
    kept = {"conv1": (0, 3), "conv2": tuple(range(1, 9)), "fc1": tuple(range(0, 120, 3)), "fc2": tuple(range(50))}
    scales = {name: [1 + number / len(units) for number in range(len(units))] for name, units in kept.items()}
    logits = []
    for form in ("activation", "incoming", "split"):
        part = unit_submodel(model.unit_groups(), kept, scales=scales, scales_in=form)
        scale = part.step_scale(layout)
        values = part.extract(model_vector(model, layout), layout)
        if scale is None:
            module = part.build(model).train()
        else:
            module, values = unit_submodel(model.unit_groups(), kept).build(model), values / scale
        load_vector(module, part.layout(layout), values)
        logits.append(module(images))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_device_without_a_step_returns_the_servers_values(form: Any) -> None:
    """At a rate of 0 from the first round with sub-models on, whatever was multiplied: all comes back as it was."""
    method = fedad(base_rate=0.4, refresh=(1,), multiplier=form)
    engine = local_engine(tiny_experiment(method, build=net, rounds=3, learning_rate=0.0))
    start = engine.start()
    state = run_rounds(engine, start)
    assert state.records[-1].extra["dropout_device_rate"] > 0.39
    torch.testing.assert_close(state.vector, start.vector, rtol=1e-6, atol=1e-8)


def test_bytes_and_operations_are_equal() -> None:
    """The factors travel in all forms but ``none``, which has none."""
    costs = {}
    for form in FORMS:
        method = fedad(base_rate=0.4, refresh=(1,), multiplier=form)  # type: ignore[arg-type]
        records = run_rounds(local_engine(tiny_experiment(method, build=net, rounds=3))).records
        costs[form] = [(r.bytes_up, r.bytes_down, r.fwd_macs_per_sample, r.flops) for r in records]
    assert costs["activation"] == costs["incoming"] == costs["split"]
    without_bytes_down = [[(up, *rest) for up, _, *rest in costs[form]] for form in ("activation", "none")]
    assert without_bytes_down[0] == without_bytes_down[1]
    assert costs["none"][-1][1] < costs["activation"][-1][1]


@pytest.mark.parametrize("form", ["incoming", "split"])
def test_rate_of_zero_is_fedavg_bit_for_bit(form: Any) -> None:
    found, expected = (
        run_rounds(local_engine(tiny_experiment(method, build=net)))
        for method in (fedad(base_rate=0.0, refresh=(1,), multiplier=form), fedavg())
    )
    assert torch.equal(found.vector, expected.vector)


@pytest.mark.parametrize("keep", ["persist", "average"])
def test_momentum_that_outlives_a_round_is_of_moves_in_the_servers_scale(keep: str) -> None:
    """After the first step it is that step over the rate, whatever scale the device took it in."""
    options: dict[str, Any] = {"optimizer": OptimizerSettings(momentum=0.9, keep=keep), "double": True}
    made = tiny_experiment(
        with_parts(part_of("incoming")), build=net, num_clients=1, cohort_size=1, local_steps=1, rounds=1, **options
    )
    engine = local_engine(made)
    start, end = engine.start(), run_rounds(engine)
    params = slice(engine.layout.num_params)
    if keep == "average":
        buffer = engine.layout.views(end.vector)["optimizer.momentum_buffer"]
    else:
        buffer = torch.from_numpy(end.memories[0]["optimizer"]["momentum_buffer"])
    assert float(buffer.norm()) > 0
    torch.testing.assert_close(end.vector[params] - start.vector[params], -0.1 * buffer, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "between"), [("cnn", "units 'conv1' of Cnn go through a norm"), ("vit_tiny", "go through")]
)
def test_network_that_does_not_let_factors_pass_is_refused(model: str, between: str) -> None:
    images, labels = tiny_pictures(4)

    def experiment(form: Any) -> Any:
        return tiny_experiment(
            fedad(base_rate=0.3, multiplier=form),
            build=lambda: build_model(model, input_shape=(3, 32, 32), num_classes=10, stream=stream(0, "m")),
            images=images,
            labels=labels,
            num_clients=2,
            cohort_size=1,
        )

    for form in ("incoming", "split"):
        with pytest.raises(ConfigError, match=rf"method.multiplier={form} .*{between}.*multiplier=activation"):
            check_experiment(experiment(form))
    for form in ("activation", "none", "auto"):
        check_experiment(experiment(form))
    assert fedad(base_rate=0.3, refresh=(1,)).submodels.notes(server_context(experiment("auto"), "submodels")) == (
        f"{between if model == 'cnn' else VIT}, so the multiplier acts on activations (method.multiplier=activation)",
    )


def test_auto_is_incoming_where_that_can_be_had() -> None:
    found = {
        form: run_rounds(local_engine(tiny_experiment(fedad(base_rate=0.4, refresh=(1,), **given), build=net))).vector
        for form, given in [*((form, {"multiplier": form}) for form in FORMS), ("auto", {})]
    }
    assert torch.equal(found["auto"], found["incoming"])
    assert len({tuple(vector.tolist()) for vector in found.values()}) == 4
    context = server_context(tiny_experiment(fedad(), build=net), "submodels")
    assert fedad(base_rate=0.3, refresh=(1,)).submodels.notes(context) == ()


def test_adam_is_refused() -> None:
    adam = {"build": net, "optimizer": OptimizerSettings(name="adam")}
    with pytest.raises(ConfigError, match="scales the steps of some weights"):
        check_experiment(tiny_experiment(fedad(base_rate=0.3, multiplier="incoming"), **adam))
    check_experiment(tiny_experiment(fedad(base_rate=0.3), **adam))


def test_scaled_steps_are_taken_one_client_after_another() -> None:
    side = ClientSide(
        seed=0, objective=TaskLoss(), terms=(), solver=OptimizerSteps(), optimizer=OptimizerSettings(), indices=()
    )
    assert "scales its steps" in str(why_alone(side, part_of("incoming"), net(), is_padded=False))
    assert why_alone(side, part_of("activation"), net(), is_padded=False) is None


def test_forms_have_keys_of_their_own() -> None:
    assert len({part_of(form).key() for form in ("activation", "incoming", "split")}) == 3
    assert isinstance(part_of("split"), UnitSubModel) and part_of("split").scales_steps
    assert not AdaptiveDropout(base_rate=0.0, multiplier="split").scales_steps


def test_rates_of_a_round_by_hand() -> None:
    found = rates_of_round([0.0, 0.0, 0.0, 0.5, 0.5], [1, 1, 1, 1, 6])
    assert found == pytest.approx(
        {
            "dropout_device_rate": 0.2,
            "dropout_rate_p10": 0.0,
            "dropout_rate_median": 0.0,
            "dropout_rate_p90": 0.5,
            "dropout_rate_zero_share": 0.6,
            "dropout_rate_by_samples": 0.35,
        }
    )
    assert rates_of_round([], [])["dropout_rate_zero_share"] == 1.0
