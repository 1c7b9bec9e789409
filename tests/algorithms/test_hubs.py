"""Models that meet at clients and at edge servers: identities, bytes and times."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.shared.mixing import second_eigenvalue
from tests.shared.tiny import resumed
from torch import Tensor

from fedsweep.algorithms.aedfl import aedfl
from fedsweep.algorithms.dfedavgm import dfedavgm
from fedsweep.algorithms.dpsgd import dpsgd
from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.decentralized import aedfl_feddhad
from fedsweep.algorithms.fedopt import fedavgm
from fedsweep.algorithms.hierfavg import hierfavg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components import Uniform
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import check_first_round
from fedsweep.engine.hubs.merging import consensus_distance
from fedsweep.errors import ConfigError
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing import golden_problem, local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.testing.subject import small_network
from fedsweep.testing.worlds import tiny_device, with_devices
from fedsweep.world.availability import Availability
from fedsweep.world.drift import CosineRotation
from fedsweep.world.topology import Graph, Link, Topology, Tree, complete, exponential, hub_name, ring, tree

SIZES = (4, 8, 12, 24, 28, 20)
MODEL = 28  # values of the tiny worlds' linear model


def world(method: FederatedMethod, topology: Topology, **options: Any) -> Any:
    settings: dict[str, Any] = {"cohort_size": 6, "local_epochs": 2, "sizes": SIZES, "topology": topology}
    return tiny_experiment(method, **(settings | options))


def end(method: FederatedMethod, topology: Topology, **options: Any) -> Tensor:
    return run_rounds(local_engine(world(method, topology, **options))).vector


NOBODY = Graph(sources=((),) * 6)  # nobody talks with anybody
MOMENTUM = OptimizerSettings(momentum=0.9)


def test_a_complete_graph_with_equal_weights_is_fedavg_with_equal_weights() -> None:
    expected = end(replace(fedavg(), weighting=Uniform()), complete(num_clients=6), double=True)
    state = run_rounds(local_engine(world(dpsgd(), complete(num_clients=6), double=True)))
    assert (state.vector - expected).abs().max() < 1e-7
    assert sorted(state.models) == [*range(6)]
    assert all((own.vector - expected).abs().max() < 1e-7 for own in state.models.values())


def test_dfedavgm_is_dpsgd_with_momentum_that_begins_anew() -> None:
    own = end(dfedavgm(momentum=0.9), ring(num_clients=6), double=True)
    expected = end(dpsgd(), ring(num_clients=6), double=True, optimizer=MOMENTUM)
    assert (own - expected).abs().max() < 1e-12
    assert (own - end(dpsgd(), ring(num_clients=6), double=True)).abs().max() > 1e-3


def test_a_model_that_meets_no_other_leaves_the_device_on_which_it_was_trained() -> None:
    """Where the server takes means on a GPU, models stay there; what it keeps of them does not."""
    work = world(dpsgd(), NOBODY)
    fleet = LocalFleet(replace(work, device="lazy"))
    fleet._worker._models_stay = True
    state = run_rounds(Engine(work, fleet))
    assert {own.vector.device.type for own in state.models.values()} == {"cpu"}
    assert torch.allclose(state.vector, end(dpsgd(), NOBODY), atol=1e-6)


@pytest.mark.parametrize("graph", [ring(num_clients=6), exponential(num_clients=6), complete(num_clients=6)])
def test_bytes_of_each_link_are_one_message(graph: Graph) -> None:
    experiment = world(dpsgd(), graph)
    round = play_round(local_engine(experiment))
    links: Counter[tuple[int, int]] = Counter()
    for (client, way, _, peer), size in round.ledger.links.items():
        assert way == "up"
        links[client, peer] += size
    assert links == {(source, client): 4 * MODEL for client in range(6) for source in graph.sources[client]}
    assert round.plan.num_bytes == round.ledger.total_bytes == 4 * MODEL * len(links)


@pytest.mark.parametrize("optimizer", [OptimizerSettings(), MOMENTUM])
def test_one_edge_is_dynamicsgd_and_an_edge_for_each_client_is_fedavg(optimizer: OptimizerSettings) -> None:
    one, each, some = tree(num_clients=6, edges=1), tree(num_clients=6, edges=6), {"optimizer": optimizer}
    own = end(hierfavg(edge_interval=1), one, equal_steps=True, **some)  # as DynamicSGD asks for
    assert torch.equal(own, end(dynamicsgd(sync_rule="paper"), one, **some))
    for interval in (1, 3, 1000):
        assert torch.equal(end(hierfavg(edge_interval=interval), each, **some), end(fedavg(), each, **some))


def test_edges_keep_their_models_where_the_server_averages_rarely() -> None:
    engine = local_engine(world(hierfavg(edge_interval=2, server_interval=2), tree(num_clients=6, edges=2), rounds=4))
    first = run_rounds(engine, rounds=1)
    models = [first.models[hub].vector for hub in (-2, -3)]
    shares = [sum(SIZES[k] for k in range(first, 6, 2)) for first in (0, 1)]
    mean = (shares[0] * models[0].double() + shares[1] * models[1].double()) / sum(shares)
    assert not torch.equal(*models) and (first.vector - mean).abs().max() < 1e-6
    # In round 2 nothing comes down to the edges, and two messages go up.
    ledger = play_round(engine, first).ledger
    edges = {(k, way): n for (k, way, _), n in ledger.values.items() if k < 0}
    assert edges == {(-2, "up"): MODEL, (-3, "up"): MODEL}
    assert {(k, hub_name(peer)) for k, _, _, peer in ledger.links} == {(k, f"edge {k % 2}") for k in range(6)}
    traffic = ledger.traffic({})
    assert traffic.peers is not None and int(traffic.num_bytes.sum()) == ledger.total_bytes
    assert sorted(zip(traffic.clients.tolist(), traffic.peers.tolist(), strict=True))[:2] == [(-3, -1), (-2, -1)]


TWO_QUADRATICS: Any = {"rounds": 4, "steps": (1, 1), "problem": ((1.0, 1.0), (0.0, 10.0))}


def test_an_edge_begins_with_the_servers_model_and_not_with_what_other_edges_have_not_sent() -> None:
    """From 1 at a rate of 0.1: edge 0 gets to 0.9, then edge 1 from the server's 1 to 1.9; their mean is 1.4."""
    away = Sometimes(away=((2,), (1,)))
    topology = tree(num_clients=2, edges=2)
    states = golden_problem(hierfavg(server_interval=2), topology=topology, availability=away, **TWO_QUADRATICS)
    assert [float(states[1].models[hub].vector) for hub in (-1, -2)] == pytest.approx([1.0, 0.9])
    assert [float(states[2].models[hub].vector) for hub in (-2, -3)] == pytest.approx([0.9, 1.9])
    assert float(states[2].vector) == pytest.approx(1.4) and -1 not in states[2].models


