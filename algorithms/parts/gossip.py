"""Gossip: clients' own models, mixed along a graph; the mean of all of them is what is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsweep import ConfigError
from fedsweep.components import (
    SERVER,
    ClientTest,
    ClientUpdate,
    Count,
    Evaluation,
    Graph,
    LocalClient,
    Merge,
    Pacing,
    RoundContext,
    ServerContext,
    State,
    SyncContext,
    SyncPoint,
    Topology,
    Weighting,
    cut_round,
    due_steps,
    logits_with,
)


def graph_of(topology: Topology, method: str) -> Graph:
    """Return a topology that is a graph.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(topology, Graph):
        raise ConfigError(
            f"method {method} has clients talk with each other, but scenario.topology says no graph; set it to"
            " {kind: ring}, exponential, random, complete or file"
        )
    return topology


@dataclass(frozen=True, kw_only=True)
class Gossip(Pacing):
    """Clients go on with their own models, and mix them with their neighbours' at each exchange.

    Attributes:
        method: For the message where there is no graph.
        interval: Local steps between two exchanges; None: one a round.
    """

    has_hubs: ClassVar[bool] = True
    has_server: ClassVar[bool] = False

    method: str = field(compare=False)
    interval: Count | None

    def init(self, context: ServerContext) -> State:
        """Return the state in which nobody has taken part yet.

        Raises:
            ConfigError: The topology is no graph.
        """
        graph_of(context.topology, self.method)
        return {"last": []}

    def first_models(self, context: ServerContext) -> Iterable[int]:
        return range(context.num_clients)

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        graph = graph_of(context.topology, self.method)
        dues = {
            k: (work.steps,) if self.interval is None else due_steps(self.interval, work.steps, sync_rule="paper")
            for k, work in context.work.items()
        }
        # Whoever passed over the last round is asked now; the others go on when they are ready.
        points = [exchange(point, graph, dict.fromkeys(state["last"], 0.0), context.clock) for point in cut_round(dues)]
        everybody = Merge(hub=SERVER, hubs=tuple(range(len(context.profiles))), travels=False)
        if points:
            points[-1] = replace(points[-1], merges=(*points[-1].merges, everybody))
        return tuple(points), {"last": list(context.cohort)}


def exchange(point: SyncPoint, graph: Graph, ready: Mapping[int, float], clock: float) -> SyncPoint:
    """Return a sync point at which each attendee mixes its model with those of its neighbours that attend, too.

    Args:
        point: With its jobs and attendees.
        graph: Who is whose neighbour.
        ready: Earliest starts in virtual seconds, by client.
        clock: That of clients that are not there.
    """
    there = set(point.attend)
    return replace(
        point,
        start=tuple(replace(job, model=job.client, not_before=ready.get(job.client, clock)) for job in point.start),
        merges=tuple(
            Merge(hub=client, clients=tuple(sorted({client, *there.intersection(graph.sources[client])})))
            for client in point.attend
        ),
    )


@dataclass(frozen=True, kw_only=True)
class NeighbourWeights(Weighting):
    """The graph's weights; a client's own model has the rest. The mean of all clients' models has equal ones."""

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        graph = sync.topology
        if sync.hub == SERVER or not isinstance(graph, Graph):
            return torch.full((len(updates),), 1 / len(updates), dtype=torch.float64), state
        own = sync.hub
        weights_M = torch.tensor(
            [0.0 if u.client == own else graph.weight(own, u.client) for u in updates], dtype=torch.float64
        )
        weights_M[[u.client for u in updates].index(own)] = 1 - weights_M.sum()
        return weights_M, state


@dataclass(frozen=True, kw_only=True)
class OwnHubTest(ClientTest):
    """The client's own model, which the engine has for it, on its share of the test set."""

    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        return lambda inputs: logits_with(client.model, {}, inputs)


@dataclass(frozen=True, kw_only=True)
class MeanModel(Evaluation):
    """The mean of all clients' models answers the server's tests; clients test their own."""

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return logits

    def client_test(self) -> ClientTest:
        return OwnHubTest()
