"""AEDFL: asynchronous and without a server; devices mix their models along a graph, each at its own pace.

Source: Liu, Che, Zhou, Jin, Dai, Dou, Valduriez (2024): AEDFL: efficient asynchronous decentralized federated learning
with heterogeneous devices. SDM, arXiv:2312.10935.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, with_card
from fedsweep.components import (
    SERVER,
    ClientUpdate,
    ComponentReport,
    CountOrZero,
    Graph,
    LocalJob,
    Merge,
    NotNegative,
    Pacing,
    RoundContext,
    Selection,
    ServerContext,
    State,
    SyncContext,
    SyncPoint,
    Weighting,
)

from .parts.gossip import MeanModel, graph_of

_NAME = "aedfl"


@dataclass(frozen=True, kw_only=True)
class Everybody(Selection):
    """All clients that are there may be at work: who ends next is for the pacing."""

    def choose(self, state: State, context: RoundContext) -> tuple[tuple[int, ...], State]:
        return tuple(context.available), state


@dataclass(frozen=True, kw_only=True)
class OwnPace(Pacing):
    """The round of one moment: of the clients that end their training next, one, or several at the same time.

    A client's model changes at its own moments alone, so its training is computed when it ends, from the model that it
    had since it last mixed. Whoever was away begins anew when it is back: at the last moment before. The state has that
    moment, who was away at it, and when others came back.

    Attributes:
        method: For messages.
    """

    has_hubs: ClassVar[bool] = True
    has_server: ClassVar[bool] = False
    draws_candidates: ClassVar[bool] = True

    method: str

    def init(self, context: ServerContext) -> State:
        """Return the state of the start; clients' models and times are the engine's.

        Raises:
            ConfigError: There is no graph, or no device, or a device whose speed changes from round to round.
        """
        graph_of(context.topology, self.method)
        devices = [profile.device for profile in context.profiles]
        if any(device is None for device in devices):
            raise ConfigError(
                f"method {self.method} needs a virtual clock to tell who is done first, but scenario.devices is null;"
                " set it to {profile: phone-wifi}, say"
            )
        if any(device is not None and device.compute_jitter for device in devices):
            raise ConfigError(
                f"method {self.method}: a client's training goes on over rounds of others, in each of which"
                " scenario.devices.compute_jitter draws its speed anew; set it to 0"
            )
        return {"moment": 0.0, "away": [], "back": {}}

    def first_models(self, context: ServerContext) -> Iterable[int]:
        return range(context.num_clients)

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        if context.classes:
            raise ConfigError(
                f"method {self.method}: a client's training goes on over rounds of others, in each of which"
                " scenario.drift gives it other samples; set it to null"
            )
        graph = graph_of(context.topology, self.method)
        returned = set(state["away"]).intersection(context.cohort)
        back = {**state["back"], **dict.fromkeys(sorted(returned), state["moment"])}
        starts = {k: max(context.hub_times.get(k, 0.0), back.get(k, 0.0)) for k in context.cohort}
        ends = {k: start + context.durations[k] for k, start in starts.items()}
        moment = min(ends.values())
        done = tuple(client for client in context.cohort if ends[client] == moment)
        everybody = Merge(hub=SERVER, hubs=tuple(range(len(context.profiles))), travels=False)
        point = SyncPoint(
            start=tuple(LocalJob(client=k, steps=context.work[k].steps, model=k, not_before=starts[k]) for k in done),
            attend=done,
            merges=(*(_mixed(client, done, graph) for client in done), everybody),
        )
        away = sorted(set(range(len(context.profiles))).difference(context.cohort))
        back = {client: since for client, since in back.items() if client not in done}
        return (point,), {"moment": moment, "away": away, "back": back}


def _mixed(client: int, done: Sequence[int], graph: Graph) -> Merge:
    """Return the merge of a client's model with its neighbours': what they have trained now, or what they have."""
    sources = graph.sources[client]
    return Merge(
        hub=client,
        clients=tuple(sorted({client, *(set(sources) & set(done))})),
        hubs=tuple(source for source in sources if source not in done),
    )


@dataclass(frozen=True, kw_only=True)
class NeighbourWeighting(Weighting):
    """The graph's weights, shifted from neighbours that are behind to those that are not.

    A neighbour with s rounds of training fewer counts ``(1 + s) ** -exponent``, one that is more than ``patience``
    behind nothing; the neighbours' weights together stay what the graph says. The state has for each client how often
    it has trained, and in which round of the run it did last.

    Attributes:
        exponent: At least 0; 0: all count alike.
        patience: Rounds of training, at least 0.
    """

    exponent: NotNegative
    patience: CountOrZero

    def init(self, context: ServerContext) -> State:
        """Return the state in which nobody has trained."""
        return {"trained": [0] * context.num_clients, "last": [0] * context.num_clients, "behind": 0.0}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        if sync.hub == SERVER:
            return torch.full((len(updates),), 1 / len(updates), dtype=torch.float64), state
        graph, own = graph_of(sync.topology, "of this weighting"), sync.hub
        trained, last = list(state["trained"]), list(state["last"])
        trained[own], last[own] = trained[own] + 1, sync.round
        # Who trained at this moment too may come later in it.
        times = [trained[u.client] + (u.steps > 0 and last[u.client] != sync.round) for u in updates]
        behind = [max(0, trained[own] - number) for number in times]
        counts = [(1 + s) ** -self.exponent if s <= self.patience else 0.0 for s in behind]
        shares = [0.0 if u.client == own else graph.weight(own, u.client) for u in updates]
        parts = zip(shares, counts, self.factors(state, updates, sync), strict=True)
        raw = [share * count * factor for share, count, factor in parts]
        scale = sum(shares) / sum(raw) if sum(raw) else 0.0
        weights_M = torch.tensor([value * scale for value in raw], dtype=torch.float64)
        weights_M[[u.client for u in updates].index(own)] = 1 - weights_M.sum()
        others = max(1, len(updates) - 1)
        return weights_M, {**state, "trained": trained, "last": last, "behind": sum(behind) / others}

    @abstractmethod
    def factors(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> Sequence[float]:
        """Return what each model counts beside that, up to a common factor."""

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={"rounds_behind": state["behind"]})


@dataclass(frozen=True, kw_only=True)
class FreshNeighbours(NeighbourWeighting):
    """Weights that follow the graph and how far behind neighbours are, and nothing else."""

    def factors(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> Sequence[float]:
        return [1.0] * len(updates)


@with_card(
    Card(
        title="AEDFL",
        source="Liu et al., SDM 2024",
        needs=("graph", "devices", "no drift", "classes"),
        live=("personal_accuracy", "rounds_behind"),
        differs=(
            "the weights are a stand-in: the paper learns them, by a reinforcement learner on each device",
            "its sparse training is left out: whole models travel",
        ),
    )
)
def aedfl(*, exponent: NotNegative = 0.5, patience: CountOrZero = 16) -> FederatedMethod:
    """Nobody waits: a client that has trained mixes in the models that its neighbours have by then.

    A round is one moment: the one at which the next client ends its training, or several that end at the same time.
    Where all clients take equally long and have equally many neighbours it is D-PSGD. ``training.cohort_size`` has no
    say: all clients are at work. The paper's graph is ``scenario.topology: {kind: exponential}``.

    Reading: a neighbour's model is the one that it has at that moment, after its own last mixing; clients that end at
    the same moment exchange what they have just trained. The models are sent when they are asked for; a neighbour that
    is just mixing answers when it has.

    Args:
        exponent: A neighbour that has trained s times less often counts (1 + s) ** -exponent; 0: all count alike.
        patience: One that is more often behind than this counts nothing.
    """
    return FederatedMethod(
        name=_NAME,
        selection=Everybody(),
        pacing=OwnPace(method=_NAME),
        weighting=FreshNeighbours(exponent=exponent, patience=patience),
        evaluation=MeanModel(),
    )
