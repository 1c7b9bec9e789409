"""Topologies: clients talk with the server, along a tree's edges, or with each other along a graph.

A *hub* is a place where models meet and a model stays: the server, an edge server of a tree, or a client. Hubs are
numbered: clients by their ids, the server and edges below them, see :data:`SERVER` and :func:`edge_hub`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsweep.errors import ConfigError, DataError
from fedsweep.parameters.ranges import Count, NotNegative, Positive, check_value
from fedsweep.streams import stream
from fedsweep.world.spec_checks import read_text

SERVER = -1
"""The server as a hub."""


def edge_hub(edge: int) -> int:
    """Return the hub of an edge server, which count from 0: -2, -3, ..."""
    return -2 - edge


def hub_name(hub: int) -> str:
    """Return a hub as people read it: ``server``, ``edge 0``, ``client 3``."""
    if hub == SERVER:
        return "server"
    return f"client {hub}" if hub >= 0 else f"edge {-2 - hub}"


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Models that meet at a hub, whose model then is what is made of them.

    Each of another place travels there, but for a merge that only the simulation sees.

    Attributes:
        hub: Where they meet.
        clients: Attendees of the sync point whose trained models count, ascending.
        hubs: Hubs whose present models count, after those.
        travels: False: nothing travels, since nobody has the result; the mean of all clients' models is tested, say.
    """

    hub: int
    clients: tuple[int, ...] = ()
    hubs: tuple[int, ...] = ()
    travels: bool = True


@dataclass(frozen=True, kw_only=True)
class Link:
    """Links that a topology brings along, one for each pair of hubs that it joins.

    Attributes:
        bits_per_s: Of each link, above 0.
        latency_s: Of each message, at least 0.
    """

    bits_per_s: Positive
    latency_s: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Topology(ABC):
    """A rule for who talks with whom.

    Attributes:
        link: Of each pair of hubs that the topology joins. None: between clients messages go over the devices' own
            links, and between an edge server and the server they take no time.
    """

    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Star(Topology):
    """Every client talks with the server."""


@dataclass(frozen=True, kw_only=True)
class Tree(Topology):
    """Clients talk with edge servers, these with the server; client k belongs to edge k mod ``edges``.

    Attributes:
        edges: Number of edge servers.
    """

    edges: Count

    def edge_of(self, client: int) -> int:
        """Return the hub of a client's edge server."""
        return edge_hub(client % self.edges)


@dataclass(frozen=True, kw_only=True)
class Graph(Topology):
    """Clients talk with each other.

    Attributes:
        sources: For each client those whose models it gets, ascending, without itself.
    """

    sources: tuple[tuple[int, ...], ...]

    def weight(self, client: int, source: int) -> float:
        """Return the weight of a source's model at a client: 1 / (1 + the greater one of their degrees).

        With it the mixing matrix is doubly stochastic where links go both ways, and where all clients have the same
        degree: then it is 1 / (1 + degree).

        Source: Xiao, Boyd (2004), Metropolis-Hastings weights.
        """
        return 1 / (1 + max(len(self.sources[client]), len(self.sources[source])))


def _link(bits_per_s: float | None, latency_s: float) -> Link | None:
    if bits_per_s is None:
        if latency_s:
            raise ConfigError(
                f"scenario.topology.latency_s={latency_s:g} is of links of their own, which bits_per_s gives a rate;"
                " set scenario.topology.bits_per_s, too"
            )
        return None
    check_value("scenario.topology.bits_per_s", bits_per_s, Positive)
    check_value("scenario.topology.latency_s", latency_s, NotNegative)
    return Link(bits_per_s=bits_per_s, latency_s=latency_s)


def _graph(sources: Iterable[Iterable[int]], bits_per_s: float | None, latency_s: float) -> Graph:
    own = tuple(tuple(sorted({*others} - {client})) for client, others in enumerate(sources))
    return Graph(sources=own, link=_link(bits_per_s, latency_s))


def star() -> Star:
    """Clients talk with the server alone, as without a topology."""
    return Star()


def tree(
    *, num_clients: int, edges: Count = 2, bits_per_s: Positive | None = None, latency_s: NotNegative = 0.0
) -> Tree:
    """Clients talk with edge servers, and these with the server.

    Args:
        num_clients: Clients in the federation.
        edges: Edge servers, at most as many as clients; client k belongs to edge k mod edges.
        bits_per_s: Of the link between each edge server and the server, both ways; null: it takes no time.
        latency_s: Of a message there.
    """
    if edges > num_clients:
        raise ConfigError(
            f"scenario.topology.edges must be at most scenario.clients={num_clients}, but got {edges}; lower it"
        )
    return Tree(edges=edges, link=_link(bits_per_s, latency_s))


