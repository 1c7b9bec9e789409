"""HierFAVG: edge servers average their clients often, and the server averages the edges rarely.

Source: Liu, Zhang, Song, Letaief (2020): Client-edge-cloud hierarchical federated learning. ICC. Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    SERVER,
    Count,
    Merge,
    Pacing,
    RoundContext,
    ServerContext,
    State,
    SyncPoint,
    Topology,
    Tree,
    cut_round,
    due_steps,
    takes,
)


def _tree_of(topology: Topology) -> Tree:
    if not isinstance(topology, Tree):
        raise ConfigError(
            "method hierfavg has clients talk with edge servers, but scenario.topology says no tree; set it to"
            " {kind: tree, edges: 4}, say"
        )
    return topology


@dataclass(frozen=True, kw_only=True)
class TwoLevels(Pacing):
    """Two intervals: of local steps at the edges, of rounds at the server.

    The state has the edges whose work the server does not have yet, and the last round that had clients.

    Attributes:
        edge_interval: Local steps between two averages at an edge; also at the round's end.
        server_interval: Rounds between two averages at the server; also after the last of training.rounds.
    """

    has_hubs: ClassVar[bool] = True
    syncs_inside: ClassVar[bool] = True

    edge_interval: Count = 10
    server_interval: Count = 1

    def init(self, context: ServerContext) -> State:
        """Return the state in which every edge is to be sent the server's model.

        Raises:
            ConfigError: The topology is no tree.
        """
        _tree_of(context.topology)
        return {"ahead": [], "last": [], "round": 0, "rounds": context.num_rounds}

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        tree = _tree_of(context.topology)
        dues = {k: due_steps(self.edge_interval, w.steps, sync_rule="paper") for k, w in context.work.items()}
        # An edge that passed over the last round is asked now.
        ready = dict.fromkeys(state["last"], 0.0)
        points = [_at_edges(point, tree, ready, context.clock) for point in cut_round(dues)]
        edges = sorted({tree.edge_of(client) for client in context.cohort}, reverse=True)
        ahead = set(state["ahead"])
        # An edge that has nothing of its own begins with the server's model.
        down = tuple(Merge(hub=edge, hubs=(SERVER,)) for edge in edges if edge not in ahead)
        ahead |= set(edges)
        passed = context.round // self.server_interval - state["round"] // self.server_interval
        meets = passed > 0 or context.round == state["rounds"]
        every = Merge(hub=SERVER, hubs=tuple(sorted(ahead, reverse=True)), travels=meets)
        points[-1] = replace(points[-1], merges=(*points[-1].merges, every))
        first = (SyncPoint(start=(), attend=(), merges=down),) if down else ()
        ahead = set() if meets else ahead
        return (*first, *points), {**state, "ahead": sorted(ahead), "last": edges, "round": context.round}


def _at_edges(point: SyncPoint, tree: Tree, ready: Mapping[int, float], clock: float) -> SyncPoint:
    """Return a sync point at which each attendee's model goes to its edge server, where it also started from.

    Args:
        point: With its jobs and attendees.
        tree: Whose edge is whose.
        ready: Earliest starts in virtual seconds, by edge.
        clock: That of edges that are not there.
    """
    edges = sorted({tree.edge_of(client) for client in point.attend}, reverse=True)
    return replace(
        point,
        start=tuple(
            replace(job, model=edge, not_before=ready.get(edge, clock))
            for job, edge in ((job, tree.edge_of(job.client)) for job in point.start)
        ),
        merges=tuple(
            Merge(hub=edge, clients=tuple(k for k in point.attend if tree.edge_of(k) == edge)) for edge in edges
        ),
    )


@with_card(
    Card(
        title="HierFAVG",
        source="Liu et al., ICC 2020",
        needs=("tree",),
        small={"edge_interval": 2},
        limits=(Limit(given={"edge_interval": 1000}, tolerance=1e-6),),
    )
)
@takes(TwoLevels)
def hierfavg(**parameters: Any) -> FederatedMethod:
    """Edge servers average their clients' models every few local steps, the server the edges' every few rounds.

    The clients of an edge are those of ``scenario.topology`` (tree). With one edge it is DynamicSGD at that interval,
    with one client for each edge FedAvg.

    Reading: with a server interval above 1, ``test_accuracy`` in between is that of the edges' mean, which nobody has;
    an edge none of whose clients takes part in a round keeps its model, and sends it with the others'. An average at
    the server that falls on a round without clients takes place in the next that has some. Reading: at the
    server an edge counts by the samples of those of its clients that took part in its last round, not in all rounds
    since the server's last average.
    """
    return FederatedMethod(name="hierfavg", pacing=TwoLevels(**parameters))
