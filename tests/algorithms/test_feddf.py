"""FedDF: ensemble distillation on the server, and the student that it shares with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import normed, tiny_sync
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddf import feddf
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.parts.distilling import Student, batches, cosine_rate
from fedsweep.algorithms.parts.ensembles import ensemble_logits
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.network import ModelShape
from fedsweep.models.networks.chains import Mlp
from fedsweep.models.user_network import adopt
from fedsweep.records import SyncContext
from fedsweep.streams import stream
from fedsweep.testing import linear_model, local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import layout_of, load_vector, model_vector

IMAGES = np.random.default_rng(5).normal(size=(24, 1, 1, 6)).astype(np.float32)
PROXY = (IMAGES, None)
SHORT = {"steps": 20, "check_every": 5, "patience": 10, "batch_size": 8}


def run(method: FederatedMethod, **options: object) -> RunState:
    options = {"proxy": PROXY} | options
    return run_rounds(local_engine(tiny_experiment(method, **options)))  # type: ignore[arg-type]


def place(model: nn.Module, vector: Tensor) -> SyncContext:
    return tiny_sync(model, vector, anchors={0: vector}, cohort=(0, 1, 2))


def test_one_step_of_a_student_by_hand() -> None:
    """The gradient of KL(p || q) by the logits is (q - p) / B; SGD at 0.5."""
    model = linear_model().double()
    vector = model_vector(model, layout_of(model))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 1, 1, 6, dtype=torch.float64, generator=generator)
    targets = torch.randn(8, 4, dtype=torch.float64, generator=generator).softmax(dim=1)
    student = Student(vector, place(model, vector), batch_norm="proxy")
    sgd = torch.optim.SGD(student.module.parameters(), lr=0.5)
    loss = student.step(sgd, inputs, targets, temperature=2.0, clip_norm=float("inf"))
    weight, bias = vector[:24].view(4, 6), vector[24:]
    q = ((inputs.flatten(1) @ weight.T + bias) / 2).softmax(dim=1)
    slope = (q - targets) / 8 / 2
    expected = torch.cat([(weight - 0.5 * slope.T @ inputs.flatten(1)).reshape(-1), bias - 0.5 * slope.sum(dim=0)])
    torch.testing.assert_close(student.vector(), expected, rtol=0, atol=1e-14)
    assert loss == pytest.approx(float((targets * (targets / q).log()).sum() / 8), abs=1e-14)
    assert torch.equal(model_vector(model, layout_of(model)), vector)


def test_identical_teachers_teach_nothing() -> None:
    """With SGD, which does not blow rounding up, the loss is 0 and the student stays."""
    model = Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)
    vector = model_vector(model, layout_of(model))
    inputs = torch.from_numpy(IMAGES)
    student = Student(vector, place(model, vector), batch_norm="proxy")
    sgd = torch.optim.SGD(student.module.parameters(), lr=0.1)
    with torch.no_grad():
        targets = model(inputs).softmax(dim=1)
    losses = [student.step(sgd, inputs, targets, temperature=1.0, clip_norm=5.0) for _ in range(10)]
    assert max(losses) < 1e-6
    torch.testing.assert_close(student.vector(), vector, rtol=0, atol=1e-6)


def test_a_long_gradient_is_clipped() -> None:
    model = linear_model()
    vector = model_vector(model, layout_of(model))
    student = Student(vector, place(model, vector), batch_norm="proxy")
    sgd = torch.optim.SGD(student.module.parameters(), lr=1.0)
    targets = torch.eye(4)[torch.zeros(24, dtype=torch.int64)]
    student.step(sgd, 100 * torch.from_numpy(IMAGES), targets, temperature=1.0, clip_norm=0.25)
    assert float((student.vector() - vector).norm()) == pytest.approx(0.25, rel=1e-4)


def test_the_student_comes_closer_to_the_ensemble() -> None:
    """Than the plain mean of the same clients, which all methods' first round has."""

    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    options: dict[str, object] = {"build": build, "rounds": 1, "local_epochs": 5}
    method = feddf(**(SHORT | {"steps": 200, "check_every": 200, "learning_rate": 0.01}))  # type: ignore[arg-type]
    engine = local_engine(tiny_experiment(method, proxy=PROXY, **options))  # type: ignore[arg-type]
    played = play_round(engine)
    model, inputs = engine.experiment.build_model(), torch.from_numpy(IMAGES)
    targets = ensemble_logits(played.updates, place(model, played.vector), inputs).mean(dim=0).softmax(dim=1)

    def loss(vector: Tensor) -> float:
        load_vector(model, layout_of(model), vector)
        with torch.no_grad():
            found = model(inputs).log_softmax(dim=1)
        return float((targets * (targets.log() - found)).sum(dim=1).mean())

    assert loss(played.vector) < 0.5 * loss(run(fedavg(), **options).vector)


def test_teachers_stay_and_a_constant_on_their_logits_changes_nothing() -> None:
    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    engine = local_engine(tiny_experiment(fedavg(), double=True, build=build, local_epochs=5))
    played = play_round(engine)
    before = [u.vector.clone() for u in played.updates if u.vector is not None]
    component = feddf(**SHORT).refinements[0]  # type: ignore[arg-type]
    inputs = torch.from_numpy(IMAGES).double()
    sync = replace(place(engine.experiment.build_model(), played.vector), proxy_data=(inputs, None))
    state = {"loss": None, "steps": 0}
    first, _ = component.refine(state, played.vector, played.updates, sync)
    shifted = []
    for update, constant in zip(played.updates, (1.0, -2.0, 5.0), strict=True):
        assert update.vector is not None
        vector = update.vector.clone()
        vector[-4:] += constant  # the classifier's biases
        shifted.append(replace(update, vector=vector))
    second, _ = component.refine(state, played.vector, shifted, sync)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-9)
    assert not torch.equal(first, played.vector)
    assert all(torch.equal(u.vector, b) for u, b in zip(played.updates, before, strict=True) if u.vector is not None)


