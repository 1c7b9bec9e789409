"""AEDFL with FedDHAD: what a device does by itself, and what travels."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsweep.algorithms.feddhad import decentralized
from fedsweep.algorithms.feddhad.decentralized import DegreesOfNeighbours, aedfl_feddhad, neighbour_pulls
from fedsweep.client.messages import Progress, Reply
from fedsweep.components import ClientUpdate, SyncContext
from fedsweep.engine.aggregation import client_update
from fedsweep.engine.state import RunState
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.testing.subject import small_network
from fedsweep.testing.worlds import tiny_data, tiny_device, with_devices
from fedsweep.trees import FlatLayout, layout_of
from fedsweep.world.topology import SERVER, Graph, ring

RING = ring(num_clients=6)


def engine_of(
    rounds: int = 12,
    speeds: tuple[float, ...] = (1e5, 2e5, 3e5, 1e5, 2e5, 3e5),
    topology: Graph = RING,
    **parameters: Any,
) -> Any:
    images, labels = tiny_data(num_samples=96)
    order = np.argsort(labels, kind="stable")
    order[:16] = order[[*range(0, 96, 6)]]  # client 0 has some of all, others few classes
    world = tiny_experiment(
        aedfl_feddhad(**parameters),
        num_clients=6,
        cohort_size=6,
        rounds=rounds,
        local_epochs=2,
        sizes=(16,) * 6,
        images=images[order],
        labels=labels[order],
        build=small_network,
        topology=topology,
    )
    return local_engine(with_devices(world, [tiny_device(speed) for speed in speeds]))


def test_a_neighbours_weight_moves_the_mix_as_its_formula_says() -> None:
    generator = torch.Generator().manual_seed(1)
    layout = FlatLayout(names=("w",), shapes=((5,),), num_params=5, num_buffers=0, dtype=torch.float64)
    models_MP = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    raw = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    own, share = 0, 0.4

    def mixed(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        neighbours = raw[1:] / raw[1:].sum() * (1 - share)
        weights = torch.cat([torch.tensor([share], dtype=torch.float64), neighbours])
        return weights, weights @ models_MP

    weights, _ = mixed(raw)
    gradient = torch.randn(5, generator=generator, dtype=torch.float64)
    (slope,) = torch.autograd.grad((mixed(raw)[1] * gradient).sum(), raw)
    updates = [
        client_update(Reply(client=k, vector=row, progress=Progress(samples=1)), learning_rate=0.1, layout=layout)
        for k, row in enumerate(models_MP)
    ]
    sync = cast(SyncContext, SimpleNamespace(layout=layout, vector=torch.zeros(5, dtype=torch.float64)))
    pulls = neighbour_pulls(updates, weights.detach(), own, sync)
    by_formula = (pulls @ gradient)[1:]
    assert torch.allclose(by_formula, (slope * raw.detach())[1:], atol=1e-12)  # d / d ln a = a d / d a


def test_neighbours_share_what_the_graph_gives_them_by_samples_over_degrees() -> None:
    engine = engine_of(speeds=(1e5,), base_rate=0.0, learning_rate_v=0.0, learning_rate_b=0.0)
    seen: list[tuple[int, list[int], list[float]]] = []
    weighting = engine.experiment.method.weighting

    class Watched(DegreesOfNeighbours):
        def weigh(self, state: Any, updates: Any, sync: Any) -> Any:
            weights, after = DegreesOfNeighbours.weigh(weighting, state, updates, sync)
            seen.append((sync.hub, [u.client for u in updates], weights.tolist()))
            return weights, after

    object.__setattr__(engine.tools.aggregator._method, "weighting", Watched())
    state = engine.start()
    js = state.components["weighting"]["js"]
    assert float(js.max()) > 3 * float(js.min())
    run_rounds(engine, state, rounds=1)
    object.__setattr__(engine.tools.aggregator._method, "weighting", weighting)
    for hub, members, weights in seen:
        if hub == SERVER:
            continue
        of = dict(zip(members, weights, strict=True))
        left, right = (k for k in members if k != hub)
        assert of[hub] == pytest.approx(1 / 3) and sum(weights) == pytest.approx(1)
        degrees = {k: max(float(js[k]), 1e-3) for k in (left, right)}
        assert of[left] / of[right] == pytest.approx(degrees[right] / degrees[left])


def test_what_a_device_trains_stays_the_same_while_it_is_at_work_and_its_scores_are_its_own() -> None:
    engine = engine_of(rounds=30, base_rate=0.4, refresh=[2])
    state: RunState = engine.start()
    cut: dict[int, str] = {}
    for _ in range(30):
        drawn = state.components["submodels"]["drawn"]
        plan = engine.planner.plan(state)
        planned = plan.components["submodels"]["drawn"]
        assert all(planned[k] == drawn[k] for k in drawn)
        round = play_round(engine, state)
        due = engine.experiment.method.submodels._due(state.components["submodels"])
        for update in round.updates:
            own = update.submodel
            assert update.client not in due or own == FULL_MODEL
            if own != FULL_MODEL:
                cut[update.client] = own.key()
            assert ("unit_scores/scores" in update.extras) == (update.client in due)
        # Nothing but models and masks travels.
        assert {kind for _, _, kind in round.ledger.values} == {"params"}
        assert {kind for _, _, kind in round.ledger.sizes} <= {"params", "mask"}
        assert round.plan.num_bytes == round.ledger.total_bytes
        state = run_rounds(engine, state, rounds=1)
    trained, scores = (state.components["submodels"][key] for key in ("trained", "scores"))
    assert sum(trained) == sum(len(row.attendees) for row in state.records)
    assert set(scores) == {k for k, times in enumerate(trained) if times >= 2}
    # The slow ones leave units out, the fast ones need not.
    assert cut and cut.keys() <= {0, 1, 3, 4}


def test_what_a_device_leaves_out_of_its_model_stays_with_it() -> None:
    nobody = Graph(sources=((),) * 6)
    engine = engine_of(speeds=(1e5, 1e6, 1e6), topology=nobody, base_rate=0.4, refresh=[], device_rate="printed")
    state, cut = engine.start(), 0
    for _ in range(8):
        before, round = state, play_round(engine, state)
        state = run_rounds(engine, state, rounds=1)
        for update in round.updates:
            cover = update.submodel.embed(update.vector, engine.layout).cover
            held, now = (each.models[update.client].vector for each in (before, state))
            if cover is not None:
                cut += 1
                assert torch.equal(now[~cover], held[~cover]) and not torch.equal(now[cover], held[cover])
    assert cut


def test_degrees_are_learned_by_each_device_of_its_neighbours() -> None:
    engine = engine_of(rounds=12, learning_rate_v=1.0, learning_rate_b=1e-3)
    state = run_rounds(engine).components["weighting"]
    assert any(value != 1.0 for row in state["v"].values() for value in row.values())
    for hub, row in state["v"].items():
        assert row.keys() <= {(hub - 1) % 6, (hub + 1) % 6}


def test_a_devices_gradient_is_read_off_the_scaled_steps_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move is the gradients' sum times the rate and the square of the scale; 0 where the device held nothing."""
    model = small_network()
    layout, group = layout_of(model), model.unit_groups()[0]
    part = unit_submodel([group], {group.name: (0, 2)}, scales={group.name: (1.25, 2.0)}, scales_in="incoming")
    scale = part.step_scale(layout)
    assert scale is not None
    start, gradient = torch.randn(layout.num_values), torch.randn(len(scale))
    moved = part.embed(part.extract(start, layout) - 0.1 * 3 * scale.square() * gradient, layout)
    expected = part.embed(gradient, layout)
    assert moved.cover is not None and expected.cover is not None
    reply = Reply(
        client=0,
        vector=torch.where(moved.cover, moved.vector, start),
        progress=Progress(samples=1, steps=3, effective_steps=3.0),
    )
    update = replace(client_update(reply, learning_rate=0.1, layout=layout), sent_as=part)
    found = decentralized._gradient_on_the_way(update, cast(SyncContext, SimpleNamespace(layout=layout, vector=start)))
    assert found is not None
    torch.testing.assert_close(found, expected.vector.masked_fill(~expected.cover, 0.0), rtol=1e-4, atol=1e-4)

    sent: list[SubModel | None] = []
    reads = decentralized._gradient_on_the_way

    def noted(update: ClientUpdate, sync: SyncContext) -> torch.Tensor | None:
        sent.append(update.sent_as)
        return reads(update, sync)

    monkeypatch.setattr(decentralized, "_gradient_on_the_way", noted)
    run_rounds(engine_of(rounds=12, base_rate=0.4, refresh=[]))
    assert any(each is not None and each.scales_steps for each in sent) and None in sent
