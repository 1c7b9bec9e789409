"""Graphs: who gets whose model, with which weight, and how fast that mixes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tests.shared.mixing import mixing_matrix, second_eigenvalue

from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError, DataError
from fedsweep.experiment.build import build_experiment
from fedsweep.world.topology import Graph, complete, edge_hub, exponential, file, hub_name, random, ring, tree


@pytest.mark.parametrize("number", [1, 2, 3, 8, 11])
def test_mixing_keeps_the_mean_and_graphs_have_their_degrees(number: int) -> None:
    graphs = [ring(num_clients=number), exponential(num_clients=number), complete(num_clients=number)]
    graphs.append(random(num_clients=number, run_seed=0))
    for graph in graphs:
        matrix = mixing_matrix(graph)
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
    assert {len(sources) for sources in graphs[0].sources} == {min(2, number - 1)}
    assert {len(sources) for sources in graphs[1].sources} == {max(0, number - 1).bit_length()}
    assert sum(map(len, graphs[2].sources)) == number * (number - 1)


def test_a_rings_second_eigenvalue_is_the_textbooks() -> None:
    assert second_eigenvalue(ring(num_clients=10)) == pytest.approx((1 + 2 * math.cos(2 * math.pi / 10)) / 3)
    assert second_eigenvalue(complete(num_clients=10)) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("number", [1, 2, 5, 6])
def test_a_ring_that_reaches_everybody_is_complete_and_is_no_longer_than_its_clients(number: int) -> None:
    for reach in (number // 2, 10**15):
        assert ring(num_clients=number, reach=max(1, reach)) == complete(num_clients=number)


def test_a_drawn_graph_is_its_seeds_and_connected() -> None:
    graph = random(num_clients=30, run_seed=3)
    assert graph == random(num_clients=30, run_seed=7, seed=3) != random(num_clients=30, run_seed=4)
    assert max(map(len, graph.sources)) <= 4 and second_eigenvalue(graph) < 1 - 1e-6
    with pytest.raises(ConfigError, match="degree must be even"):
        random(num_clients=30, run_seed=3, degree=3)


def test_a_file_lists_links(tmp_path: Path) -> None:
    path = tmp_path / "links.txt"
    path.write_text("# a path\n0 1\n1, 2\n")
    graph = file(num_clients=3, path=str(path))
    path.write_text("0 1\n1 2\n", encoding="utf-8-sig")  # as Windows' editors write it
    assert file(num_clients=3, path=str(path)) == graph
    assert graph.sources == ((1,), (0, 2), (1,))
    np.testing.assert_allclose(mixing_matrix(graph), [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]])
    for text, message in (("0 1\n", "apart from client 0"), ("0 3\n", "line 1"), ("0 0", "line 1"), ("0 x", "line 1")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            file(num_clients=3, path=str(path))


def test_trees_and_links_are_checked() -> None:
    assert [tree(num_clients=5, edges=2).edge_of(k) for k in range(3)] == [edge_hub(0), edge_hub(1), edge_hub(0)]
    assert [hub_name(hub) for hub in (3, -1, -2, -3)] == ["client 3", "server", "edge 0", "edge 1"]
    with pytest.raises(ConfigError, match=r"at most scenario\.clients=3"):
        tree(num_clients=3, edges=4)
    with pytest.raises(ConfigError, match="bits_per_s"):
        ring(num_clients=3, latency_s=0.1)
    graph = ring(num_clients=3, bits_per_s=1e6)
    assert isinstance(graph, Graph) and graph.link is not None and graph.link.bits_per_s == 1e6


def test_rates_of_links_need_a_virtual_clock() -> None:
    topology = {"kind": "ring", "bits_per_s": 1e6}
    scenario = {"clients": 4, "topology": topology, "devices": {"profile": "phone-wifi"}}
    config = {"scenario": scenario, "method": {"name": "dpsgd"}}
    assert build_experiment(load_config(config)).world.topology.link is not None
    with pytest.raises(ConfigError, match=r"bits_per_s is a rate on the virtual clock, .* scenario\.devices is null"):
        plan_run(load_config({**config, "scenario": {**scenario, "devices": None}}))