def test_the_best_student_is_kept_and_patience_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracies .3, .5, .4, .5 after steps 5, 10, 15, 20: the second is the best, and ten steps later it is over."""
    seen: list[Tensor] = []

    def scripted(student: Student, inputs: Tensor, targets: Tensor) -> float:
        assert len(inputs) == len(targets) == 8
        seen.append(student.vector())
        return [0.3, 0.5, 0.4, 0.5][len(seen) - 1]

    monkeypatch.setattr(Student, "accuracy", scripted)
    validation = (IMAGES[:8], np.zeros(8, dtype=np.int64))
    engine = local_engine(tiny_experiment(feddf(**(SHORT | {"steps": 500})), proxy=PROXY, validation=validation))  # type: ignore[arg-type]
    played = play_round(engine)
    state = played.components["refinement0"]
    assert state["steps"] == 20 and set(state) == {"loss", "steps"}  # the data is no part of it
    assert torch.equal(played.vector, seen[1]) and not torch.equal(seen[1], seen[3])


def test_a_students_accuracy_is_that_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(6, 4))
    vector = model_vector(model, layout_of(model))
    student = Student(vector, place(model, vector), batch_norm="proxy")
    inputs = torch.from_numpy(IMAGES)
    own = (inputs.flatten(1) @ vector[:24].view(4, 6).T + vector[24:]).argmax(dim=1)
    assert student.accuracy(inputs, own) == 1.0
    assert student.accuracy(inputs, torch.cat([own[:18], (own[18:] + 1) % 4])) == 0.75


def test_batch_norms_statistics_follow_the_proxy_data_or_stay() -> None:
    options: dict[str, object] = {"build": normed, "rounds": 1}
    plain = run(fedavg(), **options).vector[-12:]
    frozen = run(feddf(**SHORT, batch_norm="frozen"), **options).vector[-12:]  # type: ignore[arg-type]
    proxy = run(feddf(**SHORT), **options).vector[-12:]  # type: ignore[arg-type]
    assert torch.equal(frozen, plain)
    torch.testing.assert_close(proxy[:6], torch.from_numpy(IMAGES).flatten(1).mean(dim=0), rtol=0, atol=0.3)
    assert not torch.equal(proxy, plain)


def test_statistics_are_read_anew() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))
    vector = model_vector(model, layout_of(model))
    student = Student(vector, place(model, vector), batch_norm="proxy")
    inputs = torch.from_numpy(IMAGES)
    mean, variance = student.with_statistics(vector + 1, inputs)[-12:].split(6)
    torch.testing.assert_close(mean, inputs.flatten(1).mean(dim=0))
    torch.testing.assert_close(variance, inputs.flatten(1).var(dim=0))


def test_statistics_of_a_frozen_batch_norm_are_not_read_anew() -> None:
    norm = nn.BatchNorm1d(6).requires_grad_(False)
    nn.init.constant_(norm.get_buffer("running_mean"), 3.0)
    module = nn.Sequential(nn.Flatten(), norm, nn.BatchNorm1d(6), nn.Linear(6, 4))
    model = adopt(module, name="own", shape=ModelShape(input_shape=(1, 1, 6), num_classes=4))
    layout = layout_of(model)
    vector = model_vector(model, layout)
    inputs = torch.from_numpy(IMAGES)
    read = Student(vector, place(model, vector), batch_norm="proxy").with_statistics(vector, inputs)
    expected = (inputs.flatten(1).mean(dim=0) - 3.0) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(layout.views(read)["module.2.running_mean"], expected)


def test_dropout_draws_from_a_stream() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    torch.manual_seed(1)
    first = run(feddf(**SHORT), build=build).vector  # type: ignore[arg-type]
    torch.manual_seed(2)
    assert torch.equal(first, run(feddf(**SHORT), build=build).vector)  # type: ignore[arg-type]


@pytest.mark.slow
def test_sub_models_teach_too() -> None:
    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    method = merge(feddf(**SHORT), fedad(base_rate=0.4, refresh=(1,)))  # type: ignore[arg-type]
    assert bool(torch.isfinite(run(method, build=build).vector).all())


def test_batches_are_whole_and_each_pass_is_in_its_own_order() -> None:
    found = list(batches(10, 4, stream(0, "test"), steps=4))
    assert [len(index) for index in found] == [4] * 4
    assert len({*found[0].tolist(), *found[1].tolist()}) == 8
    assert found[0].tolist() != found[2].tolist()
    assert [len(index) for index in batches(3, 8, stream(0, "test"), steps=2)] == [3, 3]


def test_the_rate_falls_along_half_a_cosine() -> None:
    assert [cosine_rate(step, 4) for step in range(5)] == pytest.approx([1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_nothing_but_models_travels() -> None:
    for record in run(feddf(**SHORT)).records:  # type: ignore[arg-type]
        assert record.values_up == record.values_down == 3 * 28
        assert record.extra["distillation_steps"] == 20


def test_what_is_missing_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"feddf needs data on the server.*scenario\.server_data\.proxy"):
        check_experiment(tiny_experiment(feddf()))
    with pytest.raises(ConfigError, match=r"method\.keep=best needs validation data on the server"):
        check_experiment(tiny_experiment(feddf(keep="best"), proxy=PROXY))
