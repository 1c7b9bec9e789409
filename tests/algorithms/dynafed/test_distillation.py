from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_server, tiny_sync
from tiny_synthesis import TinyNetwork, distillation, small
from torch import Tensor, nn

from fedsweep.algorithms.dynafed.distillation import TrajectoryDistillation
from fedsweep.errors import ConfigError, RunError
from fedsweep.records import ServerContext, State, SyncContext
from fedsweep.runs.checkpoints.state_codec import from_bytes, to_bytes
from fedsweep.streams import Stream
from fedsweep.testing import component_conforms, linear_model, tiny_data
from fedsweep.trees import layout_of, model_vector


def context(*, vector: Tensor, round: int = 1, stream: Stream | None = None, **more: Any) -> SyncContext:
    return tiny_sync(
        TinyNetwork(),
        vector,
        round=round,
        stream=stream or Stream(("test", round)),
        checkpoint=more.pop("checkpoint", lambda tree: None),
        **more,
    )


def server_context(model: nn.Module, vector: Tensor | None = None) -> ServerContext:
    layout = layout_of(model)
    return tiny_server(
        model, model_vector(model, layout) if vector is None else vector, layout=layout, stream=Stream(("test", 0))
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
    """Adam's steps of about 1 from a rate that is far too high would go below zero."""
    state = trained_state(distillation(small(inner_rate=3.0, inner_rate_learning_rate=1.0)))
    assert float(state["synthetic"]["rate"]) >= 1e-6 * (1 - 1e-6)


def test_an_inner_rate_that_is_not_learned_stays_where_it_is() -> None:
    state = trained_state(distillation(small(inner_rate=1e-8, inner_rate_learning_rate=0.0)))
    assert float(state["synthetic"]["rate"]) == pytest.approx(1e-8)


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
    # The objective of the last iteration is a number, its gradients are none.
    with pytest.raises(RunError, match=r"diverged: the last iteration's gradients .*; lower method\.inner_rate"):
        trained_state(distillation(small(iterations=1, inner_steps=2, inner_rate=1e19, augment=False)))


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
        "synthesis_parameter_cosine_distance",
        "synthesis_noise_parameter_cosine_distance",
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


def test_models_with_batch_statistics_or_of_unknown_inputs_are_refused() -> None:
    component = distillation(small())
    with pytest.raises(ConfigError, match="batch statistics"):
        component.init(server_context(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))))
    with pytest.raises(ConfigError, match="input_shape"):
        component.init(server_context(linear_model()))
