"""AEDFL with FedDHAD: devices mix without a server, by learned degrees, what they trained on sub-models of their own.

Source: Liu et al. (2025), FedDHAD: federated learning with dynamic aggregation and adaptive dropout, Table 7, which
names the combination and prints its two figures.

Shape letters: M models that meet, P trained parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    FULL_MODEL,
    SERVER,
    BelowOne,
    ClientUpdate,
    ComponentReport,
    CountOrZero,
    NotNegative,
    Positive,
    Probe,
    RoundContext,
    ServerContext,
    Share,
    State,
    SubModel,
    SyncContext,
    parameters_of,
    takes,
)

from ..aedfl import NeighbourWeighting, OwnPace, aedfl
from .degrees import degree_gradients, degrees, divergences, label_counts_of, pulls
from .dropout_rates import device_time, rates_of_round, target_time
from .fedad import UnitDropout
from .unit_scores import UnitScores, maskable_groups

_NAME = "aedfl_feddhad"


@dataclass(frozen=True, kw_only=True)
class OwnScores(UnitScores):
    """Scores that some clients take for themselves.

    Attributes:
        clients: These.
    """

    clients: tuple[int, ...]

    def asks(self, client: int) -> bool:
        return client in self.clients


@dataclass(frozen=True, kw_only=True)
class OwnDropout(UnitDropout):
    """FedAD without a server: each device scores its units and draws its sub-model by itself.

    It draws when it begins its training, and trains the whole model where it takes scores; before its first ones all
    units are alike. The state has for each client how often it has trained, its scores, and the sub-model that it is
    training.

    Attributes:
        base_rate: Mean dropout rate of the reference device, known to all; 0: whole models.
        refresh: Of each device's trainings, from 1, those in which it takes scores anew.
    """

    probes_stay: ClassVar[bool] = True

    base_rate: BelowOne = 0.05
    refresh: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(number < 1 for number in self.refresh):
            raise ConfigError(f"method.refresh must be numbers of trainings, from 1, but got {list(self.refresh)}")

    def init(self, context: ServerContext) -> State:
        """Return the state before any score; errors are those of FedAD."""
        number = context.num_clients
        return {
            **self._costs(context),
            "trained": [0] * number,
            "scores": {},
            "drawn": {},
            "rates": rates_of_round([], []),
        }

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        return () if self.base_rate else ("base_rate=0: devices train the whole model, as in AEDFL",)

    def _due(self, state: State) -> tuple[int, ...]:
        """Return the clients that take scores at the end of their present training."""
        return tuple(k for k, times in enumerate(state["trained"]) if self.base_rate and times + 1 in self.refresh)

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        due = self._due(state)
        return (OwnScores(**vars(self._own_scores(state)), clients=due),) if due else ()

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        parts: dict[int, SubModel] = dict.fromkeys(context.cohort, FULL_MODEL)
        whole = set(self._due(state))
        if not self.base_rate or not context.cohort or context.model is None:
            return parts, state
        times = {k: device_time(state["macs"], context, k) for k in context.cohort}
        sizes = {k: context.profiles[k].num_samples for k in context.cohort}
        measure = sizes if self.reference == "largest" else times
        chosen = max(context.cohort, key=lambda k: (measure[k], -k))
        target_s = target_time(self.base_rate, times[chosen], device_rate=self.device_rate)
        drawn, rates = dict(state["drawn"]), []
        alike = torch.zeros(sum(group.size for group in maskable_groups(context.model)))
        for client in context.cohort:
            if client in whole:
                rates.append(0.0)
                continue
            rate = self._device_rate(times[client], target_s)
            rates.append(rate)
            if client not in drawn:  # once for a training, however many moments of others it lasts
                units, scales = self._drawn(context, client, state["scores"].get(client, alike), rate)
                drawn[client] = {"units": units, "scales": scales}
            parts[client] = self._part(context.model, **drawn[client])
        return parts, {**state, "drawn": drawn, "rates": rates_of_round(rates, [*sizes.values()])}

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        trained, scores, drawn = list(state["trained"]), dict(state["scores"]), dict(state["drawn"])
        for update in updates:
            trained[update.client] += 1
            drawn.pop(update.client, None)
            if "unit_scores/scores" in update.extras:
                scores[update.client] = update.extras["unit_scores/scores"]
        return {**state, "trained": trained, "scores": scores, "drawn": drawn}

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics=state["rates"])


@dataclass(frozen=True, kw_only=True)
class DegreesOfNeighbours(NeighbourWeighting):
    """AEDFL's weights, of neighbours by samples over a non-IID degree, which each device learns of each neighbour.

    ``D_ij = max(v_ij JS_j + b_ij, floor)``. When device i mixes, it takes a gradient step on its v and b, with the
    gradient of its own loss along the training that it has just done. The neighbours' weights together stay what the
    graph says.

    Attributes:
        learning_rate_v: Rate of the factor v of the label divergence; 0: not learned.
        decay_v: Its decay from one of the device's trainings to the next.
        learning_rate_b: Rate of the offset b; 0: not learned.
        decay_b: Its decay.
        floor: Smallest degree.
    """

    needs_updates: ClassVar[bool] = True

    exponent: NotNegative = 0.5
    patience: CountOrZero = 16
    learning_rate_v: NotNegative = 0.01
    decay_v: Share = 0.9999
    learning_rate_b: NotNegative = 1e-4
    decay_b: Share = 0.99
    floor: Positive = 1e-3

    @property
    def needs_one_rate(self) -> bool:
        """Tell whether the device reads its gradient off its move."""
        return bool(self.learning_rate_v or self.learning_rate_b)

    def registration(self) -> tuple[str, ...]:
        """Register the label counts: neighbours know them of one another."""
        return ("label_counts",)

    def init(self, context: ServerContext) -> State:
        """Return factors v of 1 and offsets b of 0, for each device one of each client that it mixed with."""
        sizes = [profile.num_samples for profile in context.profiles]
        js = divergences(label_counts_of(context))
        return {**super().init(context), "js": js, "sizes": sizes, "v": {}, "b": {}}

    def _degrees(self, state: State, updates: Sequence[ClientUpdate], hub: int) -> tuple[Tensor, Tensor]:
        """Return D [M], and where it follows v and b."""
        v, b = state["v"].get(hub, {}), state["b"].get(hub, {})
        members = [u.client for u in updates]
        v_M = torch.tensor([v.get(k, 1.0) for k in members], dtype=torch.float64)
        b_M = torch.tensor([b.get(k, 0.0) for k in members], dtype=torch.float64)
        return degrees(v_M, b_M, state["js"][members], floor=self.floor)

    def factors(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> Sequence[float]:
        degrees_M, _ = self._degrees(state, updates, sync.hub)
        return [state["sizes"][u.client] / float(d) for u, d in zip(updates, degrees_M, strict=True)]

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        weights_M, after = super().weigh(state, updates, sync)
        learns = self.learning_rate_v or self.learning_rate_b
        if sync.hub == SERVER or not learns or len(updates) == 1 or float(weights_M.max()) == 1:
            return weights_M, after
        own = [u.client for u in updates].index(sync.hub)
        gradient = _gradient_on_the_way(updates[own], sync)
        if gradient is None:
            return weights_M, after
        degrees_M, free = self._degrees(state, updates, sync.hub)
        slopes = degree_gradients(gradient, neighbour_pulls(updates, weights_M, own, sync), degrees_M) * free
        past = after["trained"][sync.hub] - 1
        rate_v, rate_b = self.learning_rate_v * self.decay_v**past, self.learning_rate_b * self.decay_b**past
        v, b = dict(after["v"].get(sync.hub, {})), dict(after["b"].get(sync.hub, {}))
        for place, update in enumerate(updates):
            if place != own:
                slope, js = float(slopes[place]), float(after["js"][update.client])
                v[update.client] = v.get(update.client, 1.0) - rate_v * slope * js
                b[update.client] = b.get(update.client, 0.0) - rate_b * slope
        return weights_M, {**after, "v": {**after["v"], sync.hub: v}, "b": {**after["b"], sync.hub: b}}

    def report(self, state: State) -> ComponentReport:
        """Report the mean of the factors that were learned, and how far behind neighbours are."""
        learned = [value for row in state["v"].values() for value in row.values()]
        mean = sum(learned) / len(learned) if learned else 1.0
        return ComponentReport(metrics={**super().report(state).metrics, "noniid_v_mean": mean})


def neighbour_pulls(updates: Sequence[ClientUpdate], weights: Tensor, own: int, sync: SyncContext) -> Tensor:
    """Return the mixed model's move as the logarithm of each neighbour's unnormalised weight grows: [M, P].

    The neighbours share ``1 - q_own``, so ``dq_j / d ln a_k = q_j (1[j = k] - q_k / (1 - q_own))``. With m_j the move
    as q_j grows, ``sum_j q_j m_j = 0``, so that ``dw / d ln a_k = q_k m_k + q_k / (1 - q_own) q_own m_own``.

    Args:
        updates: Those that meet, the device's own at the place ``own``, whose row means nothing.
        weights: q [M].
        own: See there.
        sync: Where this is.
    """
    pulls_MP = pulls(updates, weights, sync)
    rest = float(1 - weights[own])
    return torch.stack([row + float(q) / rest * pulls_MP[own] for row, q in zip(pulls_MP, weights, strict=True)])


def _gradient_on_the_way(update: ClientUpdate, sync: SyncContext) -> Tensor | None:
    """Return the device's mean gradient [P] on its way from its model before; None where it took no step.

    What its part leaves out has not moved: there the gradient is 0.
    """
    steps = update.effective_steps if isfinite(update.effective_steps) else float(update.steps)
    if not steps or not update.learning_rate or update.vector is None:
        return None
    move = (sync.vector - update.vector) / (update.learning_rate * steps)
    if part := update.sent_as:
        whole = part.embed(part.unscaled(part.extract(move, sync.layout), sync.layout), sync.layout)
        move = whole.vector if whole.cover is None else whole.vector.masked_fill(~whole.cover, 0.0)
    return move[: sync.layout.num_params]


@with_card(
    Card(
        title="AEDFL+FedDHAD",
        source="Liu et al. 2025, FedDHAD, Table 7",
        needs=("graph", "devices", "no drift", "classes", "units"),
        live=("personal_accuracy", "dropout_device_rate", "noniid_v_mean"),
        limits=(
            Limit(
                given={"base_rate": 0.0, "learning_rate_v": 0.0, "learning_rate_b": 0.0, "floor": 1e3},
                of="aedfl",
                tolerance=1e-6,
                equal_sizes=True,
            ),
        ),
        differs=(
            "the paper prints the combination's figures alone: how the two go together is our reading",
            "AEDFL's own staleness weights are a stand-in, and its sparse training is left out, see aedfl",
        ),
        small={"base_rate": 0.4, "refresh": [2], "device_rate": "printed"},
    )
)
@takes(
    DegreesOfNeighbours, NeighbourWeighting, OwnDropout, UnitDropout, UnitScores, but=("scores", "name", "has_filters")
)
def aedfl_feddhad(**parameters: Any) -> FederatedMethod:
    """AEDFL whose devices weigh their neighbours as FedDH does and train sub-models as in FedAD.

    Reading: each device learns v and b of its neighbours by the gradient of its own loss; of one another they know the
    label counts alone. The gradient is that along the training that led to the mix, as the paper prints the order of
    steps. Reading: a device scores its own units, and tells nobody. What its sub-model leaves out of its model stays as
    it was. A neighbour that has trained at the same moment sends its sub-model with its mask, others their whole model.

    Args:
        patience: A neighbour that has trained so many times less often, and one more, counts nothing.
        base_rate: Mean dropout rate of the reference device, which all know; 0: whole models.
        refresh: Of each device's trainings, from 1, those in which it trains the whole model and scores its units.
            Before the first of them all units are alike.
        reference: The device whose time the others are measured by: largest (data set) or slowest, of those there.
    """
    own = parameters_of(OwnDropout, parameters)
    rounds = own.pop("refresh")
    scores = UnitScores(**parameters_of(UnitScores, parameters))
    return dataclasses.replace(
        aedfl(),
        name=_NAME,
        pacing=OwnPace(method=_NAME),
        weighting=DegreesOfNeighbours(**parameters_of(DegreesOfNeighbours, parameters)),
        submodels=OwnDropout(refresh=tuple(rounds), scores=scores, **own),
    )
