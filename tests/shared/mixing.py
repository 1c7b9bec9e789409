"""How models mix along a graph's links, as a matrix."""

from __future__ import annotations

import numpy as np

from fedsweep.world.topology import Graph


def mixing_matrix(graph: Graph) -> np.ndarray:
    """Return the weights with which each client mixes all clients' models [N, N]."""
    number = len(graph.sources)
    matrix_NN = np.zeros((number, number))
    for client, sources in enumerate(graph.sources):
        for source in sources:
            matrix_NN[client, source] = graph.weight(client, source)
        matrix_NN[client, client] = 1 - matrix_NN[client].sum()
    return matrix_NN


def second_eigenvalue(graph: Graph) -> float:
    """Return the second greatest absolute one: the clients' distance from their mean shrinks by it, in the long run."""
    sizes = np.sort(np.abs(np.linalg.eigvals(mixing_matrix(graph))))[::-1]
    return float(sizes[1])
