"""Robust aggregation: rules that a few clients with wrong models move little; each goes with any server optimiser.

Source: Yin, Chen, Kannan, Bartlett (2018): Byzantine-robust distributed learning: towards optimal statistical rates.
ICML (median, trimmed mean). Blanchard, El Mhamdi, Guerraoui, Stainer (2017): Machine learning with adversaries:
Byzantine tolerant gradient descent. NeurIPS (Krum). Sun, Kairouz, Suresh, McMahan (2019): Can you really backdoor
federated learning? (norm bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    Aggregation,
    ClientUpdate,
    Count,
    CountOrZero,
    Positive,
    SyncContext,
    takes,
    weighted_mean,
)

# Below one half, so that somebody is left.
BelowHalf = Annotated[float, Ge(0), Lt(0.5)]


def _models(updates: Sequence[ClientUpdate]) -> list[Tensor]:
    """Return the attendees' models [V]."""
    return [cast(Tensor, update.vector) for update in updates]


def _mean(models: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    out = torch.empty_like(models[0])
    weighted_mean(list(models), list(weights), out)
    return out


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregation):
    """The mean of each coordinate without its least and its greatest values; clients count alike.

    Attributes:
        share: Of the attendees that is left out on either side, rounded down, 0 to below 0.5.
    """

    share: BelowHalf = 0.1

    def combine(self, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
        models_MV = torch.stack(_models(updates)).sort(0).values
        # The slack keeps 0.07 x 100 at 7, where the product is a hair below.
        out = int(self.share * len(models_MV) + 1e-9)
        left = models_MV[out : len(models_MV) - out]
        return _mean([*left], [1 / len(left)] * len(left))


@dataclass(frozen=True, kw_only=True)
class Median(Aggregation):
    """The median of each coordinate, of an even number the mean of the two in the middle; clients count alike."""

    def combine(self, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
        models_MV = torch.stack(_models(updates)).sort(0).values
        middle = models_MV[(len(models_MV) - 1) // 2 : len(models_MV) // 2 + 1]
        return middle[0].clone() if len(middle) == 1 else _mean([*middle], [0.5, 0.5])


@dataclass(frozen=True, kw_only=True)
class Krum(Aggregation):
    """The mean of the models that lie closest to most others; clients count alike.

    A model's score is the sum of squared distances, over the params, to its M - wrong - 2 nearest others.

    Attributes:
        wrong: Attendees that may be wrong.
        chosen: Models that are averaged, those with the lowest scores; 1: Krum, more: multi-Krum.
    """

    wrong: CountOrZero = 1
    chosen: Count = 1

    def combine(self, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
        models = _models(updates)
        params_MP = torch.stack([model[: sync.layout.num_params] for model in models]).double()
        distances_MM = torch.stack([(params_MP - own).square().sum(1) for own in params_MP])
        nearest = max(1, len(models) - self.wrong - 2)
        # The first is the model itself.
        scores_M = distances_MM.sort(1).values[:, 1 : nearest + 1].sum(1)
        best: list[int] = sorted(scores_M.argsort(stable=True)[: self.chosen].tolist())
        if len(best) == 1:
            return models[best[0]].clone()
        return _mean([models[k] for k in best], [1 / len(best)] * len(best))


@dataclass(frozen=True, kw_only=True)
class NormBound(Aggregation):
    """The weighted mean of models whose moves from the hub's model, over the params, are cut to a norm.

    Attributes:
        bound: Greatest 2-norm of a client's move from the server's model, above 0.
    """

    bound: Positive = 1.0

    def combine(self, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
        params, models = slice(sync.layout.num_params), []
        for model in _models(updates):
            move = model[params] - sync.vector[params]
            norm = float(move.double().norm())
            if norm > self.bound:
                model = model.clone()
                model[params] = sync.vector[params] + move * (self.bound / norm)
            models.append(model)
        return _mean(models, weights.tolist())


@with_card(Card(title="FedMedian", source="Yin et al., ICML 2018"))
def fedmedian() -> FederatedMethod:
    """FedAvg with the median of each coordinate in place of the mean."""
    return FederatedMethod(name="fedmedian", aggregation=Median())


@with_card(
    Card(
        title="Trimmed mean",
        source="Yin et al., ICML 2018",
        small={"share": 0.25},
        limits=(Limit(given={"share": 0.0}, tolerance=1e-6, equal_sizes=True),),
    )
)
@takes(TrimmedMean)
def trimmed_mean(**parameters: Any) -> FederatedMethod:
    """FedAvg with the mean of each coordinate without its extreme values."""
    return FederatedMethod(name="trimmed_mean", aggregation=TrimmedMean(**parameters))


@with_card(
    Card(
        title="Krum",
        source="Blanchard et al., NeurIPS 2017",
        limits=(Limit(given={"chosen": 1000}, tolerance=1e-6, equal_sizes=True),),
    )
)
@takes(Krum)
def krum(**parameters: Any) -> FederatedMethod:
    """FedAvg with the model that lies closest to most others in place of the mean."""
    return FederatedMethod(name="krum", aggregation=Krum(**parameters))


@with_card(
    Card(
        title="Norm bound",
        source="Sun et al. 2019",
        small={"bound": 0.1},
        limits=(Limit(given={"bound": 1e9}),),
    )
)
@takes(NormBound)
def norm_bound(**parameters: Any) -> FederatedMethod:
    """FedAvg with moves that are cut to a norm."""
    return FederatedMethod(name="norm_bound", aggregation=NormBound(**parameters))
