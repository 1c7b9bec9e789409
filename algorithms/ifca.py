"""IFCA: several models on the server, one for each cluster of clients; each client trains the one that fits it best.

Source: Ghosh, Chung, Yin, Ramchandran (2020): An efficient framework for clustered federated learning. NeurIPS.
Algorithm 1, with model averaging.

Shape letters: J clusters, M attendees, P params, V values of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    ClientTest,
    ClientUpdate,
    ComponentReport,
    Count,
    Evaluation,
    FlatLayout,
    LocalClient,
    LocalTerm,
    LocalWork,
    Memory,
    ParamTree,
    Passes,
    Payload,
    PositiveShare,
    Published,
    ServerContext,
    ServerUpdate,
    State,
    SyncContext,
    combined,
    logits_with,
)

_NAME = "ifca"
_CHOICE = f"{_NAME}/cluster"


def _models(client: LocalClient, clusters: int) -> list[ParamTree]:
    """Return the clusters' params, as the client received them: the first as the server's model."""
    others = [
        {name: client.broadcast[f"cluster{j}/{name}"].to(client.targets.device) for name in client.params}
        for j in range(1, clusters)
    ]
    return [client.params, *others]


def best_fitting(client: LocalClient, models: Sequence[ParamTree]) -> int:
    """Return the number of the model that has the least loss on all of a client's samples; of several the first."""
    if len(models) == 1:
        return 0
    with torch.no_grad():
        losses = [F.cross_entropy(client.forward_with(values, client.inputs), client.targets) for values in models]
    return int(torch.stack(losses).argmin())


@dataclass(frozen=True, kw_only=True)
class BestCluster(LocalTerm):
    """Starts each job from the model of the cluster that fits the client best, and says which that was.

    Attributes:
        clusters: J.
    """

    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True  # from a job's start to its end
    needs_anchor: ClassVar[bool] = False

    name: str = _NAME
    clusters: int

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        return Passes(job=self.clusters if self.clusters > 1 else 0)

    def prepare(
        self, memory: Memory, anchor: ParamTree, local: LocalClient | None = None
    ) -> tuple[Memory, ParamTree | None]:
        if local is None or self.clusters == 1:
            return {"cluster": 0}, None
        models = _models(local, self.clusters)
        cluster = best_fitting(local, models)
        return {"cluster": cluster}, models[cluster] if cluster else None

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return memory, {"cluster": torch.tensor([memory["cluster"]])} if self.clusters > 1 else {}


@dataclass(frozen=True, kw_only=True)
class OneModelEach(ServerUpdate):
    """Each cluster's model becomes what is combined of those of its members that attend; without any it stays.

    The first cluster's is the server's model; the state has the params of the others.

    Attributes:
        clusters: J.
        shuffled: Share of each tensor's values that have another place in each further cluster's first model.
    """

    needs_updates: ClassVar[bool] = True

    clusters: Count
    shuffled: PositiveShare

    @property
    def has_several(self) -> bool:
        return self.clusters > 1

    def init(self, context: ServerContext) -> State:
        """Return the other clusters' params [J - 1, P] before round 1; nobody has been assigned yet."""
        if self.clusters > context.num_clients:
            raise ConfigError(
                f"method.clusters must not exceed scenario.clients, but {self.clusters} > {context.num_clients}"
            )
        others = [
            _shuffled(context.vector, context.layout, self.shuffled, context.stream.child("cluster", j).torch())
            for j in range(1, self.clusters)
        ]
        return {"others": others, "members": [0] * self.clusters}

    def publish(self, state: State) -> Mapping[str, Published]:
        return {
            f"cluster{j}": Published(value=params, like="params", is_kept=False)
            for j, params in enumerate(state["others"], 1)
        }

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        # Whoever is idle has not chosen.
        chosen = [int(u.extras[_CHOICE]) if _CHOICE in u.extras else None for u in updates]
        size = sync.layout.num_params
        # Batch norm's statistics are everybody's.
        vector = combined(updates, weights, sync)
        if self.clusters == 1:
            return vector, {**state, "members": [len(updates)]}
        present = [sync.vector[:size], *state["others"]]
        params = [self._of_cluster(j, chosen, updates, weights, before, sync) for j, before in enumerate(present)]
        vector = torch.cat([params[0], vector[size:]])
        return vector, {"others": params[1:], "members": [chosen.count(j) for j in range(self.clusters)]}

    def _of_cluster(
        self,
        cluster: int,
        chosen: Sequence[int | None],
        updates: Sequence[ClientUpdate],
        weights: Tensor,
        before: Tensor,
        sync: SyncContext,
    ) -> Tensor:
        places = [place for place, own in enumerate(chosen) if own == cluster]
        # Of members whose weights are all 0 (ABAVG's, say) nothing can be averaged, either.
        if not float(weights[places].sum()):
            return before
        # All of them: the weights as they are, to the bit.
        own = weights if len(places) == len(updates) else weights[places] / weights[places].sum()
        vector = sync.vector.clone()
        vector[: len(before)] = before
        return combined([updates[place] for place in places], own, replace(sync, vector=vector))[: len(before)]

    def report(self, state: State) -> ComponentReport:
        """Report how many attendees of the last aggregation chose each cluster."""
        return ComponentReport(metrics={f"cluster{j}_clients": float(n) for j, n in enumerate(state["members"])})


