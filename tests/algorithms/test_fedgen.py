"""FedGen: a generator of features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import net, run_net, tiny_step, tiny_sync
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.fedgen import GeneratedLatents, LatentGenerator, fedgen
from fedsweep.algorithms.parts.features import diversity, drawn, generated, new_generator
from fedsweep.components.local import ClientFacts, LocalStep
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.runs.checkpoints.state_codec import to_bytes
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_data, tiny_experiment

SMALL: dict[str, Any] = {"noise_width": 3, "hidden_width": 5, "generator_steps": 4, "generator_batch": 6}
# 8 features: (3 + 4) x 5 + 5, norm 2 x 5, 5 x 8 + 8, statistics 2 x 5.
GENERATOR_VALUES = 40 + 10 + 48 + 10


def server(method: FederatedMethod) -> LatentGenerator:
    (component,) = method.refinements
    assert isinstance(component, LatentGenerator)
    return component


def local_step(broadcast: dict[str, Tensor], *, round: int = 2) -> LocalStep:
    torch.manual_seed(3)
    model = net().double()
    inputs = torch.randn(6, 1, 1, 6, dtype=torch.float64)
    return tiny_step(
        model,
        inputs=inputs,
        targets=torch.tensor([0, 1, 2, 3, 0, 1]),
        broadcast=broadcast,
        client=ClientFacts(client=1, round=round, num_samples=6, label_counts=torch.tensor([0, 4, 0, 2])),
    )


def sent_generator() -> dict[str, Tensor]:
    values = new_generator(3, 5, 8, 4, stream=stream(0, "test"))
    return {f"generator/{name}": value.double() for name, value in values.items()}


def test_the_generator_is_the_papers_module() -> None:
    """Linear, batch norm, ReLU, linear; on CIFAR (512, 64, 84 features, 10 classes) it has 82,516 parameters."""
    values = new_generator(3, 5, 8, 4, stream=stream(0, "test"))
    module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 8))
    names = [
        "hidden_weight",
        "hidden_bias",
        "norm_weight",
        "norm_bias",
        "mean",
        "variance",
        "feature_weight",
        "feature_bias",
    ]
    floats = [name for name, value in module.state_dict().items() if value.is_floating_point()]
    module.load_state_dict(dict(zip(floats, (values[name] for name in names), strict=True)), strict=False)
    noise, labels = torch.rand(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])
    joined = torch.cat([noise, F.one_hot(labels, 4)], dim=1)
    for training in (True, False):  # the first pass moves the statistics, the second uses them
        module.train(training)
        torch.testing.assert_close(generated(values, noise, labels, training=training), module(joined))
    torch.testing.assert_close(values["variance"], module[1].running_var)
    large = new_generator(64, 512, 84, 10, stream=stream(0, "test"))
    assert sum(v.numel() for v in large.values()) - 2 * 512 == 82_516
    assert float(large["hidden_weight"].abs().max()) <= 1 / math.sqrt(74)


def test_diversity_by_hand() -> None:
    """Two samples with |z_i - z_j| 3 on average and (e_i - e_j)^2 4: exp(-(0 + 12 + 12 + 0) / 4)."""
    noise, features = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([[1.0, 5.0], [3.0, 1.0]])
    assert float(diversity(noise, features)) == pytest.approx(math.exp(-6), rel=1e-6)
    assert float(diversity(noise, torch.ones(2, 2))) == 1.0


def test_draws_are_uniform_over_the_classes_that_are_allowed() -> None:
    allowed = torch.tensor([True, False, True, True])
    noise, labels = drawn(6000, allowed, 2, stream=stream(0, "test"), like=torch.zeros(1))
    counts = torch.bincount(labels, minlength=4)
    assert counts[1] == 0 and float((counts[[0, 2, 3]] - 2000).abs().max()) < 150
    assert 0 <= float(noise.min()) and float(noise.max()) < 1 and noise.shape == (6000, 2)


def test_the_clients_loss_by_hand() -> None:
    """Round 3: both strengths times 0.5^2."""
    step = local_step(sent_generator(), round=3)
    found = GeneratedLatents(strength=4.0, consistency=2.0, decay=0.5, noise_width=3).loss(step)
    values = {name.removeprefix("generator/"): value for name, value in sent_generator().items()}
    noise, labels = drawn(
        6, torch.ones(4, dtype=torch.bool), 3, stream=step.stream.child("fedgen"), like=values["mean"]
    )
    assert isinstance(step.model, Mlp)
    logits = step.model.head(generated(values, noise, labels, training=False))
    expected = 4 * 0.25 * F.cross_entropy(logits, labels)
    own = step.model.head(generated(values, noise, step.targets, training=False)).softmax(dim=1)
    expected += 2 * 0.25 * (own * (own.log() - step.logits.log_softmax(dim=1))).sum() / 6
    assert found is not None and float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)


def test_strengths_do_not_fall_below_their_floor() -> None:
    step = local_step(sent_generator(), round=500)
    found = GeneratedLatents(strength=4.0, consistency=0.0, decay=0.5, noise_width=3).loss(step)
    plain = GeneratedLatents(strength=1.0, consistency=0.0, decay=1.0, noise_width=3).loss(step)
    assert found is not None and plain is not None
    assert float(found.detach()) == pytest.approx(1e-4 * float(plain.detach()), rel=1e-12)


def test_generated_features_teach_the_head_alone_and_the_target_has_no_gradient() -> None:
    step = local_step(sent_generator())
    loss = GeneratedLatents(strength=1.0, consistency=0.0, decay=1.0, noise_width=3).loss(step)
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in step.model.named_parameters()}
    assert gradients["classifier.weight"] is not None and float(gradients["classifier.weight"].norm()) > 0
    assert all(g is None or not g.any() for name, g in gradients.items() if not name.startswith("classifier"))
    step = local_step(sent_generator())
    loss = GeneratedLatents(strength=0.0, consistency=1.0, decay=1.0, noise_width=3).loss(step)
    assert loss is not None
    (slope,) = torch.autograd.grad(loss, step.logits)
    torch.testing.assert_close(slope.sum(dim=1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-15)


def test_without_a_generator_there_is_no_loss() -> None:
    assert GeneratedLatents(strength=1.0, consistency=1.0, decay=1.0, noise_width=3).loss(local_step({})) is None


def test_round_one_is_fedavgs_but_in_dynamicfls_variant() -> None:
    plain = run_net(fedavg(), rounds=1)
    assert torch.equal(run_net(fedgen(**SMALL), rounds=1).vector, plain.vector)
    assert not torch.equal(run_net(fedgen(**SMALL, variant="dynamicfl"), rounds=1).vector, plain.vector)
    assert not torch.equal(run_net(fedgen(**SMALL), rounds=2).vector, run_net(fedavg(), rounds=2).vector)


def test_a_generator_is_sent_once_however_often_a_round_synchronises() -> None:
    """Local steps 1 to 3: three starts from the server's model, and the generator learned at the round's end."""
    size = sum(p.numel() for p in net().parameters())
    state = run_net(merge(fedgen(**SMALL), dynamicsgd()), rounds=2, local_steps=3)
    points = state.records[-1].sync_points
    assert points > 1
    assert state.records[-1].values_down == 3 * (points * size + GENERATOR_VALUES)


def test_classes_that_nobody_has_are_not_drawn() -> None:
    """One byte for the list of four, once a client."""
    size = sum(p.numel() for p in net().parameters())
    images, labels = tiny_data()
    state = run_net(fedgen(**SMALL), rounds=3, cohort_size=6, images=images, labels=labels + (labels == 2))
    extra = [r.bytes_down - 4 * 6 * (size + GENERATOR_VALUES) for r in state.records]
    assert extra == [-4 * 6 * GENERATOR_VALUES, 6, 0]
    assert server(fedgen()).publish(state.components["refinement0"])["labels"].value.tolist() == [
        True,
        True,
        False,
        True,
    ]


def test_dynamicfls_clients_draw_their_own_classes() -> None:
    """Of which the client has word itself; as if the server had said so."""
    own = GeneratedLatents(strength=1.0, consistency=0.0, decay=1.0, noise_width=3, own_classes=True)
    told = dataclasses.replace(own, own_classes=False)
    labels = {"labels": torch.tensor([False, True, False, True])}
    expected = told.loss(local_step(sent_generator() | labels))
    found, free = own.loss(local_step(sent_generator())), told.loss(local_step(sent_generator()))
    assert found is not None and expected is not None and free is not None
    assert torch.equal(found, expected) and not torch.equal(found, free)
    size = sum(p.numel() for p in net().parameters())
    record = run_net(fedgen(**SMALL, variant="dynamicfl"), rounds=1).records[0]
    assert record.values_down == 3 * (size + GENERATOR_VALUES)
    assert record.bytes_down == 4 * record.values_down
    (term,) = fedgen(variant="dynamicfl").terms
    assert isinstance(term, GeneratedLatents) and term.own_classes


def test_class_weights_by_hand() -> None:
    """Counts (3, 0, 1) and (1, 0, 0): smoothed 4:2, 1:1, 2:1."""
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    labels, weights = server(fedgen())._weights(counts)
    assert labels.tolist() == [True, False, True]
    np.testing.assert_allclose(weights, [[4 / 6, 0.5, 2 / 3], [2 / 6, 0.5, 1 / 3]], rtol=1e-15)
    labels, weights = server(fedgen(variant="dynamicfl"))._weights(counts)
    assert labels.tolist() == [True, False, False]
    np.testing.assert_allclose(weights, [[0.75, 0.0, 1.0], [0.25, 0.0, 0.0]], rtol=1e-7)


@pytest.mark.parametrize("teacher", ["clients", "logits", "global"])
def test_the_generators_loss_by_hand(teacher: str) -> None:
    component = server(fedgen(teacher=teacher, diversity=0.5, **SMALL))  # type: ignore[arg-type]
    values = new_generator(3, 5, 8, 4, stream=stream(0, "test"))
    torch.manual_seed(5)
    heads = [net() for _ in range(1 if teacher == "global" else 2)]
    noise, labels = torch.rand(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])
    weights = torch.tensor([[0.9, 0.2, 0.5, 0.4], [0.1, 0.8, 0.5, 0.6]])
    asked = [head.head for head in heads]
    found = component._loss(values, asked, weights, noise, labels)  # type: ignore[arg-type]
    features = generated(values, noise, labels, training=True)
    logits = torch.stack([head.head(features) for head in heads])  # type: ignore[operator]
    if teacher == "clients":
        picked = -logits.log_softmax(dim=2).gather(2, labels.expand(2, 6)[..., None])[..., 0]
        expected = (
            sum(float((weights[k, y] * picked[k, b]).detach()) for k in range(2) for b, y in enumerate(labels)) / 6
        )
    else:
        expected = float(F.cross_entropy(logits.mean(dim=0), labels).detach())
    expected += 0.5 * float(diversity(noise, features).detach())
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)


def test_the_generator_learns_to_make_what_the_heads_take_for_the_class() -> None:
    state = run_net(fedgen(**(SMALL | {"generator_steps": 60}), generator_learning_rate=0.01, diversity=0.0), rounds=6)
    losses = [r.extra["generator_loss"] for r in state.records]
    assert losses[-1] < 0.7 * losses[0]


def test_adams_moments_are_part_of_the_state() -> None:
    engine = local_engine(tiny_experiment(fedgen(**SMALL), build=net, rounds=4))
    half = run_rounds(engine, rounds=2)
    fresh = dataclasses.replace(
        half, components=half.components | {"refinement0": half.components["refinement0"] | {"adam": None}}
    )
    ends = [run_rounds(engine, start).components["refinement0"] for start in (half, fresh)]
    assert to_bytes(ends[0]) != to_bytes(ends[1])


def test_dynamicfls_counts_add_up_over_rounds() -> None:
    engine = local_engine(tiny_experiment(fedgen(**SMALL, variant="dynamicfl"), build=net, cohort_size=6))
    counts = engine.start().components["refinement0"]["counts"]
    state = run_rounds(engine, rounds=3)
    assert torch.equal(state.components["refinement0"]["seen"], 3 * counts)


def test_clients_count_whatever_their_order() -> None:
    """Another order of the attendees changes the generator's training by rounding alone."""
    engine = local_engine(tiny_experiment(fedgen(**SMALL), build=net, double=True))
    played = play_round(engine)
    component, start = server(fedgen(**SMALL)), engine.start()
    sync = tiny_sync(
        engine.experiment.build_model(), start.vector, layout=engine.layout, anchors={0: start.vector}, cohort=(0, 1, 2)
    )
    outs = [
        component.refine(start.components["refinement0"], played.vector, updates, sync)[1]["generator"]
        for updates in (played.updates, played.updates[::-1])
    ]
    for name, value in outs[0].items():
        torch.testing.assert_close(value, outs[1][name], rtol=0, atol=1e-7)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="fedgen generates what a model's head reads, but model Sequential has no"):
        check_experiment(tiny_experiment(fedgen()))
    refusal = r"fedgen\+fedad: its LatentGenerator needs clients that train the whole model, but AdaptiveDropout gives"
    with pytest.raises(ConfigError, match=refusal):
        merge(fedgen(**SMALL), fedad())
