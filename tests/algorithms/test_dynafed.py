from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.algorithms.dynafed import PROFILES, TrajectoryDistillation, dynafed
from fedsweep.algorithms.dynamicfl import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.components.weighting import BySamples, Uniform
from fedsweep.config.methods import build_method, resolve_method
from fedsweep.errors import ConfigError, RunError
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import ServerContext, State, SyncContext
from fedsweep.runtime.checkpoint import CheckpointStore
from fedsweep.runtime.engine import Engine
from fedsweep.runtime.experiment import Experiment
from fedsweep.runtime.messages import OptimizerSettings
from fedsweep.runtime.state import RunState
from fedsweep.runtime.state_trees import from_bytes, to_bytes
from fedsweep.streams import Stream
from fedsweep.testing import component_conforms, linear_model, local_engine, run_rounds, tiny_data, tiny_experiment
from fedsweep.trees import layout_of, model_vector

# Three rounds of trajectory (four snapshots), then fine-tuning from round 4 on.
SMALL: Mapping[str, Any] = {
    "snapshots": 4,
    "horizon_rounds": 2,
    "inner_steps": 3,
    "iterations": 12,
    "images_per_class": 2,
    "finetune_epochs": 3,
    "finetune_learning_rate": 0.05,
    "checkpoint_seconds": 0.0,
}


