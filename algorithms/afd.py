"""AFD, adaptive federated dropout: sub-models that made a client's loss fall are kept, others are drawn by scores.

Source: Bouacida et al. (2021): Adaptive federated dropout: improving communication efficiency and generalization for
federated learning. INFOCOM workshops.

Shape letters: U units of the network, groups one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    FULL_MODEL,
    ClientUpdate,
    ComponentReport,
    Positive,
    PositiveShare,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    SyncContext,
    UnitGroup,
    ordered_width,
    parameters_of,
    takes,
    unit_submodel,
)

from .parts.server_updates import Aggregate, aggregation
from .parts.unit_draws import drawn_of_each, unit_groups_of

ScoreMaps = Literal["client", "shared"]

_EVERYBODY = -1


@dataclass(frozen=True, kw_only=True)
class ScoredUnits(SubModelPolicy):
    """Units of a client (or of all) by a score map: reused while the training loss falls, else drawn anew.

    A loss below the last one gives the units that were trained a score, the loss's relative fall, and they are reused.
    Otherwise as many units of each group are drawn without replacement, with chances that follow the scores.

    Attributes:
        keep: Share of each layer's units that a client trains, above 0 and at most 1; 1 is FedAvg bit for bit.
        scores: client: each client has a map, a loss and units of its own; shared: all have the same ones, and the
            loss is the participants' mean: better where clients rarely repeat.
        accumulate: Scores add up over the rounds; otherwise the last fall of the loss stands.
        score_floor: Added to each score in a draw, above 0: the larger, the more even the draw.

    Source: Bouacida et al. (2021), Algorithms 1 and 2 (multi-model, single-model). Reading: a client's loss is the mean
    over all local steps of its round, taken on the units that it had; a first loss is only noted. Reading: the paper
    does not say what chance a unit without a score has; here it is that of the floor. The paper's quantised downlink
    and compressed uplink are left out.
    """

    keep: PositiveShare = 0.75
    scores: ScoreMaps = "client"
    accumulate: bool = False
    score_floor: Positive = 0.01

    def init(self, context: ServerContext) -> State:
        """Return the state before any loss or score.

        Raises:
            ConfigError: The network lists no units that can be left out.
        """
        if self.keep < 1:
            unit_groups_of(context.model, method="afd")
        return {"known": {}, "drawn": {}, "losses": {}, "reused": 0.0}

    def _owner(self, client: int) -> int:
        return client if self.scores == "client" else _EVERYBODY

    # -- sub-models ----------------------------------------------------------------------------------------------

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        if self.keep == 1 or not context.cohort:
            return dict.fromkeys(context.cohort, FULL_MODEL), {**state, "drawn": {}, "reused": 0.0}
        groups, records = unit_groups_of(context.model, method="afd"), state["known"]
        drawn: dict[int, Tensor] = {}
        # With a shared map there is one owner, so everybody in the round trains the same units.
        for owner in dict.fromkeys(self._owner(k) for k in context.cohort):
            old = records.get(owner)
            if old is not None and old["reuse"]:
                drawn[owner] = old["units"]
            else:
                generator = context.stream.child("units", owner).numpy()
                drawn[owner] = self._draw(groups, None if old is None else old["scores"], generator)
        parts = {owner: unit_submodel(groups, _units_by_group(groups, units)) for owner, units in drawn.items()}
        reused = sum(1.0 for owner in drawn if owner in records and records[owner]["reuse"]) / len(drawn)
        return {k: parts[self._owner(k)] for k in context.cohort}, {**state, "drawn": drawn, "reused": reused}

    def _draw(self, groups: Sequence[UnitGroup], scores_U: Tensor | None, generator: np.random.Generator) -> Tensor:
        """Draw the units of a sub-model (bool [U])."""
        sizes = [group.size for group in groups]
        scores = np.zeros(sum(sizes)) if scores_U is None else scores_U.numpy()
        weights = np.split(scores + self.score_floor, np.cumsum(sizes)[:-1])
        counts = [ordered_width(size, self.keep) for size in sizes]
        drawn = drawn_of_each(groups, counts, generator=generator, weights=weights)
        chosen = [torch.zeros(size, dtype=torch.bool) for size in sizes]
        for group, units in zip(groups, chosen, strict=True):
            units[list(drawn[group.name])] = True
        return torch.cat(chosen)

    # -- what losses say -----------------------------------------------------------------------------------------

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        """Compare each owner's loss with its last one."""
        losses = dict(state["losses"])
        for u in updates:
            # It counts from the model that came last. Who took no step has NaN, and would spoil a shared map's mean.
            if isfinite(u.train_loss):
                jobs = losses.get(u.client, {})
                losses[u.client] = {**jobs, u.anchor_version: (u.train_loss, u.steps, u.num_samples)}
        if not sync.ends_round:
            return {**state, "losses": losses}
        records = dict(state["known"])
        for owner, units in state["drawn"].items():
            own = [_of_round(losses[k].values()) for k in sorted(losses) if self._owner(k) == owner]
            if own:
                samples = sum(num_samples for _, num_samples in own)
                loss = sum(loss * (num_samples / samples) for loss, num_samples in own)
                records[owner] = self._judged(records.get(owner), units, loss)
        return {**state, "known": records, "losses": {}}

    def _judged(self, old: State, units_U: Tensor, loss: float) -> State:
        """Return an owner's map, units and loss after a round."""
        if old is None:
            return {
                "scores": torch.zeros(len(units_U), dtype=torch.float64),
                "units": units_U,
                "loss": loss,
                "reuse": False,
            }
        scores, fell = old["scores"], loss < old["loss"]
        if fell:
            gain = (old["loss"] - loss) / abs(old["loss"]) if old["loss"] else 0.0
            scores = torch.where(units_U, scores * self.accumulate + gain, scores)
        return {"scores": scores, "units": units_U, "loss": loss, "reuse": fell}

    def report(self, state: State) -> ComponentReport:
        """Return the share of the round's clients that train the units of their last round again."""
        return ComponentReport(metrics={"dropout_reused": state["reused"]})


def _units_by_group(groups: Sequence[UnitGroup], units_U: Tensor) -> dict[str, tuple[int, ...]]:
    parts = torch.split(units_U, [group.size for group in groups])
    return {g.name: tuple(int(i) for i in part.nonzero().flatten()) for g, part in zip(groups, parts, strict=True)}


def _of_round(jobs: Iterable[tuple[float, int, int]]) -> tuple[float, int]:
    """Return a client's mean loss over the steps of its jobs, given as loss, steps and samples; and its samples."""
    losses, steps, samples = zip(*jobs, strict=True)
    return sum(loss * (taken / sum(steps)) for loss, taken in zip(losses, steps, strict=True)), samples[-1]


@with_card(
    Card(
        title="AFD",
        source="Bouacida et al., INFOCOM workshops 2021",
        needs=("units",),
        limits=(Limit(given={"keep": 1.0}),),
        live=("dropout_reused",),
    )
)
@takes(ScoredUnits)
def afd(*, aggregate: Aggregate = "masked", **parameters: Any) -> FederatedMethod:
    """FedAvg on sub-models that follow the clients' losses: units are reused while it falls, else drawn by scores.

    Args:
        aggregate: masked: each value is the mean over the clients that hold it; complete: clients that do not hold a
            value count with the server's.
    """
    return FederatedMethod(
        name="afd",
        submodels=ScoredUnits(**parameters_of(ScoredUnits, parameters)),
        server_update=aggregation(aggregate),
    )
