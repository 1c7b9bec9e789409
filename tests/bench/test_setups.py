from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fedsweep.bench import data, rounds, speed_test, workloads
from fedsweep.bench.networks import SpeedCnn
from fedsweep.bench.plain import PlainLoop, plain_processes, work_of
from fedsweep.bench.setup import Figure, Request, in_turns
from fedsweep.bench.setups import SETUPS
from fedsweep.errors import InvariantError
from fedsweep.streams import stream
from fedsweep.testing import build_model, local_engine
from fedsweep.trees import layout_of, model_vector
from fedsweep.world.data.datasets import Dataset

PEERS = Path(__file__).resolve().parents[1] / "benchmarks" / "peers"
COLOUR = (3, 32, 32)


def given(**training: object) -> dict[str, object]:
    asked = {"cohort_size": 4, "local_steps": 2, "batch_size": 5, "optimizer": {"name": "sgd", "lr": 0.1}}
    return {
        "scenario": {"clients": 4},
        "model": {"name": "lenet5"},
        "method": {"name": "fedavg"},
        "training": {**asked, **training},
        "runtime": {"backend": "local", "device": "cpu"},
    }


def small_noise() -> Dataset:
    return data.noise("cifar10", samples=40)


def test_the_speed_tests_network_has_the_published_size() -> None:
    network = SpeedCnn(input_shape=COLOUR, num_classes=10)
    assert sum(p.numel() for p in network.parameters()) == 1_626_442


def test_the_speed_test_is_the_published_one() -> None:
    plan = speed_test.planned(data.noise("cifar10", samples=50_000), {"backend": "local"})
    training, indices = plan.experiment.training, plan.experiment.world.indices
    assert (len(indices), {len(own) for own in indices}) == (1000, {50})
    assert (training.cohort_size, training.local_steps, training.batch_size) == (50, 5, 10)
    assert (training.learning_rate, plan.experiment.layout.num_params) == (0.1, 1_626_442)
    assert speed_test.ROUNDS == 1500


def test_figures_are_medians_of_pairs() -> None:
    figure = Figure(what="", ours_s=(1.0, 2.0, 4.0), reference_s=(2.0, 2.0, 2.0), asked=1.0)
    assert figure.ratios == (2.0, 1.0, 0.5)
    assert (figure.ratio, figure.seconds, figure.is_good) == (1.0, 2.0, True)


@pytest.mark.parametrize(
    ("figure", "good"),
    [
        (Figure(what="", ours_s=(2.0,), reference_s=(1.9,), asked=1.0), False),
        (Figure(what="", ours_s=(2.0,), limit_s=2.0), True),
        (Figure(what="", ours_s=(2.1,), limit_s=2.0), False),
        (Figure(what="", ours_s=(2.0,), reference_s=(4.0,), asked=1.0, limit_s=1.0), False),
        (Figure(what="", ours_s=(2.0,), reference_s=(4.0,)), None),
    ],
)
def test_a_figure_is_good_where_all_that_is_asked_is_reached(figure: Figure, good: bool | None) -> None:
    assert figure.is_good is good


def test_sides_are_measured_in_turns_after_a_try_of_each() -> None:
    calls: list[str] = []

    def side(name: str, seconds: Iterator[float]) -> float:
        calls.append(name)
        return next(seconds)

    mine, theirs = iter([9.0, 1.0, 2.0]), iter([9.0, 3.0, 4.0])
    found = in_turns(lambda: side("ours", mine), lambda: side("theirs", theirs), 2, what="w")
    assert found == Figure(what="w", ours_s=(1.0, 2.0), reference_s=(3.0, 4.0))
    assert calls == ["theirs", "ours", "ours", "theirs", "ours", "theirs"]


def test_the_plain_loop_comes_to_fedsweeps_model() -> None:
    # One step of all of a client's samples: no draw of an order can tell the two apart.
    plan = rounds.plan_of(given(local_steps=1, batch_size=10), small_noise())
    engine = local_engine(plan.experiment)
    state, _ = engine.advance(engine.start())
    loop = PlainLoop(work_of(plan, small_noise()))
    loop.play(1)
    plain = torch.cat([value.flatten() for value in loop._server])
    start = plan.experiment.initial_vector
    assert float((state.vector - start).norm()) > 1e-3
    torch.testing.assert_close(plain - start, state.vector - start, rtol=1e-4, atol=1e-6)