class TinyNetwork(nn.Module):
    """A linear classifier that tells the shape of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.input_shape = (1, 1, 6)
        self.classifier = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(inputs.flatten(1))
        return logits


def experiment(method: FederatedMethod, *, rounds: int = 6, **more: Any) -> Experiment:
    return tiny_experiment(method, rounds=rounds, **{"build": TinyNetwork, **more})


def after(method: FederatedMethod, *, rounds: int = 6, **more: Any) -> RunState:
    return run_rounds(local_engine(experiment(method, rounds=rounds, **more)))


def distillation(method: FederatedMethod) -> TrajectoryDistillation:
    refinement = method.refinements[0]
    assert isinstance(refinement, TrajectoryDistillation)
    return refinement


def small(**more: Any) -> FederatedMethod:
    return dynafed(**{**SMALL, **more})


# -- its place in a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "plain"),
    [("size", fedavg()), ("uniform", FederatedMethod(name="fedavg", source="", weighting=Uniform()))],
)
def test_run_is_fedavg_bit_for_bit_up_to_the_synthesis(weights: str, plain: FederatedMethod) -> None:
    sizes = [8, 24, 16, 16, 8, 24]
    for rounds in (1, 2, 3):
        ours = after(small(weights=weights), rounds=rounds, sizes=sizes)
        assert torch.equal(ours.vector, after(plain, rounds=rounds, sizes=sizes).vector)
    fourth = after(small(weights=weights), rounds=4, sizes=sizes)
    assert not torch.equal(fourth.vector, after(plain, rounds=4, sizes=sizes).vector)


def test_weights_differ_where_sizes_do() -> None:
    sizes = [8, 24, 16, 16, 8, 24]
    uniform, by_size = (after(small(weights=weights), rounds=1, sizes=sizes) for weights in ("uniform", "size"))
    assert not torch.equal(uniform.vector, by_size.vector)


@pytest.mark.parametrize("nothing", [{"finetune_epochs": 0}, {"finetune_learning_rate": 0.0}])
def test_without_fine_tuning_the_run_stays_fedavg_for_ever(nothing: dict[str, Any]) -> None:
    ours, plain = after(small(weights="size", **nothing), rounds=7), after(fedavg(), rounds=7)
    assert torch.equal(ours.vector, plain.vector)
    assert ours.components["refinement0"]["synthetic"] is not None
    assert ours.total_bytes == plain.total_bytes


def test_trajectory_holds_the_first_models_and_is_dropped_after_the_synthesis() -> None:
    engine = local_engine(experiment(small()))
    state = engine.start()
    expected = [state.vector.clone()]
    for round in range(1, 6):
        state = run_rounds(engine, state, rounds=1)
        expected.append(state.vector.clone())
        kept = state.components["refinement0"]
        if round < 3:
            assert kept["synthetic"] is None
            assert len(kept["snapshots"]) == round + 1
            assert all(torch.equal(a, b) for a, b in zip(kept["snapshots"], expected, strict=True))
        else:
            assert kept["snapshots"] == []
            assert kept["learned_in"] == 3
    assert ("synthesis_objective" in state.records[1].extra, "synthesis_objective" in state.records[2].extra) == (
        False,
        True,
    )
    assert "finetune_loss" not in state.records[2].extra
    assert state.records[3].extra["finetune_loss"] > 0


def test_the_round_of_the_synthesis_is_not_fine_tuned_and_the_next_one_is() -> None:
    """Round 4's aggregate is FedAvg's of a round from the same model; what is sent on is that, fine-tuned."""
    by_size = small(weights="size")
    third = after(by_size, rounds=3)
    engine = local_engine(experiment(by_size))
    fourth = run_rounds(engine, third, rounds=1)
    plain = run_rounds(local_engine(experiment(fedavg())), replace(third, components=plain_states()), rounds=1)
    sync = context(vector=third.vector, round=4, stream=Stream((0, "refinement0", 4, -1, 0)))
    refined, _ = distillation(by_size).refine(third.components["refinement0"], plain.vector, [], sync)
    assert torch.equal(fourth.vector, refined)
    assert not torch.equal(fourth.vector, plain.vector)


def plain_states() -> Mapping[str, State]:
    return local_engine(experiment(fedavg())).start().components


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    first, again, other = after(small()), after(small()), after(small(), seed=1)
    assert torch.equal(first.vector, again.vector)
    assert to_bytes(first.components["refinement0"], root="a") == to_bytes(again.components["refinement0"], root="a")
    assert not torch.equal(first.vector, other.vector)


# -- the component -----------------------------------------------------------------------------------------------------


def context(*, vector: Tensor, round: int = 1, stream: Stream | None = None, **more: Any) -> SyncContext:
    return SyncContext(
        round=round,
        index=0,
        ends_round=True,
        vector=vector,
        layout=layout_of(TinyNetwork()),
        anchors={},
        learning_rate=0.1,
        cohort=(0,),
        model=TinyNetwork(),
        stream=stream or Stream(("test", round)),
        checkpoint=more.pop("checkpoint", lambda tree: None),
        **more,
    )


def server_context(model: nn.Module, vector: Tensor | None = None) -> ServerContext:
    layout = layout_of(model)
    return ServerContext(
        num_clients=1,
        num_classes=4,
        num_rounds=10,
        profiles=(),
        model=model,
        layout=layout,
        vector=model_vector(model, layout) if vector is None else vector,
        stream=Stream(("test", 0)),
    )


def test_component_keeps_the_promises_of_its_seam() -> None:
    component_conforms(distillation(small()))
    assert distillation(small()) == distillation(small())
    assert distillation(small()) != distillation(small(inner_steps=4))


def test_snapshots_stay_when_the_model_changes_in_place() -> None:
    component, vector = distillation(small()), torch.arange(28.0)
    state = component.init(server_context(TinyNetwork(), vector))
    vector.add_(1)
    passed, state = component.refine(state, vector, [], context(vector=vector))
    assert passed is vector
    vector.zero_()
    assert torch.equal(state["snapshots"][0], torch.arange(28.0))
    assert torch.equal(state["snapshots"][1], torch.arange(28.0) + 1)


def trained_state(component: TrajectoryDistillation, **more: Any) -> State:
    """The state after a synthesis on a walk of four models."""
    generator = Stream(("walk",)).torch()
    start = torch.randn(28, generator=generator)
    state = component.init(server_context(TinyNetwork(), start))
    for round in range(1, 4):
        vector = start + round * 0.1 * torch.randn(28, generator=generator)
        _, state = component.refine(state, vector, [], context(vector=vector, round=round, **more))
    return state


def test_neither_state_nor_model_is_changed_in_place() -> None:
    component = distillation(small())
    state, vector = trained_state(component), torch.ones(28)
    before = to_bytes(state, root="a")
    refined, fresh = component.refine(state, vector, [], context(vector=vector, round=5))
    assert to_bytes(state, root="a") == before
    assert torch.equal(vector, torch.ones(28))
    assert not torch.equal(refined, vector)
    assert fresh["finetune_loss"] is not None


def test_fine_tuning_draws_anew_each_round_and_moves_what_travels_beside_the_params_not_at_all() -> None:
    component, vector = distillation(small()), torch.cat([torch.ones(28), torch.tensor([7.0, 8.0])])
    state = trained_state(component)
    layout = replace(
        layout_of(TinyNetwork()),
        names=("classifier.weight", "classifier.bias", "optimizer.mean"),
        shapes=((4, 6), (4,), (2,)),
        num_riders=2,
    )
    refined = [
        component.refine(state, vector, [], replace(context(vector=vector, round=round), layout=layout))[0]
        for round in (5, 5, 6)
    ]
    assert torch.equal(refined[0], refined[1])
    assert not torch.equal(refined[0], refined[2])
    assert refined[0][28:].tolist() == [7.0, 8.0]


def test_fine_tuning_is_adam_on_shuffled_batches_of_the_soft_labels() -> None:
    """Eight images in batches of 3, 3 and 2, two epochs: six steps of a fresh Adam, redone here step by step."""
    component = distillation(small(augment=False, finetune_epochs=2, finetune_batch=3))
    state, vector = trained_state(component), torch.linspace(-1, 1, 28)
    sync = context(vector=vector, round=9)
    refined, fresh = component.refine(state, vector, [], sync)
    model = TinyNetwork()
    with torch.no_grad():
        model.classifier.weight.copy_(vector[:24].view(4, 6))
        model.classifier.bias.copy_(vector[24:])
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    images, soft = state["synthetic"]["images"], state["synthetic"]["labels"].softmax(dim=1)
    for epoch in range(2):
        order = torch.randperm(8, generator=sync.stream.child("finetune", epoch).child("order").torch())
        losses = []
        for index in (order[:3], order[3:6], order[6:]):
            loss = F.cross_entropy(model(images[index]), soft[index]) / 4
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(float(loss.detach()) * len(index))
    expected = torch.cat([model.classifier.weight.detach().flatten(), model.classifier.bias.detach()])
    assert torch.allclose(refined, expected, rtol=0, atol=1e-6)
    assert fresh["finetune_loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)


def test_fine_tuning_on_balanced_real_data_lowers_the_loss_over_all_clients() -> None:
    """A model fitted to two of four classes, as of a cohort without the others."""
    images, labels = (torch.from_numpy(part) for part in tiny_data())
    model = TinyNetwork()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(40):
        adam.zero_grad()
        F.cross_entropy(model(images[labels < 2]), labels[labels < 2]).backward()
        adam.step()
    vector = model_vector(model, layout_of(model))
    component = distillation(small(augment=False, finetune_epochs=20, finetune_learning_rate=0.02))
    sample = torch.cat([torch.nonzero(labels == label)[:5, 0] for label in range(4)])
    synthetic = {"images": images[sample], "labels": 10.0 * F.one_hot(labels[sample], 4).float()}
    refined, _ = component.refine({"synthetic": synthetic}, vector, [], context(vector=vector))

    def loss(params: Tensor) -> float:
        logits = images.flatten(1) @ params[:24].view(4, 6).T + params[24:]
        return float(F.cross_entropy(logits, labels))

    assert loss(refined) < 0.5 * loss(vector)


def test_inner_rate_never_falls_to_zero() -> None:
    state = trained_state(distillation(small(inner_rate=1e-5, inner_rate_learning_rate=0.1)))
    assert float(state["synthetic"]["rate"]) >= 1e-6 * (1 - 1e-6)


def test_models_that_do_not_move_are_an_error() -> None:
    component = distillation(small())
    state = component.init(server_context(TinyNetwork(), torch.ones(28)))
    for round in (1, 2):
        _, state = component.refine(state, torch.ones(28), [], context(vector=torch.ones(28), round=round))
    with pytest.raises(RunError, match="needs global models that differ"):
        component.refine(state, torch.ones(28), [], context(vector=torch.ones(28), round=3))


def test_two_equal_models_in_a_trajectory_are_passed_over() -> None:
    component = distillation(small(snapshots=4, horizon_rounds=1))
    state = component.init(server_context(TinyNetwork(), torch.ones(28)))
    for round, value in ((1, 1.0), (2, 1.0), (3, 2.0)):
        vector = torch.full((28,), value)
        _, state = component.refine(state, vector, [], context(vector=vector, round=round))
    assert np.isfinite(state["synthetic"]["trace"][-1]["objective"])


def test_divergence_is_an_error_that_says_what_to_lower() -> None:
    with pytest.raises(RunError, match=r"lower method\.inner_rate"):
        trained_state(distillation(small(inner_rate=1e38)))


def test_progress_is_told_and_reported_with_pictures() -> None:
    told: list[str] = []
    component = distillation(small())
    state = trained_state(component, message=told.append)
    assert len(told) == 10
    assert told[-1].startswith("synthesis: iteration 12 of 12, objective ")
    assert "(noise " in told[-1]
    report = component.report(state)
    assert set(report.metrics) == {
        "synthesis_objective",
        "synthesis_cosine_distance",
        "synthesis_noise_cosine_distance",
        "synthesis_inner_rate",
    }
    # 8 images of 1x6 in 3 rows and 3 columns, framed by single pixels.
    assert {picture.shape for picture in report.pictures.values()} == {(7, 22)}
    moments = (0, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)
    assert list(report.pictures) == [f"synthetic_{number:06d}" for number in moments]
    assert all(0 <= picture.min() and picture.max() <= 1 for picture in report.pictures.values())
    first, last = report.pictures["synthetic_000000"], report.pictures["synthetic_000012"]
    assert not np.array_equal(first, last)
    assert component.report(component.init(server_context(TinyNetwork()))).pictures == {}


# -- going on in the middle --------------------------------------------------------------------------------------------


class Killed(Exception):
    """The process ends."""


@pytest.mark.parametrize("kills", [1, 7])
@pytest.mark.parametrize("optimizer", [None, OptimizerSettings(name="adam", keep="persist")])
def test_synthesis_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, kills: int, optimizer: OptimizerSettings | None
) -> None:
    run = experiment(small(), optimizer=optimizer, learning_rate=0.05)
    whole = run_rounds(local_engine(run))
    store = CheckpointStore(tmp_path, keep=2, config_hash="")
    saves = 0

    def save(state: RunState) -> None:
        nonlocal saves
        store.save(state, fetch=fleet.fetch)
        saves += 1
        if saves == kills:
            raise Killed

    fleet = local_engine(run).fleet
    with pytest.raises(Killed):
        run_rounds(Engine(run, fleet, on_partial=save))
    told: list[str] = []
    fleet = local_engine(run).fleet
    engine = Engine(run, fleet, on_repair=told.append)
    engine.start()
    loaded = CheckpointStore(tmp_path, keep=2, config_hash="").newest(keep_handle=fleet.keep)
    assert loaded.state is not None
    assert loaded.state.round == 2
    (partial,) = loaded.state.partial.values()
    assert partial["done"] == kills
    resumed = run_rounds(engine, loaded.state)
    assert f"synthesis: going on after iteration {kills} of 12" in told
    assert torch.equal(resumed.vector, whole.vector)
    kept = [to_bytes(state.components["refinement0"], root="a") for state in (resumed, whole)]
    assert kept[0] == kept[1]


def test_state_survives_a_checkpoint() -> None:
    component = distillation(small())
    state = trained_state(component)
    back = from_bytes(to_bytes(state, root="a"))
    vector = torch.linspace(0, 1, 28)
    sync = context(vector=vector, round=5)
    refined = [component.refine(kept, vector, [], sync)[0] for kept in (state, back)]
    assert torch.equal(refined[0], refined[1])


def test_checkpoints_keep_their_pace() -> None:
    kept: list[State] = []
    trained_state(distillation(small(checkpoint_seconds=1e6)), checkpoint=kept.append)
    assert kept == []
    trained_state(distillation(small()), checkpoint=kept.append)
    assert [tree["done"] for tree in kept] == list(range(1, 12))


# -- with other methods ------------------------------------------------------------------------------------------------


def test_merged_with_fedprox_it_is_fedprox_up_to_the_synthesis() -> None:
    merged = merge(small(weights="size"), fedprox(mu=0.3))
    assert torch.equal(after(merged, rounds=3).vector, after(fedprox(mu=0.3), rounds=3).vector)
    assert not torch.equal(after(merged, rounds=3).vector, after(fedavg(), rounds=3).vector)
    assert not torch.equal(after(merged, rounds=4).vector, after(fedprox(mu=0.3), rounds=4).vector)
    assert merge(small(), fedprox(mu=0.3)).weighting == Uniform()


def test_merged_with_two_intervals_it_fine_tunes_once_a_round() -> None:
    two_speed = dynamicfl(high_interval=1, low_interval=3, group="random")
    merged = merge(small(weights="size"), two_speed)
    assert torch.equal(after(merged, rounds=3).vector, after(two_speed, rounds=3).vector)
    fourth = after(merged, rounds=4)
    assert not torch.equal(fourth.vector, after(two_speed, rounds=4).vector)
    assert [record.sync_points for record in fourth.records] == [
        record.sync_points for record in after(two_speed, rounds=4).records
    ]
    assert fourth.records[0].sync_points > 1
    assert len(fourth.components["refinement0"]["synthetic"]["images"]) == 8


# -- parameters --------------------------------------------------------------------------------------------------------


def test_profiles_are_the_columns_of_the_specification() -> None:
    paper, authors = distillation(dynafed()), distillation(dynafed(profile="authors"))
    assert (paper.snapshots, paper.synthesis.horizon_rounds, paper.synthesis.iterations) == (21, 5, 1000)
    assert (authors.snapshots, authors.synthesis.horizon_rounds, authors.synthesis.iterations) == (25, 3, 3000)
    for component in (paper, authors):
        synthesis = component.synthesis
        assert (synthesis.inner_steps, component.images_per_class, synthesis.augment) == (20, 15, True)
        assert (synthesis.image_learning_rate, synthesis.label_learning_rate) == (0.05, 0.01)
        assert (synthesis.inner_rate, synthesis.inner_rate_learning_rate) == (0.04, 1e-5)
        assert (component.finetune_epochs, component.finetune_learning_rate) == (20, 1e-4)
        assert (synthesis.average_target, synthesis.last_start, synthesis.batch) == (True, 50, None)
        assert component.finetune_batch == 256
    assert dynafed().weighting == Uniform()
    assert dynafed(weights="size").weighting == BySamples()


@pytest.mark.parametrize("name", sorted(PROFILES["paper"]))
def test_explicit_parameter_beats_its_profile(name: str) -> None:
    values = {"augment": False, "snapshots": 30, "horizon_rounds": 7, "inner_rate": 0.5}
    value = values.get(name, 11 if isinstance(PROFILES["paper"][name], int) else 0.125)
    for profile in ("paper", "authors"):
        component = distillation(build_method({"name": "dynafed", "profile": profile, name: value}))
        owner = component if hasattr(component, name) else component.synthesis
        assert getattr(owner, name) == value
        default = distillation(dynafed(profile=profile))
        assert replace(default, **{name: value}) == component if owner is component else True


def test_configuration_knows_its_parameters() -> None:
    spec = resolve_method({"name": "dynafed", "profile": "authors", "weights": "size"})
    assert spec["profile"] == "authors"
    assert spec["snapshots"] is None
    for name in ("horizon_rounds", "inner_steps", "iterations", "images_per_class", "augment", "finetune_epochs"):
        assert name in spec


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": "papers"}, "profile"),
        ({"weights": "sizes"}, "weights"),
        ({"snapshots": 5}, r"snapshots must exceed method\.horizon_rounds"),
        ({"horizon_rounds": 0}, r"horizon_rounds must be at least 1, but got 0"),
        ({"inner_steps": 0}, r"inner_steps must be at least 1"),
        ({"iterations": 0}, r"iterations must be at least 1"),
        ({"images_per_class": 0}, r"images_per_class must be at least 1"),
        ({"finetune_epochs": -1}, r"finetune_epochs must be at least 0"),
        ({"finetune_learning_rate": -1.0}, r"finetune_learning_rate must be a number of at least 0"),
        ({"finetune_batch": 0}, r"finetune_batch must be at least 1"),
        ({"synthesis_batch": 0}, r"synthesis_batch must be at least 1 or null"),
        ({"inner_rate": 0.0}, r"inner_rate must be a number above 0"),
        ({"memory_limit_mb": float("inf")}, r"memory_limit_mb must be"),
        ({"checkpoint_seconds": -1.0}, r"checkpoint_seconds must be"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dynafed(**wrong)


def test_models_with_batch_statistics_or_of_unknown_inputs_are_refused() -> None:
    component = distillation(small())
    with pytest.raises(ConfigError, match="batch statistics"):
        component.init(server_context(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))))
    with pytest.raises(ConfigError, match="input_shape"):
        component.init(server_context(linear_model()))
