"""FedAvg and FedSGD against closed forms and identities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tiny import vector
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg, fedsgd
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.aggregation import Uniform, Weighting
from fedsweep.components.planning import Pacing
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.records import LocalJob, RoundContext, State, SyncPoint
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_data, tiny_experiment
from fedsweep.testing.subject import Point, Quadratic

CURVATURES, CENTRES = (1.0, 4.0), (0.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class SomeSteps(Pacing):
    """Client k takes ``steps[k]`` steps of those that it has."""

    steps: tuple[int, ...]

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        start = tuple(LocalJob(client=k, steps=self.steps[k]) for k in context.cohort)
        return (SyncPoint(start=start, attend=context.cohort),), state


def quadratics(
    steps: Sequence[int], weighting: Weighting, *, rounds: int, learning_rate: float = 0.1, **more: object
) -> Experiment:
    """Two clients with f_k = a_k / 2 (w - b_k)^2, a = (1, 4), b = (0, 10) and shares of samples (1/4, 3/4)."""
    sizes = (1, 3)
    samples = np.repeat(np.column_stack([CURVATURES, CENTRES]), sizes, axis=0)
    method = FederatedMethod(
        name="fedavg",
        source="",
        objective=Quadratic(),
        pacing=SomeSteps(steps=tuple(steps)),
        weighting=weighting,
    )
    return tiny_experiment(
        method,
        num_clients=2,
        cohort_size=2,
        rounds=rounds,
        local_steps=max(steps),
        batch_size=1,
        learning_rate=learning_rate,
        build=Point,
        double=True,
        sizes=sizes,
        images=samples.reshape(-1, 1, 1, 2),
        labels=np.zeros(4, dtype=np.int64),
        **more,  # type: ignore[arg-type]
    )


def value(experiment: Experiment) -> float:
    return float(run_rounds(local_engine(experiment)).vector[0])


@pytest.mark.parametrize(
    ("steps", "weighting", "first", "limit"),
    [
        ((5, 5), Uniform(), 4.945325, 6.925023465),
        ((5, 5), fedavg().weighting, 7.1227425, 8.710704200),
        ((2, 10), Uniform(), 5.3777902208, 8.395207085),
        ((2, 10), fedavg().weighting, 7.6616853312, 9.400982417),
    ],
    ids=["equal steps, uniform", "equal steps, by samples", "unequal steps, uniform", "unequal steps, by samples"],
)
def test_quadratics_reach_the_closed_form_fixed_point(
    steps: tuple[int, int], weighting: Weighting, first: float, limit: float
) -> None:
    """x* = sum q_k s_k b_k / sum q_k s_k with s_k = 1 - (1 - eta a_k)^K_k."""
    shares = (0.5, 0.5) if isinstance(weighting, Uniform) else (0.25, 0.75)
    pulls = [q * (1 - (1 - 0.1 * a) ** k) for q, a, k in zip(shares, CURVATURES, steps, strict=True)]
    closed_form = sum(pull * b for pull, b in zip(pulls, CENTRES, strict=True)) / sum(pulls)
    assert closed_form == pytest.approx(limit, abs=1e-8)
    assert value(quadratics(steps, weighting, rounds=1)) == pytest.approx(first, abs=1e-12)
    assert value(quadratics(steps, weighting, rounds=40)) == pytest.approx(closed_form, abs=1e-9)


def one_model(experiment: Experiment, rounds: int) -> Tensor:
    """Full-batch gradient descent on the union of all clients' data."""
    model, data = experiment.build_model(), experiment.world.data
    used = np.concatenate(experiment.world.indices)
    images, labels = torch.from_numpy(data.images[used]), torch.from_numpy(data.labels[used])
    for _ in range(rounds):
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=experiment.training.learning_rate)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("sizes", [(8, 8, 8), (3, 5, 11)])
def test_fedsgd_of_everybody_with_whole_sets_is_centralised_gradient_descent(sizes: tuple[int, ...]) -> None:
    experiment = tiny_experiment(
        fedsgd(), num_clients=3, cohort_size=3, rounds=6, batch_size=max(sizes), sizes=sizes, double=True
    )
    found = run_rounds(local_engine(experiment)).vector
    torch.testing.assert_close(found, one_model(experiment, 6), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (3, 5, 11)])
def test_one_whole_batch_of_fedavg_is_fedsgd_bit_for_bit(sizes: tuple[int, ...]) -> None:
    options = {"num_clients": 3, "cohort_size": 2, "batch_size": max(sizes), "sizes": sizes}
    assert torch.equal(vector(fedsgd(), **options), vector(fedavg(), local_epochs=1, **options))


def test_fedsgd_takes_one_step_whatever_the_training_section_says() -> None:
    for options in ({"local_epochs": 3}, {"local_steps": 9}, {"equal_steps": True}):
        state = run_rounds(local_engine(tiny_experiment(fedsgd(), cohort_size=3, rounds=2, **options)))
        assert [record.local_steps for record in state.records] == [3, 3]


@pytest.mark.parametrize("keep", ["reset", "average"])
def test_fedsgd_is_dynamicsgd_of_one_step(keep: str) -> None:
    optimizer = OptimizerSettings(momentum=0.9, keep=keep)
    options = {"rounds": 4, "optimizer": optimizer}
    assert torch.equal(vector(fedsgd(), **options), vector(dynamicsgd(), local_steps=1, **options))


