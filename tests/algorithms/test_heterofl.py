"""HeteroFL: widths, the inner block, the scaler, and the loss on a client's own classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import lenet_run, net
from torch import nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.heterofl import HeldClasses, Widths, heterofl
from fedsweep.engine.engine import Engine
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.models.networks.chains import Mlp
from fedsweep.models.unit_submodel import UnitSubModel
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import (
    build_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    tiny_pictures,
    with_devices,
)

torch.set_num_threads(1)


# Without the paper's masked loss and equal weights width 1 alone is FedAvg.
PLAIN: dict[str, Any] = {"masked_loss": False, "weighting": "size"}


def engine_of(method: FederatedMethod, **more: Any) -> Engine:
    return local_engine(tiny_experiment(method, **({"build": net} | more)))


def widths_of(engine: Engine, rounds: int = 1) -> list[dict[int, int]]:
    """Each round's clients with the units that they have of the first layer."""
    state, found = engine.start(), []
    for _ in range(rounds):
        plan = engine.planner.plan(state)
        parts = plan.context.submodels
        found.append({k: part.layout(engine.layout).shapes[0][0] for k, part in parts.items()})
        state = run_rounds(engine, state, rounds=1)
    return found


@pytest.mark.parametrize("more", [{}, {"scaler": False}, {"assignment": "drawn"}])
def test_the_full_width_alone_is_fedavg_bit_for_bit(more: dict[str, Any]) -> None:
    sizes = (6, 10, 14, 18, 22, 26)
    found, plain = (run_rounds(engine_of(m, sizes=sizes)) for m in (heterofl(widths=(1.0,), **PLAIN, **more), fedavg()))
    assert torch.equal(found.vector, plain.vector)
    assert [(r.bytes_up, r.bytes_down, r.flops) for r in found.records] == [
        (r.bytes_up, r.bytes_down, r.flops) for r in plain.records
    ]


def test_with_equal_sizes_counting_alike_is_by_samples() -> None:
    """Everybody has the same 16 samples of all four classes, so the papers' weights and mask change nothing either."""
    sizes = (16,) * 6
    paper = heterofl(widths=(1.0,), weighting="uniform", masked_loss=True)
    found, plain = (run_rounds(engine_of(m, sizes=sizes)).vector for m in (paper, fedavg()))
    assert torch.equal(found, plain)


def test_widths_are_dealt_evenly_and_stay() -> None:
    method = heterofl(widths=(1.0, 0.5, 0.25))
    first, second = widths_of(engine_of(method, cohort_size=6), rounds=2)
    assert sorted(first.values()) == [2, 2, 4, 4, 8, 8] and first == second
    assert widths_of(engine_of(method, cohort_size=6, seed=1))[0] != first


def test_drawn_widths_change_from_round_to_round() -> None:
    found = widths_of(engine_of(heterofl(widths=(1.0, 0.5, 0.25), assignment="drawn"), cohort_size=6), rounds=4)
    assert len({tuple(f.values()) for f in found}) > 1
    assert {width for f in found for width in f.values()} == {8, 4, 2}


def test_fast_devices_get_the_widest() -> None:
    made = tiny_experiment(heterofl(widths=(1.0, 0.5, 0.25), assignment="speed"), build=net, cohort_size=6)
    engine = local_engine(with_devices(made, [tiny_device(f) for f in (3e5, 1e5, 2e5)]))
    assert widths_of(engine)[0] == {0: 8, 1: 2, 2: 4, 3: 8, 4: 2, 5: 4}


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_inner_block_is_the_mean_of_all_and_the_rest_of_those_who_hold_it(weighting: str) -> None:
    """Widths 1 and 1/2 for two clients of 4 and 12 samples: inner block by 1/4, 3/4 or by halves, the rest by one."""
    method = heterofl(widths=(1.0, 0.5), weighting=weighting)  # type: ignore[arg-type]
    engine = engine_of(method, num_clients=2, cohort_size=2, sizes=(4, 12), double=True)
    start = engine.start()
    played = play_round(engine, start)
    wide, narrow = sorted(played.updates, key=lambda u: -u.layout.num_values)
    assert wide.vector is not None and narrow.vector is not None and wide.submodel == FULL_MODEL
    share = 0.5 if weighting == "uniform" else wide.num_samples / 16
    found = engine.layout.views(played.vector)["fc2.weight"]
    own, inner = wide.params["fc2.weight"], narrow.params["fc2.weight"]
    assert inner.shape == (4, 4)
    torch.testing.assert_close(found[:4, :4], share * own[:4, :4] + (1 - share) * inner, rtol=0, atol=1e-15)
    assert torch.equal(found[4:], own[4:]) and torch.equal(found[:, 4:], own[:, 4:])


