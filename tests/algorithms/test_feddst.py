"""FedDST by hand: layer densities, moved weights, the mean over sent masks, the schedule."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi

import pytest
import torch
from tiny import tiny_sync
from torch import nn

from fedsweep.algorithms.feddst import AdjustableMask, erk_densities, feddst, moved_weights
from fedsweep.algorithms.parts.element_masks import largest, shared_out, weight_layers
from fedsweep.card import card_of
from fedsweep.components.aggregation import mean_of_updates
from fedsweep.models.networks.chains import Mlp
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.testing.checks import bytes_are_the_cards
from fedsweep.testing.subject import Subject


def build() -> nn.Module:
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=10)


def test_layers_share_the_weights_by_sides_over_product() -> None:
    """(6 + 10) : (10 + 10) : (10 + 4) alive weights of 60, 100 and 40; at 0.2 these are 40 of 200."""
    densities = erk_densities([(10, 6), (10, 10), (4, 10)], 0.2)
    alive = [d * n for d, n in zip(densities, (60, 100, 40), strict=True)]
    assert alive == pytest.approx([40 * 16 / 50, 40 * 20 / 50, 40 * 14 / 50])


def test_a_layer_that_is_full_leaves_the_rest_to_the_others() -> None:
    """At 0.7, 140 of 200: the shares 44.8, 56, 39.2 all fit; at 0.8 the last would have 44.8 of 40."""
    densities = erk_densities([(10, 6), (10, 10), (4, 10)], 0.8)
    assert densities[2] == 1.0
    assert densities[0] * 60 == pytest.approx(120 * 16 / 36) and densities[1] * 100 == pytest.approx(120 * 20 / 36)
    assert erk_densities([(10, 6), (4, 10)], 1.0) == [1.0, 1.0]


def test_all_layers_keep_the_same_share_where_that_is_asked_for() -> None:
    engine = local_engine(tiny_experiment(feddst(sparsity=0.8, distribution="uniform"), build=build))
    mask = engine.start().components["submodels"]["mask"]
    assert [int(mask[a:b].sum()) for a, b in weight_layers(build()).values()] == [12, 20, 8]


def test_numbers_add_up_and_nobody_is_left_with_none() -> None:
    assert shared_out(40, [60, 100, 40], [12.8 / 60, 16 / 100, 11.2 / 40]) == [13, 16, 11]
    assert shared_out(3, [10, 10, 100], [0.0, 0.0, 0.03]) == [1, 1, 1]
    assert shared_out(5, [2, 10], [1.0, 0.1]) == [2, 3]
    values = torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert largest(values, 2).tolist() == [False, True, True, False]
    assert largest(values, 2, then_n=torch.tensor([9, 1, 1, 2])).tolist() == [False, True, False, True]


def test_the_smallest_give_way_to_dead_ones_of_large_gradient() -> None:
    """Half of four alive weights: 0.1 and 0.2 go; of the dead, gradients 9 and 5 come; an active 100 does not count."""
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool)
    values = torch.tensor([0.1, -3.0, -0.2, 2.0, 0.0, 0.0, 0.0, 0.0])
    gradient = torch.tensor([100.0, 0.0, 50.0, 0.0, 1.0, -9.0, 5.0, 0.0])
    assert moved_weights(mask, values, gradient, 0.5).int().tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
    assert torch.equal(moved_weights(mask, values, gradient, 0.0), mask)
    full = torch.ones(8, dtype=torch.bool)
    assert torch.equal(moved_weights(full, values, gradient, 0.5), full)
    almost = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    assert moved_weights(almost, torch.arange(8.0), gradient, 0.5).int().tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_each_layer_keeps_its_number_of_alive_weights() -> None:
    engine = local_engine(
        tiny_experiment(feddst(sparsity=0.8, moved=0.5, every=1, until=9), build=build, rounds=8, num_clients=6)
    )
    layers, state = weight_layers(build()), engine.start()
    first = state.components["submodels"]["mask"]
    counts, masks = [int(first[a:b].sum()) for a, b in layers.values()], [first]
    assert counts == [13, 16, 11] and int(first.sum()) == 40 + 24
    for _ in range(8):
        for update in play_round(engine, state).updates:
            if "feddst/mask" in update.extras:
                sent, place = update.extras["feddst/mask"], 0
                for count, (start, stop) in zip(counts, layers.values(), strict=True):
                    assert int(sent[place : place + stop - start].sum()) == count
                    place += stop - start
        state, _ = engine.advance(state)
        masks.append(state.components["submodels"]["mask"])
        assert [int(masks[-1][a:b].sum()) for a, b in layers.values()] == counts
        assert not state.vector[~masks[-1]].any()
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_what_clients_moved_is_averaged_over_those_who_have_it() -> None:
    """A weight that one client grew has that client's value, and one that all dropped is zero."""
    engine = local_engine(
        tiny_experiment(feddst(sparsity=0.5, moved=0.5, every=1, until=9), build=build, num_clients=3)
    )
    state = run_rounds(engine, rounds=1)
    round = play_round(engine, state)
    masks = []
    for update in round.updates:
        assert isinstance(update.submodel, AdjustableMask) and update.submodel.moved > 0 and update.vector is not None
        mask, place = update.submodel.mask.clone(), 0
        for start, stop in update.submodel.layers.values():
            mask[start:stop] = update.extras["feddst/mask"][place : place + stop - start]
            place += stop - start
        assert not update.vector[~mask].any()
        grown = mask & ~update.submodel.mask
        assert grown.any() and not update.vector[grown].any()  # the last step came before they grew
        masks.append(mask)
    held = torch.stack(masks)
    kept = round.components["submodels"]["mask"]
    assert not round.vector[~held.any(dim=0)].any()
    one = (held.sum(dim=0) == 1) & kept
    for j in one.nonzero().flatten().tolist():
        owner = int(held[:, j].int().argmax())
        vector = round.updates[owner].vector
        assert vector is not None and float(round.vector[j]) == float(vector[j])
    weights = torch.tensor(round.weights, dtype=torch.float64)
    everybody = held.all(dim=0) & kept
    plain = mean_of_updates(round.updates, weights, engine_sync(engine, state))
    assert everybody.any() and torch.equal(round.vector[everybody], plain[everybody])


def engine_sync(engine, state):  # type: ignore[no-untyped-def]

    return tiny_sync(build(), state.vector, round=2, layout=engine.layout, cohort=(0, 1, 2))


def test_adjustments_are_in_the_second_round_and_every_so_many_until_their_end() -> None:
    engine = local_engine(tiny_experiment(feddst(sparsity=0.8, moved=0.4, every=3), build=build, rounds=16))
    state, moved = engine.start(), {}
    for _ in range(16):
        plan = engine.planner.plan(state)
        part = plan.context.submodels[plan.context.cohort[0]]
        assert isinstance(part, AdjustableMask)
        if part.moved:
            moved[plan.context.round] = part.moved
        state, _ = engine.advance(state)
    assert moved == pytest.approx(
        {2: 0.2 * (1 + cos(pi / 8)), 5: 0.2 * (1 + cos(pi / 2)), 8: 0.2 * (1 + cos(pi * 7 / 8))}
    )


@pytest.mark.parametrize("every", [1, 2])
def test_masks_that_travel_are_the_cards_where_adjustments_end_with_half_of_the_run(every: int) -> None:
    card = card_of(feddst)
    assert card is not None
    small = {"sparsity": 0.5, "moved": 0.2, "every": every, "until": None}
    bytes_are_the_cards(Subject(name="feddst", builder=feddst, card=replace(card, small=small)))
