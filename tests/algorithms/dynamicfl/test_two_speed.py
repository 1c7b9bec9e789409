"""DynamicFL and DynamicSGD: identities with FedAvg, who is averaged with whom, and their parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_groups import every, two_speed
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd, interval_of
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import FixedInterval, OncePerRound
from fedsweep.engine.round import Round
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_data, tiny_experiment
from fedsweep.world.budgets import DynamicBudget

MOMENTUM = OptimizerSettings(momentum=0.9, nesterov=True)


def bits(method: FederatedMethod, **more: object) -> Tensor:
    options: dict[str, object] = {"cohort_size": 3, "rounds": 3, "local_steps": 7, "optimizer": MOMENTUM} | more
    return run_rounds(local_engine(tiny_experiment(method, **options))).vector  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
@pytest.mark.parametrize("method", [every(7), every(10_000, "authors"), two_speed(0, 2, high=9, low=256)])
def test_intervals_of_a_whole_round_are_fedavg_bit_for_bit(method: FederatedMethod, keep: str) -> None:
    optimizer = OptimizerSettings(momentum=0.9, keep=keep)
    assert torch.equal(bits(method, optimizer=optimizer), bits(fedavg(), optimizer=optimizer))


@pytest.mark.parametrize("method", [every(10_000), two_speed(1), dynamicsgd()], ids=["one interval", "low", "every"])
def test_clients_with_unequal_steps_all_count_at_the_rounds_end(method: FederatedMethod) -> None:
    sizes = {"num_clients": 3, "sizes": (4, 9, 30), "local_steps": None, "equal_steps": False}
    round = play_round(local_engine(tiny_experiment(method, **sizes)))  # type: ignore[arg-type]
    assert [update.client for update in round.updates] == [0, 1, 2]
    assert round.weights == pytest.approx([4 / 43, 9 / 43, 30 / 43])
    if method != dynamicsgd():
        assert torch.equal(bits(method, **sizes), bits(fedavg(), **sizes))


@pytest.mark.parametrize("rows", [(), (0,), (2,)])
@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_high_group_of_at_most_one_client_is_fedavg_bit_for_bit(rows: tuple[int, ...], keep: str) -> None:
    optimizer = OptimizerSettings(momentum=0.9, nesterov=True, keep=keep)
    assert torch.equal(bits(two_speed(*rows), optimizer=optimizer), bits(fedavg(), optimizer=optimizer))


def test_everybody_in_the_high_group_is_dynamicsgd_bit_for_bit() -> None:
    assert torch.equal(bits(two_speed(0, 1, 2)), bits(dynamicsgd()))


def test_two_clients_in_the_high_group_differ_from_fedavg() -> None:
    assert not torch.equal(bits(two_speed(0, 1)), bits(fedavg()))


@pytest.mark.parametrize("method", [every(1), every(3), two_speed(0, 2), two_speed(1, 2, high=2, low=3)])
def test_equal_data_on_all_clients_is_sgd_of_one_client(method: FederatedMethod) -> None:
    images, labels = tiny_data(num_samples=4, dtype=np.float64)
    runs = {}
    for num_clients in (1, 3):
        clients = {"num_clients": num_clients, "cohort_size": num_clients, "sizes": (4,) * num_clients}
        runs[num_clients] = bits(
            method if num_clients > 1 else fedavg(),
            images=np.tile(images, (num_clients, 1, 1, 1)),
            labels=np.tile(labels, num_clients),
            double=True,
            **clients,
        )
    torch.testing.assert_close(runs[3], runs[1], rtol=0, atol=1e-12)


def test_only_members_receive_an_average_inside_a_round() -> None:
    """The low client's model at the round's end is the one that it would have without any other client."""
    dynamic = play_round(local_engine(tiny_experiment(two_speed(0, 1), local_steps=7)))
    plain = play_round(local_engine(tiny_experiment(fedavg(), local_steps=7)))
    assert dynamic.updates[2].client == plain.updates[2].client
    assert torch.equal(_vector(dynamic, 2), _vector(plain, 2))
    assert not torch.equal(_vector(dynamic, 0), _vector(plain, 0))


def _vector(round: Round, row: int) -> Tensor:
    vector = round.updates[row].vector
    assert vector is not None
    return vector


def test_union_average_is_the_mean_of_the_two_groups_means() -> None:
    sizes = (4, 8, 12, 6)
    round = play_round(
        local_engine(
            tiny_experiment(two_speed(0, 2), num_clients=4, cohort_size=4, sizes=sizes, local_steps=5, double=True)
        )
    )
    groups = [(0, 2), (1, 3)]
    means = [sum(sizes[k] * _vector(round, k) for k in g) / sum(sizes[k] for k in g) for g in groups]
    shares = [sum(sizes[k] for k in g) / sum(sizes) for g in groups]
    expected = shares[0] * means[0] + shares[1] * means[1]
    torch.testing.assert_close(round.vector, expected, rtol=0, atol=1e-14)


def test_weights_are_the_shares_of_samples() -> None:
    sizes = (4, 8, 12)
    state = run_rounds(
        local_engine(tiny_experiment(two_speed(0, 1), num_clients=3, sizes=sizes, local_steps=4, rounds=1))
    )
    assert state.records[0].aggregation_weights == pytest.approx([n / 24 for n in sizes], abs=1e-15)


def test_the_round_s_model_lies_between_its_clients_models() -> None:
    round = play_round(local_engine(tiny_experiment(two_speed(0, 1, high=2, low=3), local_steps=7)))
    models = torch.stack([_vector(round, row) for row in range(3)])
    assert bool((round.vector >= models.min(0).values - 1e-7).all())
    assert bool((round.vector <= models.max(0).values + 1e-7).all())


def starred(idle_clients: str) -> Round:
    method = two_speed(0, 2, high_only=True, idle_clients=idle_clients)
    sizes = (4, 8, 12, 6)
    return play_round(
        local_engine(tiny_experiment(method, num_clients=4, cohort_size=4, sizes=sizes, local_steps=5, double=True))
    )


def test_idle_clients_take_no_part_unless_asked_for() -> None:
    round = starred("exclude")
    assert round.attendees == (0, 2)
    assert {client for client, _, _ in round.ledger.values} == {0, 2}
    assert round.weights == pytest.approx([4 / 16, 12 / 16])


def test_authors_idle_clients_damp_the_update_by_the_groups_share() -> None:
    """The result is h W_high + (1 - h) W_g with h = (4 + 12) / 30."""
    alone, damped = starred("exclude"), starred("authors")
    start = local_engine(
        tiny_experiment(fedavg(), num_clients=4, cohort_size=4, sizes=(4, 8, 12, 6), double=True)
    ).start()
    share = 16 / 30
    torch.testing.assert_close(damped.vector, share * alone.vector + (1 - share) * start.vector, rtol=0, atol=1e-14)
    assert damped.ledger.values == alone.ledger.values
    assert damped.attendees == (0, 1, 2, 3)
    idle = damped.updates[1]
    assert (idle.steps, idle.anchor_version) == (0, start.version)


def test_a_starred_round_with_an_empty_group_changes_nothing() -> None:
    state = run_rounds(local_engine(tiny_experiment(two_speed(high_only=True), local_steps=4, rounds=1)))
    start = local_engine(tiny_experiment(fedavg())).start()
    record = state.records[0]
    assert torch.equal(state.vector, start.vector)
    assert (record.comm_cost, record.local_steps, record.attendees, record.high_frequency) == (0, 0, (), ())


def test_the_server_admits_at_most_its_share_of_the_cohort() -> None:
    plan = DynamicBudget(budget_fraction=0.57).assign(100, stream(0, "budgets"))
    experiment = tiny_experiment(
        dynamicfl(group="random"),
        num_clients=100,
        cohort_size=100,
        sizes=(1,) * 96 + (0,) * 4,
        local_steps=2,
        budgets=plan,
    )
    engine = local_engine(experiment)
    context = engine.planner.plan(engine.start()).context
    assert len(context.cohort) == 96
    group = engine.planner.plan(engine.start()).components["pacing"]["group"]
    assert len(group) == 54  # floor(0.57 x 96 = 54.72)


@pytest.mark.parametrize("group", ["dynacomm", "random", "exhaustive", "similarity"])
def test_a_group_of_a_given_size_has_it_or_what_the_budgets_admit(group: str) -> None:
    method = dynamicfl(group=group, group_size=3)  # type: ignore[arg-type]
    for fraction, size in ((1.0, 3), (0.5, 2), (0.1, 0)):
        plan = DynamicBudget(budget_fraction=fraction).assign(6, stream(0, "budgets"))
        experiment = tiny_experiment(method, cohort_size=4, rounds=2, local_steps=2, budgets=plan)
        for record in run_rounds(local_engine(experiment)).records:
            assert len(record.high_frequency or ()) == size


def test_a_given_size_of_one_is_fedavg_and_of_all_dynamicsgd_bit_for_bit() -> None:
    assert torch.equal(bits(dynamicfl(group_size=1)), bits(fedavg()))
    assert torch.equal(bits(dynamicfl(group_size=3)), bits(dynamicsgd()))


def test_records_name_the_group_and_its_divergence() -> None:
    state = run_rounds(local_engine(tiny_experiment(two_speed(0, 2), rounds=1)))
    record, profiles = state.records[0], local_engine(tiny_experiment(fedavg())).experiment.world.profiles
    assert record.high_frequency == (record.cohort[0], record.cohort[2])
    counts = np.sum([profiles[k].label_counts for k in record.high_frequency], axis=0)
    everybody = np.sum([p.label_counts for p in profiles], axis=0)
    shares, target = counts / counts.sum(), everybody / everybody.sum()
    expected = sum(p * np.log(p / q) for p, q in zip(shares, target, strict=True) if p > 0)
    assert record.kl_divergence == pytest.approx(expected, abs=1e-12) and expected > 0.1


def test_levels_are_the_papers_and_numbers_are_taken_as_they_are() -> None:
    assert [interval_of(level, key="k") for level in "abcdefg"] == [1, 4, 16, 32, 64, 128, 256]
    assert interval_of(7, key="k") == 7


def test_the_interval_of_dynamicsgd_is_one_step_under_either_rule() -> None:
    assert dynamicsgd().pacing == FixedInterval(interval=1, sync_rule="authors")
    assert dynamicsgd(sync_rule="paper").pacing == FixedInterval(interval=1, sync_rule="paper")
    assert fedavg().pacing == OncePerRound()
    with pytest.raises(ConfigError, match="interval must be an integer >= 1, but got 0"):
        FixedInterval(interval=0)
