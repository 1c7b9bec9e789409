"""AFD: the score rule, reuse, and what the draws follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import net, tiny_sync, tiny_update
from torch import Tensor

from fedsweep.algorithms.afd import ScoredUnits, afd
from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.hierfavg import hierfavg
from fedsweep.experiment.experiment import server_context
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.unit_submodel import UnitSubModel
from fedsweep.records import ClientUpdate, RoundContext, State, SyncContext
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import layout_of
from fedsweep.world.topology import tree

torch.set_num_threads(1)

SIZES = (6, 10, 14, 18, 22, 26)


class Script:
    """A policy alone: rounds of given participants and losses."""

    def __init__(self, policy: ScoredUnits) -> None:
        made = tiny_experiment(FederatedMethod(name="x", source="", submodels=policy), build=net)
        self.policy, self.round = policy, 0
        self.state: State = policy.init(server_context(made, "submodels"))

    def play(self, losses: dict[int, float], *, lost: tuple[int, ...] = ()) -> dict[int, Tensor]:
        """Each participant's units (bool [16]); members that are lost report nothing."""
        self.round += 1
        cohort = tuple(sorted({*losses, *lost}))
        context = RoundContext(
            round=self.round,
            available=cohort,
            cohort_size=len(cohort),
            profiles=(),
            cohort=cohort,
            model=net(),
            stream=stream(0, "submodels", self.round),
        )
        parts, self.state = self.policy.assign(self.state, context)
        updates = [update(k, loss) for k, loss in losses.items()]
        self.state = self.policy.learn(self.state, updates, place(self.round))
        found = {}
        for client, part in parts.items():
            assert isinstance(part, UnitSubModel)
            found[client] = torch.zeros(2, 8, dtype=torch.bool)
            for row, (_, units) in enumerate(part.kept):
                found[client][row, list(units)] = True
        return {client: units.flatten() for client, units in found.items()}

    def known(self, owner: int) -> Any:
        return self.state["known"][owner]


def update(client: int, loss: float) -> ClientUpdate:
    return tiny_update(client, layout=layout_of(net()), num_samples=SIZES[client], train_loss=loss)


def place(round: int) -> SyncContext:
    layout = layout_of(net())
    return tiny_sync(net(), torch.zeros(layout.num_values), round=round, layout=layout)


def test_losses_of_2_then_1_5_then_1_6() -> None:
    """The first is noted; the second fell by a quarter: score 0.25, units reused; the third rose: drawn anew."""
    script = Script(ScoredUnits(keep=0.5))
    first = script.play({0: 2.0})[0]
    assert not script.known(0)["scores"].any() and not script.known(0)["reuse"]
    second = script.play({0: 1.5})[0]
    assert not torch.equal(first, second)
    assert torch.equal(script.known(0)["scores"], 0.25 * second)
    third = script.play({0: 1.6})[0]
    assert torch.equal(third, second)
    assert script.known(0) | {"scores": 0, "units": 0} == {"scores": 0, "units": 0, "loss": 1.6, "reuse": False}
    assert torch.equal(script.known(0)["scores"], 0.25 * second)
    fourth = script.play({0: 1.7})[0]
    assert int((fourth & second).sum()) > 4  # by scores: 0.26 against the floor's 0.01
    assert int(fourth[:8].sum()) == int(fourth[8:].sum()) == 4


def test_the_last_fall_stands_or_falls_add_up() -> None:
    """2 -> 1: 0.5; 1 -> 0.75: 0.25, on the units that are reused."""
    for accumulate, expected in ((False, 0.25), (True, 0.75)):
        script = Script(ScoredUnits(keep=0.5, accumulate=accumulate))
        for loss in (2.0, 1.0, 0.75):
            units = script.play({0: loss})[0]
        assert torch.equal(script.known(0)["scores"], expected * units)


def test_clients_have_maps_of_their_own_unless_they_are_shared() -> None:
    """Shared: the mean over participants by samples, (6 x 1 + 10 x 3) / 16 = 2.25."""
    own = Script(ScoredUnits(keep=0.5))
    units = own.play({0: 1.0, 1: 3.0})
    assert not torch.equal(units[0], units[1])
    assert (own.known(0)["loss"], own.known(1)["loss"]) == (1.0, 3.0)
    own.play({0: 2.0, 1: 1.0})
    assert (own.known(0)["reuse"], own.known(1)["reuse"]) == (False, True)
    shared = Script(ScoredUnits(keep=0.5, scores="shared"))
    units = shared.play({0: 1.0, 1: 3.0})
    assert torch.equal(units[0], units[1])
    assert shared.known(-1)["loss"] == pytest.approx(2.25)
    before = shared.play({4: 1.0})[4]
    assert torch.equal(shared.play({0: 1.0, 1: 1.0})[1], before)


