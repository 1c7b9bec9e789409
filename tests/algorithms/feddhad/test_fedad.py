"""FedAD and FedDHAD through whole rounds: identities, what travels, the clock, and when rates are refreshed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import comparable, net, part_of, run_units, tiny_sync, tiny_update, units_experiment
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.dropout_rates import Multiplier
from fedsweep.algorithms.feddhad.fedad import AdaptiveDropout, fedad
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import ClientUpdate, SyncContext
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import (
    local_engine,
    run_rounds,
    tiny_device,
    tiny_experiment,
    with_parts,
)
from fedsweep.trees import layout_of

torch.set_num_threads(1)

UNITS = 8 + 8
PARAMS = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4


# -- identities --------------------------------------------------------------------------------------------------

DEVICES = (tiny_device(1e4), tiny_device(3e4), tiny_device(2e5))


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (fedad(base_rate=0.0, refresh=(1,)), fedavg()),
        (fedad(base_rate=0.3, refresh=(99,)), fedavg()),
        (fedad(base_rate=0.3), fedavg()),  # the trigger's first check is in round 10
        (merge(feddh(), fedad(base_rate=0.0)), feddh()),
        (with_parts(part_of({"fc1": range(8), "fc2": range(8)})), fedavg()),
    ],
    ids=["rate 0", "before the first refresh", "before the first check", "FedDHAD at rate 0", "mask of ones"],
)
def test_without_dropout_it_is_the_plain_method_bit_for_bit(method: FederatedMethod, plain: FederatedMethod) -> None:
    """R1: models, traffic, FLOPs and the clock."""
    optimizer = OptimizerSettings(momentum=0.9, weight_decay=0.01)
    found, expected = (run_units(m, devices=DEVICES, optimizer=optimizer) for m in (method, plain))
    assert torch.equal(found.vector, expected.vector)
    assert comparable(found) == comparable(expected)
    assert found.clock == expected.clock is not None


def test_masks_do_not_change_which_batches_and_clients_are_drawn() -> None:
    dropped, plain = run_units(fedad(base_rate=0.4, refresh=(1,))), run_units(fedavg())
    assert [r.cohort for r in dropped.records] == [r.cohort for r in plain.records]
    assert not torch.equal(dropped.vector, plain.vector)


# -- refreshes ---------------------------------------------------------------------------------------------------


def test_refresh_round_trains_the_full_model_and_sends_a_score_per_unit() -> None:
    state = run_units(fedad(base_rate=0.4, refresh=(2, 4)), rounds=5)
    up = [r.values_up for r in state.records]
    assert up[0] == 3 * PARAMS
    assert up[1] == up[3] == 3 * (PARAMS + UNITS)
    assert up[2] < 3 * PARAMS and up[4] < 3 * PARAMS
    assert [r.extra["dropout_refreshes"] for r in state.records] == [0, 1, 1, 2, 2]
    assert [r.extra["dropout_device_rate"] for r in state.records] == pytest.approx([0, 0, 0.4, 0, 0.4])


def test_curvature_is_measured_at_refreshes_alone_and_capped() -> None:
    """One more value per client; the raw rate is logged, the rate that is used stays below the cap."""
    state = run_units(fedad(refresh=(1,), base_rate_cap=0.2), rounds=2)
    assert state.records[0].values_up == 3 * (PARAMS + UNITS + 1)
    extra = state.records[0].extra
    assert 0 <= extra["dropout_base_rate"] <= min(0.2, extra["dropout_base_rate_raw"])


def test_device_rates_follow_the_times_of_the_devices() -> None:
    """The same work everywhere: seconds 4, 2, 1; the reference (largest data set, smallest id) is client 0.

    T = 0.75 x 4 = 3: device 0 drops 0.25, the faster ones nothing.
    """
    slow = tuple(tiny_device(f, bits_per_s=1e12) for f in (1e5, 2e5, 4e5))
    engine = local_engine(units_experiment(fedad(base_rate=0.25, refresh=(1,)), devices=slow, cohort_size=6, rounds=2))
    state = run_rounds(engine, rounds=1)
    plan = engine.planner.plan(state)
    assert [s == FULL_MODEL for s in plan.context.submodels.values()] == [False, True, True] * 2
    assert plan.components["submodels"]["rates"]["dropout_device_rate"] == pytest.approx(0.25 / 3)


def scripted(policy: AdaptiveDropout, norms: list[float]) -> list[bool]:
    """Whether each check asks for a refresh, where the scores move by these distances from check to check."""
    state = policy.init(context_of(policy))
    found = []
    place = torch.zeros(UNITS, dtype=torch.float64)
    for number, norm in enumerate([0.0, *norms], start=1):
        place = place.clone()
        place[0] += norm
        before = state["refreshes"]
        state = policy.learn(state | {"times": {0: 1.0}}, [told(place)], place_in_run(number))
        found.append(state["refreshes"] > before)
    return found[1:]


def context_of(policy: AdaptiveDropout) -> Any:
    from fedsweep.experiment.experiment import server_context

    made = units_experiment(FederatedMethod(name="x", source="", submodels=policy))
    return server_context(made, "submodels")


def told(scores: Tensor) -> ClientUpdate:
    return tiny_update(0, layout=layout_of(net()), num_samples=3, extras={"unit_scores/scores": scores})


def place_in_run(round: int) -> SyncContext:
    layout = layout_of(net())
    return tiny_sync(net(), torch.zeros(layout.num_values), round=round, layout=layout)


def test_trigger_waits_until_the_change_has_not_fallen_for_a_while_then_follows_each_fall() -> None:
    """Changes 5, 4, 4, 5: risen or equal twice in a row: refresh. Then at each fall: 3 and 1, not at 3 and 4."""
    policy = AdaptiveDropout(base_rate=0.3, check_every=1, patience=2)
    assert scripted(policy, [5, 4, 4, 5, 3, 3, 4, 1]) == [False, False, False, True, True, False, False, True]
    reset = AdaptiveDropout(base_rate=0.3, check_every=1, patience=2)
    assert scripted(reset, [5, 6, 4, 5, 4, 3]) == [False] * 6


def test_checks_send_scores_in_every_so_many_rounds() -> None:
    state = run_units(fedad(base_rate=0.3, check_every=2, patience=9), rounds=5)
    assert [r.values_up - 3 * PARAMS for r in state.records] == [0, 3 * UNITS, 0, 3 * UNITS, 0]


def test_curvature_comes_in_the_round_after_the_check_that_asked_for_it() -> None:
    """A refresh that is due measures scores and curvature with the full model, whatever the round."""
    engine = local_engine(units_experiment(fedad(check_every=10), rounds=3))
    state = run_rounds(engine, rounds=1)
    due = {**state.components, "submodels": {**state.components["submodels"], "due": True}}
    state = run_rounds(engine, replace(state, components=due), rounds=1)
    assert state.records[-1].values_up == 3 * (PARAMS + UNITS + 1)
    assert not state.components["submodels"]["due"] and state.components["submodels"]["refreshes"] == 1


# -- FedDHAD and other company -----------------------------------------------------------------------------------


def feddhad(multiplier: Multiplier = "auto", **more: Any) -> FederatedMethod:
    dropout = fedad(base_rate=0.4, refresh=(1,), multiplier=multiplier)
    return merge(feddh(learning_rate_v=0.3, learning_rate_b=0.2, **more), dropout)


@pytest.mark.parametrize("gradient", ["deferred", "same_round", "explicit", "proxy"])
def test_feddhad_learns_degrees_from_sub_models(gradient: str) -> None:
    made = units_experiment(feddhad(gradient=gradient), rounds=4, sizes=(6, 10, 14, 18, 22, 26))
    data = made.world.data
    made = replace(made, world=replace(made.world, proxy=(data.images[:8], data.labels[:8])))
    state = run_rounds(local_engine(made))
    assert float((state.components["weighting"]["v"] - 1).abs().max()) > 1e-9
    assert min(r.fwd_macs_per_sample or 0 for r in state.records[1:]) < 144
    assert all(abs(sum(r.aggregation_weights) - 1) < 1e-9 for r in state.records)


def test_degrees_learn_from_gradients_wherever_the_multiplier_acts() -> None:
    """One step on all samples from the same model: its move is that of scaled steps, its gradient is not."""
    learned = []
    for multiplier in ("activation", "incoming", "split"):
        options: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "batch_size": 64, "double": True}
        made = units_experiment(feddhad(multiplier), sizes=(6, 10, 14, 18, 22, 26), **options)
        state = run_rounds(local_engine(made))
        assert (state.records[1].fwd_macs_per_sample or 0) < 144
        learned.append(torch.stack([state.components["weighting"][name] for name in ("v", "b")]))
    assert float((learned[0][0] - 1).abs().max()) > 1e-6
    for other in learned[1:]:
        torch.testing.assert_close(other, learned[0], rtol=1e-5, atol=1e-9)


def test_feddhe_reads_the_gradients_of_sub_models() -> None:
    made = units_experiment(feddhad(estimate="gradients"), rounds=3, cohort_size=3)
    data = made.world.data
    made = replace(made, world=replace(made.world, proxy=(data.images[:16], data.labels[:16])))
    state = run_rounds(local_engine(made))
    assert int(state.components["weighting"]["known"].sum()) == len({k for r in state.records for k in r.cohort})


def test_two_speed_rounds_train_one_part_throughout_and_score_at_the_end() -> None:
    method = merge(feddhad(), dynamicfl(high_interval=1, low_interval=8, sync_rule="paper"))
    two = units_experiment(method, rounds=3, local_epochs=1, local_steps=4, equal_steps=True)
    state = run_rounds(local_engine(two))
    assert [r.sync_points for r in state.records] == [4, 4, 4]
    # Once a round, not once a sync point: everything else that goes up also goes down.
    assert [r.values_up - r.values_down for r in state.records] == [3 * UNITS, 0, 0]
    assert (state.records[1].fwd_macs_per_sample or 0) < 144


def test_one_interval_for_all_is_feddhad_with_one_aggregation() -> None:
    options: dict[str, Any] = {"rounds": 3, "local_steps": 4, "equal_steps": True}
    once = run_units(feddhad(), **options)
    paced = run_units(merge(feddhad(), dynamicfl(high_interval=4, low_interval=4)), **options)
    assert torch.equal(once.vector, paced.vector)


@pytest.mark.parametrize(
    ("with_fedad", "plain"),
    [
        (merge(dynamicfl(high_interval=1, low_interval=3), fedad(base_rate=0.0, refresh=(1,))), {}),
        (merge(dynamicfl(high_interval=1, low_interval=3), fedad(base_rate=0.4, refresh=(99,))), {}),
        (
            merge(merge(feddh(), dynamicfl(high_interval=1, low_interval=3)), fedad(base_rate=0.0, refresh=(1,))),
            {"weighting": feddh().weighting},
        ),
    ],
    ids=["rate 0", "before the first refresh", "FedDHAD at rate 0"],
)
def test_two_speed_rounds_without_dropout_are_dynamicfls_bit_for_bit(
    with_fedad: FederatedMethod, plain: dict[str, Any]
) -> None:
    """DynamicFL's rounds fold among the workers, these go through the server: models, traffic and clock are equal."""
    expected_method = replace(dynamicfl(high_interval=1, low_interval=3), **plain)
    options: dict[str, Any] = {"devices": DEVICES, "local_steps": 5, "optimizer": OptimizerSettings(momentum=0.9)}
    found, expected = (run_units(m, **options) for m in (with_fedad, expected_method))
    assert min(r.sync_points for r in found.records) > 1
    assert torch.equal(found.vector, expected.vector)
    assert comparable(found) == comparable(expected)
    assert found.clock == expected.clock is not None


# -- errors ------------------------------------------------------------------------------------------------------


def test_network_without_units_is_an_error_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="lists no unit groups"):
        check_experiment(tiny_experiment(fedad(base_rate=0.1)))
    check_experiment(tiny_experiment(fedad(base_rate=0.0)))