def test_the_plain_loop_in_step_comes_to_the_same_where_a_round_has_one_step() -> None:
    plan = rounds.plan_of(given(local_steps=1, batch_size=10), small_noise())
    rounds_apart, in_step = (PlainLoop(work_of(plan, small_noise())) for _ in range(2))
    rounds_apart.play(1)
    in_step.play_in_step(1)
    for one, other in zip(rounds_apart._server, in_step._server, strict=True):
        torch.testing.assert_close(one, other)


def test_images_made_ready_by_client_or_by_batch_are_the_same() -> None:
    work = work_of(rounds.plan_of(given(local_steps=1, batch_size=5), small_noise()), small_noise())
    by_client, by_batch = PlainLoop(work, readies_clients=True), PlainLoop(work)
    for loop in (by_client, by_batch):
        loop.play(2)
    for one, other in zip(by_client._server, by_batch._server, strict=True):
        torch.testing.assert_close(one, other)


def test_shares_of_the_work_are_all_of_it() -> None:
    whole = work_of(rounds.plan_of(given(cohort_size=3), small_noise()), small_noise())
    shares = [whole.share(part, 2) for part in range(2)]
    assert [share.cohort for share in shares] == [2, 1]
    assert sum(len(share.labels) for share in shares) == len(whole.labels)


def test_a_plain_loop_refuses_what_it_does_not_do() -> None:
    asked = given(optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9})
    with pytest.raises(InvariantError, match="plain SGD alone"):
        work_of(rounds.plan_of(asked, small_noise()), small_noise())


@pytest.mark.slow
def test_plain_processes_play_and_end() -> None:
    work = work_of(rounds.plan_of(given(), small_noise()), small_noise())
    with plain_processes(work, 2) as play:
        assert play(1) > 0


def test_a_set_up_is_measured_through_the_real_code_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data._SHAPES, "cifar10", (COLOUR, 2000))
    monkeypatch.setattr(data, "is_present", lambda name, *, root: False)
    clients, batches = SETUPS["W2"].measure(Request(rounds=1, repeats=2))
    assert (clients.asked, batches.asked) == (1.0, None)
    for figure in (clients, batches):
        assert (len(figure.ours_s), len(figure.reference_s)) == (2, 2)
        assert min(*figure.ours_s, *figure.reference_s) > 0 and figure.data == "noise shaped like cifar10"


def test_the_logistic_regression_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "is_present", lambda name, *, root: False)
    (figure,) = SETUPS["L1"].measure(Request(rounds=1, repeats=1))
    assert figure.what.startswith("1 rounds") and figure.data == "noise shaped like mnist"


def test_noise_is_the_same_each_time() -> None:
    one, other = small_noise(), small_noise()
    assert np.array_equal(one.train_images, other.train_images) and one.train_images.std() > 70
    assert data.noise_like_mnist(root="", download=False).image_shape == (1, 28, 28)


@pytest.fixture(scope="module")
def peers_work() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_work", PEERS / "work.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers_work"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["speed_cnn", "lenet5"])
def test_peers_train_the_same_network(peers_work: ModuleType, name: str) -> None:
    ours = (
        SpeedCnn(input_shape=COLOUR, num_classes=10)
        if name == "speed_cnn"
        else build_model("lenet5", input_shape=COLOUR, num_classes=10, stream=stream(0, "model"))
    ).eval()
    theirs = peers_work.network(name).eval()
    vector = model_vector(ours, layout_of(ours))
    torch.nn.utils.vector_to_parameters(vector, theirs.parameters())
    inputs = torch.randn(3, *COLOUR)
    torch.testing.assert_close(theirs(inputs), ours(inputs))


def test_peers_batches_are_permutations(peers_work: ModuleType) -> None:
    images, labels = np.arange(8, dtype=np.float32).reshape(2, 4, 1, 1, 1), np.arange(8).reshape(2, 4)
    inputs, targets = peers_work.samples(images, labels, 1, 6)
    assert sorted(targets[:4].tolist()) == [4, 5, 6, 7] and inputs.flatten().tolist() == targets.tolist()


def test_w3_synchronises_at_every_step() -> None:
    plan = workloads.planned(
        data.noise("cifar10", samples=1000),
        method={"name": "dynamicsgd", "sync_rule": "paper"},
        steps=3,
        runtime={"backend": "local"},
    )
    engine = local_engine(plan.experiment)
    state, _ = engine.advance(engine.start())
    assert state.records[-1].sync_points == 3
