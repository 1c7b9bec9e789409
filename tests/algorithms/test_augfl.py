"""AugFL: the ADMM identities, the server's step, what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedsweep.algorithms.augfl import AdaptedTest, augfl
from fedsweep.components import LocalClient
from fedsweep.errors import ConfigError
from fedsweep.streams import stream
from fedsweep.testing import linear_model, local_engine, play_round, run_rounds, tiny_data, tiny_experiment

torch.set_num_threads(1)
SIZES = (10, 20, 30, 16, 12, 8)


def experiment(method: Any, **options: Any) -> Any:
    images, labels = tiny_data(num_samples=24, seed=7)
    return tiny_experiment(
        method, **{"sizes": SIZES, "cohort_size": 6, "batch_size": 32, **options}, proxy=(images, labels)
    )


def gradient(engine: Any, vector: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    leaf = vector.clone().requires_grad_()
    logits = torch.func.functional_call(engine.tester.model, engine.layout.params(leaf), (inputs,))
    return torch.autograd.grad(F.cross_entropy(logits, targets), leaf)[0]


def test_a_client_without_samples_of_its_present_classes_tests_the_model_as_it_is() -> None:
    """The loss of no samples is NaN, and so was each answer of the adapted model: class 0."""
    inputs, model = torch.eye(4).view(4, 1, 1, 4), linear_model(4)
    client = LocalClient(
        client=0,
        round=1,
        inputs=inputs[:0],
        targets=torch.zeros(0, dtype=torch.int64),
        num_classes=4,
        anchor={},
        params={name: value.detach() for name, value in model.named_parameters()},
        model=model,
        forward_with=lambda values, given: torch.func.functional_call(model, values, (given,)),
        stream=stream(0, "test"),
    )
    assert torch.equal(AdaptedTest(adaptation_rate=0.1).predictor(client)(inputs), model(inputs))


def test_without_adaptation_and_transfer_the_first_round_is_a_step_of_federated_sgd() -> None:
    """From dual variables of 0, ``theta' - theta = -2 / (N rho) sum_k w_k grad_k`` on the query halves."""
    engine = local_engine(experiment(augfl(adaptation_rate=0.0, transfer=0.0, penalty=0.5), double=True))
    round = play_round(engine)
    start, expected = engine.experiment.initial_vector, torch.zeros_like(round.vector)
    for update in round.updates:
        y = round.memories[update.client]["terms"]["augfl"]
        sent = torch.cat([(update.params[n] - engine.layout.params(start)[n]).reshape(-1) for n in y])
        dual = torch.cat([value.reshape(-1) for value in y.values()])  # -w g
        assert torch.allclose(sent, 2 * dual / 0.5, atol=1e-14)
        expected += sent / 6
    assert torch.allclose(round.vector - start, expected, atol=1e-14)


def test_the_dual_variable_is_minus_the_weighted_meta_gradient() -> None:
    engine = local_engine(experiment(augfl(adaptation_rate=0.1, transfer=0.0), double=True, batch_size=1))
    round = play_round(engine)  # a batch of one sample is support and query
    start, data = engine.experiment.initial_vector, engine.experiment.world.data
    for client, size in enumerate(SIZES):
        own = engine.experiment.world.indices[client]
        dual = torch.cat([v.reshape(-1) for v in round.memories[client]["terms"]["augfl"].values()])
        found = []
        for index in own:
            x, y = torch.from_numpy(data.images[[index]]), torch.from_numpy(data.labels[[index]])
            r = gradient(engine, start - 0.1 * gradient(engine, start, x, y), x, y)
            delta = 1 / 110
            above, below = (gradient(engine, start + s * delta * r, x, y) for s in (1, -1))
            found.append(-size / sum(SIZES) * (r - 0.1 * (above - below) / (2 * delta)))
        assert min(float((dual - value).abs().max()) for value in found) < 1e-12


def test_the_server_steps_down_the_distance_to_its_teacher() -> None:
    plain, pulled = (
        play_round(local_engine(experiment(augfl(transfer=t, teacher_steps=30), double=True))) for t in (0.0, 2.0)
    )
    state = pulled.components["refinement0"]
    engine = local_engine(experiment(augfl()))
    assert state["teacher"].shape == (engine.layout.num_values,)
    assert state["distance"] > 0
    ratio = (pulled.vector - plain.vector).norm()
    halved = play_round(local_engine(experiment(augfl(transfer=1.0, teacher_steps=30), double=True)))
    assert torch.allclose(pulled.vector - plain.vector, 2 * (halved.vector - plain.vector), atol=1e-12)
    assert ratio > 0


def test_the_pull_is_a_share_of_all_clients_whoever_is_there() -> None:
    """R and its gradient are those of the start, so in round 1 the pull does not depend on the cohort."""
    pulls = []
    for cohort in (2, 6):
        plain, pulled = (
            play_round(local_engine(experiment(augfl(transfer=t, teacher_steps=5), double=True, cohort_size=cohort)))
            for t in (0.0, 2.0)
        )
        pulls.append(pulled.vector - plain.vector)
    assert pulls[0].norm() > 0
    assert torch.allclose(pulls[0], pulls[1], atol=1e-14)


def test_the_servers_work_is_counted() -> None:
    """A network of 24 weights and 24 samples: 5 steps of the teacher, then its forward pass and a step's three."""
    rows = run_rounds(local_engine(experiment(augfl(teacher_steps=5, server_batch=24)))).records
    forward = 2 * 24 * 24
    assert [row.extra["server_flops"] for row in rows] == [5 * 3 * forward + 4 * forward, 4 * forward, 4 * forward]


def test_one_model_each_way_and_the_number_of_clients_once() -> None:
    engine = local_engine(experiment(augfl(transfer=0.0), cohort_size=6))
    rows = run_rounds(engine).records
    values = engine.layout.num_values
    assert [row.values_up for row in rows] == [6 * values] * 3
    assert [row.values_down for row in rows] == [6 * (values + 1), 6 * values, 6 * values]
    assert [row.local_steps for row in rows] == [6] * 3


def test_it_learns_and_adapts() -> None:
    whole = run_rounds(local_engine(experiment(augfl(teacher_steps=50, transfer=0.5), rounds=6)))
    first, last = whole.records[0], whole.records[-1]
    assert last.test_loss is not None and first.test_loss is not None
    assert last.test_loss < first.test_loss
    assert 0 < last.extra["personal_accuracy"] <= 1


def test_a_server_without_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match="augfl trains its teacher on labelled samples"):
        tiny_experiment(augfl()).initial_states  # noqa: B018