def test_a_meeting_at_the_server_waits_for_a_round_with_clients() -> None:
    """Nobody is there in round 2: the edges' 0.81 and 2.71 meet in round 3, and what follows them in round 4."""
    away = Sometimes(away=((2,), (2,)))
    states = golden_problem(
        hierfavg(server_interval=2), topology=tree(num_clients=2, edges=2), availability=away, **TWO_QUADRATICS
    )
    assert [float(state.vector) for state in states[1:]] == pytest.approx([1.4, 1.4, 1.76, 2.084])
    own = [float(states[n].models[-1].vector) if -1 in states[n].models else None for n in (1, 2, 3, 4)]
    assert own == [1.0, 1.0, None, None]  # None: the server's model is the one that is tested


def test_where_the_last_round_has_no_clients_the_saved_model_is_the_edges_mean() -> None:
    """They met at 1.76 in round 2; then each took a step of its own."""
    away = Sometimes(away=((4,), (4,)))
    states = golden_problem(
        hierfavg(server_interval=2), topology=tree(num_clients=2, edges=2), availability=away, **TWO_QUADRATICS
    )
    assert float(states[4].vector) == float(states[3].vector) == pytest.approx((1.584 + 2.584) / 2)
    assert float(states[4].models[-1].vector) == pytest.approx(1.76)