def _shuffled(vector: Tensor, layout: FlatLayout, share: float, generator: torch.Generator) -> Tensor:
    """Return a model's params [P] with a share of each tensor's values in other places of the same tensor."""
    params = vector[: layout.num_params].clone()
    for view in layout.params(params).values():
        flat = view.view(-1)
        moved = torch.randperm(len(flat), generator=generator)[: max(2, round(share * len(flat)))]
        flat[moved] = flat[moved[torch.randperm(len(moved), generator=generator)]].clone()
    return params


@dataclass(frozen=True, kw_only=True)
class BestClusterTest(ClientTest):
    """The cluster's model that fits the client's training samples best, on the client's share of the test set.

    Attributes:
        clusters: J.
    """

    reads_data = True
    reads_broadcast: ClassVar[bool] = True
    clusters: int

    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        models = _models(client, self.clusters)
        values = models[best_fitting(client, models)]
        return lambda inputs: logits_with(client.model, values, inputs)


@dataclass(frozen=True, kw_only=True)
class FirstClusterForTheServer(Evaluation):
    """The first cluster's model answers the server's tests; clients test the one that fits them best.

    Attributes:
        clusters: J.
    """

    clusters: int

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return logits

    def client_test(self) -> ClientTest:
        return BestClusterTest(clusters=self.clusters)


def other_models(*, params: int, clusters: int) -> int:
    """The models of the further clusters: `clusters` - 1 times `params` values."""
    return (clusters - 1) * params


def choice(*, clusters: int) -> int:
    """With several `clusters` the number of the one that was chosen."""
    return int(clusters > 1)


@with_card(
    Card(
        title="IFCA",
        source="Ghosh et al., NeurIPS 2020",
        needs=("classes", "two clients"),
        up=(choice,),
        down=(other_models,),
        limits=(Limit(given={"clusters": 1}),),
        live=("personal_accuracy", "cluster0_clients"),
    )
)
def ifca(*, clusters: Count = 2, shuffled: PositiveShare = 1.0) -> FederatedMethod:
    """Each client receives a model for each cluster, trains the one that fits it best, and the clusters are averaged.

    ``test_accuracy`` is the first cluster's; ``personal_accuracy`` has for each client the model that fits its training
    samples best, on its share of the test set.

    Reading: the loss that decides is that on all of a client's samples; the paper also allows a part. Clients send the
    number of their cluster, the paper sends one value for each. The clusters' first models have the initial one's
    values in other places of each tensor, so that each is as good as drawn anew; the paper draws several sets of them
    and keeps the best. Batch norm's statistics are one for all clusters.

    Args:
        clusters: Models on the server, as many as clients at most; 1: FedAvg.
        shuffled: Share of each tensor's values that has another place in each further cluster's first model, above 0.
            Small values, 0.01 say, keep a pretrained model.
    """
    return FederatedMethod(
        name=_NAME,
        terms=(BestCluster(clusters=clusters),),
        server_update=OneModelEach(clusters=clusters, shuffled=shuffled),
        evaluation=FirstClusterForTheServer(clusters=clusters),
    )
