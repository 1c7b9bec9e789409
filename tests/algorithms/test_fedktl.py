"""FedKTL: the frame, the margin, the discrepancy; what travels; learning and going on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedsweep.algorithms.fedktl import (
    ClippedSteps,
    cosines,
    discrepancy,
    fedktl,
    simplex,
    with_margin,
)
from fedsweep.errors import ConfigError
from fedsweep.streams import Stream
from fedsweep.testing import (
    build_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_data,
    tiny_experiment,
)

torch.set_num_threads(1)
SMALL = {"latent_width": 3, "decoder_steps": 5, "server_epochs": 5}


def network() -> torch.nn.Module:
    return build_model("mlp", input_shape=(1, 1, 6), num_classes=4, stream=Stream(("m",)), hidden_width=5)


def experiment(method: Any, **options: Any) -> Any:
    return tiny_experiment(method, build=network, **{"cohort_size": 6, **options}, proxy=(tiny_data(seed=5)[0], None))


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_the_frame_is_a_simplex(classes: int) -> None:
    products = simplex(classes).T @ simplex(classes)
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1.0)
    assert torch.allclose(products, expected, atol=1e-12)


def test_margins_by_hand_and_beyond_pi() -> None:
    found = torch.tensor([[0.5, 0.1], [0.2, -0.99], [1.0, 0.0]], dtype=torch.float64)
    moved = with_margin(found, torch.tensor([0, 1, 0]), 0.5)
    assert moved[0].tolist() == pytest.approx([math.cos(math.acos(0.5) + 0.5), 0.1])
    assert moved[1].tolist() == pytest.approx([0.2, -0.99 - 0.5 * math.sin(0.5)])
    assert moved[2, 0] == pytest.approx(math.cos(0.5), abs=1e-3)  # the clamp keeps acos in its range
    assert torch.equal(with_margin(found, torch.tensor([0, 1, 0]), 0.0)[0, 1], found[0, 1])


def test_the_discrepancy_of_a_sample_with_itself_is_0() -> None:
    x, y = (torch.randn(5, 3, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    assert float(discrepancy(x, x)) == pytest.approx(0.0, abs=1e-6)
    by_hand = 0.0
    for width in (10, 15, 20, 50):
        for a, b, sign in ((x, x, 1), (y, y, 1), (x, y, -2)):
            by_hand += sign * sum(math.exp(-float((p - q).square().sum()) / (2 * width)) for p in a for q in b) / 25
    assert float(discrepancy(x, y)) == pytest.approx(by_hand, abs=1e-5)


def test_without_images_and_margin_clients_learn_alone() -> None:
    method = fedktl(strength=0.0, margin=0.0, scale=4.0, **SMALL)
    engine = local_engine(experiment(method, rounds=2, num_clients=2, cohort_size=2, local_steps=1, batch_size=48))
    state = run_rounds(engine)
    assert torch.equal(state.vector, engine.experiment.initial_vector)  # nothing travels
    for client in range(2):
        own = engine.experiment.world.indices[client]
        inputs = torch.from_numpy(engine.experiment.world.data.images[own])
        targets = torch.from_numpy(engine.experiment.world.data.labels[own])
        model = engine.experiment.new_model()
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(4.0 * cosines(model(inputs), simplex(4)), targets).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad  # type: ignore[operator]
        kept = state.memories[client]["terms"]["fedktl"]["values"]
        assert all(torch.allclose(kept[n], p, atol=1e-5) for n, p in model.named_parameters())


def test_prototypes_go_up_and_images_come_down() -> None:
    engine = local_engine(experiment(fedktl(**SMALL)))
    rows = run_rounds(engine).records
    classes = sum(int((p.label_counts > 0).sum()) for p in engine.experiment.world.profiles)
    frame, projection, pairs = 4 * 4, 3 * 5 + 3, 4 * (6 + 3)
    assert [row.values_up for row in rows] == [classes * 4] * 3
    assert [row.values_down for row in rows] == [6 * (frame + projection), 6 * pairs, 6 * pairs]


def test_prototypes_are_normalised_means_by_class() -> None:
    round = play_round(local_engine(experiment(fedktl(**SMALL))))
    for update in round.updates:
        assert torch.allclose(update.extras["prototypes/means"].norm(dim=1), torch.ones(1), atol=1e-5)
    state = round.components["refinement0"]
    assert state["images"].shape == (4, 1, 1, 6)
    assert state["centroids"].shape == (4, 3)


def test_a_class_that_nobody_has_keeps_its_centroid() -> None:
    engine = local_engine(experiment(fedktl(**SMALL), num_clients=6, cohort_size=1))
    before = engine.start().components["refinement0"]["centroids"]
    round = play_round(engine)
    known = engine.experiment.world.profiles[round.updates[0].client].label_counts > 0
    after = round.components["refinement0"]["centroids"]
    for label in range(4):
        assert torch.equal(before[label], after[label]) != bool(known[label])


def test_images_change_what_clients_learn_and_projections_begin_anew() -> None:
    one, other = (run_rounds(local_engine(experiment(fedktl(strength=s, **SMALL)))) for s in (0.0, 5.0))
    kept = [state.memories[0]["terms"]["fedktl"] for state in (one, other)]
    assert not torch.equal(kept[0]["values"]["classifier.weight"], kept[1]["values"]["classifier.weight"]) or any(
        not torch.equal(kept[0]["values"][n], kept[1]["values"][n]) for n in kept[0]["values"]
    )
    assert kept[1].keys() == {"values"}


def test_own_models_learn() -> None:
    whole = run_rounds(local_engine(experiment(fedktl(**SMALL), rounds=4)))
    assert whole.records[-1].extra["personal_accuracy"] > 0.7
    assert whole.records[-1].extra["alignment_loss"] > 0


def test_the_servers_work_is_counted() -> None:
    """By layers: the decoder's training in round 1, its images, and the transformer's steps."""
    width, latent, classes, proxies = 32, 3, 4, len(tiny_data(seed=5)[0])
    inside = 1 * 2 * width  # the smallest maps of inputs of 1 x 6 are 1 x 2
    encoder = 9 * width * (1 * 3) + 9 * width * width * (1 * 2) + inside * 2 * latent
    decoder = latent * inside + 9 * width * width * (2 * 4) + 9 * width * (4 * 8)
    rows = run_rounds(local_engine(experiment(fedktl(**SMALL)))).records
    aligning = [row.extra["server_flops"] - 2 * decoder * classes for row in rows]
    assert aligning[0] - aligning[1] == 5 * 2 * 3 * min(64, proxies) * (encoder + decoder)
    assert aligning[1] > 0 and aligning[1] % (2 * 3 * (classes * classes + classes * latent)) == 0


def test_a_step_is_on_a_gradient_of_at_most_that_norm() -> None:
    value = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([value], lr=1.0)

    def steep() -> torch.Tensor:
        value.grad = torch.tensor([300.0, 400.0])
        return torch.tensor(7.0)

    assert float(ClippedSteps(norm=100.0).step(optimizer, steep)) == 7.0
    assert torch.allclose(value.detach(), torch.tensor([-60.0, -80.0]))


def test_a_server_without_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="proxy"):
        tiny_experiment(fedktl(), build=network).initial_states  # noqa: B018