def test_the_server_steps_from_its_own_model() -> None:
    """Half a step towards the edges' mean, which in two rounds of their own they have taken from 1 to 1.76."""
    method = merge(fedavgm(momentum=0.0, server_learning_rate=0.5), hierfavg(server_interval=2))
    states = golden_problem(method, topology=tree(num_clients=2, edges=2), **TWO_QUADRATICS)
    assert [float(states[n].vector) for n in (2, 4)] == pytest.approx([1.38, 1.7239])
    assert float(states[1].vector) == pytest.approx(1.4)  # the edges' mean, which is tested


def test_on_a_quadratic_the_distance_to_the_mean_falls_by_the_second_eigenvalue() -> None:
    graph = ring(num_clients=8)
    rates = golden_problem(
        dpsgd(),
        rounds=30,
        steps=(1,) * 8,
        problem=((1.0,) * 8, (3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0)),
        learning_rate=1e-3,
        topology=graph,
    )
    # All have the same curvature: a step shortens distances by 1 - rate, and adds a constant that is taken off here.
    models = torch.stack([torch.cat([state.models[k].vector for k in range(8)]) for state in rates[1:]]).double()
    moves = models[1:] - models[:-1]
    apart = [consensus_distance([*row[:, None]], local_engine(world(dpsgd(), graph)).layout) for row in moves]
    assert apart[-1] / apart[-2] == pytest.approx(second_eigenvalue(graph), rel=0.05)


def times(method: FederatedMethod, topology: Topology, speeds: list[float], rounds: int = 2) -> list[Any]:
    devices = [tiny_device(speed, bits_per_s=1e3) for speed in speeds]
    engine = local_engine(with_devices(world(method, topology, sizes=(16,) * 6, rounds=rounds), devices))
    states = [engine.start()]
    for _ in range(rounds):
        states.append(run_rounds(engine, states[-1], rounds=1))
    return states


def test_a_slow_client_of_a_ring_delays_its_neighbours_first() -> None:
    fast, slow = 1e6, 1e3
    after = times(dpsgd(), ring(num_clients=6), [slow, fast, fast, fast, fast, fast])
    first, second = after[1].hub_times, after[2].hub_times
    assert first[3] < first[1] == first[5] and first[2] == first[3] == first[4]
    assert second[3] == pytest.approx(2 * first[3])  # it has not heard of the slow one yet
    assert second[2] > second[3] and after[2].clock == max(second.values())


def test_a_round_on_equal_devices_takes_its_work_and_its_messages() -> None:
    states = times(dpsgd(), ring(num_clients=6), [1e5])
    message = 32 * MODEL / 1e3
    steps = states[1].records[0].flops / 6 / 1e5
    assert states[1].clock == pytest.approx(steps + 4 * message)  # two messages up, two down
    own_links = replace(ring(num_clients=6), link=Link(bits_per_s=1e3, latency_s=0.5))
    assert times(dpsgd(), own_links, [1e5])[1].clock == pytest.approx(steps + message + 0.5)


def test_edges_do_not_wait_for_one_another() -> None:
    # Edge 0 has the slow clients. The server waits for it, and edge 1 does not.
    topology = replace(tree(num_clients=6, edges=2), link=Link(bits_per_s=1e9))
    assert isinstance(topology, Tree)
    state = times(hierfavg(edge_interval=2), topology, [1e2, 1e6])[1]
    assert state.hub_times[-3] < 0.5 * state.hub_times[-2] < state.clock