def test_lenet_at_one_half_and_a_quarter_sends_the_closed_forms() -> None:
    """15,888 and 4,257 values; no masks, as the first units need none, but a factor of 4 bytes for each of 4 layers."""
    record = lenet_run(heterofl(widths=(0.5, 0.25), **PLAIN))
    assert record.values_up == 15_888 + 4_257
    assert record.bytes_down - record.bytes_up == 2 * 4 * 4
    assert record.fwd_macs_per_sample == (251_340 + 141_440) / 2
    assert record.extra["submodel_width"] == 0.375


def test_the_scaler_divides_what_a_layer_makes_by_the_width() -> None:
    """Behind ReLU as before it: relu(x W + b) / 0.5 = relu((x W + b) / 0.5), in training alone."""
    policy = heterofl(widths=(0.5,)).submodels
    assert isinstance(policy, Widths)
    full = Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)
    part = policy._part(full, 0.5)
    assert isinstance(part, UnitSubModel) and part.scales == (("fc1", (2.0,)), ("fc2", (2.0,)))
    small = part.build(full)
    assert isinstance(small, Mlp)
    inputs = torch.randn(3, 6, generator=stream(0, "x").torch())
    hidden = torch.relu(small.fc1(inputs) / 0.5)
    expected = small.classifier(torch.relu(small.fc2(hidden) / 0.5))
    torch.testing.assert_close(small.train()(inputs.view(3, 1, 1, 6)), expected)
    plain = small.classifier(torch.relu(small.fc2(torch.relu(small.fc1(inputs)))))
    torch.testing.assert_close(small.eval()(inputs.view(3, 1, 1, 6)), plain)


@pytest.mark.parametrize("name", ["lenet5", "feddhad_cnn", "cnn", "convnet3", "resnet18"])
def test_networks_without_norms_or_with_group_norm_train_narrowed(name: str) -> None:
    """Layers with a norm have no factor, which their norm would undo."""
    size = 8 if name in ("convnet3", "resnet18") else 32
    images, labels = tiny_pictures(4, size=size)
    made = tiny_experiment(
        heterofl(widths=(0.5, 0.25), masked_loss=True),
        build=lambda: build_model(name, input_shape=(3, size, size), num_classes=4, stream=stream(0, "m")),
        images=images,
        labels=labels,
        num_clients=2,
        cohort_size=2,
        rounds=1,
        sizes=(2, 2),
        learning_rate=1e-3,
    )
    engine = local_engine(made)
    start = engine.start()
    played = play_round(engine, start)
    parts = [u.submodel.part for u in played.updates if isinstance(u.submodel, HeldClasses)]
    assert len(parts) == 2 and torch.isfinite(played.vector).all()
    scaled = {"lenet5": 4, "feddhad_cnn": 4, "cnn": 2}.get(name, 0)
    assert [len(part.scales) for part in parts if isinstance(part, UnitSubModel)] == [scaled] * 2


# -- own classes -------------------------------------------------------------------------------------------------


def test_a_factor_before_a_group_norm_does_nothing() -> None:
    """Why normed layers have no scaler: the norm's output is the same up to its epsilon."""
    norm, maps = nn.GroupNorm(1, 4), torch.randn(2, 4, 5, 5, generator=stream(0, "x").torch())
    torch.testing.assert_close(norm(4.0 * maps), norm(maps), rtol=0, atol=1e-4)


def test_the_masked_loss_is_cross_entropy_on_logits_of_which_absent_classes_are_zero() -> None:
    """One step by hand: two clients, classes 0-1 and 2-3; each row of the classifier comes from its one holder."""
    method = heterofl(widths=(1.0,), masked_loss=True)
    images = np.random.default_rng(0).normal(size=(8, 1, 1, 6))
    labels = np.array([0, 1, 0, 1, 2, 3, 2, 3])
    engine = engine_of(
        method, num_clients=2, cohort_size=2, sizes=(4, 4), local_steps=1, double=True, images=images, labels=labels
    )
    start = engine.start()
    played = play_round(engine, start)
    expected = []
    for rows, held in ((slice(0, 4), (0, 1)), (slice(4, 8), (2, 3))):
        model = engine.experiment.build_model()
        mask = torch.zeros(4, dtype=torch.float64)
        mask[list(held)] = 1.0
        logits = model(torch.from_numpy(images[rows])) * mask
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(labels[rows]))
        loss.backward()  # type: ignore[no-untyped-call]
        expected.append({name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None})
    found = engine.layout.views(played.vector)
    torch.testing.assert_close(found["classifier.weight"][:2], expected[0]["classifier.weight"][:2])
    torch.testing.assert_close(found["classifier.bias"][2:], expected[1]["classifier.bias"][2:])
    torch.testing.assert_close(found["fc1.weight"], (expected[0]["fc1.weight"] + expected[1]["fc1.weight"]) / 2)