def ring(
    *, num_clients: int, reach: Count = 1, bits_per_s: Positive | None = None, latency_s: NotNegative = 0.0
) -> Graph:
    """Clients talk with their next ones on a ring, on both sides.

    Args:
        num_clients: Clients in the federation.
        reach: So many on each side.
        bits_per_s: Of each link; null: messages go over the two devices' own links.
        latency_s: Of a message there.
    """
    reach = min(reach, num_clients // 2)  # then everybody is reached
    steps = [*range(-reach, 0), *range(1, reach + 1)]
    sources = [[(client + step) % num_clients for step in steps] for client in range(num_clients)]
    return _graph(sources, bits_per_s, latency_s)


def exponential(*, num_clients: int, bits_per_s: Positive | None = None, latency_s: NotNegative = 0.0) -> Graph:
    """Client i sends to the clients i + 1, i + 2, i + 4, ... on a ring: one way, about log2 of their number each.

    Source: Ying et al. (2021), static exponential graph.

    Args:
        num_clients: Clients in the federation.
        bits_per_s: Of each link; null: messages go over the two devices' own links.
        latency_s: Of a message there.
    """
    hops = [2**power for power in range(max(0, num_clients - 1).bit_length())]
    sources = [[(client - hop) % num_clients for hop in hops] for client in range(num_clients)]
    return _graph(sources, bits_per_s, latency_s)


def random(
    *,
    num_clients: int,
    run_seed: int,
    degree: Count = 4,
    seed: int | None = None,
    bits_per_s: Positive | None = None,
    latency_s: NotNegative = 0.0,
) -> Graph:
    """Clients talk with clients that are drawn once: rings in random orders, laid over one another.

    So the graph is connected, and nobody has more neighbours than the degree; where two rings share a link, fewer.

    Args:
        num_clients: Clients in the federation.
        run_seed: The run's seed.
        degree: Neighbours of each client, even and at least 2.
        seed: What draws the graph; null: the run's seed.
        bits_per_s: Of each link; null: messages go over the two devices' own links.
        latency_s: Of a message there.
    """
    if degree % 2:
        raise ConfigError(
            f"scenario.topology.degree must be even, since each ring gives two neighbours, but got {degree}"
        )
    generator = stream(run_seed if seed is None else seed, "topology").numpy()
    sources: list[set[int]] = [set() for _ in range(num_clients)]
    for _ in range(degree // 2):
        order = generator.permutation(num_clients).tolist()
        for first, second in zip(order, order[1:] + order[:1], strict=True):
            sources[first].add(second)
            sources[second].add(first)
    return _graph(sources, bits_per_s, latency_s)


def complete(*, num_clients: int, bits_per_s: Positive | None = None, latency_s: NotNegative = 0.0) -> Graph:
    """Everybody talks with everybody.

    Args:
        num_clients: Clients in the federation.
        bits_per_s: Of each link; null: messages go over the two devices' own links.
        latency_s: Of a message there.
    """
    return _graph([range(num_clients)] * num_clients, bits_per_s, latency_s)


def file(*, num_clients: int, path: str, bits_per_s: Positive | None = None, latency_s: NotNegative = 0.0) -> Graph:
    """Clients talk along the links of a file.

    Args:
        num_clients: Clients in the federation.
        path: A text file with a link on each line: two clients' ids, which talk both ways; # begins a comment.
        bits_per_s: Of each link; null: messages go over the two devices' own links.
        latency_s: Of a message there.

    Raises:
        ConfigError: There is no such file.
        DataError: A line is no link between two clients, or the links leave clients apart.
    """
    sources: list[set[int]] = [set() for _ in range(num_clients)]
    for number, line in enumerate(read_text("scenario.topology.path", path).splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        ends = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 12]
        if len(words) != 2 or len(ends) != 2 or max(ends) >= num_clients or ends[0] == ends[1]:
            raise DataError(
                f"{path}, line {number}: a link is two clients' ids, 0 to {num_clients - 1}, such as 0 1, but it is"
                f" {line[:60]!r}; correct the line"
            )
        sources[ends[0]].add(ends[1])
        sources[ends[1]].add(ends[0])
    reached = _reached(sources)
    if len(reached) < num_clients:
        apart = min(set(range(num_clients)) - reached)
        raise DataError(
            f"{path}: its links leave client {apart} apart from client 0, so their models would never meet; add a link"
        )
    return _graph(sources, bits_per_s, latency_s)


def _reached(sources: Sequence[Iterable[int]]) -> set[int]:
    """Return the clients to which there is a way from client 0."""
    reached, ahead = {0}, [0]
    while ahead:
        for other in sources[ahead.pop()]:
            if other not in reached:
                reached.add(other)
                ahead.append(other)
    return reached


TOPOLOGIES: Mapping[str, Callable[..., Topology]] = {
    "star": star,
    "tree": tree,
    "ring": ring,
    "exponential": exponential,
    "random": random,
    "complete": complete,
    "file": file,
}
