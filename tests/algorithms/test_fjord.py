"""FjORD: a width per step, what of it is trained, distillation, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import lenet_run, net
from torch import Tensor, nn

from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fjord import NestedWidths, SelfDistillation, fjord, part_of_part
from fedsweep.algorithms.moon import moon
from fedsweep.algorithms.parts.widths import ordered_part
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalSolver, LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.engine.engine import Engine
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.cost import fwd_macs_per_sample
from fedsweep.models.network import Network
from fedsweep.models.networks.chains import LeNet5
from fedsweep.models.slicing import build_submodel_module, ordered_kept
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import (
    build_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_experiment,
    tiny_pictures,
    with_parts,
)
from fedsweep.trees import ParamTree, load_vector

torch.set_num_threads(1)


GROUPS = net().unit_groups()
STEPS = 6  # three batches of 4 of 12 samples, twice


def nested(steps: tuple[int, ...], *, widths: tuple[float, ...] = (1.0, 0.5), passes: Any = None) -> NestedWidths:
    return NestedWidths(
        widest=ordered_part(GROUPS, widths[0]),
        inner=tuple(part_of_part(GROUPS, width, widths[0]) for width in widths),
        steps=steps,
        passes=passes or tuple((ordered_part(GROUPS, w), steps.count(i) / len(steps)) for i, w in enumerate(widths)),
    )


def engine_of(method: FederatedMethod, **more: Any) -> Engine:
    options: dict[str, Any] = {"build": net, "sizes": (12,) * 6, "local_epochs": 2, "num_clients": 6, "cohort_size": 3}
    return local_engine(tiny_experiment(method, **(options | more)))


OPTIMIZERS = {
    "plain": OptimizerSettings(),
    "momentum": OptimizerSettings(momentum=0.9, weight_decay=0.1, clip_norm=0.5),
    "kept": OptimizerSettings(momentum=0.9, weight_decay=0.1, keep="persist"),
    "averaged": OptimizerSettings(momentum=0.9, weight_decay=0.1, keep="average"),
    "adam": OptimizerSettings(name="adam", weight_decay=0.1, keep="persist"),
}


# -- a part per step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_at_one_narrow_width_are_those_of_the_narrow_model_and_nothing_else_moves(
    optimizer: OptimizerSettings,
) -> None:
    """Weight decay, momentum and Adam leave alone what no step holds; two rounds, so that kept state counts too."""
    narrow = ordered_part(GROUPS, 0.5)
    options: dict[str, Any] = {"num_clients": 1, "cohort_size": 1, "sizes": (12,), "rounds": 2, "learning_rate": 0.01}
    options |= {"optimizer": optimizer, "double": True}
    engine = engine_of(with_parts(nested((1,) * STEPS)), **options)
    start = engine.start()
    found, expected = run_rounds(engine), run_rounds(engine_of(with_parts(narrow), **options))
    params = slice(0, engine.layout.num_params)
    inner = narrow.embed(narrow.extract(start.vector, engine.layout), engine.layout).cover
    assert inner is not None
    torch.testing.assert_close(found.vector[params], expected.vector[params], rtol=0, atol=1e-14)
    assert torch.equal(found.vector[params][~inner[params]], start.vector[params][~inner[params]])
    assert not torch.equal(found.vector[params][inner[params]], start.vector[params][inner[params]])


def reference(
    engine: Engine, widths: tuple[float, ...], *, distil: bool = False, mu: float = 0.0
) -> Mapping[str, Tensor]:
    """Client 0's round by hand: SGD with momentum, decay and a pull where a step's slice lies, nothing elsewhere."""
    model, world = engine.experiment.build_model(), engine.experiment.world
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(value) for name, value in values.items()}
    start = {name: value.clone() for name, value in values.items()}
    client = engine.planner.plan(engine.start()).context.cohort[0]
    indices = world.indices[client]
    orders = stream(0, "batches", 1, client).numpy()
    rows = np.concatenate([orders.permutation(12) for _ in range(2)]).reshape(STEPS, 4)
    for step, width in enumerate(widths):
        units, leaves = int(8 * width), {n: v.clone().requires_grad_() for n, v in values.items()}
        batch = indices[rows[step]]
        inputs, targets = (
            torch.from_numpy(world.data.images[batch]).flatten(1),
            torch.from_numpy(world.data.labels[batch]),
        )

        def logits(n: int, at: Mapping[str, Tensor], x: Tensor) -> Tensor:
            hidden = torch.relu(x @ at["fc1.weight"][:n].T + at["fc1.bias"][:n])
            hidden = torch.relu(hidden @ at["fc2.weight"][:n, :n].T + at["fc2.bias"][:n])
            return hidden @ at["classifier.weight"][:, :n].T + at["classifier.bias"]

        own = logits(units, leaves, inputs)
        if distil and units < 8:
            whole = logits(8, leaves, inputs)
            kl = (whole.detach().softmax(1) * (whole.detach().log_softmax(1) - own.log_softmax(1))).sum(1).mean()
            loss = F.cross_entropy(whole, targets) + kl
        else:
            loss = F.cross_entropy(own, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        trained = 8 if distil else units
        for name, block in blocks(trained).items():
            grad = leaves[name].grad
            assert grad is not None
            pulled = grad[block] + mu * (values[name][block] - start[name][block])
            momenta[name][block] = 0.9 * momenta[name][block] + pulled + 0.1 * values[name][block]
            values[name][block] -= 0.1 * momenta[name][block]
    return values


def blocks(units: int) -> dict[str, Any]:
    return {
        "fc1.weight": slice(0, units),
        "fc1.bias": slice(0, units),
        "fc2.weight": (slice(0, units), slice(0, units)),
        "fc2.bias": slice(0, units),
        "classifier.weight": (slice(None), slice(0, units)),
        "classifier.bias": slice(None),
    }


@pytest.mark.parametrize("mu", [0.0, 2.0], ids=["free", "pulled"])
@pytest.mark.parametrize("distil", [False, True], ids=["plain", "distilled"])
def test_widths_that_change_from_step_to_step_by_hand(distil: bool, mu: float) -> None:
    """Momentum of what a step does not hold waits; a distilled step trains the widest width as well, pull and all."""
    part = nested((0, 1, 1, 0, 1, 0))
    method = FederatedMethod(
        name="x",
        source="",
        submodels=with_parts(part).submodels,
        terms=fedprox(mu=mu).terms,
        **({"objective": SelfDistillation()} if distil else {}),  # type: ignore[arg-type]
    )
    engine = engine_of(method, optimizer=OptimizerSettings(momentum=0.9, weight_decay=0.1), double=True)
    found = play_round(engine).updates[0].params
    expected = reference(engine, (1.0, 0.5, 0.5, 1.0, 0.5, 1.0), distil=distil, mu=mu)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


class Seen(LocalTerm):
    """Notes the shapes that a term sees."""

    stateful = True
    name = "seen"
    shapes: ClassVar[list[tuple[tuple[int, ...], ...]]] = []

    def init(self, params: ParamTree) -> Memory:
        return {"tree": {name: value.clone() for name, value in params.items()}}

    def note(self, step: LocalStep) -> None:
        memory: Any = step.memory
        trees = (step.params, step.anchor, memory["tree"])
        self.shapes.append(tuple(tuple(tree["fc2.weight"].shape) for tree in trees))

    def loss(self, step: LocalStep) -> Tensor | None:
        self.note(step)
        return None

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        self.note(step)
        assert gradients["fc2.weight"].shape == (8, 8)
        return step.memory, None

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, dict[str, Tensor]]:
        return memory, {}


def test_terms_see_the_steps_part_in_the_loss_and_the_clients_after_it() -> None:
    Seen.shapes = []
    method = FederatedMethod(name="x", source="", submodels=with_parts(nested((1, 0) * 3)).submodels, terms=(Seen(),))
    play_round(engine_of(method, cohort_size=1))
    narrow, whole = ((4, 4),) * 3, ((8, 8),) * 3
    assert Seen.shapes == [narrow, whole, whole, whole] * 3


class SeenTwice(Seen):
    """Notes them where it adds a gradient, too."""

    def gradient(self, step: LocalStep) -> ParamTree | None:
        self.note(step)
        assert dict(step.model.named_parameters())["fc2.weight"].shape == step.params["fc2.weight"].shape
        return None


class Twice(LocalSolver):
    """Takes the gradient twice, and the step once."""

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        evaluate()
        loss = evaluate()
        optimizer.step()
        return loss


@pytest.mark.parametrize("distil", [False, True], ids=["plain", "distilled"])
def test_terms_add_to_the_gradient_of_all_that_a_step_trains(distil: bool) -> None:
    """A step at the half width: the loss is the part's each time that a solver asks, the distilled step the whole's."""
    Seen.shapes = []
    method = replace(with_parts(nested((1,) * STEPS)), terms=(SeenTwice(),), solver=Twice())
    play_round(engine_of(replace(method, objective=SelfDistillation()) if distil else method, cohort_size=1))
    narrow, whole = ((4, 4),) * 3, ((8, 8),) * 3
    assert Seen.shapes == [*(narrow, whole if distil else narrow) * 2, whole] * STEPS


def test_a_pull_towards_the_anchor_acts_on_the_steps_part() -> None:
    pulled, free = (run_rounds(engine_of(m)).vector for m in (merge(fjord(), fedprox(mu=1.0)), fjord()))
    assert not torch.equal(pulled, free)
    start = engine_of(fjord()).start().vector
    assert float((pulled - start).norm()) < float((free - start).norm())


# -- the method --------------------------------------------------------------------------------------------------


def test_each_step_draws_one_of_the_widths_up_to_the_clients() -> None:
    engine = engine_of(fjord(widths=(0.25, 0.5, 1.0)), cohort_size=6, local_epochs=40)
    parts = engine.planner.plan(engine.start()).context.submodels.values()
    values = sorted(part.layout(engine.layout).num_values for part in parts)
    assert values[0] == values[1] < values[2] == values[3] < values[4] == values[5] == engine.layout.num_values
    for part in parts:
        if isinstance(part, NestedWidths):
            counts = np.bincount(part.steps, minlength=len(part.inner))
            assert len(part.steps) == 120
            assert counts.min() > 120 / len(part.inner) - 4 * (120 / len(part.inner)) ** 0.5
    assert sum(isinstance(part, NestedWidths) for part in parts) == 4  # the narrowest have nothing to draw


def test_a_part_of_a_part_is_the_narrower_part() -> None:
    engine = engine_of(fjord())
    vector, full = engine.start().vector, engine.layout
    wide, narrow = ordered_part(GROUPS, 0.75), ordered_part(GROUPS, 0.3)
    inner = part_of_part(GROUPS, 0.3, 0.75)
    assert torch.equal(inner.extract(wide.extract(vector, full), wide.layout(full)), narrow.extract(vector, full))
    assert part_of_part(GROUPS, 0.75, 0.75) == FULL_MODEL


def test_the_inner_block_is_the_mean_of_all_and_outer_bands_of_those_who_hold_them() -> None:
    engine = engine_of(fjord(widths=(1.0, 0.5)), num_clients=2, cohort_size=2, sizes=(4, 12), double=True)
    start = engine.start()
    played = play_round(engine, start)
    wide, narrow = sorted(played.updates, key=lambda u: -u.layout.num_values)
    share = wide.num_samples / 16
    found = engine.layout.views(played.vector)["fc2.weight"]
    own, inner = wide.params["fc2.weight"], narrow.params["fc2.weight"]
    torch.testing.assert_close(found[:4, :4], share * own[:4, :4] + (1 - share) * inner, rtol=0, atol=1e-15)
    assert torch.equal(found[4:], own[4:]) and torch.equal(found[:, 4:], own[:, 4:])


def test_without_a_client_of_full_width_the_outer_bands_stay() -> None:
    engine = engine_of(fjord(widths=(0.5, 0.25)), optimizer=OptimizerSettings(weight_decay=0.1))
    start, end = engine.start(), run_rounds(engine)
    found, before = (engine.layout.views(state.vector)["fc2.weight"] for state in (end, start))
    assert torch.equal(found[4:], before[4:]) and torch.equal(found[:, 4:], before[:, 4:])
    assert not torch.equal(found[:2, :2], before[:2, :2])


def test_distillation_changes_the_model() -> None:
    plain, distilled = (run_rounds(engine_of(fjord(distillation=d))).vector for d in (False, True))
    assert not torch.equal(plain, distilled)


@pytest.mark.slow
def test_moon_with_fjord_contrasts_at_the_steps_width() -> None:
    """At width 1 alone it is MOON, without contrast FjORD; otherwise neither, whatever the order of merging."""
    options: dict[str, Any] = {"cohort_size": 6, "rounds": 2}

    def end(method: FederatedMethod) -> Tensor:
        return run_rounds(engine_of(method, **options)).vector

    assert torch.equal(end(merge(moon(), fjord(widths=(1.0,)))), end(moon()))
    assert torch.equal(end(merge(moon(strength=0.0), fjord())), end(fjord()))
    both = end(merge(moon(), fjord()))
    assert torch.equal(both, end(merge(fjord(), moon())))
    assert not torch.equal(both, end(fjord())) and not torch.equal(both, end(moon()))


# -- cost --------------------------------------------------------------------------------------------------------


def macs_at(width: float) -> int:
    return fwd_macs_per_sample(ordered_part(GROUPS, width).build(net()), (1, 1, 6))


@pytest.mark.parametrize("distil", [False, True], ids=["plain", "distilled"])
def test_flops_are_those_of_the_widths_that_were_drawn(distil: bool) -> None:
    """Batches of 4, 4 and 2: each step's samples at its width; distilled, narrower steps cost the widest as well."""
    engine = engine_of(fjord(widths=(1.0, 0.5, 0.25), distillation=distil), sizes=(10,) * 6)
    parts = engine.planner.plan(engine.start()).context.submodels
    expected = 0
    for part in parts.values():
        if not isinstance(part, NestedWidths):
            expected += 6 * macs_at(0.25) * 20
            continue
        widths = {3: (1.0, 0.5, 0.25), 2: (0.5, 0.25)}[len(part.inner)]
        for step, samples in zip(part.steps, (4, 4, 2) * 2, strict=True):
            narrower = distil and step > 0
            expected += 6 * samples * (macs_at(widths[step]) + narrower * macs_at(widths[0]))
    record = run_rounds(engine, rounds=1).records[0]
    assert record.flops == pytest.approx(expected, abs=6 * 20 * 3 / 2)  # mean MACs of a client are whole numbers