def test_what_only_a_server_could_do_is_refused() -> None:
    from fedsweep.algorithms.scaffold import scaffold
    from fedsweep.method import merge

    with pytest.raises(ConfigError, match=r"other hubs than the server .*the term scaffold"):
        merge(hierfavg(), scaffold())

    class Carrying(type(dpsgd().pacing)):
        def carries_work(self) -> bool:
            return True

    with pytest.raises(ConfigError, match=r"other hubs than the server .*work that clients keep over several rounds"):
        replace(dpsgd(), pacing=Carrying(method="dpsgd", interval=None))
    for method in (dpsgd(), dfedavgm()):
        with pytest.raises(ConfigError, match=rf"method {method.name} .*scenario\.topology says no graph"):
            _ = world(method, tree(num_clients=6)).initial_states
    with pytest.raises(ConfigError, match=r"scenario\.topology says no tree"):
        _ = world(hierfavg(), ring(num_clients=6)).initial_states


@pytest.mark.parametrize("graph", [ring(num_clients=6), exponential(num_clients=6), complete(num_clients=6)])
def test_aedfl_on_equal_devices_is_dpsgd(graph: Graph) -> None:
    own, other = (times(method, graph, [1e5], rounds=3) for method in (aedfl(), dpsgd()))
    assert torch.equal(own[-1].vector, other[-1].vector)
    assert own[-1].hub_times == other[-1].hub_times and own[-1].total_bytes == other[-1].total_bytes


def test_aedfl_follows_a_plain_event_queue() -> None:
    """Each client trains, gets a message up and one down for each neighbour once all have mixed, and begins anew."""
    speeds, graph, rounds = [1e4, 2.3e4, 3.1e4, 0.7e4, 5.3e4, 1.9e4], ring(num_clients=6), 40
    states = times(aedfl(), graph, speeds, rounds=rounds)
    message = 32 * MODEL / 1e3
    training = states[1].records[0].flops
    queue = [(training / speed, client) for client, speed in enumerate(speeds)]
    heapq.heapify(queue)
    mixed = [0.0] * 6
    for number in range(rounds):
        moment, client = heapq.heappop(queue)
        assert states[number + 1].records[-1].attendees == (client,)
        asked = max(moment, *(mixed[other] for other in graph.sources[client]))
        mixed[client] = asked + message + 2 * message
        assert states[number + 1].hub_times[client] == pytest.approx(mixed[client])
        heapq.heappush(queue, (mixed[client] + training / speeds[client], client))
    assert states[-1].total_bytes - states[0].total_bytes == rounds * 2 * 4 * MODEL


def test_neighbours_that_are_behind_count_less() -> None:
    states = times(aedfl(exponent=1.0), ring(num_clients=6), [1e2, 1e5, 1e2, 1e2, 1e2, 1e2], rounds=3)
    assert [row.attendees for row in states[-1].records] == [(1,)] * 3  # the fast one alone, three times
    # Both neighbours are equally behind, so together they weigh what they would: two thirds.
    assert states[-1].records[-1].extra["rounds_behind"] == 3
    # One round behind is too far for no patience: the client keeps what it has trained.
    alone = times(aedfl(patience=0), ring(num_clients=6), [1e2, 1e5, 1e2, 1e2, 1e2, 1e2], rounds=1)
    cut_off = times(aedfl(), NOBODY, [1e2, 1e5, 1e2, 1e2, 1e2, 1e2], rounds=1)
    assert torch.equal(alone[-1].models[1].vector, cut_off[-1].models[1].vector)


@pytest.mark.parametrize("method", [aedfl(), aedfl_feddhad(base_rate=0.3)])
def test_samples_that_change_while_a_client_trains_are_refused_before_the_run(method: FederatedMethod) -> None:
    drift = CosineRotation(num_classes=4, num_rounds=6, min_classes=2, max_classes=3)
    scene = world(method, ring(num_clients=6), build=small_network, drift=drift)
    with pytest.raises(ConfigError, match=r"goes on over rounds of others, .*scenario\.drift .* set it to null"):
        check_first_round(with_devices(scene, [tiny_device(1e4)]))