def test_one_client_is_local_training_bit_for_bit() -> None:
    """The aggregate of one model is that model, and rounds of one client are one long training."""
    rounds, steps = 3, 4
    experiment = tiny_experiment(
        fedavg(), num_clients=1, cohort_size=1, rounds=rounds, local_steps=steps, batch_size=96, double=True
    )
    torch.testing.assert_close(
        run_rounds(local_engine(experiment)).vector, one_model(experiment, rounds * steps), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("num_clients", [2, 5])
def test_identical_clients_are_one_client(num_clients: int) -> None:
    images, labels = tiny_data(num_samples=4, dtype=np.float64)

    def run(count: int) -> Tensor:
        return vector(
            fedavg(),
            num_clients=count,
            cohort_size=count,
            sizes=(4,) * count,
            images=np.tile(images, (count, 1, 1, 1)),
            labels=np.tile(labels, count),
            double=True,
            local_epochs=3,
        )

    torch.testing.assert_close(run(num_clients), run(1), rtol=0, atol=1e-13)


def test_model_is_the_mean_weighted_by_samples_of_the_round() -> None:
    sizes = (5, 9, 2, 16)
    engine = local_engine(tiny_experiment(fedavg(), num_clients=4, cohort_size=3, sizes=sizes, rounds=1, double=True))
    state = engine.start()
    round = play_round(engine, state)
    members = [update.client for update in round.updates]
    shares = np.array([sizes[k] for k in members]) / sum(sizes[k] for k in members)
    assert round.weights == pytest.approx(shares.tolist(), abs=1e-15)
    expected = sum(w * u.vector for w, u in zip(shares, round.updates, strict=True) if u.vector is not None)
    torch.testing.assert_close(round.vector, expected, rtol=0, atol=1e-14)


def test_epochs_give_each_client_steps_by_its_samples() -> None:
    """E x ceil(n_k / B): 2 x (2 + 3 + 1) for 5, 9 and 2 samples in batches of 4."""
    state = run_rounds(
        local_engine(tiny_experiment(fedavg(), num_clients=3, sizes=(5, 9, 2), rounds=1, local_epochs=2))
    )
    assert state.records[0].local_steps == 12


def test_equal_steps_are_the_mean_clients_rounded_down() -> None:
    """floor((5 + 9 + 2) x 2 / (3 x 4)) = 2 steps for each."""
    engine = local_engine(
        tiny_experiment(fedavg(), num_clients=3, sizes=(5, 9, 2), rounds=1, local_epochs=2, equal_steps=True)
    )
    assert [work.steps for work in engine.planner.plan(engine.start()).context.work.values()] == [2, 2, 2]


def test_the_cohort_follows_from_the_seed_and_the_round_alone() -> None:
    def cohorts(method: FederatedMethod, **options: object) -> list[tuple[int, ...]]:
        state = run_rounds(local_engine(tiny_experiment(method, rounds=5, **options)))  # type: ignore[arg-type]
        return [record.cohort for record in state.records]

    first = cohorts(fedavg())
    assert first == cohorts(dynamicsgd(), local_steps=2) == cohorts(fedsgd(), learning_rate=0.5)
    assert len(set(first)) > 1
    assert first != cohorts(fedavg(), seed=1)
    expected = stream(0, "selection", 1).numpy().choice(np.arange(6), size=3, replace=False)
    assert first[0] == tuple(sorted(expected.tolist()))


def test_every_message_is_the_model_once_each_way() -> None:
    state = run_rounds(local_engine(tiny_experiment(fedavg(), rounds=1)))
    record, num_values = state.records[0], 28
    assert (record.values_up, record.values_down, record.comm_cost) == (84, 84, 2 * 3 * num_values)
    assert record.sync_points == 1
    assert record.comm_ratio == pytest.approx(1 / 4)  # four steps of the sixteen samples in batches of four


def test_float_buffers_are_averaged_and_metered_and_variances_stay_positive() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4))

    engine = local_engine(tiny_experiment(fedavg(), build=build, rounds=1))
    state = engine.start()
    round = play_round(engine, state)
    views = [engine.layout.views(u.vector)["2.running_var"] for u in round.updates if u.vector is not None]
    mean = torch.stack(views).mean(0)
    torch.testing.assert_close(engine.layout.views(round.vector)["2.running_var"], mean)
    assert bool((mean > 0).all()) and not torch.equal(mean, torch.ones(4))
    assert {kind for _, _, kind in round.ledger.values} == {"params", "buffers"}
    assert round.ledger.values[round.attendees[0], "up", "buffers"] == 8


def test_training_learns_and_runs_repeat_bit_for_bit() -> None:
    def run(seed: int) -> RunState:
        return run_rounds(local_engine(tiny_experiment(fedavg(), seed=seed, rounds=8, local_epochs=2)))

    first, again, other = run(0), run(0), run(1)
    assert torch.equal(first.vector, again.vector)
    assert not torch.equal(first.vector, other.vector)
    timeless = [replace(r, timestamp_ms=0, wall_time_s=0, eval_time_s=0, server_time_s=0) for r in first.records]
    assert timeless == [
        replace(r, timestamp_ms=0, wall_time_s=0, eval_time_s=0, server_time_s=0) for r in again.records
    ]
    assert (first.records[-1].test_accuracy or 0) > 0.85
    losses = [record.train_loss for record in first.records]
    assert losses[-1] is not None and losses[0] is not None and losses[-1] < 0.6 * losses[0]