def test_rows_of_classes_that_nobody_has_stay() -> None:
    """Sorted labels: six clients of 16 samples have one class or two each; one of them trains."""
    engine = engine_of(heterofl(widths=(1.0, 0.5), masked_loss=True), cohort_size=1)
    start = engine.start()
    played = play_round(engine, start)
    part = played.updates[0].submodel
    assert isinstance(part, HeldClasses)
    absent = sorted({0, 1, 2, 3} - {*part.classes})
    found, before = engine.layout.views(played.vector), engine.layout.views(start.vector)
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(found[name][absent], before[name][absent])
        assert not torch.equal(found[name][list(part.classes)], before[name][list(part.classes)])


def test_the_mask_is_gone_when_the_model_is_tested() -> None:
    model = net()
    part = HeldClasses(part=FULL_MODEL, classes=(1,), num_classes=4)
    built, inputs = part.build(model), torch.randn(2, 1, 1, 6, generator=stream(0, "x").torch())
    assert built is not model and torch.equal(built.eval()(inputs), model.eval()(inputs))
    assert not built.train()(inputs)[:, [0, 2, 3]].any() and model.train()(inputs).all()


# -- what is refused ---------------------------------------------------------------------------------------------


def normed(method: FederatedMethod, **world: Any) -> Experiment:
    """FedStg's network, which has batch norm, on two clients."""
    images, labels = tiny_pictures(8, size=8)
    return tiny_experiment(
        method,
        build=lambda: build_model("fedstg_cnn", input_shape=(3, 8, 8), num_classes=10, stream=stream(0, "m")),
        images=images,
        labels=labels,
        num_clients=2,
        cohort_size=2,
        sizes=(4, 4),
        rounds=2,
        learning_rate=0.01,
        **world,
    )


def test_batch_norm_without_data_on_the_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="method heterofl needs data on the server, but the scenario has none"):
        check_experiment(normed(heterofl()))
    check_experiment(normed(heterofl(widths=(1.0,))))


def test_the_statistics_are_those_of_the_servers_inputs_under_the_mean_of_the_models() -> None:
    inputs, _ = tiny_pictures(6, size=8)
    experiment = normed(heterofl(widths=(1.0, 0.5), **PLAIN), proxy=(inputs, None))
    vector = run_rounds(local_engine(experiment)).vector
    values = experiment.layout.views(vector)
    maps = F.conv2d(torch.from_numpy(inputs), values["conv1.weight"], values["conv1.bias"], padding=1)
    spread, mean = torch.var_mean(maps, dim=(0, 2, 3))
    torch.testing.assert_close(values["norm1.running_mean"], mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(values["norm1.running_var"], spread, rtol=0, atol=1e-6)
    other = normed(heterofl(widths=(1.0, 0.5), **PLAIN), proxy=(inputs + 1, None))
    assert not torch.equal(run_rounds(local_engine(other)).vector, vector)


def test_the_scaler_refuses_heads_and_says_how_to_do_without() -> None:
    images, labels = tiny_pictures(4, size=8, channels=1)
    options: dict[str, Any] = {"num_clients": 2, "cohort_size": 2, "sizes": (2, 2), "rounds": 1, "learning_rate": 1e-3}

    def vit() -> nn.Module:
        return build_model("vit_tiny", input_shape=(1, 8, 8), num_classes=10, stream=stream(0, "m"), depth=1, width=16)

    with pytest.raises(ConfigError, match=r"through SelfAttention; choose another model, or set method\.scaler=false"):
        check_experiment(tiny_experiment(heterofl(), build=vit, images=images, labels=labels, **options))
    engine = engine_of(
        heterofl(widths=(0.5,), scaler=False, **PLAIN), build=vit, images=images, labels=labels, **options
    )
    assert run_rounds(engine).records[0].values_up < 2 * engine.layout.num_values


def test_networks_without_units_or_a_linear_head_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"heterofl leaves out .* but model Sequential lists no unit groups"):
        check_experiment(tiny_experiment(heterofl()))
    with pytest.raises(ConfigError, match="masked_loss needs a network whose head is one linear layer `classifier`"):
        check_experiment(tiny_experiment(heterofl(widths=(1.0,), masked_loss=True)))


def test_widths_by_speed_need_devices() -> None:
    with pytest.raises(ConfigError, match=r"method\.assignment=speed needs the devices' speeds; set scenario\.devices"):
        check_experiment(tiny_experiment(heterofl(assignment="speed"), build=net))