def test_a_row_has_the_distance_and_how_good_clients_models_are() -> None:
    work = replace(world(dpsgd(), ring(num_clients=6), rounds=1), evaluate_per_client=True)
    engine = local_engine(work)
    state = run_rounds(engine)
    extra = state.records[-1].extra
    models = [state.models[k].vector for k in range(6)]
    assert extra["consensus_distance"] == consensus_distance(models, work.layout) > 0
    assert 0 < extra["own_accuracy_worst10"] <= extra["own_accuracy"] <= extra["own_accuracy_best10"] <= 1
    assert (torch.stack(models).mean(0) - state.vector).abs().max() < 1e-6


@pytest.mark.parametrize("method", [dpsgd(interval=2), dfedavgm(), aedfl(), aedfl_feddhad(base_rate=0.3, refresh=[2])])
def test_a_run_goes_on_from_its_checkpoint_on_the_disk(method: FederatedMethod, tmp_path: Path) -> None:
    devices = [tiny_device(speed) for speed in (1e4, 3e4, 2e5)]
    options = {"rounds": 9, "optimizer": MOMENTUM, "build": small_network}
    work = with_devices(world(method, ring(num_clients=6), **options), devices)
    unbroken, own = run_rounds(local_engine(work)), resumed(work, tmp_path, rounds=5)
    assert torch.equal(own.vector, unbroken.vector) and own.hub_times == unbroken.hub_times
    assert own.models.keys() == unbroken.models.keys() == {*range(6)}
    assert all(torch.equal(own.models[k].vector, unbroken.models[k].vector) for k in range(6))
    assert [row.total_bytes for row in own.records] == [row.total_bytes for row in unbroken.records]


def test_edges_models_come_back_from_a_checkpoint_on_the_disk(tmp_path: Path) -> None:
    work = world(hierfavg(edge_interval=2, server_interval=3), tree(num_clients=6, edges=2), rounds=5)
    unbroken, own = run_rounds(local_engine(work)), resumed(work, tmp_path, rounds=2)
    assert torch.equal(own.vector, unbroken.vector)
    assert all(torch.equal(own.models[hub].vector, unbroken.models[hub].vector) for hub in (-2, -3))


@dataclass(frozen=True, kw_only=True)
class Sometimes(Availability):
    """Client k is away in those rounds that are listed for it."""

    away: tuple[tuple[int, ...], ...]

    def probability(self, round: int, **more: Any) -> np.ndarray:
        return np.array([0.0 if round in rounds else 1.0 for rounds in self.away])


@pytest.mark.parametrize("method", [aedfl(), aedfl_feddhad(base_rate=0.3)])
def test_whoever_was_away_begins_anew_when_it_is_back(method: FederatedMethod) -> None:
    """No moment lies before one that was there already."""
    away = (tuple(range(2, 9)), (), tuple(range(1, 30)), (), (5, 6, 7), ())
    devices = [tiny_device(speed) for speed in (1e5, 2e4, 3e4, 1e4, 5e4, 2e4)]
    options = {"rounds": 25, "sizes": (16,) * 6, "build": small_network}
    scene = world(method, ring(num_clients=6), **options, availability=Sometimes(away=away))
    engine = local_engine(with_devices(scene, devices))
    state, moments = engine.start(), [0.0]
    for number in range(1, 26):
        state = run_rounds(engine, state, rounds=1)
        moments.append(state.components["pacing"]["moment"])
        there = {k for k in range(6) if number not in away[k]}
        assert set(state.records[-1].attendees) <= there and state.records[-1].present == tuple(sorted(there))
        assert state.clock is not None and state.clock >= moments[-1]
        assert all(time >= moments[-2] for time in (state.hub_times[k] for k in state.records[-1].attendees))
    assert moments == sorted(moments) and len({*moments}) > 10
    first_back = next(row.round for row in state.records if row.round > 8 and 0 in row.attendees)
    # The fast one is back in round 9, and takes as long as ever from the moment before.
    assert moments[first_back] >= moments[8] and first_back <= 12