def test_a_client_that_is_lost_keeps_its_last_loss_and_units() -> None:
    script = Script(ScoredUnits(keep=0.5))
    script.play({0: 2.0})
    units = script.play({0: 1.0})[0]
    before = dict(script.known(0))
    assert torch.equal(script.play({}, lost=(0,))[0], units)
    assert script.known(0) == before
    assert torch.equal(script.play({0: 1.5})[0], units)


@pytest.mark.slow
def test_without_scores_all_units_are_drawn_alike() -> None:
    script = Script(ScoredUnits(keep=0.25))
    total = sum(script.play({0: 1.0}).get(0, torch.zeros(16)).double() for _ in range(400))
    assert isinstance(total, Tensor)
    assert float((total / 400 - 0.25).abs().max()) < 4 * (0.25 * 0.75 / 400) ** 0.5


def test_draws_follow_scores_and_the_floor() -> None:
    """One unit of 8 with score 0.25 is drawn with 0.26 / (0.26 + 7 x 0.01) = 0.788; at floor 10 about an eighth."""
    groups = net().unit_groups()  # type: ignore[operator]
    scores = torch.zeros(16, dtype=torch.float64)
    scores[3] = 0.25
    for floor, expected in ((0.01, 0.26 / 0.33), (10.0, 10.25 / 80.25)):
        policy = ScoredUnits(keep=0.125, score_floor=floor)
        draws = [policy._draw(groups, scores, stream(0, "d", position=n).numpy())[3] for n in range(600)]
        assert np.mean(draws) == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 600) ** 0.5)


def test_in_a_run_falling_losses_freeze_the_units() -> None:
    """Everybody in every round: from the third on half of them or more train what they trained."""
    made = tiny_experiment(afd(keep=0.5), build=net, sizes=SIZES, cohort_size=6, rounds=4, local_epochs=2)
    engine = local_engine(made)
    state = run_rounds(engine)
    reused = [r.extra["dropout_reused"] for r in state.records]
    assert reused[:2] == [0.0, 0.0] and min(reused[2:]) >= 0.5
    before = run_rounds(engine, rounds=3)
    parts = {u.client: u.submodel for u in play_round(engine, before).updates}
    for client, known in before.components["submodels"]["known"].items():
        if known["reuse"]:
            kept = dict(parts[client].kept)  # type: ignore[attr-defined]
            units = torch.split(known["units"], 8)
            assert [list(kept[g]) for g in ("fc1", "fc2")] == [u.nonzero().flatten().tolist() for u in units]


def test_a_rounds_loss_is_that_of_all_its_jobs() -> None:
    """Two steps at 1, then four, of which the update says 2 and later, of five, 2.6: (2 + 5 x 2.6) / 7."""
    policy = ScoredUnits(keep=0.5)
    state: State = {"known": {}, "drawn": {0: torch.ones(16, dtype=torch.bool)}, "losses": {}, "reused": 0.0}
    inner = replace(place(1), ends_round=False)
    for loss, steps, version in ((1.0, 2, 0), (2.0, 4, 1)):
        heard = replace(update(0, loss), steps=steps, anchor_version=version)
        state = policy.learn(state, [heard, update(1, float("nan"))], inner)
    assert not state["known"]
    state = policy.learn(state, [replace(update(0, 2.6), steps=5, anchor_version=1)], place(1))
    assert state["known"][0]["loss"] == pytest.approx(15 / 7, rel=1e-15) and not state["losses"]
    assert policy.learn(state, [update(0, float("nan"))], place(2)) == state


@pytest.mark.parametrize("other", [dynamicsgd(), hierfavg(edge_interval=2)])
def test_with_sync_points_inside_rounds_it_learns_from_every_step(other: FederatedMethod) -> None:
    options: dict[str, Any] = {"build": net, "local_steps": 6, "cohort_size": 2, "sizes": (16,) * 6}
    made = tiny_experiment(merge(afd(keep=0.5), other), topology=tree(num_clients=6, edges=2), **options)
    engine = local_engine(made)
    state = run_rounds(engine, rounds=1)
    records = state.components["submodels"]["known"]
    played = play_round(engine)
    for client, total in played.totals.items():
        assert total.steps == 6 and records[client]["loss"] == pytest.approx(total.loss_sum / 6, rel=1e-12)


def test_at_an_edge_it_learns_of_the_clients() -> None:
    """One edge that waits for a round's end is the server."""
    options: dict[str, Any] = {"build": net, "sizes": SIZES, "cohort_size": 6, "rounds": 3}
    alone = run_rounds(local_engine(tiny_experiment(afd(keep=0.5), **options)))
    edge = tree(num_clients=6, edges=1)
    own = run_rounds(local_engine(tiny_experiment(merge(afd(keep=0.5), hierfavg()), topology=edge, **options)))
    assert [record.extra["dropout_reused"] for record in own.records] == [
        r.extra["dropout_reused"] for r in alone.records
    ]
    assert any(record.extra["dropout_reused"] for record in own.records)