def test_lenet_at_eleven_widths_costs_what_is_printed() -> None:
    """FedDHAD prints 0.482 MFLOPs: the mean forward MACs over the widths 0.50, 0.55 .. 1.00."""
    widths = tuple(round(0.5 + 0.05 * k, 2) for k in range(11))
    model = LeNet5(input_shape=(3, 32, 32), num_classes=10)
    parts = [ordered_part(model.unit_groups(), width) for width in widths]
    macs = [fwd_macs_per_sample(part.build(model), (3, 32, 32)) for part in parts]
    assert round(float(np.mean(macs)) / 1e6, 3) == 0.482


def test_only_the_widest_part_travels_without_masks() -> None:
    record = lenet_run(fjord(widths=(0.5, 0.25)))
    assert record.values_up == 15_888 + 4_257 and record.bytes_up == record.bytes_down == 4 * record.values_up


# -- what is refused ---------------------------------------------------------------------------------------------


def pictured(method: FederatedMethod, name: str, **world: Any) -> Experiment:
    images, labels = tiny_pictures(8, size=16)
    return tiny_experiment(
        method,
        build=lambda: build_model(name, input_shape=(3, 16, 16), num_classes=10, stream=stream(0, "m")),
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
    with pytest.raises(ConfigError, match="method fjord needs data on the server, but the scenario has none"):
        check_experiment(pictured(fjord(), "fedstg_cnn"))


def test_each_width_is_tested_on_the_servers_validation_data() -> None:
    """Of width 1 it is the accuracy that the run reports, of one half that of the network cut out by hand."""
    inputs, targets = tiny_pictures(30, size=16)
    experiment = pictured(fjord(widths=(0.5, 1.0)), "lenet5", validation=(inputs, targets))
    state = run_rounds(local_engine(experiment))
    found, model = state.records[-1].extra, cast(Network, experiment.build_model())
    load_vector(model, experiment.layout, state.vector)
    half = build_submodel_module(model, ordered_kept(model.unit_groups(), 0.5)).eval()
    hits = half(torch.from_numpy(inputs)).argmax(dim=1) == torch.from_numpy(targets)
    assert found["accuracy_at_width_0.5"] == pytest.approx(float(hits.double().mean()), abs=1e-12)
    assert found["accuracy_at_width_1.0"] == pytest.approx(state.records[-1].validation_accuracy, abs=1e-12)
    assert "accuracy_at_width_1.0" not in run_rounds(local_engine(pictured(fjord(), "lenet5"))).records[-1].extra


def test_with_batch_norm_each_width_has_statistics_of_its_own() -> None:
    """Untrained statistics would leave the half network's as they are in the whole one."""
    inputs, targets = tiny_pictures(30, size=16)
    world = {"proxy": (inputs, None), "validation": (inputs, targets)}
    experiment = pictured(fjord(widths=(0.5, 1.0)), "fedstg_cnn", **world)
    state = run_rounds(local_engine(experiment))
    found = state.records[-1].extra
    assert found["accuracy_at_width_1.0"] == pytest.approx(state.records[-1].validation_accuracy, abs=1e-12)
    model = cast(Network, experiment.build_model())
    load_vector(model, experiment.layout, state.vector)
    half = build_submodel_module(model, ordered_kept(model.unit_groups(), 0.5))
    for module in half.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    batch = torch.from_numpy(inputs)
    half.train()(batch)
    hits = half.eval()(batch).argmax(dim=1) == torch.from_numpy(targets)
    assert found["accuracy_at_width_0.5"] == pytest.approx(float(hits.double().mean()), abs=1e-12)


def test_wrong_widths_and_networks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.widths must be distinct numbers above 0 and at most 1, but got"):
        fjord(widths=(0.5, 0.5))
    with pytest.raises(ConfigError, match=r"fjord leaves out .* but model Sequential lists no unit groups"):
        check_experiment(tiny_experiment(fjord()))


def test_parts_are_told_apart_by_their_steps() -> None:
    parts: list[SubModel] = [nested((0, 1)), nested((1, 0)), nested((0, 1), widths=(1.0, 0.25))]
    assert len({part.key() for part in parts}) == 3 and nested((0, 1)).key() == parts[0].key()


def test_builds_and_costs_of_the_widest_part_are_its_own() -> None:
    model: nn.Module = net()
    part = nested((1,), widths=(0.5, 0.25))
    assert next(part.build(model).parameters()).shape == (4, 6)
    assert part.index_bytes() == 0
